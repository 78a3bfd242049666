"""Random transforms of Sudokus that keep them valid: exchanges of rows, columns and digits."""

import numpy as np

from dataset.augmentations import sudoku_parts
from dataset.kinds.sudoku.rules import Box
from dataset.randomness import random_bits, random_orders


def draw_symmetries(seed: int, *, stream: int, index: int, count: int, box: Box) -> np.ndarray:
    """Samples transforms that exchange rows, columns and digits of a Sudoku and keep it valid.

    Returns uint8 [count, 1 + 3 n], one transform in each row, for Sudokus with n digits. A row contains:

    - 1 byte: 1 if the transform transposes the grid, otherwise 0. Grids without square boxes have 0.
    - n bytes: the order of the rows.
    - n bytes: the order of the columns.
    - n bytes: the digits that replace 1, 2, ..., n.

    seed, stream, index: Together, they determine the random numbers.
    count: Number of transforms.
    box: Numbers of rows and columns of a box of the Sudoku.
    """
    rows, columns = box
    size = rows * columns
    ends = np.cumsum([1, columns, rows, size, size, size])
    bits = random_bits(seed, stream=stream, index=index, count=count * ends[-1]).reshape(count, ends[-1])
    coin, bands, stacks, in_bands, in_stacks, relabel = np.split(bits, ends[:-1], axis=1)
    transforms = np.zeros((count, 1 + 3 * size), np.uint8)
    transposes, row_order, column_order, digits = sudoku_parts(transforms)
    if rows == columns:
        transposes[:] = coin >> np.uint64(63)
    row_order[:] = _line_order(bands, in_bands.reshape(count, columns, rows))
    column_order[:] = _line_order(stacks, in_stacks.reshape(count, rows, columns))
    digits[:] = random_orders(relabel) + 1
    return transforms


def _line_order(blocks: np.ndarray, in_blocks: np.ndarray) -> np.ndarray:
    """Samples orders of rows that keep each band (row of boxes) together: int64 [count, rows].

    Entry i of an order is the index of the row that moves to row i. The function is also used for columns.

    blocks: Random integers for the order of the bands, uint64 [count, bands]. in_blocks: Random integers for
    the order of the rows within each band, uint64 [count, bands, rows of a band].
    """
    count, num_blocks, num_lines = in_blocks.shape
    order = random_orders(blocks)[:, :, None] * num_lines + random_orders(in_blocks)
    return order.reshape(count, num_blocks * num_lines)
