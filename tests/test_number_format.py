"""A run keeps the number format of the machine where it began. An evaluation may take float32."""

import json
import shutil
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch

import solve
from checkpointing.files import CONFIG_FILE
from config.architecture import HRMConfig
from config.files import fill_defaults, format_of
from distributed.number_format import Choice, choose_evaluation_format, choose_format, instruction_set
from runtime.writing import to_yaml
from tests.checkpoints import (
    assert_equal,
    blank_state,
    open_checkpoints,
    random_state,
    resume,
    run_config,
    saved_tensors,
)
from tests.ranks import complete_program
from tests.solvers import PUZZLE, save_run
from tests.tiny import OVERRIDES, tiny_arch
from training import run_config as run_config_module
from training.run_config import compose_run, describe_changes, find_format, with_format

CPU = torch.device("cpu")
_IN_BFLOAT16 = {"arch": tiny_arch(forward_dtype="bfloat16").model_dump()}


def _pretend(monkeypatch, used: str, *instructions: str) -> None:
    """Makes this processor look like another one. used: as torch says it. instructions: that it has."""
    known = dict.fromkeys(instructions, True)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: known)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: used)


@pytest.mark.parametrize(
    ("used", "instructions", "name", "chosen"),
    [
        ("AVX512", ("avx512_bf16", "amx_bf16"), "amx_bf16", "bfloat16"),
        ("AVX512", ("avx512_bf16",), "avx512_bf16", "bfloat16"),
        ("AVX512", ("avx512_f",), "avx512", "float32"),
        ("AVX2", ("avx512_bf16", "amx_bf16"), "avx2", "float32"),  # ATEN_CPU_CAPABILITY=avx2
        ("AVX2", ("avx2",), "avx2", "float32"),
        ("DEFAULT", ("neon", "bf16"), "neon", "float32"),
        ("NO AVX", (), "unknown", "float32"),
    ],
)
def test_a_processor_with_bfloat16_instructions_computes_in_bfloat16(
    monkeypatch, used, instructions, name, chosen
):
    _pretend(monkeypatch, used, *instructions)
    choice = choose_format(CPU)
    assert (choice.name, instruction_set(CPU)) == (chosen, name)
    assert f"({name})" in choice.reason


