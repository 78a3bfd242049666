"""Builds maze datasets in the process of a test, and generates the rows of CSV files of mazes."""

import functools

import numpy as np

from dataset.kinds.maze.rules import CHARACTERS, draw_mazes, published_answers
from tests.sudoku_source import REAL_DATA, build_sets

build = functools.partial(build_sets, "maze")
REAL_MAZES = REAL_DATA.parent / "maze-30x30-hard-1k"


def to_tokens(texts: list[str]) -> np.ndarray:
    """Converts the texts of mazes to tokens, uint8 [count, cells]. A '|' between rows is removed."""
    tokens = [[CHARACTERS.index(cell) + 1 for cell in text.replace("|", "")] for text in texts]
    return np.array(tokens, np.uint8)


def to_text(maze: np.ndarray) -> str:
    return "".join(CHARACTERS[token - 1] for token in maze)


def source_rows(count: int, *, stream: int = 9, size: int = 6) -> list[list[str]]:
    """Returns `count` rows of a CSV file of different mazes: source, question, answer, rating."""
    batches = [draw_mazes(0, stream=stream, index=index, size=size, min_path_cells=6) for index in range(3)]
    mazes = list(dict.fromkeys(map(to_text, np.concatenate(batches))))[:count]
    assert len(mazes) == count
    answers = map(to_text, published_answers(to_tokens(mazes)))
    return [["made here", maze, answer, "0"] for maze, answer in zip(mazes, answers, strict=True)]
