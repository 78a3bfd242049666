"""Builds datasets in the process of a test, and writes CSV files of Sudokus to build from."""

import csv
import functools
import gzip
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from dataset.build import build_dataset
from dataset.files import open_dataset
from dataset.kinds.sudoku.generate import generate_puzzle
from dataset.kinds.sudoku.rules import count_solutions
from dataset.sets import PuzzleSet

ROOT = Path(__file__).resolve().parent.parent
REAL_DATA = Path(os.environ.get("DATA_DIR", ROOT.parent / "shared" / "data")) / "sudoku-extreme-like"
HEADER = ["source", "question", "answer", "rating"]


def build_sets(kind: str, folder: Path, *arguments) -> dict[str, PuzzleSet]:
    """Builds a dataset in this process, and checks its files. Returns {split: its set "all"}.

    kind: Name of the builder. arguments: Its options.
    """
    build_dataset(kind, ["--output-dir", folder, *arguments])
    data = open_dataset(folder, read_everything=True)
    return {name: split.sets["all"] for name, split in data.splits.items()}


def build(folder: Path, *arguments) -> dict[str, PuzzleSet]:
    """Builds a Sudoku dataset. Returns {split: its set "all"}, with the tokens of all variants."""
    sets = build_sets("sudoku", folder, *arguments)
    return {split: puzzles.materialize() for split, puzzles in sets.items()}


def is_minimal(question: list[int], *, box: tuple[int, int]) -> bool:
    """Returns whether a Sudoku has exactly one solution, but several without any one of its clues."""
    clues = (cell for cell, digit in enumerate(question) if digit)
    fewer = ([*question[:cell], 0, *question[cell + 1 :]] for cell in clues)
    is_unique = count_solutions(question, box=box) == 1
    return is_unique and all(count_solutions(each, box=box) > 1 for each in fewer)


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def rows_of(array: np.ndarray) -> list[bytes]:
    return [row.tobytes() for row in array]


def source_rows(count: int, *, stream: int = 0) -> list[list[str]]:
    """Returns rows of a CSV file of 4x4 Sudokus: source, question, answer, rating.

    An empty cell is '.' in rows with an even number, and '0' in the others. Row i has the rating i.
    """
    rows = []
    for index in range(count):
        grids = _puzzle(stream, index)
        question, answer = ("".join(map(str, grid)) for grid in grids)
        rows.append(["made here", question.replace("0", ".0"[index % 2]), answer, str(index)])
    return rows


@functools.cache
def _puzzle(stream: int, index: int) -> tuple[list[int], list[int]]:
    return generate_puzzle(0, stream=stream, index=index, box=(2, 2))


def write_csv(
    path: Path, rows: Iterable[Iterable[str]], *, header: list[str] = HEADER, delimiter: str = ","
) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with (gzip.open if path.suffix == ".gz" else open)(path, "wt", newline="") as file:
        csv.writer(file, delimiter=delimiter).writerows([header, *rows])
    return path
