"""Sudoku, with boxes of 2x2, 2x3 or 3x3 cells.

Tokens: 0 = pad, 1 = empty, 2 .. n + 1 = the digits 1 .. n. A sound puzzle has one solution, so that a valid
answer is the exact one; where the two shares differ, the puzzles have several.
"""

import functools
from pathlib import Path

import numpy as np

from dataset.evaluator import RowEvaluator
from dataset.format import Metadata
from dataset.kinds import FAINT, Kind, Look
from dataset.kinds.sudoku.rules import BOXES, SUDOKU, Box, are_solved

_BOX_OF = {(rows * columns) ** 2: (rows, columns) for rows, columns in BOXES.values()}  # by number of cells
_DIGIT_1 = 2  # token


def _misfit(metadata: Metadata) -> str | None:
    num_digits = metadata.vocab_size - _DIGIT_1
    if metadata.seq_len != num_digits**2:
        cells = f"the {num_digits}x{num_digits} cells that go with vocab_size {metadata.vocab_size}"
        return f"seq_len is {metadata.seq_len}, not {cells} (pad, empty and the digits)"
    return None


def _build_evaluator(folder: Path, metadata: Metadata) -> RowEvaluator:
    if (num := metadata.seq_len) not in _BOX_OF:
        only = f"only those of {', '.join(map(str, _BOX_OF))} cells"
        raise ValueError(f"{folder}: Sudokus of {num} cells cannot be evaluated, {only}")
    return RowEvaluator("sudoku", functools.partial(check_answers, box=_BOX_OF[num]))


def check_answers(inputs: np.ndarray, preds: np.ndarray, *, box: Box) -> dict[str, np.ndarray]:
    """valid: whether every row, column and box holds each digit once, and every clue of the input is kept.

    inputs, preds: tokens [n, seq_len]. Returns {"valid": bool [n]}.
    """
    is_digit = (preds >= _DIGIT_1) & (preds < _DIGIT_1 + box[0] * box[1])
    digits = np.where(is_digit, preds - (_DIGIT_1 - 1), 0).astype(np.uint8)
    keeps_clues = ((preds == inputs) | (inputs < _DIGIT_1)).all(axis=1)
    return {"valid": are_solved(digits, box=box) & keeps_clues}


KIND = Kind(
    name="sudoku",
    builder="dataset.build_sudoku",
    misfit=_misfit,
    build_evaluator=_build_evaluator,
    augmentations={"sudoku": SUDOKU},
    look=Look(
        symbols=["_", ".", *map(str, range(1, 26))],
        styles={0: FAINT, 1: FAINT},
        boxes=_BOX_OF,
        marks_new=True,
    ),
)
