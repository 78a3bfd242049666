"""Sudoku, with boxes of 2x2, 2x3 or 3x3 cells.

Tokens: 0 = pad, 1 = empty, 2 .. n + 1 = the digits 1 .. n. A sound puzzle has one solution, so that a valid
answer is the exact one; where the two shares differ, the puzzles have several.
"""

import functools
import re
import string
from pathlib import Path

import numpy as np

from dataset.format import Metadata
from dataset.kinds.kind import FAINT, Kind, Puzzle, RowEvaluator, Rules, Style
from dataset.kinds.sudoku.rules import BOXES, Box, are_solved, unit_cells

_BOX_OF = {(rows * columns) ** 2: (rows, columns) for rows, columns in BOXES.values()}  # by number of cells
_EMPTY, _DIGIT_1 = 1, 2  # tokens
_DIGITS = string.digits[1:] + string.ascii_uppercase  # as people write them
_EMPTY_CELLS = ".0_"
_RULED_LINE = re.compile(r"[-+=|\s]*")  # between the boxes of a drawing


def _mismatch(metadata: Metadata) -> str | None:
    num_digits = metadata.vocab_size - _DIGIT_1
    if metadata.seq_len != num_digits**2:
        cells = f"the {num_digits}x{num_digits} cells that go with vocab_size {metadata.vocab_size}"
        return f"seq_len is {metadata.seq_len}, not {cells} (pad, empty and the digits)"
    return None


def _build_evaluator(folder: Path, metadata: Metadata) -> RowEvaluator:
    if (num := metadata.seq_len) not in _BOX_OF:
        known = ", ".join(map(str, _BOX_OF))
        raise ValueError(f"{folder}: Sudokus of {num} cells cannot be evaluated, only of {known}")
    return RowEvaluator("sudoku", functools.partial(check_answers, box=_BOX_OF[num]))


def check_answers(inputs: np.ndarray, preds: np.ndarray, *, box: Box) -> dict[str, np.ndarray]:
    """valid: whether every row, column and box holds each digit once, and every clue of the input is kept.

    inputs, preds: tokens [n, seq_len]. Returns {"valid": bool [n]}.
    """
    is_digit = (preds >= _DIGIT_1) & (preds < _DIGIT_1 + box[0] * box[1])
    digits = np.where(is_digit, preds - (_DIGIT_1 - 1), 0).astype(np.uint8)
    keeps_clues = ((preds == inputs) | (inputs < _DIGIT_1)).all(axis=1)
    return {"valid": are_solved(digits, box=box) & keeps_clues}


def read_puzzles(text: str) -> list[Puzzle]:
    """Reads one Sudoku: its cells row by row, with '.', '0' or '_' where one is empty.

    Spaces, lines, commas and what is drawn between the boxes do not matter.
    """
    lines = [line for line in text.splitlines() if not _RULED_LINE.fullmatch(line)]
    cells = re.sub(r"[\s|,]", "", "".join(lines)).upper()
    if unknown := next((cell for cell in cells if cell not in _EMPTY_CELLS + _DIGITS), None):
        raise ValueError(
            f"{unknown!r} is no cell of a Sudoku: give digits, and '.', '0' or '_' where it is empty"
        )
    if len(cells) not in _BOX_OF:
        sizes = ", ".join(f"{num} ({box[0] * box[1]}x{box[0] * box[1]})" for num, box in _BOX_OF.items())
        raise ValueError(f"{len(cells)} cells make no Sudoku, which has one of {sizes}")
    box = _BOX_OF[len(cells)]
    size = box[0] * box[1]
    digits = np.array([_DIGITS.find(cell) + 1 for cell in cells])
    for index in np.flatnonzero(digits > size):
        row, cell = index // size, cells[index]
        raise ValueError(
            f"row {row + 1} has the digit {cell}, but {size}x{size} cells take 1 to {_DIGITS[size - 1]}"
        )
    for number, unit in enumerate(unit_cells(box)):
        counts = np.bincount(digits[unit], minlength=size + 1)[1:]
        if (counts > 1).any():
            name = f"{('row', 'column', 'box')[number // size]} {number % size + 1}"
            raise ValueError(
                f"the clues contradict each other: {name} has the digit {_DIGITS[counts.argmax()]} twice"
            )
    tokens = np.where(digits > 0, digits + _DIGIT_1 - 1, _EMPTY).astype(np.uint8)
    return [Puzzle(tokens, vocab_size=_DIGIT_1 + size, rules=_rules(box))]


def _rules(box: Box) -> Rules:
    return lambda inputs, preds: check_answers(inputs, preds, box=box)["valid"]


KIND = Kind(
    name="sudoku",
    mismatch=_mismatch,
    build_evaluator=_build_evaluator,
    augmentation="sudoku",
    style=Style(
        symbols=["_", ".", *map(str, range(1, 26))],
        ansi={0: FAINT, 1: FAINT},
        boxes=_BOX_OF,
        marks_new=True,
    ),
    read_puzzles=read_puzzles,
)
