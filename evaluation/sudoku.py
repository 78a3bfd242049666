"""Whether an answer is a solution of its Sudoku: the rules themselves, not the one answer on record.

Tokens: 0 = pad, 1 = empty, 2 .. n + 1 = the digits 1 .. n. A sound puzzle has one solution, so that a valid
answer is the exact one; where the two shares differ, the puzzles have several.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from dataset.format import Metadata
from dataset.sudoku import are_solved

_BOXES = {16: (2, 2), 36: (2, 3), 81: (3, 3)}  # by the number of cells
_DIGIT_1 = 2  # token


def sudoku_rules(
    folder: Path, metadata: Metadata
) -> Callable[[np.ndarray, np.ndarray], dict[str, np.ndarray]]:
    """The function (inputs, preds) -> {"valid": bool [n]}, tokens [n, seq_len] each.

    valid: every row, column and box holds each digit once, and every clue of the input is kept. Raises
    ValueError where the dataset in `folder` is no Sudoku of a size with known boxes.
    """
    box = _BOXES.get(metadata.seq_len)
    if box is None:
        raise ValueError(
            f"{folder} is no Sudoku: its seq_len is {metadata.seq_len}, not one of "
            f"{', '.join(map(str, _BOXES))}; choose the judge of its puzzles"
        )
    num_digits = box[0] * box[1]
    if metadata.vocab_size != num_digits + _DIGIT_1:
        raise ValueError(
            f"{folder} is no Sudoku: its vocab_size is {metadata.vocab_size}, not {num_digits + _DIGIT_1} "
            f"(pad, empty and {num_digits} digits); choose the judge of its puzzles"
        )

    def judge(inputs: np.ndarray, preds: np.ndarray) -> dict[str, np.ndarray]:
        is_digit = (preds >= _DIGIT_1) & (preds < _DIGIT_1 + num_digits)
        digits = np.where(is_digit, preds - (_DIGIT_1 - 1), 0).astype(np.uint8)
        keeps_clues = ((preds == inputs) | (inputs < _DIGIT_1)).all(axis=1)
        return {"valid": are_solved(digits, box=box) & keeps_clues}

    return judge
