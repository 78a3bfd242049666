"""Draws grids of cells, for a terminal (text with ANSI codes) or for a page (SVG).

Colors in an SVG are the variables of theme.css. They are light or dark, as on the reader's system. An SVG
file includes its background, so that any page can show it.
"""

import dataclasses
import itertools
import re
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dataset.kinds.kind import Style, crop, to_grid
from dataset.metadata import Metadata

THEME, *SCRIPTS = (Path(__file__).with_name(file_name) for file_name in ("theme.css", "theme.js", "grid.js"))
GREEN = "32"
_WRONG = "41;97"  # white on red
_ANSI = re.compile(r"\x1b\[[0-9;]*m")

# ------------------------------------------------------------------------------------------------------ cells


def cells_of(style: Style, tokens: np.ndarray, *, frame: np.ndarray | None = None) -> np.ndarray:
    """Returns which cells of a token array [seq_len] to draw, as indices: int64 [rows, columns].

    If grids may be smaller than the token array, as in ARC, only the rectangle that contains the grid is
    drawn. Otherwise, all cells are drawn.

    frame: Other tokens, [seq_len], such as the right answer. If given, the rectangle contains the grid in
    `frame` and the end marks below it and to its right. The grid in `tokens` then has no effect.
    """
    cells = to_grid(np.arange(len(tokens)), num_columns=style.num_columns)
    if style.first_of_field is None:
        return cells
    is_inside = tokens >= style.first_of_field if frame is None else frame >= style.first_of_field - 1
    return crop(cells, to_grid(is_inside, num_columns=style.num_columns))


def symbols_of(style: Style, tokens: np.ndarray) -> np.ndarray:
    """Returns the text that is drawn for each token, in the shape of `tokens`."""
    texts = [style.symbol(token) for token in tokens.ravel().tolist()]
    return np.array(texts, np.str_).reshape(tokens.shape)


def regions_of(style: Style, num_cells: int) -> list[int] | None:
    """Returns, for each cell of a grid, the index of its region, such as a box of a Sudoku.

    The cells are in the order of rows. Returns None if grids of `num_cells` cells have no regions.
    """
    regions = style.regions.get(num_cells)
    return None if regions is None else list(regions)


def irregular_regions(style: Style, cells: np.ndarray, num_cells: int) -> np.ndarray | None:
    """Returns, for each drawn cell, the index of its region: int64 [rows, columns].

    Returns None if the grid has no regions, or if all regions are rectangles, such as the boxes of a Sudoku.

    cells: Indices of the drawn cells, [rows, columns]. num_cells: Number of cells of the whole grid.
    """
    numbers = np.array(regions_of(style, num_cells) or [0] * num_cells)
    grid = to_grid(numbers, num_columns=style.num_columns)
    are_rectangles = all((crop(grid, grid == region) == region).all() for region in set(numbers.tolist()))
    return None if are_rectangles else numbers[cells]


def page_style(style: Style, metadata: Metadata) -> dict[str, Any]:
    """Returns the settings with which the script grid.js draws grids on a web page, as values for JSON."""
    tokens = range(metadata.vocab_size)
    is_blank = [style.is_blank(token) or token == metadata.pad_id for token in tokens]
    return {
        "vocab_size": metadata.vocab_size,
        "symbols": ["" if is_blank[token] else style.symbol(token) for token in tokens],
        "colors": [style.colors.get(token) for token in tokens],
        "regions": regions_of(style, metadata.seq_len),
        "first_of_field": style.first_of_field,
    }


# --------------------------------------------------------------------------------------------------- terminal


def draw(
    title: str,
    style: Style,
    tokens: np.ndarray,
    *,
    color: bool,
    frame: np.ndarray | None = None,
    is_new: np.ndarray | None = None,
    is_wrong: np.ndarray | None = None,
) -> list[str]:
    """Draws a grid for a terminal. Returns lines of text: the title, then the rows.

    tokens: The grid, [seq_len]. color: Whether to use ANSI color codes. frame: Tokens of the right answer,
    [seq_len]. If given, the drawing has the size of the grid in `frame`, with its end marks. is_new: Cells to
    draw in green, bool [seq_len]. It has no effect unless `style.marks_new`. is_wrong: Cells to draw white on
    red, followed by an x, bool [seq_len].
    """
    cells = cells_of(style, tokens, frame=frame)

    def style_of(cell: int) -> str:
        if is_wrong is not None and is_wrong[cell]:
            return _WRONG
        is_marked = style.marks_new and is_new is not None and is_new[cell]
        return GREEN if is_marked else style.ansi.get(int(tokens[cell]), "")

    marks = None if is_wrong is None else np.where(is_wrong, "x", " ")[cells]
    styles = [[style_of(cell) for cell in row] for row in cells.tolist()]
    texts = symbols_of(style, tokens)[cells]
    regions = irregular_regions(style, cells, len(tokens))
    return draw_cells(title, texts, marks=marks, styles=styles, gap=style.gap, color=color, regions=regions)


