"""Grids of tokens as text, side by side, as the `Look` of their kind says.

Every cell of a grid takes the same number of columns, whether it is coloured or not, so that grids line up.
Colours are ANSI codes, and only added to what can be read without them.
"""

import itertools
import math
import re
from collections.abc import Sequence

import numpy as np

from dataset.kinds import Look

_WRONG, _GREEN = "41;97", "32"  # white on red
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_MAX_COLUMNS = 32


def draw(
    title: str,
    look: Look,
    tokens: np.ndarray,
    *,
    color: bool,
    frame: np.ndarray | None = None,
    is_new: np.ndarray | None = None,
    is_wrong: np.ndarray | None = None,
) -> list[str]:
    """Draws tokens [seq_len] as a grid: its title, then its lines.

    frame: tokens [seq_len] of another grid, with its end; of this one only what lies within is drawn. is_new,
    is_wrong: bool [seq_len]; a new cell is green where the look wants it, an x follows a wrong one.
    """
    cells = _to_grid(np.arange(len(tokens)))
    if look.first_of_field is not None:
        is_inside = tokens >= look.first_of_field if frame is None else frame >= look.first_of_field - 1
        cells = _crop(cells, _to_grid(is_inside))
    symbols = {cell: _symbol(look, int(tokens[cell])) for cell in cells.flat}
    cell_width = max(map(len, symbols.values()), default=0)

    def draw_cell(cell: int) -> str:
        text, style = f"{symbols[cell]:>{cell_width}}", look.styles.get(int(tokens[cell]), "")
        if look.marks_new and is_new is not None and is_new[cell]:
            style = _GREEN
        if is_wrong is not None:
            text += "x" if is_wrong[cell] else " "
            style = _WRONG if is_wrong[cell] else style
        return f"\x1b[{style}m{text}\x1b[0m" if color and style else text

    lines = [look.gap.join(map(draw_cell, row)) for row in cells.tolist()]
    return [title, *(lines or ["(nothing)"])]


def side_by_side(drawings: Sequence[list[str]]) -> str:
    widths = [max(map(_width, lines)) + 3 for lines in drawings]
    rows = []
    for lines in itertools.zip_longest(*drawings, fillvalue=""):
        padded = (line + " " * (width - _width(line)) for line, width in zip(lines, widths, strict=True))
        rows.append("".join(padded).rstrip())
    return "\n".join(rows)


def _width(line: str) -> int:
    return len(_ANSI.sub("", line))


def _symbol(look: Look, token: int) -> str:
    return look.symbols[token] if 0 <= token < len(look.symbols) else str(token)


def _to_grid(cells: np.ndarray) -> np.ndarray:
    """Reshapes [seq_len] to [rows, columns], a square where it can be one."""
    num_columns = math.isqrt(len(cells))
    if num_columns**2 != len(cells):
        num_columns = next(number for number in range(_MAX_COLUMNS, 0, -1) if len(cells) % number == 0)
    return cells.reshape(-1, num_columns)


def _crop(grid: np.ndarray, is_inside: np.ndarray) -> np.ndarray:
    """Keeps the rows and the columns from the first to the last that has a cell inside."""
    for axis in (0, 1):
        found = np.flatnonzero(is_inside.any(axis=1 - axis))
        grid = grid.take(range(found[0], found[-1] + 1) if len(found) else [], axis=axis)
    return grid
