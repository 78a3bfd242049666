"""Sudoku, with boxes from 2x2 to 5x5 cells.

Tokens: 0 = pad, 1 = empty, 2 .. n + 1 = the digits 1 .. n. A proper puzzle has one solution, so a valid
answer is also exact. If the metric `valid` exceeds `exact`, some puzzles have several solutions.
"""

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dataset.kinds.evaluator import RowEvaluator
from dataset.kinds.kind import FAINT, Kind, Puzzle, Style
from dataset.kinds.sudoku.generate import generate_puzzle
from dataset.kinds.sudoku.rules import (
    Box,
    TooHardError,
    are_solved,
    count_solutions,
    unit_cells,
)
from dataset.kinds.sudoku.texts import BOX_OF, EMPTY_CELLS, SYMBOLS, GridText, list_sizes, read_grids
from dataset.metadata import Metadata

_EMPTY, _DIGIT_1 = 1, 2  # tokens
_MOST_SOLUTIONS = 1000  # maximum that is counted
_MADE_UP = 6  # a stream of random bits; the builder uses the lower numbers


def _mismatch(metadata: Metadata) -> str | None:
    num_digits = metadata.vocab_size - _DIGIT_1
    if metadata.seq_len != num_digits**2:
        cells = f"the {num_digits}x{num_digits} cells that go with vocab_size {metadata.vocab_size}"
        return f"seq_len is {metadata.seq_len}, not {cells} (pad, empty and the digits)"
    return None


def _build_evaluator(folder: Path, metadata: Metadata) -> RowEvaluator:
    if (num := metadata.seq_len) not in BOX_OF:
        known = ", ".join(map(str, BOX_OF))
        raise ValueError(f"{folder}: Sudokus of {num} cells cannot be evaluated, only those of {known}")
    return RowEvaluator("sudoku", functools.partial(check_answers, box=BOX_OF[num]))


def check_answers(inputs: np.ndarray, preds: np.ndarray, *, box: Box) -> dict[str, np.ndarray]:
    """Checks by the rules whether answers to Sudokus are right. Returns {"valid": bool [n]}.

    Every row, column and box must contain each digit once. The clues of the input must not be changed.
    inputs, preds: Puzzles and answers, tokens [n, seq_len].
    """
    is_digit = (preds >= _DIGIT_1) & (preds < _DIGIT_1 + box[0] * box[1])
    digits = np.where(is_digit, preds - (_DIGIT_1 - 1), 0).astype(np.uint8)
    keeps_clues = ((preds == inputs) | (inputs < _DIGIT_1)).all(axis=1)
    return {"valid": are_solved(digits, box=box) & keeps_clues}


@dataclasses.dataclass(frozen=True)
class SudokuPuzzle(Puzzle):
    box: Box = (3, 3)  # rows and columns of a box

    @functools.cached_property
    def remark(self) -> str | None:
        question = np.maximum(self.tokens.astype(int) - _EMPTY, 0).tolist()
        try:
            count = count_solutions(question, box=self.box, limit=_MOST_SOLUTIONS)
        except TooHardError as error:
            return str(error)
        if not count:
            raise ValueError("the puzzle has no solution. Check its clues.")
        several = f"this puzzle has {count if count < _MOST_SOLUTIONS else f'at least {count}'} solutions"
        return None if count == 1 else several


def read_puzzles(text: str) -> list[Puzzle]:
    """Reads one or more Sudokus from a text: rows of cells, drawings with frames, or one puzzle in each line.

    Raises ValueError if a Sudoku is not valid, for example because a row has a digit twice. If the text has
    several Sudokus, the message starts with the line where the wrong one begins, such as "line 5: ". A Sudoku
    without a solution raises no error here, but in `SudokuPuzzle.remark`.
    """
    grids, puzzles = read_grids(text), []
    for grid in grids:
        try:
            puzzles.append(_puzzle(grid))
        except ValueError as error:
            raise ValueError(f"line {grid.line}: {error}" if len(grids) > 1 else str(error)) from None
    return puzzles


def _puzzle(grid: GridText) -> SudokuPuzzle:
    if unknown := next((cell for cell in grid.cells if cell not in EMPTY_CELLS + SYMBOLS), None):
        raise ValueError(
            f"{unknown!r} is not a cell of a Sudoku. Use digits, and '.', '0', '_' or '-' for empty cells."
        )
    if len(grid.cells) not in BOX_OF:
        raise ValueError(f"{len(grid.cells)} cells are not a Sudoku. It must have one of {list_sizes()}.")
    box = BOX_OF[len(grid.cells)]
    size = box[0] * box[1]
    digits = np.array([SYMBOLS.find(cell) + 1 for cell in grid.cells])
    for index in np.flatnonzero(digits > size):
        row, cell = index // size, grid.cells[index]
        raise ValueError(
            f"row {row + 1} has the digit {cell}, but {size}x{size} cells take 1 to {SYMBOLS[size - 1]}"
        )
    counts = (digits[unit_cells(box)][:, :, None] == np.arange(1, size + 1)).sum(axis=1)
    for unit, digit in np.argwhere(counts > 1):
        unit_name = f"{('row', 'column', 'box')[unit // size]} {unit % size + 1}"
        raise ValueError(f"the clues contradict each other: {unit_name} has the digit {SYMBOLS[digit]} twice")
    answer = (
        None if grid.answer is None else np.array([SYMBOLS.find(cell) for cell in grid.answer]) + _DIGIT_1
    )
    tokens = np.where(digits > 0, digits + _DIGIT_1 - 1, _EMPTY).astype(np.uint8)

    def obeys_rules(inputs: np.ndarray, preds: np.ndarray) -> np.ndarray:
        return check_answers(inputs, preds, box=box)["valid"]

    return SudokuPuzzle(tokens, vocab_size=_DIGIT_1 + size, rules=obeys_rules, solution=answer, box=box)


def _make_up(metadata: Metadata, count: int) -> Sequence[np.ndarray]:
    if (box := BOX_OF.get(metadata.seq_len)) is None:
        return []
    drawn = [generate_puzzle(0, stream=_MADE_UP, index=index, box=box) for index in range(count)]
    return list(np.array(drawn, np.uint8).swapaxes(0, 1) + np.uint8(_EMPTY))


def _groups(metadata: Metadata) -> list[list[int]] | None:
    box = BOX_OF.get(metadata.seq_len)
    return None if box is None else unit_cells(box).tolist()


def _box_numbers(box: Box) -> list[int]:
    size = box[0] * box[1]
    rows, columns = np.divmod(np.arange(size**2), size)
    return (rows // box[0] * (size // box[1]) + columns // box[1]).tolist()


_REGIONS = {num_cells: _box_numbers(box) for num_cells, box in BOX_OF.items()}

KIND = Kind(
    name="sudoku",
    mismatch=_mismatch,
    build_evaluator=_build_evaluator,
    plural="Sudoku",
    augmentation="sudoku",
    style=Style(symbols=["_", ".", *SYMBOLS], ansi={0: FAINT, 1: FAINT}, regions=_REGIONS, marks_new=True),
    read_puzzles=read_puzzles,
    make_up=_make_up,
    groups=_groups,
)
