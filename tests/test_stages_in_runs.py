"""Runs in stages, on several datasets, from given weights: the real program, stopped and resumed."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dataset.build import build_dataset
from tests.checkpoints import assert_equal, saved_tensors
from tests.ranks import complete_program
from tests.tiny import OVERRIDES, logged_rows
from training.initial import fill_

pytestmark = pytest.mark.slow

_TRM = (
    "arch=trm",
    *(override for override in OVERRIDES if not override.startswith("arch.H_layers")),
    *("arch.puzzle_emb_len=2", "arch.H_cycles=2", "arch.L_cycles=2"),
    *("epochs=1", "eval_interval=1", "ema=0.3", "raw=true"),
)


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "other"
    build_dataset("sudoku", ["--output-dir", str(folder), "--generate", "120", "--box", "2x2", "--seed", "9"])
    return folder


def _run(folder: Path, program: str, *overrides: str, world_size: int = 1):
    return complete_program(program, *overrides, folder=folder, world_size=world_size)


@pytest.mark.long
def test_a_curriculum_stopped_in_a_stage_goes_on_to_the_same_end(tmp_path, sudoku_folder, other_folder):
    data = (
        f"data_path=[{sudoku_folder},{other_folder}]",
        f"curriculum=[{{data_path:[{other_folder}],epochs:1,H_cycles:1}},{{epochs:1,L_cycles:1}}]",
    )
    _run(tmp_path, "pretrain", *_TRM, *data, "checkpoint_path=whole")
    whole = logged_rows(tmp_path / "whole")
    last = whole[-1]["step"]
    assert last == 5 + 13 + 13  # of 24: 120 puzzles, and twice 320

    _run(tmp_path, "pretrain", *_TRM, *data, "checkpoint_path=run", "max_steps=7")
    _run(tmp_path, "pretrain", *_TRM, *data, "checkpoint_path=run")
    ours, theirs = (saved_tensors(tmp_path / name / f"step_{last}") for name in ("run", "whole"))
    assert_equal(ours, theirs)
    assert {"ema_weights.lm_head.weight", "ema_state.table.rows"} <= theirs.keys()
    regular = {line["step"] for line in whole}
    assert [line for line in logged_rows(tmp_path / "run") if line["step"] in regular] == whole

    names = {
        f"{kind}/{folder.name}.all/count"
        for kind in ("eval", "eval_raw")
        for folder in (sudoku_folder, other_folder)
    }
    assert names <= whole[-1].keys()
    _run(tmp_path, "evaluate", "checkpoint=whole", "device=cpu", world_size=2)
    evaluated = json.loads((tmp_path / "whole" / "evaluation" / f"step_{last}" / "metrics.json").read_text())
    for folder in (sudoku_folder, other_folder):
        expected = whole[-1][f"eval/{folder.name}.all/lm_loss"]
        assert evaluated[f"{folder.name}.all"]["lm_loss"] == pytest.approx(expected, rel=1e-5)


def test_a_shallow_stage_is_evaluated_with_all_cycles(tmp_path, sudoku_folder):
    """As its checkpoint is afterwards: the best of all evaluations are those of one model."""
    options = (f"data_path={sudoku_folder}", "curriculum=[{share:0.9,H_cycles:1}]", "max_steps=3")
    _run(tmp_path, "pretrain", *_TRM, *options, "checkpoint_path=run")
    _run(tmp_path, "evaluate", "checkpoint=run/best", "device=cpu", "output_dir=out")
    evaluated = json.loads((tmp_path / "out" / "metrics.json").read_text())["all"]
    assert evaluated["lm_loss"] == pytest.approx(
        logged_rows(tmp_path / "run")[-1]["eval/all/lm_loss"], rel=1e-5
    )
    assert evaluated["selected_by"] == "test"


def test_beginning_with_given_weights(tmp_path, sudoku_folder, other_folder):
    _run(tmp_path, "pretrain", *_TRM, f"data_path={sudoku_folder}", "checkpoint_path=first", "max_steps=4")
    options = (f"data_path=[{sudoku_folder},{other_folder}]", "init_from=first", "checkpoint_path=next")
    options += ("train_only=puzzle_embeddings", "max_steps=3")
    options += ("replica_check_interval=1",)  # rank 0 alone reads the weights, and all have them
    finished = _run(tmp_path, "pretrain", *_TRM, *options, world_size=2)
    assert "Every row starts as the mean of the checkpoint's rows" in finished.stdout
    given = load_file(tmp_path / "first" / "step_4" / "ema_weights.safetensors")
    adapted = load_file(tmp_path / "next" / "step_3" / "weights.safetensors")
    table = "puzzle_emb.weights"
    assert (len(given[table]), len(adapted[table])) == (1, 2)
    assert not torch.equal(adapted[table], given[table].expand(2, -1))
    for name in given.keys() - {table}:
        assert torch.equal(adapted[name], given[name]), name
    line = logged_rows(tmp_path / "next")[-1]
    assert line["train/grad_norm"] == 0


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        ({}, "the architecture of this run: the checkpoint has no weight layer.weight"),
        ({"layer.weight": (3, 2), "more": (1,)}, "the architecture of this run: this run has no weight more"),
        (
            {"layer.weight": (3, 4)},
            "this run: layer.weight has shape .3, 4. in the checkpoint, but .3, 2. in this run",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused(stored, expected):
    stored = {name: torch.zeros(shape) for name, shape in stored.items()}
    with pytest.raises(ValueError, match=f"init_from=first does not match {expected}"):
        fill_({"layer.weight": torch.zeros(3, 2)}, stored, source="init_from=first")
