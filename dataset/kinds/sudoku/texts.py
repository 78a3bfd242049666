"""Reads Sudokus as people write them: rows of cells, drawings with frames, lists with one puzzle per line.

The symbols are digits, then letters: 1 to 9 and A to G for a 16x16 grid, 1 to 9 and A to P for 25x25. Grids
larger than 9x9 may also be written with letters only (A is 1), or with numbers separated by spaces. 16x16
grids may also be written with 0 to F. An empty cell is one of `EMPTY_CELLS`.
"""

import math
import re
import string
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from dataset.kinds.sudoku.rules import BOXES, Box

SYMBOLS = string.digits[1:] + string.ascii_uppercase[:16]  # of the digits 1 .. 25
EMPTY_CELLS = ".0_-*"
BOX_OF: dict[int, Box] = {(rows * columns) ** 2: (rows, columns) for rows, columns in BOXES.values()}

_SIZES = {rows * columns for rows, columns in BOXES.values()}
_LEAST_CELLS = 36  # of a text that is a whole grid: fewer may be a row
_FRAME = re.compile(r"[-+=|*\s]*")  # between the boxes of a drawing
_BETWEEN = re.compile(r"[\s,;:|]+")
_TITLE = re.compile(r"(?:grid|puzzle|sudoku|board|game|no)\W*(?:\d+\W*)?", re.IGNORECASE)


class GridText(NamedTuple):
    """A Sudoku that was found in a text.

    Attributes:
        line: Number of its first line, from 1.
        cells: One character for each cell, row by row. The digits are 1 to 9, then A to P. An empty cell is
            ".".
        answer: The solution in the same form. None if the text does not contain it.
    """

    line: int
    cells: str
    answer: str | None = None


def in_symbols(*texts: str, num_cells: int) -> list[str]:
    """Converts each Sudoku grid to a text with one character for each cell.

    Letters become upper case. The digits become 1 to 9, then A to P. An empty cell becomes ".". Example: the
    digits 0 to F of a 16x16 grid become 1 to G. Unknown characters stay.

    texts: Grids with the same notation, such as a puzzle and its answer.
    """
    grids = ["".join(_split_cells(text)).upper() for text in texts]
    used = set("".join(grids))
    others, first = used - set(EMPTY_CELLS), None
    if num_cells == 256 and "G" not in used and {"0"} < used & set(EMPTY_CELLS):
        first = "0123456789ABCDEF"
    elif num_cells > 81 and others and others <= set(string.ascii_uppercase[:25]):
        first = string.ascii_uppercase
    table = str.maketrans(EMPTY_CELLS, "." * len(EMPTY_CELLS))
    table |= str.maketrans(dict(zip(first or "", SYMBOLS, strict=False)))
    return [grid.translate(table) for grid in grids]


