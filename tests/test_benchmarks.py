"""The benchmarks: that they measure what they say, and run to their last line. Never how fast anything is."""

import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from benchmarks import collectives, gradient_sync, harness, optimizers, scaling, sparse_optimizer
from benchmarks.harness import Sample, num_cores, print_report, time_rounds
from benchmarks.processes import run_program as run_words
from benchmarks.train_step import __main__ as train_step
from benchmarks.trainee import METADATA, TINY, build_config, build_experiment, read_yaml
from config.schema import PretrainConfig, validate_config
from models import build_model
from parallel.process_group import rank, world_size
from tests.float64 import assert_close
from tests.ranks import REPOSITORY, Finished, run_program, run_ranks

_KEYS = {
    "start": ["help_seconds", "first_step_seconds_2_processes"],
    "gradient_sync": ["flat_over_ddp", "flat_over_per_parameter", "shared_over_ddp", "shared_over_copy"],
    "scaling": ["weak_efficiency_2", "weak_over_apart_2", "strong_over_apart_2"],
    "collectives": [],
    "sparse_optimizer": ["time_1m_over_1k_rows"],
    "optimizers": ["adam_atan2_over_loop", "ema_over_loop", "adam_atan2_over_traffic"],
    "checkpoint": ["stall_over_torch_save"],
    "memory": ["kept_mib_1", "kept_mib_2_optimizer_sharding", "kept_mib_2_puzzle_emb_sharding"],
    "evaluation": ["act_speedup"],
    "dataset": [
        *("arc_build_seconds", "arc_megabytes"),
        *("sudoku_examples_per_second", "arc_examples_per_second"),
    ],
    "train_step": [
        *("speedup_hrm_bf16", "speedup_hrm_bf16_eager", "speedup_hrm_bf16_exact"),
        "fraction_of_matmul_peak_hrm_bf16",
    ],
}
_WORDS = {
    "scaling": ("--processes", "1", "2"),
    "memory": ("--processes", "1", "2"),
    "checkpoint": (),
    "evaluation": (),
    "optimizers": (),
    "dataset": (),
    # Compiling takes a minute. Of TRM: where the batch is halved.
    "train_step": (*("--arch", "hrm", "--dtype", "bfloat16", "--contenders", "published", "ours"),),
}


# ------------------------------------------------------------------------------------ what they measure with
_turns: list[str] = []


def _take_turns() -> tuple[dict[str, np.ndarray], list[str]]:
    """A takes as many seconds as the turn on rank 0 and 10 on the others; B the other way round."""

    def contender(name: str, slow_rank: int):
        def turn() -> dict[str, float]:
            _turns.append(name)
            return {name: 10.0 if rank() == slow_rank else float(len(_turns))}

        return turn

    return time_rounds([contender("a", 1), contender("b", 0)], rounds=2, warmup_rounds=1), _turns


@pytest.mark.slow
def test_contenders_take_turns_and_the_slowest_rank_counts():
    for seconds, turns in run_ranks(_take_turns, 2):
        assert turns == ["a", "b"] * 3
        assert {name: values.tolist() for name, values in seconds.items()} == {"a": [10, 10], "b": [10, 10]}


@pytest.mark.parametrize(("changes", "uneven"), [({}, ["b"]), ({"quick": True}, None), ({"rounds": 1}, None)])
def test_ratios_of_an_uneven_machine_are_called_estimates(capsys, changes, uneven):
    arguments = SimpleNamespace(
        **{"quick": False, "rounds": 3, "device": "cpu", "processes": 1, "threads": 1} | changes
    )
    samples = {"a": Sample.of([1.0, 1.1, 1.0]), "b": Sample.of([1.0, 1.1, 1.5])}
    parts = {"header": ["way"], "rows": [["a"]], "notes": [], "result": {"ratio": 1.1}, "samples": samples}
    print_report("some", **parts, arguments=arguments)
    *said, last = capsys.readouterr().out.splitlines()
    assert json.loads(last).get("uneven") == uneven
    told = [line for line in said if line.startswith("too uneven to tell: 'b' spreads by 36% (at most 15%)")]
    assert bool(told) == bool(uneven)


def test_efficiency_is_over_one_process_and_never_over_shared_cores():
    rows = [scaling.Row(*row) for row in (("weak", 1, 8), ("weak", 2, 8), ("strong", 2, 4), ("weak", 3, 8))]
    seconds = dict(zip(rows, map(np.array, ([1.0, 1.0], [1.25, 1.25], [0.5, 1.0], [2.0, 2.0])), strict=True))
    of_medians, of_rounds = zip(*(scaling.efficiency(seconds, row, cores=2) for row in rows[:3]), strict=True)
    assert of_medians == pytest.approx([1, 0.8, 0.5 / 0.75])
    assert (of_rounds[2].p10, of_rounds[2].p90) == pytest.approx((0.55, 0.95))
    assert scaling.efficiency(seconds, rows[3], cores=2) is None


