"""What all evaluators share: how they are found, and sums that no number of ranks changes."""

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np

from dataset.format import open_dataset
from dataset.kinds.kind import Answers, find_kind
from evaluation.evaluators import Evaluators
from tests.answers import add_in_batches, answers, metadata, metrics_of
from tests.ranks import REPOSITORY, run_ranks


def random_sudoku_answers(num: int) -> Answers:
    """4x4 grids, many of them right or only valid."""
    random = np.random.default_rng(0)
    right = np.array([1, 2, 3, 4, 3, 4, 1, 2, 2, 1, 4, 3, 4, 3, 2, 1]) + 1
    others = np.array([right, (right - 1) % 4 + 2, right.reshape(4, 4).T.ravel(), np.ones(16)])
    preds = others[random.integers(0, len(others), num)].astype(np.uint8)
    return answers(np.ones((num, 16)), np.tile(right, (num, 1)), preds)


def _evaluate_sudoku(folder: Path, num: int, global_batch_size: int) -> dict:
    evaluators = Evaluators(["sudoku"], open_dataset(folder, splits=("test",), read_everything=False))
    add_in_batches(evaluators, "all", random_sudoku_answers(num), global_batch_size=global_batch_size)
    return evaluators.gather_metrics()


def test_ranks_and_batches_change_nothing(sudoku_folder):
    alone = _evaluate_sudoku(sudoku_folder, 101, 101)
    metrics = alone["all"]
    assert 0 < metrics["sudoku/exact_accuracy"] < metrics["sudoku/valid_accuracy"] < 1
    assert metrics["sudoku/count"] == 101
    assert _evaluate_sudoku(sudoku_folder, 101, 8) == alone
    assert run_ranks(_evaluate_sudoku, 3, sudoku_folder, 101, 7) == [alone, {}, {}]


def test_a_new_kind_is_one_file(tmp_path):
    """In a copy of the tree with one more module in dataset/kinds."""
    for package in ("config", "dataset"):
        shutil.copytree(REPOSITORY / package, tmp_path / package)
    (tmp_path / "dataset" / "kinds" / "colours.py").write_text(_NEW_KIND)
    run = subprocess.run(
        [sys.executable, "-c", _USE_NEW_KIND], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert run.stdout.split() == ["arc,colours,maze,pairs,sudoku", "colours", "r"]


_NEW_KIND = """
from dataset.kinds.kind import Kind, RowEvaluator, Style

KIND = Kind(
    name="colours",
    mismatch=lambda metadata: None if metadata.vocab_size == 3 else "vocab_size is not 3",
    build_evaluator=lambda folder, metadata: RowEvaluator("colours", lambda inputs, preds: {}),
    augmentation="square",
    style=Style(symbols="_rb"),
)
"""
_USE_NEW_KIND = """
from dataset.format import Metadata
from dataset.kinds.kind import kind_names, kind_of
kind = kind_of(Metadata(0, 0, 0, 3, 5, 1, 1, 1.0, ("all",)))
print(",".join(kind_names()), kind.name, kind.style.symbols[1])
"""


def test_nothing_seen_is_nothing_said():
    for name in ("sudoku", "maze"):
        assert metrics_of(find_kind(name).build_evaluator(Path("data"), metadata())) == {}
