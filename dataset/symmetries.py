"""Ways to rewrite a puzzle into another one that is as good: what augmentation is made of.

A dataset may hold every variant of its puzzles, as the public tools write it, or the originals once and, for
each puzzle, the few bytes of its transform; then the variants are made while they are read, a whole batch at
a time. Which transforms there are depends on the kind of puzzle: a `Family` for each.

Invariant: a transform is a bijection on grids, the same for the input and the label of an example.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

NUM_DIHEDRAL = 8
DIHEDRAL_INVERSES = (0, 3, 2, 1, 4, 5, 6, 7)
ARC_SIZE = 30  # rows and columns into which an ARC grid is laid
ARC_PAD, ARC_END, ARC_COLOR_0 = (
    0,
    1,
    2,
)  # tokens; the end is the line after the grid
_NUM_COLORS = 10

# The cell (i, j) of the transformed grid shows (row, column) of the original, of h x w cells. By number:
# whether i and j change places, whether the row is counted from the end, whether the column is.
_DIHEDRAL = np.array(
    [(0, 0, 0), (1, 0, 1), (0, 1, 1), (1, 1, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (1, 1, 1)], bool
)


class Family(NamedTuple):
    """The transforms of one kind of puzzle.

    num_bytes  of a transform, from seq_len
    is_valid   transforms [n, num_bytes], seq_len -> bool [n]
    apply      tokens uint8 [n, seq_len], transforms uint8 [n, num_bytes], translations uint8 [n, 2] or None
               -> tokens uint8 [n, seq_len]
    """

    num_bytes: Callable[[int], int]
    is_valid: Callable[[np.ndarray, int], np.ndarray]
    apply: Callable[[np.ndarray, np.ndarray, np.ndarray | None], np.ndarray]
    has_translations: bool = False


def dihedral(grid: np.ndarray, number: int) -> np.ndarray:
    """A [rows, columns] grid under one of the 8 symmetries of the square, numbered as in the public tools.

    0 as it is; 1 to 3 rotated by 90, 180, 270 degrees counterclockwise; 4 mirrored left to right, 5 top to
    bottom; 6 transposed; 7 transposed along the other diagonal. `DIHEDRAL_INVERSES` has the way back.
    """
    swaps, rows_from_end, columns_from_end = _DIHEDRAL[number]
    grid = grid[::-1] if rows_from_end else grid
    grid = grid[:, ::-1] if columns_from_end else grid
    return grid.T if swaps else grid


# ---------------------------------------------------------------------------------------------------- squares


def _apply_to_squares(tokens: np.ndarray, transforms: np.ndarray, _translations) -> np.ndarray:
    """Grids that fill their square, such as mazes. A transform is the number of a dihedral one."""
    cells = _dihedral_cells(math.isqrt(tokens.shape[1]))
    return np.take_along_axis(tokens, cells[transforms[:, 0]], axis=1)


@functools.cache
def _dihedral_cells(size: int) -> np.ndarray:
    """The cell of the original that each cell shows: int64 [8, size * size]."""
    cells = np.arange(size * size).reshape(size, size)
    return np.stack([dihedral(cells, number).ravel() for number in range(NUM_DIHEDRAL)])


def _are_dihedral(transforms: np.ndarray, _seq_len: int) -> np.ndarray:
    return transforms[:, 0] < NUM_DIHEDRAL


# ----------------------------------------------------------------------------------------------------- Sudoku


def _apply_to_sudoku(tokens: np.ndarray, transforms: np.ndarray, _translations) -> np.ndarray:
    """A transform of a n x n grid: whether it is transposed, the order of its rows, that of its columns, what
    the digits 1 .. n become; 1 + 3 n bytes. The tokens are 0 = pad, 1 = empty, then the digits.
    """
    size = math.isqrt(tokens.shape[1])
    transposes, row_order, column_order, digits = np.split(transforms, [1, 1 + size, 1 + 2 * size], axis=1)
    swaps = transposes.astype(bool)
    # Separable: row and column of the transformed grid each add their part to the cell of the original.
    rows, columns = row_order.astype(np.intp) * size, column_order.astype(np.intp)
    down, across = np.where(swaps, columns, rows), np.where(swaps, rows, columns)
    cells = (down[:, :, None] + across[:, None, :]).reshape(tokens.shape)
    names = np.empty((len(tokens), size + 2), np.uint8)
    names[:, 0], names[:, 1], names[:, 2:] = 0, 1, digits + 1
    return _look_up(names, _look_up(tokens, cells))


def _are_sudoku(transforms: np.ndarray, seq_len: int) -> np.ndarray:
    size = math.isqrt(seq_len)
    _, row_order, column_order, digits = np.split(transforms, [1, 1 + size, 1 + 2 * size], axis=1)
    is_valid = transforms[:, 0] <= 1
    for order, first in ((row_order, 0), (column_order, 0), (digits, 1)):
        is_valid &= (np.sort(order, axis=1) == np.arange(first, first + size)).all(axis=1)
    return is_valid


# -------------------------------------------------------------------------------------------------------- ARC


def _apply_to_arc(tokens: np.ndarray, transforms: np.ndarray, translations: np.ndarray | None) -> np.ndarray:
    """A transform: the number of a dihedral one, and what each of the 10 colours becomes; 11 bytes.

    The grid, of any size, lies in the top left corner of the original, and `translations` (down, right) away
    from it in the result; the end-of-grid token marks the row below and the column right of it.
    """
    num = len(tokens)
    is_cell = tokens.reshape(num, ARC_SIZE, ARC_SIZE) >= ARC_COLOR_0
    height, width = is_cell[:, :, 0].sum(axis=1), is_cell[:, 0, :].sum(axis=1)
    swaps, rows_from_end, columns_from_end = (flag[:, None] for flag in _DIHEDRAL[transforms[:, 0]].T)
    offsets = np.zeros((num, 2), np.intp) if translations is None else translations.astype(np.intp)
    down = np.arange(ARC_SIZE) - offsets[:, :1]  # row of the transformed grid at each row of the result
    right = np.arange(ARC_SIZE) - offsets[:, 1:]

    # Row and column of the original that go with each row and column of the result; outside beyond the end.
    along_rows, along_columns = np.where(swaps, right, down), np.where(swaps, down, right)
    outside = tokens.shape[1]
    rows = _line(along_rows, height[:, None], rows_from_end, step=ARC_SIZE, outside=outside)
    columns = _line(along_columns, width[:, None], columns_from_end, step=1, outside=outside)
    first, second = np.where(swaps, columns, rows), np.where(swaps, rows, columns)
    cells = np.minimum(first[:, :, None] + second[:, None, :], outside).reshape(tokens.shape)

    # The token after the last is the padding that cells outside show.
    padded = np.zeros((num, outside + 1), np.uint8)
    padded[:, :-1] = tokens
    names = np.empty((num, ARC_COLOR_0 + _NUM_COLORS), np.uint8)
    names[:, ARC_PAD], names[:, ARC_END] = ARC_PAD, ARC_END
    names[:, ARC_COLOR_0:] = transforms[:, 1:] + ARC_COLOR_0
    result = _look_up(names, _look_up(padded, cells)).reshape(num, ARC_SIZE, ARC_SIZE)

    in_down, in_right = first < outside, second < outside
    end_down = down == np.where(swaps[:, 0], width, height)[:, None]
    end_right = right == np.where(swaps[:, 0], height, width)[:, None]
    result[end_down[:, :, None] & in_right[:, None, :]] = ARC_END
    result[in_down[:, :, None] & end_right[:, None, :]] = ARC_END
    return result.reshape(tokens.shape)


def _line(
    places: np.ndarray, length: np.ndarray, from_end: np.ndarray, *, step: int, outside: int
) -> np.ndarray:
    """What a row or column of the original adds to the number of a cell; `outside` where there is none."""
    is_inside = (places >= 0) & (places < length)
    return np.where(is_inside, np.where(from_end, length - 1 - places, places) * step, outside)


def _are_arc(transforms: np.ndarray, _seq_len: int) -> np.ndarray:
    are_colors = (np.sort(transforms[:, 1:], axis=1) == np.arange(_NUM_COLORS)).all(axis=1)
    return (transforms[:, 0] < NUM_DIHEDRAL) & are_colors


def _look_up(tables: np.ndarray, places: np.ndarray) -> np.ndarray:
    """tables [n, k], places [n, m] -> [n, m]: take_along_axis, which is slower."""
    return tables.ravel()[places + (np.arange(len(tables)) * tables.shape[1])[:, None]]


FAMILIES = {
    "square": Family(lambda _: 1, _are_dihedral, _apply_to_squares),
    "sudoku": Family(lambda seq_len: 1 + 3 * math.isqrt(seq_len), _are_sudoku, _apply_to_sudoku),
    "arc": Family(lambda _: 1 + _NUM_COLORS, _are_arc, _apply_to_arc, has_translations=True),
}
