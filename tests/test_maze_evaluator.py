"""Ways through mazes, evaluated: the labelled one, another shortest one, a longer one, no way at all."""

from pathlib import Path

import numpy as np
import pytest

from dataset.format import IGNORE_LABEL_ID
from dataset.kinds.kind import RowEvaluator
from evaluation.evaluators import build_evaluator
from tests.answers import answers, metadata, metrics_of

FOLDER = Path("data")

# Rows of 5 x 5 cells, side by side with "|".
MAZE = "S   #|    #|#   #|    #|##  G"
LABEL = "S   #|oooo#|#  o#|   o#|## oG"


def tokens(maze: str) -> list[int]:
    return ["?# SGo".index(cell) for cell in maze if cell != "|"]


def maze_evaluator(seq_len: int) -> RowEvaluator:
    return build_evaluator("maze", folder=FOLDER, metadata=metadata(seq_len=seq_len, vocab_size=6))


@pytest.mark.parametrize("dtype", [np.uint8, np.int32])
@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (LABEL, "exact valid shortest"),
        ("Sooo#|   o#|#  o#|   o#|## oG", "valid shortest"),
        ("Sooo#|   o#|#ooo#| o  #|##ooG", ""),  # the path is broken
        ("S   #|oooo#|#? o#|   o#|## oG", ""),
        (MAZE, ""),
    ],
)
def test_answers_of_every_kind(answer, expected, dtype):
    evaluator = maze_evaluator(25)
    evaluator.add("all", answers([tokens(MAZE)], [tokens(LABEL)], np.array([tokens(answer)], dtype)))
    metrics = metrics_of(evaluator)["all"]
    assert metrics == {
        **{f"maze/{share}_accuracy": share in expected.split() for share in ("exact", "valid", "shortest")},
        "maze/count": 1,
    }


def test_longer_ways_are_valid():
    maze, label = "S   |    |    |G   ", "S   |o   |o   |G   "
    longer = ("Soo |  o |  o |Goo ", "Sooo|   o|   o|Gooo")
    evaluator = maze_evaluator(16)
    evaluator.add(
        "all", answers([tokens(maze)] * 3, [tokens(label)] * 3, [tokens(way) for way in (label, *longer)])
    )
    assert metrics_of(evaluator)["all"] == {
        "maze/exact_accuracy": 1 / 3,
        "maze/valid_accuracy": 1.0,
        "maze/shortest_accuracy": 1 / 3,
        "maze/count": 3,
    }


def test_rows_without_a_label_and_batches_without_a_row_count_nowhere():
    evaluator = maze_evaluator(25)
    grid, label = tokens(MAZE), tokens(LABEL)
    evaluator.add("all", answers(*np.empty((3, 0, 25), np.uint8)))
    assert metrics_of(evaluator) == {}
    evaluator.add("all", answers([grid] * 2, [label, [IGNORE_LABEL_ID] * 25], [grid, label]))
    metrics = metrics_of(evaluator)["all"]
    assert (metrics["maze/valid_accuracy"], metrics["maze/count"]) == (0.0, 1)
