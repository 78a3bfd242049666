"""All layouts of the ranks, with all models that they allow: what test_layouts has of a few."""

import itertools

import pytest

from tests.checkpoints import FINGERPRINT
from tests.float64 import in_float64
from tests.ranks import run_ranks
from tests.test_compilation import assert_compiles
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


def test_the_programs_do_the_same_also_where_a_run_changes_its_layout(tmp_path, sudoku_folder):
    runs = {each: [each] for each in ("one", "tp2", "tp2 x pp2")} | {"changing": ["fsdp2 x pp2", "pp2"]}
    assert_programs_agree(tmp_path, sudoku_folder, runs)


@pytest.mark.parametrize("layouts", [["one"], ["pp2", "tp2", "fsdp2"], ["tp2 x pp2"]])
def test_blocks_of_a_layout_compile(layouts):
    run_ranks(assert_compiles, LAYOUTS[layouts[0]][0], layouts)