def draw_cells(
    title: str,
    texts: np.ndarray,
    *,
    styles: Sequence[Sequence[str]],
    gap: str,
    color: bool,
    marks: np.ndarray | None = None,
    regions: np.ndarray | None = None,
) -> list[str]:
    """Draws a table of texts for a terminal, with columns of equal width.

    Returns lines of text: the title, then the rows. With `regions`, lines between the rows show the borders
    of the regions.

    texts: Text of each cell, [rows, columns]. styles: ANSI code of each cell, such as "32" for green, or "".
    gap: Text between the cells of a row. It is not used with `regions`. color: Whether to use the ANSI codes.
    marks: Text after each cell, in the same color. regions: Index of the region of each cell, such as a
    box of a Sudoku, [rows, columns].
    """
    width = max(map(len, texts.flat), default=0)
    marks = np.full(texts.shape, "") if marks is None else marks

    def draw_cell(text: str, mark: str, code: str) -> str:
        cell = f"{text:>{width}}{mark}"
        return f"\x1b[{code}m{cell}\x1b[0m" if color and code else cell

    drawn = [list(map(draw_cell, *row)) for row in zip(texts.tolist(), marks.tolist(), styles, strict=True)]
    if regions is None:
        lines = [gap.join(row) for row in drawn]
    else:
        lines = _with_lines(drawn, regions, width=width + max(map(len, marks.flat), default=0))
    return [title, *(lines or ["(nothing)"])]


def _with_lines(drawn: list[list[str]], regions: np.ndarray, *, width: int) -> list[str]:
    walls = np.pad(regions[:, 1:] != regions[:, :-1], [(0, 0), (0, 1)])  # right of each cell
    floors = np.pad(regions[1:] != regions[:-1], [(0, 1), (0, 1)])  # below each cell
    is_upright, is_level = walls | np.roll(walls, -1, axis=0), floors[:, :-1] | floors[:, 1:]  # at its corner
    lines = []  # for each row of cells: the row, then the borders below it
    for row, cells in enumerate(drawn):
        ends = (" |"[wall] for wall in walls[row].tolist())
        lines.append("".join(cell + end for cell, end in zip(cells, ends, strict=True)))
        corners = (is_upright[row] + 2 * is_level[row]).tolist()
        sides = (" -"[floor] * width for floor in floors[row, :-1].tolist())
        lines.append("".join(side + " |-+"[corner] for side, corner in zip(sides, corners, strict=True)))
    return [line[:-1] for line in lines[:-1]]


def without_codes(text: str) -> str:
    return _ANSI.sub("", text)  # its length is the width in a terminal


def side_by_side(drawings: Sequence[list[str]]) -> str:
    """Returns a text that shows several drawings, lists of lines, next to each other."""
    widths = [max(len(without_codes(line)) for line in lines) + 3 for lines in drawings]
    rows = []
    for lines in itertools.zip_longest(*drawings, fillvalue=""):
        row = ""
        for line, end in zip(lines, itertools.accumulate(widths), strict=True):
            row += line + " " * (end - len(without_codes(row + line)))
        rows.append(row.rstrip())
    return "\n".join(rows)


# -------------------------------------------------------------------------------------------------------- SVG

TINT = 0.75  # opacity of the background of a cell with doubt 1
SVG_STYLE = """text{text-anchor:middle;dominant-baseline:central}
.left{text-anchor:start;dominant-baseline:auto}
.clue{fill:var(--ink);font-weight:650}
.own{fill:var(--accent);font-weight:500}
.small{font-size:13px;fill:var(--muted)}
"""
_FONT = 'ui-sans-serif, system-ui, -apple-system, "Segoe UI", Inter, Roboto, "Helvetica Neue", sans-serif'
_COLOR = re.compile(r"--([\w-]+): light-dark\((#\w+), (#\w+)\);")


class Paint(NamedTuple):
    """The appearance of a cell in an SVG."""

    ground: str = ""  # color of the background
    opacity: float = 0  # of the background, from 0 to 1
    text: str = ""
    kind: str = ""  # CSS class of the text


def paint_cell(style: Style, token: int, *, is_clue: bool, doubt: float = 0.0) -> Paint:
    """Returns the appearance of a cell in an SVG.

    is_clue: Whether the puzzle gives the cell. doubt: How unsure the model is about the cell, from 0 (sure)
    to 1. If `style` has a color for the token, more doubt makes it more transparent. Otherwise, more doubt
    makes the mark behind the symbol more opaque. A clue without a color is always opaque.
    """
    if token in style.colors:
        return Paint(style.colors[token], round(1 - 0.7 * doubt, 3))
    ground = ("var(--clue)", 1) if is_clue else ("var(--ring)", round(TINT * doubt, 3))
    text = "" if style.is_blank(token) else style.symbol(token)
    return Paint(*ground, text, "clue" if is_clue or not style.marks_new else "own")


