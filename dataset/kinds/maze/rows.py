"""Mazes in CSV files (`csv_rows`): the columns question and answer.

Both are the characters of a square maze row by row: '#' is a wall, a space an open cell, S the start, G the
goal, and in the answer 'o' a cell of the path. Invariant: what is read is a maze with an answer that is one
path from S to G (`rules.is_path`), and all mazes are of one size.
"""

import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from dataset.csv_rows import codes_of, expect, read_columns
from dataset.kinds.maze.rules import CHARACTERS, GOAL, OPEN, PATH, START, WALL, is_path, shortest_path_cells
from dataset.pairs import Pairs

_ILLEGAL = 0
_TOKEN_OF_BYTE = np.full(256, _ILLEGAL, np.uint8)
_TOKEN_OF_BYTE[[ord(character) for character in CHARACTERS]] = [WALL, OPEN, START, GOAL, PATH]


def read_mazes(files: Sequence[Path]) -> list[Pairs]:
    """Reads the mazes of each file, as tokens. Raises ValueError naming the file and the line."""
    num_cells = None
    read: list[Pairs] = []
    for path in files:
        parts = []
        for lines, columns in read_columns(path, ("question", "answer")):
            if num_cells is None:
                num_cells = len(columns["question"][0])
                is_square = num_cells >= 4 and math.isqrt(num_cells) ** 2 == num_cells
                message = f"the question has {num_cells} cells, which make no square of at least 2x2"
                expect(path, lines, np.array([is_square]), message)
            parts.append(_parse(columns, num_cells, functools.partial(expect, path, lines)))
        read.append(Pairs.concatenate(parts) if parts else _NONE)
    return read


_NONE = Pairs(np.empty((0, 0), np.uint8), np.empty((0, 0), np.uint8))


def _parse(
    columns: dict[str, list[str]], num_cells: int, expect_here: Callable[[np.ndarray, str], None]
) -> Pairs:
    tokens = {}
    for name, texts in columns.items():
        lengths = np.fromiter(map(len, texts), np.int64, len(texts))
        message = f"the {name} does not have {num_cells} cells like the first maze: all must be of one size"
        expect_here(lengths == num_cells, message)
        tokens[name] = codes_of(texts, table=_TOKEN_OF_BYTE)
        last = PATH if name == "answer" else GOAL
        characters = ", ".join(repr(character) for character in CHARACTERS[: last - WALL + 1])
        is_known = (tokens[name] != _ILLEGAL) & (tokens[name] <= last)
        expect_here(is_known.all(axis=1), f"the {name} has a character that is none of {characters}")
    mazes, answers = tokens["question"], tokens["answer"]
    for token, thing in ((START, "start S"), (GOAL, "goal G")):
        num = np.count_nonzero(mazes == token, axis=1)
        expect_here(num > 0, f"the maze has no {thing}")
        expect_here(num < 2, f"the maze has more than one {thing}")
    expect_here(shortest_path_cells(mazes) > 0, "the maze has no path from S to G")
    agrees = ((answers == mazes) | ((mazes == OPEN) & (answers == PATH))).all(axis=1)
    expect_here(agrees, "the answer contradicts its maze: it must be the maze with 'o' on some open cells")
    expect_here(is_path(mazes, answers), "the cells marked 'o' are not exactly one path from S to G")
    return Pairs(mazes, answers)
