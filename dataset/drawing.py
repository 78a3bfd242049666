"""Grids of tokens as text, side by side, as the `Look` of their kind says.

Every cell of a grid takes the same number of columns, whether it is coloured or not, so that grids line up.
Colours are ANSI codes, and only added to what can be read without them.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dataset.kinds import Look

_WRONG_MARK, _WRONG = "x", "41;97"  # white on red
_GREEN = "32"
_MAX_COLUMNS = 32


class Drawing(NamedTuple):
    """A grid with its title. width: columns of every line, less the codes of its colours."""

    title: str
    lines: list[str]
    width: int


def draw(
    title: str,
    look: Look,
    tokens: np.ndarray,
    *,
    color: bool,
    frame: np.ndarray | None = None,
    is_new: np.ndarray | None = None,
    is_wrong: np.ndarray | None = None,
) -> Drawing:
    """Draws tokens [seq_len] as a grid.

    frame: tokens [seq_len] of another grid, with its end; of this one only what lies within is drawn. is_new,
    is_wrong: bool [seq_len]; a new cell is green where the look wants it, an x follows a wrong one.
    """
    grid = _to_grid(tokens)
    extent = slice(None), slice(None)
    if look.first_of_field is not None:
        is_inside = tokens >= look.first_of_field if frame is None else frame >= look.first_of_field - 1
        extent = _extent(_to_grid(is_inside))
    symbols = [[_symbol(look, token) for token in row] for row in grid[extent].tolist()]
    styles = np.array([look.styles.get(token, "") for token in tokens.tolist()], object)
    if is_new is not None and look.marks_new:
        styles[is_new] = _GREEN
    if is_wrong is not None:
        styles[is_wrong] = _WRONG
    cell_width = max((len(symbol) for row in symbols for symbol in row), default=0)
    marks = _to_grid(np.zeros_like(tokens, bool) if is_wrong is None else is_wrong)[extent]
    lines = []
    for row, style_row, mark_row in zip(symbols, _to_grid(styles)[extent], marks, strict=True):
        cells = []
        for symbol, style, mark in zip(row, style_row, mark_row, strict=True):
            text = f"{symbol:>{cell_width}}"
            if is_wrong is not None:
                text += _WRONG_MARK if mark else " "
            cells.append(f"\x1b[{style}m{text}\x1b[0m" if color and style else text)
        lines.append(look.gap.join(cells))
    if not lines:
        return Drawing(title, ["(nothing)"], len("(nothing)"))
    num_columns = len(symbols[0])
    width = num_columns * (cell_width + (is_wrong is not None)) + (num_columns - 1) * len(look.gap)
    return Drawing(title, lines, width)


def side_by_side(drawings: Sequence[Drawing]) -> str:
    height = max(len(drawing.lines) for drawing in drawings)
    texts = ["".join(f"{drawing.title:<{_width(drawing)}}" for drawing in drawings)]
    for row in range(height):
        text = ""
        for drawing in drawings:
            line, width = (drawing.lines[row], drawing.width) if row < len(drawing.lines) else ("", 0)
            text += line + " " * (_width(drawing) - width)
        texts.append(text)
    return "\n".join(text.rstrip() for text in texts)


def _width(drawing: Drawing) -> int:
    return max(drawing.width, len(drawing.title)) + 3


def _symbol(look: Look, token: int) -> str:
    return look.symbols[token] if 0 <= token < len(look.symbols) else str(token)


def _to_grid(cells: np.ndarray) -> np.ndarray:
    """Reshapes [seq_len] to [rows, columns], a square where it can be one."""
    num_columns = math.isqrt(len(cells))
    if num_columns**2 != len(cells):
        num_columns = next(number for number in range(_MAX_COLUMNS, 0, -1) if len(cells) % number == 0)
    return cells.reshape(-1, num_columns)


def _extent(is_inside: np.ndarray) -> tuple[slice, slice]:
    """Finds the rows and the columns from the first to the last that has a cell inside."""
    places = [np.flatnonzero(is_inside.any(axis=axis)) for axis in (1, 0)]
    rows, columns = (slice(found[0], found[-1] + 1) if len(found) else slice(0) for found in places)
    return rows, columns
