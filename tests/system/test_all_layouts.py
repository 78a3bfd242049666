"""All layouts of the ranks, with all models that they allow: what test_layouts has of a few."""

import itertools
import json
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from evaluation import compilation
from tests.checkpoints import FINGERPRINT, do_step
from tests.float64 import TOLERANCE, in_float64
from tests.ranks import complete_program, run_ranks
from tests.test_layouts import (
    ACCUMULATION,
    ARCHS,
    LAYOUTS,
    assert_bits_of_resumed,
    assert_equal_to_one,
    assert_files_close,
    begin,
    do_steps,
    go_on,
    save_in_the_middle,
)
from tests.tiny import OVERRIDES, assert_same_row, logged_rows, random_batch
from training.checkpoints import CheckpointManager

_SIZES, _OPTIMIZERS = (1, 2, 4), ("adam_atan2", "muon", "adamw")
_OPTIMIZER_OF = dict(zip(ARCHS, itertools.cycle(_OPTIMIZERS), strict=False))


def _layouts(size: int) -> list[str]:
    """Returns the layouts on so many ranks."""
    return [layout for layout, (number, _) in LAYOUTS.items() if number == size]


@pytest.mark.parametrize("number", range(3), ids=_OPTIMIZERS)
def test_every_layout_is_one_process(number, tmp_path):
    """Every pair of a model, a layout and an optimizer; with AdamW also accumulation and recomputation."""
    options = {"optimizer": _OPTIMIZERS[number]} | (ACCUMULATION if number == 2 else {})
    pairs = itertools.product(enumerate(ARCHS), enumerate(LAYOUTS))
    runs = {
        f"{name} {layout}": (name, layout, options)
        for (row, name), (column, layout) in pairs
        if layout != "one" and (row + column) % 3 == number
    }
    assert_equal_to_one(tmp_path, runs)


@pytest.mark.parametrize("size", _SIZES)
def test_every_layout_that_is_resumed_in_itself_has_the_same_bits(size, tmp_path):
    """With two models each, of other optimizers; with all of them, up to rounding: below."""
    names, runs = list(ARCHS), {}
    for number, layout in enumerate(LAYOUTS):
        for name in (names[number % 6], names[(number + 2) % 6]) if layout in _layouts(size) else ():
            options = {"arch": {"forward_dtype": "bfloat16"}, "optimizer": _OPTIMIZER_OF[name]}
            runs[f"{name} {layout}"] = (name, layout, options)
    assert_bits_of_resumed(tmp_path, runs, size)


def test_a_run_may_change_from_every_layout_to_every_other(tmp_path):
    of_size = {size: {layout: ("trm", layout, {}) for layout in _layouts(size)} for size in _SIZES}
    for size, runs in of_size.items():
        run_ranks(in_float64, size, save_in_the_middle, tmp_path, runs)
    for size, runs in of_size.items():
        run_ranks(in_float64, size, go_on, tmp_path, list(LAYOUTS), runs)
    for start in LAYOUTS:
        for layout in LAYOUTS:
            assert_files_close(tmp_path / start / layout, tmp_path / "one" / "end")


def _pass_on(folder, size: int) -> None:
    """Goes on with a step in each layout of this size, and saves after each of them."""
    for name in ARCHS:
        for layout in _layouts(size):
            state, config = begin(name, layout, {"optimizer": _OPTIMIZER_OF[name]})
            (folder / name).mkdir(exist_ok=True)
            with CheckpointManager(folder / name, config=config, fingerprint=FINGERPRINT) as checkpoints:
                checkpoints.resume(state)
                do_steps(state, config, 1, folder / f"{name} {layout}")
                checkpoints.save(state)


def _train_alone(folder) -> None:
    for name in ARCHS:
        state, config = begin(name, "one", {"optimizer": _OPTIMIZER_OF[name]})
        do_steps(state, config, len(LAYOUTS) + 1, folder / f"{name} alone")


def test_a_run_of_each_model_passes_through_all_layouts(tmp_path):
    """From one process to two, to four, and back to one."""
    for size in (*_SIZES, 1):
        run_ranks(in_float64, size, _pass_on, tmp_path, size)
    run_ranks(in_float64, 1, _train_alone, tmp_path)
    for name in ARCHS:
        assert_files_close(tmp_path / f"{name} one", tmp_path / f"{name} alone")


