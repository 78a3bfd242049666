"""Maze sets built in this process, and CSV files to build them from."""

from pathlib import Path

import numpy as np

from dataset.build import build_dataset
from dataset.format import check_tokens, open_split
from dataset.kinds.maze.rules import CHARACTERS, draw_mazes, published_answers
from dataset.sets import PuzzleSet
from tests.sudoku_source import REAL_DATA

REAL_MAZES = REAL_DATA.parent / "maze-30x30-hard-1k"


def to_tokens(texts: list[str]) -> np.ndarray:
    """uint8 [count, cells]. Line ends, '|', between the rows of a maze are for the eye."""
    return np.array(
        [[CHARACTERS.index(cell) + 1 for cell in text.replace("|", "")] for text in texts], np.uint8
    )


def to_text(maze: np.ndarray) -> str:
    return "".join(CHARACTERS[token - 1] for token in maze)


def source_rows(count: int, *, stream: int = 9, size: int = 6) -> list[list[str]]:
    """Rows of a CSV file of different mazes: source, question, answer, rating."""
    batches = [draw_mazes(0, stream=stream, index=index, size=size, min_path_cells=6) for index in range(3)]
    mazes = list(dict.fromkeys(map(to_text, np.concatenate(batches))))[:count]
    assert len(mazes) == count
    answers = map(to_text, published_answers(to_tokens(mazes)))
    return [["made here", maze, answer, "0"] for maze, answer in zip(mazes, answers, strict=True)]


def build(folder: Path, *arguments) -> dict[str, PuzzleSet]:
    """Runs the builder in this process; the set `all` of both splits, through every check of the format."""
    build_dataset("maze", ["--output-dir", str(folder), *map(str, arguments)])
    splits = {split: open_split(folder, split) for split in ("train", "test")}
    for split, data in splits.items():
        check_tokens(folder, split, data)
    return {split: data.sets["all"] for split, data in splits.items()}