@dataclasses.dataclass(frozen=True)
class SvgGrid:
    """Creates the SVG elements of a grid. All positions and sizes are in SVG units."""

    rows: int
    columns: int
    left: float
    top: float
    size: float  # of a cell

    @property
    def frame(self) -> str:
        width, height = self.columns * self.size, self.rows * self.size
        return f'x="{self.left:.4g}" y="{self.top:.4g}" width="{width:.4g}" height="{height:.4g}"'

    def corner(self, row: int, column: int) -> tuple[float, float]:
        """Returns (x, y) of the top left corner of a cell."""
        return self.left + column * self.size, self.top + row * self.size

    def ground(self, row: int, column: int, paint: Paint) -> str:
        x, y = self.corner(row, column)
        square = f'x="{x:.4g}" y="{y:.4g}" width="{self.size:.4g}" height="{self.size:.4g}"'
        return f'<rect {square} fill="{paint.ground}" fill-opacity="{paint.opacity:g}"/>'

    def text(self, row: int, column: int, paint: Paint) -> str:
        x, y = (start + self.size / 2 for start in self.corner(row, column))
        middle = f'x="{x:.4g}" y="{y:.4g}" font-size="{self.size * 0.5:.3g}"'
        return f'<text {middle} class="{paint.kind}">{escape(paint.text)}</text>'

    def cross(self, row: int, column: int) -> str:
        (x, y), size = self.corner(row, column), f"{self.size:.4g}"
        path = f"M{x:.4g} {y:.4g}l{size} {size}m0-{size}l-{size} {size}"
        return "".join(
            f'<path d="{path}" stroke="{color}" stroke-width="{width}" fill="none"/>'
            for color, width in (("#fff", 3.5), ("#000", 1.5))  # visible on every color
        )

    def lines(self, regions: Sequence[int] | None) -> Iterator[str]:
        """Yields the SVG elements of the lines between cells, and of the frame around the grid.

        regions: Index of the region of each cell, row by row. Lines between regions are thicker. If None, all
        lines are thin.
        """
        numbers = np.zeros((self.rows, self.columns), int)
        if regions is not None:
            numbers = np.reshape(regions, numbers.shape)
        thin, heavy = [], []
        for direction, across in (("h", numbers), ("v", numbers.T)):
            for line in range(1, len(across)):
                for first, end, is_border in _runs(across[line] != across[line - 1]):
                    x, y = self.corner(line, first) if direction == "h" else self.corner(first, line)
                    length = (end - first) * self.size
                    (heavy if is_border else thin).append(f"M{x:.4g} {y:.4g}{direction}{length:.4g}")
        yield f'<path d="{"".join(thin)}" stroke="var(--line)" fill="none"/>'
        if heavy:
            yield f'<path d="{"".join(heavy)}" stroke="var(--box)" stroke-width="1.6" fill="none"/>'
        yield f'<rect {self.frame} rx="6" stroke="var(--box)" stroke-width="1.6" fill="none"/>'


def _runs(values: np.ndarray) -> Iterator[tuple[int, int, bool]]:
    ends = [*(np.flatnonzero(values[1:] != values[:-1]) + 1).tolist(), len(values)]
    for first, end in itertools.pairwise([0, *ends]):
        yield first, end, bool(values[first])  # a run of equal values


def light_colors() -> dict[str, str]:
    """Returns the colors of theme.css for light mode, such as {"var(--ink)": "#1f2024"}."""
    return {f"var(--{name})": color for name, color, _ in _COLOR.findall(THEME.read_text(encoding="utf-8"))}


def svg_file(content: str, *, width: float, height: float, title: str, style: str = "") -> str:
    """Returns the text of an SVG file that shows `content` on a rounded background.

    content: SVG elements. width, height: Size of the background. title: Title of the SVG document. style:
    Additional CSS. `content` and `style` may use the color variables of theme.css, such as var(--ink).
    """
    colors = _COLOR.findall(THEME.read_text(encoding="utf-8"))
    light = "".join(f"--{name}:{color};" for name, color, _ in colors)
    dark = "".join(f"--{name}:{color};" for name, _, color in colors)
    size = f'width="{width:g}" height="{height:g}"'
    namespaces = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    ground = f'<rect x="0.5" y="0.5" width="{width - 1:g}" height="{height - 1:g}" rx="10"'
    lines = (
        f'<svg {namespaces} {size} viewBox="0 0 {width:g} {height:g}" role="img">',
        f"<title>{escape(title)}</title>",
        f"<style>svg{{{light}font-family:{_FONT}}}",
        f"@media(prefers-color-scheme:dark){{svg{{{dark}}}}}",
        f"{style}</style>",
        f'{ground} fill="var(--raised)" stroke="var(--line)"/>',
        content,
        "</svg>",
    )
    return "\n".join(lines) + "\n"
