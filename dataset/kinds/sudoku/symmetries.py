"""The symmetries of Sudoku: they keep valid grids valid, and the number of solutions of a question.

Digits are relabelled, bands and stacks permuted, and the rows and columns inside them; where the box is
square, a grid may also be transposed (a transposed 2x3 box would be a 3x2 one).

A transform of a n x n grid is 1 + 3 n bytes: whether the grid is transposed, the order of its rows, that of
its columns, what the digits 1 .. n become.
"""

import math

import numpy as np

from dataset.kinds.sudoku.rules import Box
from dataset.randomness import random_orders
from dataset.symmetries import Augmentation, look_up


def draw_symmetries(words: np.ndarray, *, box: Box) -> np.ndarray:
    """Draws a transform for each row of random words: uint8 [count, 1 + 3 n].

    words: uint64 [count, `words_per_symmetry`(box)].
    """
    rows, columns = box
    count, size = len(words), rows * columns
    coin, bands, stacks, in_bands, in_stacks, relabel = np.split(
        words, np.cumsum([1, columns, rows, size, size]), axis=1
    )
    transforms = np.zeros((count, 1 + 3 * size), np.uint8)
    transposes, row_order, column_order, digits = _parts(transforms)
    if rows == columns:
        transposes[:] = coin >> np.uint64(63)
    row_order[:] = _line_order(bands, in_bands.reshape(count, columns, rows))
    column_order[:] = _line_order(stacks, in_stacks.reshape(count, rows, columns))
    digits[:] = random_orders(relabel) + 1
    return transforms


def no_symmetry(box: Box) -> np.ndarray:
    """Returns the transform that leaves every grid as it is: uint8 [1 + 3 n]."""
    lines = range(box[0] * box[1])
    return np.array([0, *lines, *lines, *(line + 1 for line in lines)], np.uint8)


def words_per_symmetry(box: Box) -> int:
    rows, columns = box
    return 1 + rows + columns + 3 * rows * columns


def _parts(transforms: np.ndarray) -> list[np.ndarray]:
    """Splits off views of the four parts of transforms [count, 1 + 3 n]."""
    size = (transforms.shape[1] - 1) // 3
    return np.split(transforms, [1, 1 + size, 1 + 2 * size], axis=1)


def _line_order(blocks: np.ndarray, in_blocks: np.ndarray) -> np.ndarray:
    """Orders n lines: the blocks permuted, and the lines in each. in_blocks: [count, blocks, lines]."""
    count, num_blocks, num_lines = in_blocks.shape
    order = random_orders(blocks)[:, :, None] * num_lines + random_orders(in_blocks)
    return order.reshape(count, num_blocks * num_lines)


# --------------------------------------------------------------------------------------------------- applying


def _apply(tokens: np.ndarray, transforms: np.ndarray, _translations: np.ndarray | None) -> np.ndarray:
    size = math.isqrt(tokens.shape[1])
    transposes, row_order, column_order, digits = _parts(transforms)
    swaps = transposes.astype(bool)
    # Separable: row and column of the transformed grid each add their part to the cell of the original.
    rows, columns = row_order.astype(np.intp) * size, column_order.astype(np.intp)
    down, across = np.where(swaps, columns, rows), np.where(swaps, rows, columns)
    cells = (down[:, :, None] + across[:, None, :]).reshape(tokens.shape)
    names = np.empty((len(tokens), size + 2), np.uint8)
    names[:, 0], names[:, 1], names[:, 2:] = 0, 1, digits + 1
    return look_up(names, look_up(tokens, cells))


def _is_valid(transforms: np.ndarray, seq_len: int) -> np.ndarray:
    size = math.isqrt(seq_len)
    _, row_order, column_order, digits = _parts(transforms)
    is_valid = transforms[:, 0] <= 1
    for order, first in ((row_order, 0), (column_order, 0), (digits, 1)):
        is_valid &= (np.sort(order, axis=1) == np.arange(first, first + size)).all(axis=1)
    return is_valid


def _describe(transform: list[int], _translation: list[int] | None) -> str:
    _, rows, columns, digits = (part[0].tolist() for part in _parts(np.array([transform])))
    words = []
    for lines, order in (("rows", rows), ("columns", columns)):
        if order != sorted(order):
            words.append(f"{lines} in the order {' '.join(str(line + 1) for line in order)}")
    if transform[0]:
        words.append("transposed")
    if digits != sorted(digits):
        words.append(f"digits {' '.join(map(str, sorted(digits)))} become {' '.join(map(str, digits))}")
    return ", then ".join(words)


SUDOKU = Augmentation(
    num_bytes=lambda seq_len: 1 + 3 * math.isqrt(seq_len),
    is_valid=_is_valid,
    apply=_apply,
    describe=_describe,
)
