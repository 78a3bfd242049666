"""Augmentations: families of transforms that turn a puzzle and its answer into another valid puzzle.

A dataset has one of two forms. Either it contains the tokens of all variants, as the public HRM and TRM tools
write them. Or it contains only the tokens of the originals, and a transform of a few bytes for each variant.
The loader then computes the variants of a batch when it reads the batch. `AUGMENTATIONS` maps the names in
`dataset.json` to families. The package or the plugin of a kind of puzzle may add one family, under the name
of the kind.

Invariant: a transform is a bijection on grids. The input and the label of an example get the same transform.
"""

import functools
import importlib
import math
import pkgutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

NUM_DIHEDRAL = 8
DIHEDRAL_INVERSES = (0, 3, 2, 1, 4, 5, 6, 7)
# How to find the original of cell (i, j) of a transformed grid, by dihedral number. Flags: exchange i and j,
# count rows from the end, count columns from the end.
DIHEDRAL_FLAGS = np.array(
    [(0, 0, 0), (1, 0, 1), (0, 1, 1), (1, 1, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (1, 1, 1)], bool
)

PAD, END, FIRST_SYMBOL = 0, 1, 2  # tokens of fields, see "fields" below


class Augmentation(NamedTuple):
    """A family of transforms that turn a puzzle and its answer into another valid puzzle.

    A transform is a row of bytes. For example, the bytes of a Sudoku's transform contain the new order of its
    rows and columns, and the new digits.

    Attributes:
        num_bytes: Function (seq_len, vocab_size) -> number of bytes of a transform.
        is_valid: Function (transforms [n, num_bytes], seq_len) -> whether each row of bytes is a transform of
            the family, bool [n].
        apply: Function (tokens uint8 [n, seq_len], transforms uint8 [n, num_bytes], translations uint8 [n, 2]
            or None) -> transformed tokens, uint8 [n, seq_len].
        has_translations: Whether each example also has a translation: the numbers of rows down and of columns
            right by which its grid moves.
        may_turn: Whether rotated and mirrored puzzles are valid, too. If True, the model LDT rotates and
            mirrors puzzles at random. If the boxes of a Sudoku are not square, LDT uses only the symmetries
            that map rows to rows, because the others make the Sudoku invalid.
        may_permute: Whether a puzzle stays valid under every permutation of its values, such as the digits of
            a Sudoku. If True, the model LDT permutes the values at random.
    """

    num_bytes: Callable[[int, int], int]
    is_valid: Callable[[np.ndarray, int], np.ndarray]
    apply: Callable[[np.ndarray, np.ndarray, np.ndarray | None], np.ndarray]
    has_translations: bool = False
    may_turn: bool = False
    may_permute: bool = False  # LDT also takes it as a sign of a grid with boxes (models/ldt_symmetry.py)


def dihedral(grid: np.ndarray, number: int) -> np.ndarray:
    """Rotates or mirrors a grid. `number` selects one of the 8 symmetries of a square.

    0: unchanged. 1 to 3: rotated by 90, 180 and 270 degrees counterclockwise. 4: mirrored left to right. 5:
    mirrored top to bottom. 6: transposed. 7: transposed along the other diagonal.
    DIHEDRAL_INVERSES[number] is the number of the symmetry that undoes this one.

    grid: [rows, columns].
    """
    swaps, rows_from_end, columns_from_end = DIHEDRAL_FLAGS[number]
    grid = grid[::-1] if rows_from_end else grid
    grid = grid[:, ::-1] if columns_from_end else grid
    return grid.T if swaps else grid


def rename_by_first_use(tokens: np.ndarray, free: Sequence[int]) -> np.ndarray:
    """Renames the tokens `free` of each row in the order of their first use, as free[0], free[1], ...

    Other tokens stay. Example: with free=[2, 3, 4], the row 4 9 2 4 becomes 2 9 3 2. tokens: [n, length].
    """
    if not len(free):
        return tokens
    masks = [tokens == token for token in free]
    firsts = [np.where(mask.any(axis=1), mask.argmax(axis=1), tokens.shape[1]) for mask in masks]
    ranks = np.argsort(firsts, axis=0, kind="stable").argsort(axis=0)
    renamed = tokens.copy()
    for is_token, rank in zip(masks, ranks, strict=True):
        np.copyto(renamed, np.array(free, tokens.dtype)[rank][:, None], where=is_token)
    return renamed


def _look_up(tables: np.ndarray, indices: np.ndarray) -> np.ndarray:
    # tables[i, indices[i, j]], faster than np.take_along_axis
    return tables.ravel()[indices + (np.arange(len(tables)) * tables.shape[1])[:, None]]


# ---------------------------------------------------------------------------------------------------- squares
#
# Square grids without a field, such as mazes. A transform is one byte: its number in `dihedral`.


def _apply_to_squares(
    tokens: np.ndarray, transforms: np.ndarray, _translations: np.ndarray | None
) -> np.ndarray:
    cells = _dihedral_cells(math.isqrt(tokens.shape[1]))
    return np.take_along_axis(tokens, cells[transforms[:, 0]], axis=1)


@functools.cache
def _dihedral_cells(size: int) -> np.ndarray:
    # Entry [number, i] is the original cell that cell i of the rotated or mirrored grid shows.
    cells = np.arange(size * size).reshape(size, size)
    return np.stack([dihedral(cells, number).ravel() for number in range(NUM_DIHEDRAL)])


# ---------------------------------------------------------------------------------------------------- Sudokus
#
# A transform relabels the digits, permutes bands and stacks, and permutes the rows and columns inside them.
# If boxes are square, it may also transpose the grid. A valid grid stays valid, and a puzzle keeps its number
# of solutions. The 1 + 3 n bytes for an n x n grid: whether it is transposed (1), the order of its rows (n),
# the order of its columns (n), the new digits of 1 .. n (n).


def sudoku_parts(transforms: np.ndarray) -> list[np.ndarray]:
    """Splits the bytes of Sudoku transforms into their four parts, as numpy views.

    - whether the permuted grid is then transposed, 0 or 1 [count, 1]
    - the original row (from 0) at each row of the permuted grid, [count, n]
    - the original column (from 0) at each column of the permuted grid, [count, n]
    - the new digit of each digit from 1 to n, [count, n]

    transforms: uint8 [count, 1 + 3 n].
    """
    size = (transforms.shape[1] - 1) // 3
    return np.split(transforms, [1, 1 + size, 1 + 2 * size], axis=1)


def _apply_to_sudokus(
    tokens: np.ndarray, transforms: np.ndarray, _translations: np.ndarray | None
) -> np.ndarray:
    size = math.isqrt(tokens.shape[1])
    transposes, row_order, column_order, digits = sudoku_parts(transforms)
    swaps = transposes.astype(bool)
    # The index of an original cell is the sum of a term for the new row and a term for the new column.
    rows, columns = row_order.astype(np.intp) * size, column_order.astype(np.intp)
    down, across = np.where(swaps, columns, rows), np.where(swaps, rows, columns)
    cells = (down[:, :, None] + across[:, None, :]).reshape(tokens.shape)
    names = np.empty((len(tokens), size + 2), np.uint8)
    names[:, 0], names[:, 1], names[:, 2:] = 0, 1, digits + 1
    return _look_up(names, _look_up(tokens, cells))


def _are_sudoku_transforms(transforms: np.ndarray, seq_len: int) -> np.ndarray:
    size = math.isqrt(seq_len)
    _, row_order, column_order, digits = sudoku_parts(transforms)
    is_valid = transforms[:, 0] <= 1
    for order, first in ((row_order, 0), (column_order, 0), (digits, 1)):
        is_valid &= (np.sort(order, axis=1) == np.arange(first, first + size)).all(axis=1)
    return is_valid


# ----------------------------------------------------------------------------------------------------- fields
#
# A field is a token array of fixed size that contains a grid of any size, as in ARC. Tokens: 0 = pad, 1 =
# end, 2 and up = symbols. END marks the row below the grid and the column to its right, if the field has
# room. So a model's answer also shows the size of its grid. A transform has 1 + (number of symbols) bytes: a
# dihedral number, then the new symbol of each symbol, counted from 0.


def _apply_to_fields(
    tokens: np.ndarray, transforms: np.ndarray, translations: np.ndarray | None
) -> np.ndarray:
    size = math.isqrt(tokens.shape[1])
    # If fields are not square, only the symbols are exchanged.
    if size**2 == tokens.shape[1] and (translations is not None or transforms[:, 0].any()):
        tokens = _move(tokens, transforms[:, 0], translations, size=size)
    names = np.empty((len(tokens), FIRST_SYMBOL + transforms.shape[1] - 1), np.uint8)
    names[:, PAD], names[:, END], names[:, FIRST_SYMBOL:] = PAD, END, transforms[:, 1:] + FIRST_SYMBOL
    return _look_up(names, tokens)


def _move(
    tokens: np.ndarray, numbers: np.ndarray, translations: np.ndarray | None, *, size: int
) -> np.ndarray:
    # numbers: Symmetry of each grid (`dihedral`), [n]. translations: Rows down and columns right, [n, 2].
    num = len(tokens)
    is_cell = tokens.reshape(num, size, size) >= FIRST_SYMBOL
    height, width = is_cell[:, :, 0].sum(axis=1), is_cell[:, 0, :].sum(axis=1)
    swaps, rows_from_end, columns_from_end = (flag[:, None] for flag in DIHEDRAL_FLAGS[numbers].T)
    offsets = np.zeros((num, 2), np.intp) if translations is None else translations.astype(np.intp)
    down = np.arange(size) - offsets[:, :1]  # row of the transformed grid at each row of the result
    right = np.arange(size) - offsets[:, 1:]

    # The index of an original cell is the sum of a term for the new row and a term for the new column.
    along_rows, along_columns = np.where(swaps, right, down), np.where(swaps, down, right)
    outside = tokens.shape[1]
    rows = _line(along_rows, height[:, None], rows_from_end, step=size, outside=outside)
    columns = _line(along_columns, width[:, None], columns_from_end, step=1, outside=outside)
    first, second = np.where(swaps, columns, rows), np.where(swaps, rows, columns)
    cells = np.minimum(first[:, :, None] + second[:, None, :], outside).reshape(tokens.shape)

    # A cell of the result without an original reads PAD, which is at index `outside`.
    padded = np.full((num, outside + 1), PAD, np.uint8)
    padded[:, :-1] = tokens
    result = _look_up(padded, cells).reshape(num, size, size)

    in_down, in_right = first < outside, second < outside
    end_down = down == np.where(swaps[:, 0], width, height)[:, None]
    end_right = right == np.where(swaps[:, 0], height, width)[:, None]
    result[end_down[:, :, None] & in_right[:, None, :]] = END
    result[in_down[:, :, None] & end_right[:, None, :]] = END
    return result.reshape(tokens.shape)


def _line(
    positions: np.ndarray, length: np.ndarray, from_end: np.ndarray, *, step: int, outside: int
) -> np.ndarray:
    # The term of each row or column. positions: Its index in the transformed grid, [n, size].
    is_inside = (positions >= 0) & (positions < length)
    return np.where(is_inside, np.where(from_end, length - 1 - positions, positions) * step, outside)


def _are_field_transforms(transforms: np.ndarray, seq_len: int) -> np.ndarray:
    num_symbols = transforms.shape[1] - 1
    are_symbols = (np.sort(transforms[:, 1:], axis=1) == np.arange(num_symbols)).all(axis=1)
    num_moves = NUM_DIHEDRAL if math.isqrt(seq_len) ** 2 == seq_len else 1
    return (transforms[:, 0] < num_moves) & are_symbols


_PAIRS = Augmentation(
    num_bytes=lambda _seq_len, vocab_size: 1 + vocab_size - FIRST_SYMBOL,
    is_valid=_are_field_transforms,
    apply=_apply_to_fields,
)

AUGMENTATIONS: dict[str, Augmentation] = {
    "arc": _PAIRS._replace(has_translations=True),
    "pairs": _PAIRS,
    "square": Augmentation(
        num_bytes=lambda _seq_len, _vocab_size: 1,
        is_valid=lambda transforms, _seq_len: transforms[:, 0] < NUM_DIHEDRAL,
        apply=_apply_to_squares,
        may_turn=True,
    ),
    "sudoku": Augmentation(
        num_bytes=lambda seq_len, _vocab_size: 1 + 3 * math.isqrt(seq_len),
        is_valid=_are_sudoku_transforms,
        apply=_apply_to_sudokus,
        may_turn=True,
        may_permute=True,
    ),
}


def find_augmentation(name: str | None) -> Augmentation | None:
    """Returns the family of transforms with this name, such as "sudoku".

    Returns None if no family has this name, or if `name` is None. If `name` is not in `AUGMENTATIONS`, first
    imports the kind of puzzle with this name, because importing a kind may add its family.
    """
    if name is not None and name not in AUGMENTATIONS:
        kinds = pkgutil.iter_modules([str(Path(__file__).with_name("kinds"))])
        if name in [module.name for module in kinds]:
            importlib.import_module(f"dataset.kinds.{name}")
    return AUGMENTATIONS.get(name)
