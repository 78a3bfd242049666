"""Puzzles in CSV files, as they are published: one puzzle a line, the first line names the columns.

A source is a folder with train.csv and test.csv, or one file; plain or compressed (.csv.gz). What the columns
hold is for `sudoku_csv` and `maze_csv` to say. Invariant: what is wrong raises ValueError with the file and
the line.
"""

import csv
import gzip
import itertools
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from dataset.format import SPLITS

_CHUNK_ROWS = 1 << 15


def source_files(source: Path, *, output_dir: Path) -> list[Path]:
    """Finds the CSV file, or the two files of the folder, training first."""
    if not source.exists():
        raise ValueError(f"--source {source} does not exist")
    files = _csv_files(source) if source.is_dir() else [source]
    if any(path.resolve().is_relative_to(output_dir.resolve()) for path in files):
        raise ValueError(f"{output_dir} holds the source and would be replaced: choose another --output-dir")
    return files


def _csv_files(source: Path) -> list[Path]:
    files = []
    for split in SPLITS:
        found = [path for path in (source / f"{split}.csv", source / f"{split}.csv.gz") if path.is_file()]
        if not found:
            raise ValueError(f"{source / f'{split}.csv'} is missing, and there is no {split}.csv.gz either")
        if len(found) > 1:
            raise ValueError(f"{source} has both {split}.csv and {split}.csv.gz: remove one of them")
        files += found
    return files


def read_columns(path: Path, names: Sequence[str]) -> Iterator[tuple[Sequence[int], dict[str, list[str]]]]:
    """Chunks of the rows of a CSV file: their line numbers, and the columns asked for."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8-sig", errors="replace", newline="") as file:
        reader = csv.reader(file)
        try:
            header = next(reader, [])
            if missing := [name for name in names if name not in header]:
                raise ValueError(
                    f"{path}:1: no column {', '.join(missing)}: the first line names the columns"
                )
            positions = {name: header.index(name) for name in names}
            numbered = ((reader.line_num, row) for row in reader if row)
            while chunk := list(itertools.islice(numbered, _CHUNK_ROWS)):
                for line, row in chunk:
                    if len(row) != len(header):
                        raise ValueError(
                            f"{path}:{line}: {len(row)} columns, but {len(header)} in the first line"
                        )
                lines, rows = zip(*chunk, strict=True)
                yield lines, {name: [row[position] for row in rows] for name, position in positions.items()}
        except csv.Error as error:
            raise ValueError(f"{path}:{reader.line_num}: no CSV ({error})") from None
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise ValueError(f"{path} is no gzip file, or not a whole one ({error})") from None


def expect(path: Path, lines: Sequence[int], good: np.ndarray, message: str) -> None:
    """Raises ValueError with the first line that is not good. good: bool [len(lines)]."""
    if not good.all():
        raise ValueError(f"{path}:{lines[int(np.argmin(good))]}: {message}")


def codes_of(texts: Sequence[str], *, table: np.ndarray) -> np.ndarray:
    """Looks up each character of texts of equal length: uint8 [len(texts), length].

    table: uint8 [256], by byte; a character that is not ASCII counts as a question mark.
    """
    characters = np.frombuffer("".join(texts).encode("ascii", "replace"), np.uint8)
    return table[characters].reshape(len(texts), -1)