@pytest.mark.parametrize(("is_supported", "name"), [(True, "bfloat16"), (False, "float32")])
def test_a_gpu_that_emulates_bfloat16_computes_in_float32(monkeypatch, is_supported, name):
    """Such as a T4, which no machine here has."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: is_supported)
    _pretend(monkeypatch, "AVX2")
    assert choose_format(torch.device("cuda")).name == name
    assert choose_format(torch.device("mps")).name == "float32"


@pytest.mark.parametrize(
    ("stored", "rule", "device", "given", "chosen"),
    [
        ("bfloat16", "AVX512", "cpu", None, "bfloat16"),
        ("bfloat16", "AVX2", "cpu", None, "float32"),
        ("bfloat16", "AVX2", "cpu", "bfloat16", "bfloat16"),
        ("float32", "AVX512", "cpu", None, "float32"),
        ("float32", "AVX512", "cpu", "bfloat16", "bfloat16"),
        ("bfloat16", "AVX2", "cuda", None, "bfloat16"),
        ("bfloat16", "AVX2", "mps", None, "bfloat16"),
    ],
)
def test_an_evaluation_keeps_the_format_unless_it_is_slow(monkeypatch, stored, rule, device, given, chosen):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    _pretend(monkeypatch, rule, "avx512_bf16")
    allowed = tiny_arch(forward_dtype=stored).formats
    found = choose_evaluation_format(stored, torch.device(device), allowed=allowed, configured=given)
    assert found.name == chosen


def test_a_format_that_the_config_of_a_plugin_does_not_allow_is_not_chosen(monkeypatch):
    class Config(HRMConfig):
        forward_dtype: Literal["bfloat16"]

    _pretend(monkeypatch, "AVX2", "avx512_bf16")
    arch = Config(**tiny_arch().model_dump() | {"forward_dtype": "bfloat16"})
    assert arch.formats == ["bfloat16"]
    assert choose_evaluation_format("bfloat16", CPU, allowed=arch.formats).name == "bfloat16"
    with pytest.raises(
        ValueError, match="^forward_dtype=float32: the model allows only bfloat16. Remove it."
    ):
        choose_evaluation_format("bfloat16", CPU, allowed=arch.formats, configured="float32")


@pytest.mark.parametrize("arch", [{}, {"forward_dtype": "auto"}, {"forward_dtype": "bfloat16"}])
def test_a_stored_config_is_never_auto(arch):
    assert format_of({"arch": {"name": "trm"} | arch}) == "bfloat16"
    assert fill_defaults({"arch": {"name": "ldt"} | arch})["arch"]["forward_dtype"] == "bfloat16"


def test_a_stored_format_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="forward_dtype='half' is neither bfloat16 nor float32"):
        format_of({"arch": {"name": "trm", "forward_dtype": "half"}})


def _compose(*words: str):
    return compose_run(["data_path=.", "device=cpu", "arch.hidden_size=32", "arch.num_heads=2", *words])


@pytest.mark.slow
def test_a_run_keeps_the_format_that_it_began_with(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    _pretend(monkeypatch, "AVX512", "amx_bf16")
    begun = _compose("run_name=a")
    assert begun.arch.forward_dtype == "bfloat16"
    assert "auto: bfloat16, because the processor has bfloat16 instr" in capsys.readouterr().out
    run = Path(begun.checkpoint_path)
    run.mkdir(parents=True)
    (run / CONFIG_FILE).write_text(to_yaml(begun.model_dump()))
    (run / "step_3").mkdir()
    assert _compose("run_name=a").arch.forward_dtype == "bfloat16"
    assert "slow" not in capsys.readouterr().err

    _pretend(monkeypatch, "AVX2")
    assert _compose("run_name=a").arch.forward_dtype == "bfloat16"
    way = f"set resume={run / 'step_3'} run_name=NEW arch.forward_dtype=float32."
    assert way.replace("resume=" + str(run), "resume=" + begun.checkpoint_path) in capsys.readouterr().err
    assert _compose("run_name=b", f"resume={run}").arch.forward_dtype == "bfloat16"
    assert "set arch.forward_dtype=float32." in capsys.readouterr().err
    assert (
        _compose("run_name=b", f"resume={run}", "arch.forward_dtype=float32").arch.forward_dtype == "float32"
    )
    assert _compose("run_name=b").arch.forward_dtype == "float32"
    assert "slow" not in capsys.readouterr().err


def test_a_config_that_was_never_resolved_fits_every_run():
    before = run_config(Path("run"), **_IN_BFLOAT16)
    for name, changes in (("auto", ""), ("bfloat16", ""), ("float32", "bfloat16 -> float32")):
        assert describe_changes(before.model_dump(), with_format(before, name)).endswith(changes)
        assert bool(describe_changes(before.model_dump(), with_format(before, name))) == bool(changes)


@pytest.mark.parametrize(("stored", "chosen"), [("float32", "float32"), ("bfloat16", "by the rule")])
def test_weights_bring_no_format_but_float32_stays(monkeypatch, tmp_path, stored, chosen):
    monkeypatch.setattr(run_config_module, "choose_format", lambda _: Choice("bfloat16", "by the rule"))
    arch = {"arch": tiny_arch(forward_dtype=stored).model_dump()}
    with open_checkpoints(tmp_path / "run", **arch) as checkpoints:
        checkpoints.save(random_state(1, **arch))
    given = with_format(run_config(tmp_path / "new", init_from=str(tmp_path / "run")), "auto")
    assert chosen in find_format(given)
    words = run_config_module.name_arch(["arch=checkpoint", f"init_from={tmp_path / 'run'}"])
    assert ("++arch.forward_dtype=float32" in words) == (stored == "float32")
    assert not any("bfloat16" in word for word in words)


@pytest.mark.parametrize(("before", "after"), [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_a_checkpoint_continues_in_another_format(tmp_path, before, after):
    """States and their initial values are cast. Weights, moments and averages keep their bits."""
    old, new = ({"arch": tiny_arch(forward_dtype=each).model_dump(), "ema": 0.9} for each in (before, after))
    saved = random_state(7, **old)
    with open_checkpoints(tmp_path / "old", **old) as checkpoints:
        checkpoints.save(saved)
    state = blank_state(**new)
    open_checkpoints(tmp_path / "new", **new, resume=str(tmp_path / "old" / "step_7")).resume(state)
    with open_checkpoints(tmp_path / "again", **new) as checkpoints:
        checkpoints.save(state)
    theirs, ours = (saved_tensors(tmp_path / f"{name}/step_7") for name in ("old", "again"))
    is_cast = {name for name in theirs if name.endswith(("carry.z_H", "carry.z_L", "_init"))}
    assert {name for name in ours if ours[name].dtype != theirs[name].dtype} == is_cast
    for name in is_cast:
        theirs[name] = theirs[name].to(getattr(torch, after))
    assert_equal(ours, theirs)
    assert len(is_cast) == 6


def test_another_dtype_elsewhere_is_still_refused(tmp_path):
    with open_checkpoints(tmp_path) as checkpoints:
        state = random_state(1)
        state.carry = state.carry._replace(steps=state.carry.steps.long())
        checkpoints.save(state)
    with pytest.raises(SystemExit):
        resume(tmp_path)


@pytest.mark.slow
def test_a_run_continues_in_bfloat16_on_a_machine_that_emulates_it(tmp_path, sudoku_folder):
    """Without the key and with it: the same bits. Or as a new run, in float32."""
    given = "arch.forward_dtype=bfloat16"
    begin = [] if choose_format(CPU).name == "bfloat16" else [given]
    words = [word for word in OVERRIDES if not word.startswith("arch.forward_dtype")]
    words = [f"data_path={sudoku_folder}", *words, "optimizer=muon"]
    complete_program("pretrain", *words, *begin, "checkpoint_path=auto", "max_steps=3", folder=tmp_path)
    shutil.copytree(tmp_path / "auto", tmp_path / "given")
    new, found = ("resume=auto/step_3", "arch.forward_dtype=float32"), {}
    for name, later in {"auto": (), "given": (given,), "new": new}.items():
        of_run = [*words, f"checkpoint_path={name}", *later, "max_steps=6"]
        finished = complete_program("pretrain", *of_run, folder=tmp_path, ATEN_CPU_CAPABILITY="avx2")
        assert ("torch finds no bfloat16 instructions (avx2)" in finished.stderr) == (name != "new")
        found[name] = saved_tensors(tmp_path / name / "step_6")
    assert_equal(found["auto"], found["given"])
    assert found["auto"]["carry.z_H"].dtype == torch.bfloat16
    assert found["new"]["carry.z_H"].dtype == torch.float32
    difference = found["new"]["weights.lm_head.weight"] - found["auto"]["weights.lm_head.weight"]
    assert difference.abs().max() < 0.1


def _answers(run: Path, data: Path, **options) -> list[np.ndarray]:
    solver = solve.load(run, data_path=data, device="cpu", **options)
    return [step.confidence for step in solver.solve(PUZZLE).steps]


def test_a_model_of_float32_gives_the_same_answers_on_every_machine(tmp_path, sudoku_folder, monkeypatch):
    """A model of bfloat16 does not: it computes in float32 where bfloat16 is emulated."""
    found = {}
    for stored in ("float32", "bfloat16"):
        run = save_run(tmp_path / stored, sudoku_folder, forward_dtype=stored)
        for used in ("AVX512", "AVX2"):
            _pretend(monkeypatch, used, "avx512_bf16")
            found[stored, used] = _answers(run, sudoku_folder)
    assert np.array_equal(found["float32", "AVX512"], found["float32", "AVX2"])
    assert not np.array_equal(found["bfloat16", "AVX512"], found["bfloat16", "AVX2"])
    run = tmp_path / "bfloat16"
    given = _answers(run, sudoku_folder, forward_dtype="bfloat16")
    assert np.array_equal(given, found["bfloat16", "AVX512"])


@pytest.mark.slow
def test_an_evaluation_in_another_format_replaces_the_results(tmp_path, sudoku_folder):
    """A format that is given belongs to the identity of a result, and has a folder of its own."""
    save_run(tmp_path / "run", sudoku_folder, forward_dtype="bfloat16")
    first = "bfloat16" if choose_format(CPU).name == "bfloat16" else "float32"
    words = ("checkpoint=run", f"data_path={sudoku_folder}", "device=cpu", "cpu_threads=1")
    assert "replaced" not in complete_program("evaluate", *words, folder=tmp_path).stdout
    (results,) = (tmp_path / "run" / "evaluation").glob("*/metrics.json")
    assert json.loads(results.read_text())["all"]["forward_dtype"] == first
    said = complete_program("evaluate", *words, folder=tmp_path, ATEN_CPU_CAPABILITY="avx2").stdout
    assert json.loads(results.read_text())["all"]["forward_dtype"] == "float32"
    assert ("results computed in bfloat16 will be replaced by results computed in float32" in said) == (
        first == "bfloat16"
    )
    before = results.read_text()
    complete_program("evaluate", *words, "forward_dtype=bfloat16", folder=tmp_path)
    assert results.read_text() == before
    assert len(list(results.parents[1].iterdir())) == 2