def read_grids(text: str) -> list[GridText]:
    """Finds the Sudokus in a text.

    The text is one or more grids of several lines each, or a list with a puzzle in every line. Such a line
    may also contain other fields, such as a number. If a full grid follows a puzzle and contains all of its
    clues, it becomes the `answer` of the puzzle. Raises ValueError for JSON, or if a line of a list has no
    puzzle. Only a first line with letters may have none, because it may contain the names of columns.
    """
    if "{" in text:
        raise ValueError("it is not a list of puzzles with a character for each cell")
    lines = list(_lines(text))
    found = [(number, _complete_grids(line)) for number, line in lines]
    if any(grids for _, grids in found):
        grids = []
        names = any(map(str.isalpha, lines[0][1]))  # whether the first line may name columns
        for index, (line_number, of_line) in enumerate(found):
            if not of_line and (index or not names):
                raise ValueError(
                    f"line {line_number} has no Sudoku. It must have one of {list_sizes()} cells."
                )
            grids += [(line_number, cells) for cells in of_line]
    else:
        rows = [(number, "".join(_split_cells(line))) for number, line in _without_frames(lines)]
        grids = _join(rows)
    puzzles: list[GridText] = []
    written = ""  # the last puzzle, as the text has it
    for line_number, cells in grids:
        if puzzles and puzzles[-1].answer is None and len(cells) == len(written):
            # Together, because only the answer may show the notation: 0 is a digit of 0 to F.
            puzzle, answer = in_symbols(written, cells, num_cells=len(cells))
            if "." in puzzle and _answers(puzzle, answer):
                puzzles[-1] = GridText(puzzles[-1].line, puzzle, answer)
                continue
        puzzles.append(GridText(line_number, *in_symbols(cells, num_cells=len(cells))))
        written = cells
    return puzzles


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Yields (line number, line) for the lines that contain cells of a puzzle.

    Leaves out comments after "#" and titles such as "Grid 01". A line such as [Puzzle] is a heading. After a
    heading other than [Puzzle] and [State], all lines up to the next heading are left out. The lines after
    [State] contain the solution. They are yielded last, and only if they have no empty cell.
    """
    section, state = "puzzle", []
    for line_number, line in enumerate(text.removeprefix("\ufeff").splitlines(), 1):
        line = line.partition("#")[0].strip()
        if heading := re.fullmatch(r"\[([A-Za-z ]+)\]", line):
            section = heading[1].lower()
        elif line and section == "puzzle" and not _TITLE.fullmatch(line):
            yield line_number, line
        elif line and section == "state":
            state.append((line_number, line))
    if not any(set("".join(line for _, line in state)) & set(EMPTY_CELLS)):
        yield from state


def _split_cells(text: str) -> Sequence[str]:
    """Splits a text into the texts of its cells.

    Examples: "1.3." gives the cells 1 . 3 . and "1 16 . 3" gives the cells 1 G . 3. The text is only split at
    spaces, tabs, semicolons or commas if this gives as many cells as a row or a grid has. Otherwise each
    character is a cell, and separators are removed.
    """
    text = re.sub(r"[]|[]", " ", text)
    separator = next((character for character in "\t;," if character in text), None)
    fields, known = [field.strip() for field in text.split(separator)], _SIZES | BOX_OF.keys()
    if fields and not fields[-1] and len(fields) not in known:  # a separator at the end
        fields.pop()
    lengths = set(map(len, fields))
    if len(fields) in known and 1 in lengths and lengths <= {0, 1, 2}:
        numbers = {str(digit): symbol for digit, symbol in enumerate(SYMBOLS, 1)}
        return [numbers.get(field, field) or "." for field in fields]
    return _BETWEEN.sub("", text)


def _complete_grids(line: str) -> list[str]:
    """Returns the Sudoku grids that are complete in one line of text, or [].

    Example: "17,<81 cells>,<81 cells>" gives two texts of 81 cells. Grids of fewer than 36 cells are not
    found, because they may be a row of a larger grid.
    """
    fields = [field.strip("\"'") for field in _BETWEEN.split(line)]
    joined = "".join(_split_cells(line))
    grids = [field for field in fields if _is_grid(field)]
    return grids or ([joined] if _is_grid(joined) else [])


def is_grid_of(text: str, *, num_cells: int) -> bool:
    cells = "".join(_split_cells(text))
    return len(cells) == num_cells and _has_symbols(cells)


def _is_grid(cells: str) -> bool:
    return len(cells) >= _LEAST_CELLS and len(cells) in BOX_OF and _has_symbols(cells)


def _has_symbols(cells: str) -> bool:
    known = SYMBOLS[: math.isqrt(len(cells))] if len(cells) < 256 else SYMBOLS + string.ascii_uppercase
    return set(cells.upper()) <= set(EMPTY_CELLS + known)


def _without_frames(lines: list[tuple[int, str]]) -> list[tuple[int, str]]:
    """Removes the lines of a drawing that are only a frame, such as "---+---+---".

    Keeps all lines if they form a square, because "-" may then be an empty cell.
    """
    rows = [(line_number, line) for line_number, line in lines if not _FRAME.fullmatch(line)]
    if len(lines) in _SIZES and all(len(line) == len(lines) for _, line in lines):
        return lines
    return rows


def _join(rows: list[tuple[int, str]]) -> list[tuple[int, str]]:
    """Joins rows of cells to Sudoku grids. Returns (line number of its first row, cells) for each grid.

    The first rule that applies is used:

    1. All rows have n cells, Sudokus of size n x n exist, and the number of rows is a multiple of n: every n
    rows become one grid. Exception: 16 cells can also be a complete 4x4 grid. If the rows have 16 cells and
    no digit above 4, this rule applies only if there are exactly 16 rows.
    2. All rows have as many cells as a complete grid: each row is a grid.
    3. Otherwise: all rows together become one grid, even if it has no valid size.

    rows: (line number, cells) of each row.
    """
    lengths = {len(cells) for _, cells in rows}
    text = "".join(cells for _, cells in rows)
    if len(lengths) == 1:
        (size,) = lengths
        is_small = set(text) <= set(EMPTY_CELLS + SYMBOLS[:4])
        if size in _SIZES and len(rows) % size == 0 and not (size == 16 and is_small and len(rows) != 16):
            return [
                (rows[first][0], "".join(cells for _, cells in rows[first : first + size]))
                for first in range(0, len(rows), size)
            ]
        if size in BOX_OF:
            return rows
    return [(rows[0][0] if rows else 1, text)]


def _answers(puzzle: str, cells: str) -> bool:
    same_size = len(cells) == len(puzzle) and "." not in cells
    return same_size and all(clue in (".", cell) for clue, cell in zip(puzzle, cells, strict=True))


def list_sizes() -> str:
    """Returns a text with the numbers of cells that a Sudoku may have, such as "16 (4x4), ..."."""
    return ", ".join(f"{num} ({math.isqrt(num)}x{math.isqrt(num)})" for num in sorted(BOX_OF))
