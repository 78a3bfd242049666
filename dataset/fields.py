"""Grids of any size, each somewhere in a field of fixed size with its end marked, as ARC has them.

Tokens: 0 = pad, 1 = end, 2 and up = symbols. END fills the row below a grid and the column right of it, where
the field has room for them; a model's answer tells its size by it. A transform of a field is 1 + symbols
bytes: the number of a dihedral transform (`symmetries`), then what each symbol becomes, counted from 0.
"""

import math

import numpy as np

from dataset.symmetries import DIHEDRAL_FLAGS, NUM_DIHEDRAL, Augmentation, look_up

PAD, END, FIRST_SYMBOL = 0, 1, 2


def lay_out(grid: np.ndarray, *, num_rows: int, num_columns: int) -> np.ndarray:
    """Lays a grid of symbols, counted from 0, in the top left corner of a field: tokens, uint8 [cells]."""
    rows, columns = grid.shape
    tokens = np.full((num_rows, num_columns), PAD, np.uint8)
    tokens[: rows + 1, :columns] = END
    tokens[:rows, : columns + 1] = END
    tokens[:rows, :columns] = grid + FIRST_SYMBOL
    return tokens.ravel()


def _apply(tokens: np.ndarray, transforms: np.ndarray, translations: np.ndarray | None) -> np.ndarray:
    """Applies transforms to grids, each in the top left corner of its field.

    translations: how far down and right each lies in the result. A field that is no square keeps its grids
    as they lie.
    """
    size = math.isqrt(tokens.shape[1])
    if size**2 == tokens.shape[1] and (translations is not None or transforms[:, 0].any()):
        tokens = _move(tokens, transforms[:, 0], translations, size=size)
    names = np.empty((len(tokens), FIRST_SYMBOL + transforms.shape[1] - 1), np.uint8)
    names[:, PAD], names[:, END], names[:, FIRST_SYMBOL:] = PAD, END, transforms[:, 1:] + FIRST_SYMBOL
    return look_up(names, tokens)


def _move(
    tokens: np.ndarray, numbers: np.ndarray, translations: np.ndarray | None, *, size: int
) -> np.ndarray:
    """Turns or mirrors each grid by its dihedral number, and moves it."""
    num = len(tokens)
    is_cell = tokens.reshape(num, size, size) >= FIRST_SYMBOL
    height, width = is_cell[:, :, 0].sum(axis=1), is_cell[:, 0, :].sum(axis=1)
    swaps, rows_from_end, columns_from_end = (flag[:, None] for flag in DIHEDRAL_FLAGS[numbers].T)
    offsets = np.zeros((num, 2), np.intp) if translations is None else translations.astype(np.intp)
    down = np.arange(size) - offsets[:, :1]  # row of the transformed grid at each row of the result
    right = np.arange(size) - offsets[:, 1:]

    # Row and column of the original that go with each row and column of the result; outside beyond the end.
    along_rows, along_columns = np.where(swaps, right, down), np.where(swaps, down, right)
    outside = tokens.shape[1]
    rows = _line(along_rows, height[:, None], rows_from_end, step=size, outside=outside)
    columns = _line(along_columns, width[:, None], columns_from_end, step=1, outside=outside)
    first, second = np.where(swaps, columns, rows), np.where(swaps, rows, columns)
    cells = np.minimum(first[:, :, None] + second[:, None, :], outside).reshape(tokens.shape)

    # The token after the last is the padding that cells outside show.
    padded = np.full((num, outside + 1), PAD, np.uint8)
    padded[:, :-1] = tokens
    result = look_up(padded, cells).reshape(num, size, size)

    in_down, in_right = first < outside, second < outside
    end_down = down == np.where(swaps[:, 0], width, height)[:, None]
    end_right = right == np.where(swaps[:, 0], height, width)[:, None]
    result[end_down[:, :, None] & in_right[:, None, :]] = END
    result[in_down[:, :, None] & end_right[:, None, :]] = END
    return result.reshape(tokens.shape)


def _line(
    places: np.ndarray, length: np.ndarray, from_end: np.ndarray, *, step: int, outside: int
) -> np.ndarray:
    """Computes what a row or column adds to the number of a cell; `outside` where there is none."""
    is_inside = (places >= 0) & (places < length)
    return np.where(is_inside, np.where(from_end, length - 1 - places, places) * step, outside)


def _is_valid(transforms: np.ndarray, seq_len: int) -> np.ndarray:
    num_symbols = transforms.shape[1] - 1
    are_symbols = (np.sort(transforms[:, 1:], axis=1) == np.arange(num_symbols)).all(axis=1)
    num_moves = NUM_DIHEDRAL if math.isqrt(seq_len) ** 2 == seq_len else 1
    return (transforms[:, 0] < num_moves) & are_symbols


def field_augmentation(*, has_translations: bool) -> Augmentation:
    """Makes the family of the transforms of fields."""
    return Augmentation(
        num_bytes=lambda _seq_len, vocab_size: 1 + vocab_size - FIRST_SYMBOL,
        is_valid=_is_valid,
        apply=_apply,
        has_translations=has_translations,
    )
