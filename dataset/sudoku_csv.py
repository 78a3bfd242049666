"""Sudoku puzzles in CSV files, as they are published: one puzzle a line, the first line names the columns.

question and answer are n * n characters row by row, '.' or '0' is empty; rating is an integer. Plain or
compressed (.csv.gz). Invariant: what is read is a question with a valid answer that agrees with it; anything
else raises ValueError with the file and the line.
"""

import csv
import functools
import gzip
import itertools
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from dataset.format import SPLITS
from dataset.sudoku import Box, Puzzles, are_solved

_CHUNK_ROWS = 1 << 15
_ILLEGAL = 255
_DIGIT_OF_BYTE = np.full(256, _ILLEGAL, np.uint8)
_DIGIT_OF_BYTE[[ord(character) for character in ".0123456789"]] = [0, *range(10)]


def source_files(source: Path, *, output_dir: Path) -> list[Path]:
    """The CSV file, or the two files of the folder, training first."""
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


def read_puzzles(path: Path, *, box: Box, min_difficulty: int | None) -> Puzzles:
    """Every puzzle of a CSV file, checked, then filtered. Raises ValueError naming the file and the line."""
    names = ["question", "answer"] + (["rating"] if min_difficulty is not None else [])
    num_cells = (box[0] * box[1]) ** 2
    read = [Puzzles(np.empty((0, num_cells), np.uint8), np.empty((0, num_cells), np.uint8))]
    for lines, columns in _read_columns(path, names):
        expect = functools.partial(_expect, path, lines)
        questions = _parse_grids(columns["question"], "question", box=box, expect=expect)
        answers = _parse_grids(columns["answer"], "answer", box=box, expect=expect)
        expect((answers > 0).all(axis=1), "the answer has an empty cell")
        expect(are_solved(answers, box=box), "the answer repeats a digit in a row, a column or a box")
        expect(((questions == 0) | (questions == answers)).all(axis=1), "the answer contradicts the question")
        puzzles = Puzzles(questions, answers)
        if min_difficulty is not None:
            ratings = columns["rating"]
            expect(np.array([_is_integer(text) for text in ratings]), "the rating is not an integer")
            puzzles = puzzles[np.array([int(text) >= min_difficulty for text in ratings])]
        read.append(puzzles)
    questions = np.concatenate([puzzles.questions for puzzles in read])
    return Puzzles(questions, np.concatenate([puzzles.answers for puzzles in read]))


def _expect(path: Path, lines: Sequence[int], good: np.ndarray, message: str) -> None:
    if not good.all():
        raise ValueError(f"{path}:{lines[int(np.argmin(good))]}: {message}")


def _parse_grids(
    texts: list[str], name: str, *, box: Box, expect: Callable[[np.ndarray, str], None]
) -> np.ndarray:
    """[count, n * n] uint8; non-ASCII characters count as one illegal character each."""
    size = box[0] * box[1]
    lengths = np.fromiter(map(len, texts), np.int64, len(texts))
    expect(lengths == size**2, f"the {name} does not have {size**2} cells; is --box {box[0]}x{box[1]} right?")
    characters = np.frombuffer("".join(texts).encode("ascii", "replace"), np.uint8)
    grids = _DIGIT_OF_BYTE[characters].reshape(len(texts), size**2)
    message = f"the {name} has a character that is neither '.' or '0' (empty) nor a digit from 1 to {size}"
    expect((grids <= size).all(axis=1), message)
    return grids


def _is_integer(text: str) -> bool:
    return text.strip().removeprefix("-").isdecimal()


def _read_columns(path: Path, names: list[str]) -> Iterator[tuple[Sequence[int], dict[str, list[str]]]]:
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
