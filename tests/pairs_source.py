"""Generates pairs of random grids, writes them to files, builds datasets, and reads the pairs back."""

import json
import random
from pathlib import Path

import numpy as np
import openpyxl
import pyarrow.parquet

from dataset.build import build_dataset
from dataset.description import Vocabulary
from dataset.files import open_dataset
from tests import sudoku_source


def random_grid(draw: random.Random, symbols: str, num_rows: int, num_columns: int) -> list[str]:
    return ["".join(draw.choices(symbols, k=num_columns)) for _ in range(num_rows)]


def random_pairs(count: int, *, symbols: str = "#. ab", seed: int = 0, tasks: int = 1) -> list[dict]:
    """Returns pairs of grids of 1x1 to 4x5 random symbols. The input and output may have different sizes.

    symbols: Characters to draw from. tasks: Number of tasks. If more than 1, the pairs name their task.
    """
    draw = random.Random(seed)
    pairs = []
    for number in range(count):
        grids = [random_grid(draw, symbols, draw.randint(1, 4), draw.randint(1, 5)) for _ in range(2)]
        task = {"task": f"task {number % tasks}"} if tasks > 1 else {}
        pairs.append({"input": grids[0], "output": grids[1], **task})
    return pairs


def write_json(path: Path, pairs: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return path


def write_sheet(path: Path, rows: list[dict]) -> Path:
    """Writes an Excel file with a header and one row for each dict. Cells contain the values as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    book = openpyxl.Workbook()
    for row in ([*rows[0]], *([json.dumps(value) for value in row.values()] for row in rows)):
        book.active.append(row)
    book.create_sheet("notes")
    book.save(path)
    return path


def write_parquet(path: Path, pairs: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(pairs), path)
    return path


def write_csv(path: Path, pairs: list[dict], *, delimiter: str = ",") -> Path:
    rows = [pair.values() for pair in pairs]
    return sudoku_source.write_csv(path, rows, header=list(pairs[0]), delimiter=delimiter)


def build(folder: Path, source: Path, *options):
    build_dataset("pairs", [str(each) for each in ("--output-dir", folder, "--source", source, *options)])
    return open_dataset(folder, read_everything=True)


def text_of(vocabulary: Vocabulary, grid: list[list[str]]) -> str:
    return "\n".join((" " if vocabulary.parts_by_spaces else "").join(row) for row in grid)


def grid_of(vocabulary: Vocabulary, tokens: np.ndarray) -> list[list[str]]:
    """Converts tokens to a grid of symbols. A token without a symbol becomes '?'."""
    texts = ("?", "?", *vocabulary.symbols)
    return [[texts[token] for token in row] for row in tokens[vocabulary.cells_of(tokens)].tolist()]


def read_back(data, split: str) -> list[tuple]:
    """Returns (input, output, task) of every example of a split, with all variants. Grids are texts."""
    names = json.loads((data.folders[0] / "identifiers.json").read_text())
    vocabulary, puzzles = Vocabulary.of(data.metadata), data.splits[split].sets["all"]
    written = puzzles.materialize()
    texts = [
        [text_of(vocabulary, grid_of(vocabulary, tokens)) for tokens in array]
        for array in (written.inputs, written.labels)
    ]
    tasks = [names[number] for number in puzzles.puzzle_identifiers]
    return list(zip(*texts, tasks, strict=True))


def as_texts(pairs: list[dict]) -> list[tuple]:
    return [("\n".join(p["input"]), "\n".join(p["output"]), p.get("task", "<blank>")) for p in pairs]
