"""Ways to rewrite a puzzle into another one that is as good: what augmentation is made of.

A dataset may hold every variant of its puzzles, as the public tools write it, or the originals once and, for
each puzzle, the few bytes of its transform; then the variants are made while they are read, a whole batch at
a time. Each kind of puzzle defines its own transforms (`dataset.kinds`); here is what they share, and the
symmetries of the square.

Invariant: a transform is a bijection on grids, the same for the input and the label of an example.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

NUM_DIHEDRAL = 8
DIHEDRAL_INVERSES = (0, 3, 2, 1, 4, 5, 6, 7)
# The cell (i, j) of the transformed grid shows (row, column) of the original, of h x w cells. By number:
# whether i and j change places, whether the row is counted from the end, whether the column is.
DIHEDRAL_FLAGS = np.array(
    [(0, 0, 0), (1, 0, 1), (0, 1, 1), (1, 1, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (1, 1, 1)], bool
)


class Augmentation(NamedTuple):
    """A family of transforms, named in `dataset.json`.

    num_bytes  of a transform, from seq_len and vocab_size
    is_valid   transforms [n, num_bytes], seq_len -> bool [n]
    apply      tokens uint8 [n, seq_len], transforms uint8 [n, num_bytes], translations uint8 [n, 2] or None
               -> tokens uint8 [n, seq_len]
    """

    num_bytes: Callable[[int, int], int]
    is_valid: Callable[[np.ndarray, int], np.ndarray]
    apply: Callable[[np.ndarray, np.ndarray, np.ndarray | None], np.ndarray]
    has_translations: bool = False


def dihedral(grid: np.ndarray, number: int) -> np.ndarray:
    """Transforms a grid [rows, columns] by a symmetry of the square, numbered as in the public tools.

    0 as it is; 1 to 3 rotated by 90, 180, 270 degrees counterclockwise; 4 mirrored left to right, 5 top to
    bottom; 6 transposed; 7 transposed along the other diagonal. `DIHEDRAL_INVERSES` has the way back.
    """
    swaps, rows_from_end, columns_from_end = DIHEDRAL_FLAGS[number]
    grid = grid[::-1] if rows_from_end else grid
    grid = grid[:, ::-1] if columns_from_end else grid
    return grid.T if swaps else grid


def look_up(tables: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Looks places [n, m] up in tables [n, k]: take_along_axis, which is slower."""
    return tables.ravel()[places + (np.arange(len(tables)) * tables.shape[1])[:, None]]


# ---------------------------------------------------------------------------------------------------- squares


def _apply(tokens: np.ndarray, transforms: np.ndarray, _translations: np.ndarray | None) -> np.ndarray:
    cells = _dihedral_cells(math.isqrt(tokens.shape[1]))
    return np.take_along_axis(tokens, cells[transforms[:, 0]], axis=1)


@functools.cache
def _dihedral_cells(size: int) -> np.ndarray:
    """Returns the cell of the original that each cell shows: int64 [8, size * size]."""
    cells = np.arange(size * size).reshape(size, size)
    return np.stack([dihedral(cells, number).ravel() for number in range(NUM_DIHEDRAL)])


# Of grids that fill their square, such as mazes. A transform is the number of a dihedral one.
SQUARE = Augmentation(
    num_bytes=lambda _seq_len, _vocab_size: 1,
    is_valid=lambda transforms, _seq_len: transforms[:, 0] < NUM_DIHEDRAL,
    apply=_apply,
)