_WORDS = ("arch.H_layers=2", "arch.L_layers=2", "arch.q_target=exact", "ema=0.9", "grad_clip_norm=0.5")
_WORDS += ("log_interval=1", "epochs=2", "evaluators=[sudoku]")


def _assert_programs_agree(folder: Path, data: Path, runs: dict[str, list[str]]) -> None:
    """Trains, evaluates and solves by the programs, in float64; all runs must do as the first one.

    runs: the layouts that each goes through, five steps in each but the last. evaluate.py and solve.py are
    one process.
    """
    words, solved = (f"data_path={data}", *OVERRIDES, *_WORDS), {}
    options = {"folder": folder, "is_float64": True}
    for run, layouts in runs.items():
        for number, layout in enumerate(layouts, 1):
            size, keys = LAYOUTS[layout]
            more = [f"{key}={value}" for key, value in keys.items()] + [f"checkpoint_path={run}"]
            more += [f"max_steps={5 * number}"] if number < len(layouts) else []
            finished = complete_program("pretrain", *words, *more, world_size=size, **options)
            axes = [axis for axis in ("pipeline 2", "tensor 2") if axis in finished.stdout]
            assert axes == [axis for axis in ("pipeline 2", "tensor 2") if f"{axis[0]}p2" in layout]
        alone = (f"checkpoint={run}", "device=cpu", "cpu_threads=1")
        complete_program("evaluate", *alone, "evaluators=[sudoku]", **options)
        solved[run] = complete_program("solve", *alone, "puzzle=1..4 .... .... 4..1", **options).stdout
    first = next(iter(runs))
    expected = logged_rows(folder / first)
    for run in runs:
        for ours, theirs in zip(logged_rows(folder / run), expected, strict=True):
            common = ours.keys() & theirs.keys()  # a start's last row has more
            assert {"train/lm_loss", "train/grad_norm", "train/lr"} <= common
            assert_same_row(*({n: row[n] for n in common} for row in (ours, theirs)), tolerance=TOLERANCE)
        file = Path("evaluation", f"step_{expected[-1]['step']}", "metrics.json")
        ours, theirs = (json.loads((folder / each / file).read_text()) for each in (run, first))
        assert_same_row(ours["all"], theirs["all"], tolerance=TOLERANCE)
        assert solved[run] == solved[first]


def test_the_programs_do_the_same_also_where_a_run_changes_its_layout(tmp_path, sudoku_folder):
    runs = {each: [each] for each in ("one", "tp2", "tp2 x pp2")} | {"changing": ["fsdp2 x pp2", "pp2"]}
    _assert_programs_agree(tmp_path, sudoku_folder, runs)


def _assert_compiles(layouts: list[str]) -> None:
    """Asserts that the first gradients of compiled blocks are those of eager ones, up to rounding.

    With accumulation and recomputation; and that two steps make all graphs, whole ones, and rename nothing.
    """
    compilation.find_compiler_failure = lambda _: None  # a trial takes seconds
    for layout in layouts:
        torch.compiler.reset()
        counters.clear()
        gradients, names = [], []
        for forward_dtype, compiles in (("float32", False), ("bfloat16", False), ("bfloat16", True)):
            options = {"arch": {"forward_dtype": forward_dtype}, "compile": compiles}
            state, config = begin("trm", layout, ACCUMULATION | options)
            do_step(state, config, random_batch(8))
            gradients.append(torch.cat([flat.gradients for flat in state.weights.flats]))
            names.append([*state.model.state_dict()])
        exact, *others = gradients
        eager, compiled = ((each - exact).norm() / exact.norm() for each in others)
        assert 1e-3 < eager < 0.1, layout
        assert compiled < 1.5 * eager, layout
        assert names[0] == names[1] == names[2]
        assert counters["stats"]["unique_graphs"] > 0
        assert not counters["graph_break"], layout
        do_step(state, config, random_batch(8, seed=1))
        with torch.compiler.set_stance("fail_on_recompile"):
            do_step(state, config, random_batch(8, seed=2))


@pytest.mark.parametrize("layouts", [["one"], ["pp2", "tp2", "fsdp2"], ["tp2 x pp2"]])
def test_blocks_of_a_layout_compile(layouts):
    run_ranks(_assert_compiles, LAYOUTS[layouts[0]][0], layouts)
