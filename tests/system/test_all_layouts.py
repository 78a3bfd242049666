"""All layouts of the ranks, with all models that they allow: what test_layouts has of a few."""

import itertools

import pytest
import torch
from torch._dynamo.utils import counters

from tests.checkpoints import FINGERPRINT, do_step
from tests.float64 import in_float64
from tests.ranks import run_ranks
from tests.test_layouts import (
    ACCUMULATION,
    ARCHS,
    LAYOUTS,
    assert_bits_of_resumed,
    assert_equal_to_one,
    assert_files_close,
    assert_programs_agree,
    begin,
    do_steps,
    go_on,
    save_in_the_middle,
)
from tests.tiny import random_batch
from training.checkpoints import CheckpointManager

_SIZES, _OPTIMIZERS = (1, 2, 4), ("adam_atan2", "muon", "adamw")
_OPTIMIZER_OF = dict(zip(ARCHS, itertools.cycle(_OPTIMIZERS), strict=False))


def _layouts(size: int) -> list[str]:
    """Returns the layouts on so many ranks."""
    return [layout for layout, (number, _) in LAYOUTS.items() if number == size]


@pytest.mark.parametrize("optimizer", _OPTIMIZERS)
@pytest.mark.parametrize("name", ARCHS)
def test_every_layout_is_one_process(name, optimizer, tmp_path):
    """With AdamW also accumulation and recomputation."""
    options = {"optimizer": optimizer} | (ACCUMULATION if optimizer == "adamw" else {})
    runs = {layout: (name, layout, options) for layout in LAYOUTS if layout != "one"}
    assert_equal_to_one(tmp_path, runs)


@pytest.mark.parametrize("size", _SIZES)
@pytest.mark.parametrize("name", ARCHS)
def test_every_layout_that_is_resumed_in_itself_has_the_same_bits(name, size, tmp_path):
    options = {"arch": {"forward_dtype": "bfloat16"}, "optimizer": _OPTIMIZER_OF[name]}
    runs = {layout: (name, layout, options) for layout in _layouts(size)}
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


def test_the_programs_do_the_same_in_every_layout(tmp_path, sudoku_folder):
    runs = {layout: [layout] for layout in ("one", "pp2", "tp2", "fsdp2 x pp2", "tp2 x pp2")}
    assert_programs_agree(tmp_path, sudoku_folder, runs)


def _compile(layouts: list[str]) -> None:
    """Asserts that the first gradients of compiled blocks are those of eager ones, up to rounding.

    With accumulation and recomputation; and that two steps make all graphs.
    """
    for layout in layouts:
        torch.compiler.reset()
        counters.clear()
        gradients = []
        for forward_dtype, compiles in (("float32", False), ("bfloat16", False), ("bfloat16", True)):
            options = {"arch": {"forward_dtype": forward_dtype}, "compile": compiles}
            state, config = begin("trm", layout, ACCUMULATION | options)
            do_step(state, config, random_batch(8))
            gradients.append(torch.cat([flat.gradients for flat in state.weights.flats]))
        exact, *others = gradients
        eager, compiled = ((each - exact).norm() / exact.norm() for each in others)
        assert 1e-3 < eager < 0.1, layout
        assert compiled < 1.5 * eager, layout
        assert counters["stats"]["unique_graphs"] > 0
        assert not counters["graph_break"], layout
        do_step(state, config, random_batch(8, seed=1))
        with torch.compiler.set_stance("fail_on_recompile"):
            do_step(state, config, random_batch(8, seed=2))


@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of its own doings
@pytest.mark.parametrize("layouts", [["pp2", "tp2", "fsdp2"], ["tp2 x pp2"]])
def test_blocks_of_a_layout_compile(layouts):
    run_ranks(_compile, LAYOUTS[layouts[0]][0], layouts)
