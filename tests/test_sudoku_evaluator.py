"""Sudokus evaluated by their rules: exact answers, valid ones, and wrong ones."""

from pathlib import Path

import numpy as np
import pytest

from dataset.format import IGNORE_LABEL_ID
from dataset.kinds.kind import RowEvaluator
from dataset.kinds.sudoku.rules import generate_puzzle
from evaluation.evaluators import build_evaluator
from tests.answers import answers, metadata, metrics_of
from tests.test_sudoku import ANSWER, QUESTION

FOLDER = Path("data")


def tokens(text: str) -> list[int]:
    return [int(character) + 1 for character in text]


def sudoku_evaluator(num_digits: int) -> RowEvaluator:
    return build_evaluator(
        "sudoku", folder=FOLDER, metadata=metadata(seq_len=num_digits**2, vocab_size=num_digits + 2)
    )


def evaluated(inputs, labels, preds, *, num_digits: int, dtype=np.uint8) -> tuple[bool, bool]:
    """(exact, valid) of one answer."""
    evaluator = sudoku_evaluator(num_digits)
    evaluator.add("all", answers([inputs], [labels], np.array([preds], dtype)))
    metrics = metrics_of(evaluator)["all"]
    assert set(metrics) == {"sudoku/exact_accuracy", "sudoku/valid_accuracy", "sudoku/count"}
    assert metrics["sudoku/count"] == 1
    return bool(metrics["sudoku/exact_accuracy"]), bool(metrics["sudoku/valid_accuracy"])


def changed(values: list[int], **changes: int) -> list[int]:
    """Cells by their number, as c0, c1, ..."""
    copy = list(values)
    for cell, value in changes.items():
        copy[int(cell[1:])] = value
    return copy


RIGHT = tokens(ANSWER)
RELABELLED = [(token - 1) % 9 + 2 for token in RIGHT]  # a valid grid of other digits


@pytest.mark.parametrize("dtype", [np.uint8, np.int32])
@pytest.mark.parametrize(
    ("question", "answer", "expected"),
    [
        (QUESTION, RIGHT, (True, True)),
        (QUESTION, changed(RIGHT, c1=RIGHT[2], c2=RIGHT[1]), (False, False)),
        (QUESTION, changed(RIGHT, c80=RIGHT[79]), (False, False)),
        (QUESTION, changed(RIGHT, c40=1), (False, False)),
        (QUESTION, changed(RIGHT, c40=0), (False, False)),
        (QUESTION, tokens(QUESTION), (False, False)),
        (QUESTION, RELABELLED, (False, False)),  # the clues are gone
        ("0" * 81, RELABELLED, (False, True)),  # there are none
        ("0" * 81, changed(RELABELLED, c0=RELABELLED[0] % 9 + 2), (False, False)),
    ],
)
def test_9x9(question, answer, expected, dtype):
    assert evaluated(tokens(question), RIGHT, answer, num_digits=9, dtype=dtype) == expected


def test_latin_square_is_no_sudoku():
    rows = [[(row + column) % 9 + 2 for column in range(9)] for row in range(9)]
    assert evaluated([1] * 81, RIGHT, sum(rows, []), num_digits=9) == (False, False)


@pytest.mark.parametrize("box", [(2, 2), (2, 3), (3, 3)])
def test_boxes_of_every_size(box):
    num_digits = box[0] * box[1]
    question, answer = generate_puzzle(0, stream=0, index=0, box=box)
    question, answer = [digit + 1 for digit in question], [digit + 1 for digit in answer]
    assert evaluated(question, answer, answer, num_digits=num_digits) == (True, True)
    transposed = np.array(answer).reshape(num_digits, -1).T.ravel().tolist()
    expected = box[0] == box[1]  # 2x3 boxes transposed are 3x2 ones
    assert evaluated([1] * len(answer), answer, transposed, num_digits=num_digits) == (False, expected)


def test_sets_are_apart_and_rows_without_a_label_count_nowhere():
    evaluator = sudoku_evaluator(9)
    empty, wrong, ignored = [1] * 81, changed(RIGHT, c0=1), [IGNORE_LABEL_ID] * 81
    evaluator.add("easy", answers([empty] * 3, [RIGHT, RIGHT, ignored], [RIGHT, wrong, RIGHT]))
    evaluator.add("easy", answers([empty] * 2, [RIGHT, RIGHT], [RIGHT, RELABELLED]))
    evaluator.add("hard", answers([empty], [RIGHT], [wrong]))
    evaluator.add("nothing", answers([empty], [ignored], [RIGHT]))
    evaluator.add("no.rows", answers(*np.empty((3, 0, 81), np.uint8)))
    assert metrics_of(evaluator) == {
        "easy": {"sudoku/exact_accuracy": 0.5, "sudoku/valid_accuracy": 0.75, "sudoku/count": 4},
        "hard": {"sudoku/exact_accuracy": 0.0, "sudoku/valid_accuracy": 0.0, "sudoku/count": 1},
    }


def test_only_counted_cells_must_be_exact():
    label = changed(RIGHT, c5=IGNORE_LABEL_ID)
    assert evaluated([1] * 81, label, changed(RIGHT, c5=2), num_digits=9) == (True, False)
