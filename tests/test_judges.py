"""What all judges share: their registry, and sums that no number of ranks changes."""

from pathlib import Path

import numpy as np
import pytest

from evaluation.judges import JUDGES, Answers, build_judge
from tests.answers import add_in_batches, answers, metadata
from tests.ranks import run_ranks


def random_sudoku_answers(num: int) -> Answers:
    """4x4 grids, many of them right or only valid."""
    random = np.random.default_rng(0)
    right = np.array([1, 2, 3, 4, 3, 4, 1, 2, 2, 1, 4, 3, 4, 3, 2, 1]) + 1
    others = np.array([right, (right - 1) % 4 + 2, right.reshape(4, 4).T.ravel(), np.ones(16)])
    preds = others[random.integers(0, len(others), num)].astype(np.uint8)
    return answers(np.ones((num, 16)), np.tile(right, (num, 1)), preds)


def _judge_sudoku(num: int, global_batch_size: int) -> dict:
    judge = build_judge("sudoku", folder=Path("data"), metadata=metadata())
    add_in_batches(judge, "all", random_sudoku_answers(num), global_batch_size=global_batch_size)
    return judge.gather_metrics()


def test_ranks_and_batches_change_nothing():
    alone = _judge_sudoku(101, 101)
    metrics = alone["all"]
    assert 0 < metrics["sudoku/exact_accuracy"] < metrics["sudoku/valid_accuracy"] < 1
    assert metrics["sudoku/count"] == 101
    assert _judge_sudoku(101, 8) == alone
    for ranks, batch in ((2, 8), (4, 7)):
        first, *others = run_ranks(_judge_sudoku, ranks, 101, batch)
        assert first == alone
        assert others == [{}] * (ranks - 1)


def test_registry():
    assert sorted(JUDGES) == ["arc", "maze", "sudoku"]
    judge = build_judge("sudoku", folder=Path("data"), metadata=metadata())
    assert judge.gather_metrics() == {}


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("chess", {}, "unknown judge 'chess'; known are: arc, maze, sudoku"),
        ("arc", {}, "data is no ARC dataset"),
        (
            "sudoku",
            {"further_votes": [Path("votes.npz")]},
            "further votes are for the judge arc, not for sudoku",
        ),
        ("maze", {"further_votes": [Path("votes.npz")]}, "further votes are for the judge arc, not for maze"),
    ],
)
def test_mistakes(name, options, message):
    with pytest.raises(ValueError, match=message) as error:
        build_judge(name, folder=Path("data"), metadata=metadata(), **options)
    assert "\n" not in str(error.value)
