"""Recipes of the field, each shrunk to ten steps of the real program."""

import pytest

from dataset.build import build_dataset
from tests.ranks import NUM_THREADS, complete_program
from tests.tiny import logged_rows

pytestmark = pytest.mark.slow

# Sizes alone: what makes a recipe stays.
_SHRUNK = (
    *("arch.hidden_size=32", "arch.num_heads=2", "arch.forward_dtype=float32", "arch.puzzle_emb_len=0"),
    *("global_batch_size=16", "lr_warmup_steps=2", "eval_interval=1", "epochs=1", "log_interval=1"),
    *("device=cpu", "compile=false", f"cpu_threads={NUM_THREADS}", "wandb_mode=disabled"),
)
_SHALLOW = ("arch.H_cycles=2", "arch.L_cycles=2", "arch.halt_max_steps=3")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "sudoku"
    words = ("--generate", "160", "--num-test", "16", "--box", "2x2", "--num-aug", "2")
    build_dataset("sudoku", ["--output-dir", str(folder), *words])
    return folder


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("trm_sudoku_adamw", _SHALLOW),
        ("trm_sudoku_gate", _SHALLOW),
        ("fprm_sudoku", ("arch.halt_max_steps=3", "arch.eval_halt_max_steps=9")),
        ("trm_sudoku_cgar", ("arch.halt_max_steps=3",)),
        ("trm_sudoku_rsm", ("arch.H_cycles=3", "arch.L_cycles=3")),
        ("trm_sudoku_sic", _SHALLOW),
        ("trm_sudoku_mlp", (*_SHALLOW, "arch=trm_singlez")),
    ],
)
def test_ten_steps(tmp_path, data, name, options):
    run = tmp_path / "run"
    arguments = (f"experiment={name}", *_SHRUNK, *options, f"data_path={data}", f"checkpoint_path={run}")
    complete_program("pretrain", *arguments, folder=tmp_path)
    lines = logged_rows(run)
    assert [line["step"] for line in lines] == list(range(1, 11))
    assert 0 < lines[-1]["train/lm_loss"] < 4
    assert 0 <= lines[-1]["eval/all/sudoku/valid_accuracy"] <= 1
    assert lines[-1]["best/step"] == 10
    assert lines[-1]["best/selected_by"] == "test"
