"""Sudoku puzzles in CSV files (`csv_rows`): columns question and answer, and rating where it is asked for.

question and answer are n * n characters row by row, '.' or '0' is empty; rating is an integer. Invariant:
what is read is a question with a valid answer that agrees with it.
"""

import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np

from dataset.csv_rows import codes_of, expect, read_columns
from dataset.kinds.sudoku.rules import Box, are_solved
from dataset.pairs import Pairs

_ILLEGAL = 255
_DIGIT_OF_BYTE = np.full(256, _ILLEGAL, np.uint8)
_DIGIT_OF_BYTE[[ord(character) for character in ".0123456789"]] = [0, *range(10)]


def read_puzzles(path: Path, *, box: Box, min_difficulty: int | None) -> Pairs:
    """Reads every puzzle of a CSV file, checks, then filters it: digits [count, n * n] uint8, 0 = empty.

    Raises ValueError naming the file and the line.
    """
    names = ["question", "answer"] + (["rating"] if min_difficulty is not None else [])
    num_cells = (box[0] * box[1]) ** 2
    read = [Pairs(np.empty((0, num_cells), np.uint8), np.empty((0, num_cells), np.uint8))]
    for lines, columns in read_columns(path, names):
        expect_here = functools.partial(expect, path, lines)
        questions = _parse_grids(columns["question"], "question", box=box, expect_here=expect_here)
        answers = _parse_grids(columns["answer"], "answer", box=box, expect_here=expect_here)
        expect_here((answers > 0).all(axis=1), "the answer has an empty cell")
        expect_here(are_solved(answers, box=box), "the answer repeats a digit in a row, a column or a box")
        agrees = ((questions == 0) | (questions == answers)).all(axis=1)
        expect_here(agrees, "the answer contradicts the question")
        puzzles = Pairs(questions, answers)
        if min_difficulty is not None:
            ratings = columns["rating"]
            expect_here(np.array([_is_integer(text) for text in ratings]), "the rating is not an integer")
            puzzles = puzzles[np.array([int(text) >= min_difficulty for text in ratings])]
        read.append(puzzles)
    return Pairs.concatenate(read)


def _parse_grids(
    texts: list[str], name: str, *, box: Box, expect_here: Callable[[np.ndarray, str], None]
) -> np.ndarray:
    """Parses grids, uint8 [count, n * n]; non-ASCII characters count as one illegal character each."""
    size = box[0] * box[1]
    lengths = np.fromiter(map(len, texts), np.int64, len(texts))
    message = f"the {name} does not have {size**2} cells; is --box {box[0]}x{box[1]} right?"
    expect_here(lengths == size**2, message)
    grids = codes_of(texts, table=_DIGIT_OF_BYTE)
    message = f"the {name} has a character that is neither '.' or '0' (empty) nor a digit from 1 to {size}"
    expect_here((grids <= size).all(axis=1), message)
    return grids


def _is_integer(text: str) -> bool:
    return text.strip().removeprefix("-").isdecimal()
