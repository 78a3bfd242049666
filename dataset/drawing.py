"""Puzzles as text: the characters and colours of each kind of puzzle, and grids side by side.

Every cell of a grid takes the same number of columns, whether it is coloured or not, so that grids line up.
Colours are ANSI codes, and only added to what can be read without them.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from dataset.maze import CHARACTERS, GOAL, PATH, START, WALL
from dataset.symmetries import ARC_COLOR_0, ARC_END, ARC_SIZE

_PAD_SYMBOL = "_"
_WRONG_MARK, _WRONG = "x", "41;97"  # white on red
_FAINT, _GREEN = "2", "32"
_MAX_COLUMNS = 32

# Text and background of each colour of ARC, as its website shows them.
_WHITE, _BLACK = "38;5;15", "38;5;16"
_ARC_STYLES = [
    f"{text};48;5;{background}"
    for text, background in [
        (_WHITE, 16),
        (_WHITE, 26),
        (_WHITE, 196),
        (_BLACK, 40),
        (_BLACK, 220),
        (_BLACK, 248),
        (_WHITE, 199),
        (_BLACK, 208),
        (_BLACK, 117),
        (_WHITE, 88),
    ]
]
_MAZE_STYLES = {WALL: "90;100", START: "30;102", GOAL: "30;101", PATH: "30;103"}


class Kind(NamedTuple):
    """How one kind of puzzle looks.

    builder     the module that a manifest names
    fits        vocab_size, seq_len -> whether such puzzles have them
    symbol      of a token
    style       of a token: an ANSI code or ""
    gap         between the cells of a row
    is_cropped  whether grids lie in a larger field, which is left out
    """

    builder: str
    fits: Callable[[int, int], bool]
    symbol: Callable[[int], str]
    style: Callable[[int], str]
    gap: str
    is_cropped: bool = False


class Drawing(NamedTuple):
    """A grid with its title. width: columns of every line, less the codes of its colours."""

    title: str
    lines: list[str]
    width: int


def kind_of(builder: str | None, *, vocab_size: int, seq_len: int) -> Kind:
    """The kind that the builder makes, else the first that has such tokens, else token numbers."""
    fitting = [kind for kind in _KINDS if kind.fits(vocab_size, seq_len)]
    return next((kind for kind in fitting if kind.builder == builder), [*fitting, _NUMBERS][0])


def draw_input(kind: Kind, tokens: np.ndarray, *, color: bool) -> Drawing:
    """tokens: [seq_len]."""
    grid = _to_grid(tokens)
    return _draw("puzzle", kind, grid[_extent(kind, grid)], color=color)


def draw_label(kind: Kind, tokens: np.ndarray, inputs: np.ndarray, *, color: bool) -> Drawing:
    """tokens, inputs: [seq_len]. In a Sudoku what is not given in the puzzle is green."""
    grid = _to_grid(tokens)
    is_found = _to_grid(tokens != inputs) & (kind is _SUDOKU)
    extent = _extent(kind, grid)
    return _draw("answer", kind, grid[extent], is_found=is_found[extent], color=color)


def draw_prediction(
    kind: Kind, tokens: np.ndarray, labels: np.ndarray, is_wrong: np.ndarray, *, color: bool
) -> Drawing:
    """What a model said where the label has a cell, or an end of the grid; an x follows each wrong cell.

    tokens, labels, is_wrong: [seq_len].
    """
    extent = _extent(kind, _to_grid(labels), least=ARC_END)
    return _draw("model", kind, _to_grid(tokens)[extent], is_wrong=_to_grid(is_wrong)[extent], color=color)


def side_by_side(drawings: Sequence[Drawing]) -> str:
    blocks = [(drawing.title, *drawing.lines) for drawing in drawings]
    rows = []
    for row in range(max(map(len, blocks))):
        text = ""
        for drawing, block in zip(drawings, blocks, strict=True):
            width = max(drawing.width, len(drawing.title)) + 3
            if row == 0:
                text += f"{block[0]:<{width}}"
            elif row < len(block):
                text += block[row] + " " * (width - drawing.width)
            else:
                text += " " * width
        rows.append(text.rstrip())
    return "\n".join(rows)


def _to_grid(cells: np.ndarray) -> np.ndarray:
    """[seq_len] -> [rows, columns], a square where it can be one."""
    root = math.isqrt(len(cells))
    if root * root == len(cells):
        return cells.reshape(root, root)
    return cells.reshape(
        -1, next(number for number in range(_MAX_COLUMNS, 0, -1) if len(cells) % number == 0)
    )


def _extent(kind: Kind, grid: np.ndarray, *, least: int = ARC_COLOR_0) -> tuple[slice, slice]:
    """Of cropped grids: rows and columns from the first to the last with a token of at least `least`."""
    if not kind.is_cropped:
        return slice(None), slice(None)
    places = [np.flatnonzero((grid >= least).any(axis=axis)) for axis in (1, 0)]
    return tuple(slice(found[0], found[-1] + 1) if len(found) else slice(0) for found in places)


def _draw(
    title: str,
    kind: Kind,
    grid: np.ndarray,
    *,
    color: bool,
    is_found: np.ndarray | None = None,
    is_wrong: np.ndarray | None = None,
) -> Drawing:
    symbols = [[kind.symbol(token) for token in row] for row in grid.tolist()]
    cell_width = max((len(symbol) for row in symbols for symbol in row), default=0)
    lines = []
    for row in range(len(grid)):
        cells = []
        for column, symbol in enumerate(symbols[row]):
            style = kind.style(int(grid[row, column]))
            if is_found is not None and is_found[row, column]:
                style = _GREEN
            text = f"{symbol:>{cell_width}}"
            if is_wrong is not None:
                style = _WRONG if is_wrong[row, column] else style
                text += _WRONG_MARK if is_wrong[row, column] else " "
            cells.append(f"\x1b[{style}m{text}\x1b[0m" if color and style else text)
        lines.append(kind.gap.join(cells))
    num_columns = grid.shape[1]
    width = num_columns * (cell_width + (is_wrong is not None)) + max(num_columns - 1, 0) * len(kind.gap)
    return Drawing(title, lines or ["(nothing)"], width if lines else len("(nothing)"))


# ------------------------------------------------------------------------------------------------------ kinds


def _sudoku_symbol(token: int) -> str:
    return {0: _PAD_SYMBOL, 1: "."}.get(token, str(token - 1))


def _maze_symbol(token: int) -> str:
    return CHARACTERS[token - 1] if 0 < token <= len(CHARACTERS) else _PAD_SYMBOL


def _arc_symbol(token: int) -> str:
    return {0: _PAD_SYMBOL, ARC_END: "+"}.get(token, str(token - ARC_COLOR_0))


_SUDOKU = Kind(
    builder="dataset.build_sudoku",
    fits=lambda vocab_size, seq_len: seq_len == (vocab_size - 2) ** 2,
    symbol=_sudoku_symbol,
    style=lambda token: "" if token > 1 else _FAINT,
    gap=" ",
)
_MAZE = Kind(
    builder="dataset.build_maze",
    fits=lambda vocab_size, seq_len: vocab_size == 6 and math.isqrt(seq_len) ** 2 == seq_len,
    symbol=_maze_symbol,
    style=lambda token: _MAZE_STYLES.get(token, ""),
    gap="",
)
_ARC = Kind(
    builder="dataset.build_arc",
    fits=lambda vocab_size, seq_len: vocab_size == 12 and seq_len == ARC_SIZE**2,
    symbol=_arc_symbol,
    style=lambda token: _ARC_STYLES[token - ARC_COLOR_0] if token >= ARC_COLOR_0 else _FAINT,
    gap="",
    is_cropped=True,
)
_NUMBERS = Kind("", lambda vocab_size, seq_len: True, str, lambda token: "", " ")
_KINDS = (_SUDOKU, _MAZE, _ARC)