@pytest.mark.parametrize("name", ["sudoku_extreme", "trm_sudoku_mlp", "urm_sudoku", "serrm_sudoku"])
def test_the_config_is_the_one_that_hydra_composes(name):
    ours = build_experiment(name, sizes={"hidden_size": 256}, global_batch_size=32, lr=2e-4)
    overrides = [f"experiment={name}", "arch.hidden_size=256", "global_batch_size=32", "lr=2e-4"]
    with initialize_config_dir(str(REPOSITORY / "config"), version_base="1.3"):
        composed = OmegaConf.to_container(compose("pretrain", overrides=overrides), resolve=True)
    arch = validate_config(PretrainConfig, composed).arch
    values = vars(ours) | {"arch": vars(ours.arch) | {"loss": vars(ours.arch.loss)}}
    for computed in values["arch"].keys() - composed["arch"].keys():
        assert values["arch"].pop(computed) == getattr(arch, computed)
    assert values == composed


def test_yaml_is_read_as_far_as_configs_need_it(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(
        "# a comment\nlist:\n  - of: several lines\nnumber: 1e-4 # its comment\ncount: 3\n\nempty: []\n"
        "nothing: null\ntext: a b # c # d\nwords: [a, b]\nouter:\n"
        "  inner:\n    yes: true\n  other: x\nlast: false\n"
    )
    assert read_yaml(path) == {
        "list": {},
        "number": 1e-4,
        "count": 3,
        "empty": [],
        "nothing": None,
        "text": "a b",
        "words": ["a", "b"],
        "outer": {"inner": {"yes": True}, "other": "x"},
        "last": False,
    }


# -------------------------------------------------------------------------------------------- gradients' sums
def _summed_gradients() -> dict[str, torch.Tensor]:
    """Returns all gradients, after a step of each contender on a batch of this rank's own."""
    arguments = SimpleNamespace(puzzles=2, processes=world_size(), quick=True)
    summed = {}
    for sync in gradient_sync.SYNCS:
        contender = gradient_sync.Contender(sync, arguments, torch.device("cpu"))
        contender.backward_alone()
        contender.step()
        parameters = contender.trainee.state.model.parameters()
        summed[sync] = torch.cat([parameter.grad.flatten() for parameter in parameters])
    return summed


@pytest.mark.slow
def test_every_contender_sums_the_gradients_of_all_ranks():
    first, second = run_ranks(_summed_gradients, 2)
    for sync in gradient_sync.SYNCS:
        assert torch.equal(first[sync], second[sync]), sync
        torch.testing.assert_close(first[sync], first["flat"], rtol=0, atol=0, msg=sync)


# ------------------------------------------------------------------------------------- the sparse optimizers
_ROWS, _NDIM, _SLOTS = 20, 6, 12


def _sparse_step(way: str) -> tuple[torch.Tensor, int]:
    """The table after one step on this rank's slots, and the bytes that this rank sent."""
    identifiers, gradients = _slots()
    local = _SLOTS // world_size()
    mine = slice(rank() * local, (rank() + 1) * local)
    table = torch.ones(_ROWS, _NDIM)
    batch = identifiers[mine], gradients[mine]
    step = sparse_optimizer.WAYS[way](table, [batch])
    with sparse_optimizer.CountedBytes() as sent:
        step(*batch)
    return table, sent.total


def _slots() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    identifiers = torch.randint(0, 8, (_SLOTS,), generator=generator)
    return identifiers, torch.randn(_SLOTS, _NDIM, generator=generator)


@pytest.mark.parametrize("way", ["ours", "plain", "torch", "rows"])
def test_every_way_sums_the_gradients_of_all_ranks(way):
    identifiers, gradients = _slots()
    sums = torch.zeros(_ROWS, _NDIM).index_add_(0, identifiers, gradients)
    expected = torch.ones(_ROWS, _NDIM)
    if way == "torch":
        expected -= sparse_optimizer.LR * sums
    else:
        used = identifiers.unique()
        expected[used] *= 1 - sparse_optimizer.LR * sparse_optimizer.WEIGHT_DECAY
        expected -= sparse_optimizer.LR * sums.sign()
    for number, (table, _) in enumerate(run_ranks(_sparse_step, 2, way)):
        here = slice(number, None, 2) if way == "rows" else slice(None)
        torch.testing.assert_close(table[here], expected[here])


@pytest.mark.parametrize("way", ["plain", "torch"])
def test_bytes_are_counted_whoever_sends_them(way):
    num_bytes = _SLOTS // 2 * (8 + 4 * _NDIM)  # each slot: an int64 identifier and a float32 row
    assert [sent for _, sent in run_ranks(_sparse_step, 2, way)] == [num_bytes] * 2


@pytest.mark.parametrize("share", sparse_optimizer.DUPLICATE_SHARES)
def test_share_of_repeated_slots(share):
    for identifiers, gradients in sparse_optimizer.draw_slots(1000, share, 2, device=torch.device("cpu")):
        assert gradients.shape == (768, 2)
        assert len(identifiers.unique()) == round(768 * (1 - share))


# --------------------------------------------------------------------------------------- the dense optimizers
@pytest.mark.usefixtures("float64")
def test_the_loop_that_adam_atan2_is_measured_against_does_the_same():
    start, ours, loop = (
        _weights_after_updates(way and ("adam_atan2", way)) for way in (None, "ours, eager", "loop")
    )
    assert (ours - start).abs().median() > 2e-4
    assert_close(ours, loop)


def _weights_after_updates(key: tuple[str, str] | None) -> torch.Tensor:
    torch.manual_seed(0)
    network = build_model(build_config(global_batch_size=1, sizes=TINY).arch, METADATA).network
    if key:
        update = optimizers.WAYS[key](network)
        for _ in range(3):
            update()
    return torch.cat([parameter.detach().flatten() for parameter in network.parameters()])


# -------------------------------------------------------------------------------------------- whole programs
def _run(name: str, *words: str, folder: Path, world_size: int | None = None) -> Finished:
    """Runs a benchmark from within the repository, where some of them start programs."""
    path = REPOSITORY / "benchmarks" / name
    program = path / "__main__" if path.is_dir() else path
    return run_program(str(program), *words, folder=folder, world_size=world_size, OMP_NUM_THREADS="1")


@pytest.mark.slow
@pytest.mark.parametrize("name", list(_KEYS))
def test_benchmark_ends_with_a_line_of_json(tmp_path, name):
    words = _WORDS.get(name, ("--processes", "2"))
    rounds = () if name == "memory" else ("--rounds", "1")
    finished = _run(name, "--quick", *rounds, *words, folder=tmp_path)
    assert finished.statuses == [0], finished.stderr
    told = [line for line in finished.error_lines if "No CUDA runtime is found" not in line]  # by torch
    assert told == [] or name == "evaluation"  # which trains first, with a progress bar
    result = json.loads(finished.stdout.splitlines()[-1])
    assert result["benchmark"] == name
    for key in _KEYS[name]:
        if name == "scaling" and num_cores() < 2:
            assert result.get(key) is None
        else:
            assert math.isfinite(result[key])
            assert result[key] > 0
    for sample in result["seconds"].values():
        assert sample["p10"] <= sample["median"] <= sample["p90"]


@pytest.mark.slow
def test_benchmark_under_torchrun(tmp_path):
    finished = _run("collectives", "--quick", folder=tmp_path, world_size=2)
    assert finished.statuses == [0, 0], finished.stderr
    assert json.loads(finished.stdout.splitlines()[-1])["world_size"] == 2
    assert len(finished.stdout.splitlines()) > 5
    assert finished.stdout.count("collective ") == 1, "rank 0 prints for all"


@pytest.mark.parametrize(
    ("benchmark", "words", "message"),
    [
        (gradient_sync, ["--processes", "0"], "from 1"),
        (gradient_sync, ["--puzzles", "two"], "--puzzles"),
        (collectives, ["--device", "tpu"], "cpu"),
        (collectives, ["--round", "3"], "--round"),
        (sparse_optimizer, ["--processes", "5"], "768"),
        (sparse_optimizer, ["--threads", "many"], "--threads"),
        (optimizers, ["--processes", "2"], "unrecognized arguments: --processes 2"),
        (train_step, ["--hidden", "30", "--heads", "4"], "--hidden 30"),
        (train_step, ["--contenders", "ours"], "must name published"),
        (scaling, ["--processes", "2", "4"], "must contain 1"),
        (scaling, ["--processes", "1", "3"], "--puzzles 8 is not divisible by --processes 3"),
    ],
)
def test_a_wrong_argument_is_one_line(capsys, benchmark, words, message):
    with pytest.raises(SystemExit) as ended:
        benchmark.main(words)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert message in line


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("name", ["collectives", "scaling"])
def test_a_device_that_is_not_there_is_one_line(tmp_path, name):
    finished = _run(name, "--quick", "--device", "cuda", folder=tmp_path)
    assert finished.statuses == [1]
    (line,) = finished.error_lines
    assert "no CUDA device" in line


@pytest.mark.slow
def test_a_rank_that_fails_ends_the_benchmark(tmp_path):
    (tmp_path / "failing.py").write_text(
        "from benchmarks.harness import add_processes, benchmark_parser, parse\n"
        "from benchmarks.processes import run\n"
        "from parallel.process_group import rank\n"
        "from parallel.collectives import barrier\n"
        "def measure(arguments, device):\n"
        "    if rank() == 1: raise RuntimeError('rank 1 is broken')\n"
        "    barrier()\n"
        "parser = benchmark_parser('failing', description='', rounds=1)\n"
        "add_processes(parser)\n"
        "run(measure, parse(parser, []))\n"
    )
    finished = run_program(str(tmp_path / "failing"), folder=tmp_path, world_size=None)
    assert finished.statuses == [1]
    assert "rank 1 is broken" in finished.stderr


@pytest.mark.slow
def test_a_failing_rank_is_seen_whenever_its_exit_code_comes(tmp_path):
    """A process that ends closes what it had open, and only then has an exit code."""
    (tmp_path / "late.py").write_text(
        "import os, time\n"
        "from benchmarks import processes\n"
        "from benchmarks.harness import add_processes, benchmark_parser, parse\n"
        "def closes_and_fails(benchmark, arguments):\n"
        "    os.closerange(3, 256)\n"
        "    time.sleep(0.02)\n"
        "    os._exit(1)\n"
        "processes._measure = closes_and_fails\n"
        "parser = benchmark_parser('late', description='', rounds=1)\n"
        "add_processes(parser)\n"
        "for _ in range(20):\n"
        "    try:\n"
        "        processes.run(None, parse(parser, ['--processes', '1']))\n"
        "    except SystemExit as ended:\n"
        "        print(ended.code)\n"
        "    else:\n"
        "        print('not seen')\n"
    )
    finished = run_program(str(tmp_path / "late"), folder=tmp_path, world_size=None)
    assert finished.stdout.split() == ["1"] * 20, finished.stderr


def test_a_program_is_stopped_once_enough_is_there(tmp_path):
    """And whatever its status is then; else it counts, and its last line is told."""
    (tmp_path / "endless.py").write_text(
        "import sys, time\nfrom pathlib import Path\nPath(sys.argv[1]).touch()\n"
        "time.sleep(200)\nPath(sys.argv[2]).touch()\n"
    )
    begun, ended = tmp_path / "begun", tmp_path / "ended"
    run_words(tmp_path / "endless.py", begun, ended, until=begun.exists)
    assert begun.exists()
    assert not ended.exists()


def test_a_program_that_fails_ends_the_benchmark_with_its_last_line(tmp_path, capsys):
    (tmp_path / "failing.py").write_text("import sys\nprint('more')\nsys.exit('it is broken')\n")
    with pytest.raises(SystemExit) as ended:
        run_words(tmp_path / "failing.py")
    assert ended.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "failing.py" in line
    assert "it is broken" in line


def test_the_commit_is_dirty_by_changed_code_and_not_by_pages_and_records(tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "REPOSITORY", tmp_path)
    assert harness.commit() == "unknown"
    for name in ("trainer.py", "README.md", "records/demo.json"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("1\n")
    author = ("-c", "user.name=A", "-c", "user.email=a@example.org")
    for words in (["init", "--quiet"], ["add", "."], [*author, "commit", "--quiet", "-m", "All"]):
        subprocess.run(["git", "-C", tmp_path, *words], check=True)
    name = harness.commit()
    assert len(name) >= 7
    assert name.isalnum()
    (tmp_path / "README.md").write_text("2\n")
    (tmp_path / "records" / "demo.json").write_text("2\n")
    assert harness.commit() == name
    (tmp_path / "trainer.py").write_text("2\n")
    assert harness.commit() == f"{name}-dirty"


@pytest.mark.slow
def test_a_machine_with_torch_and_numpy_is_enough():
    """But for those about runs."""
    names = sorted(_KEYS.keys() - {"checkpoint", "evaluation", "start", "train_step"})
    modules = ", ".join(f"benchmarks.{name}" for name in (*names, "train_step.__main__"))
    code = (
        "import sys\n"
        "absent = 'pydantic yaml omegaconf hydra wandb coolname tqdm safetensors'\n"
        "sys.modules.update(dict.fromkeys(absent.split()))\n"
        f"import {modules}\n"
        "import torch\n"
        "from benchmarks.trainee import TINY, Trainee, build_config, random_batch\n"
        "cpu = torch.device('cpu')\n"
        "batch = random_batch(2, seed=0, device=cpu)\n"
        "Trainee(build_config(global_batch_size=2, sizes=TINY), cpu).step(batch)\n"
    )
    finished = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
