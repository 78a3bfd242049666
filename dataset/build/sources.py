"""Sources of puzzles: the options that name one, CSV files, and dataset repositories of the Hub."""

import argparse
import contextlib
import csv
import gzip
import itertools
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from dataset.build.command_line import integer
from dataset.format import SPLITS
from dataset.hub import download, is_address, parse_address

_CHUNK_ROWS = 1 << 15

# Options that builders add among their own, as the manifest lists all in their order.
_KEEP = "keep K training puzzles of the source, at random"
SUBSAMPLE_SIZE = {"type": integer(at_least=1), "metavar": "K", "help": _KEEP}
_WRITE_OUT = "write all variants out, as the public tools do; else they are made when they are read"
MATERIALIZE = {"action": "store_true", "help": _WRITE_OUT}
_SO_MANY = "generate T test puzzles instead"
NUM_TEST = {"type": integer(at_least=1), "metavar": "T", "help": _SO_MANY}


def add_source_options(parser: argparse.ArgumentParser, *, thing: str, columns: str, generated: str) -> None:
    """Adds --source and --generate; one of them must be given."""
    group = parser.add_mutually_exclusive_group(required=True)
    source = (
        "a folder with train.csv and test.csv, hf://datasets/OWNER/NAME[@REVISION], a dataset with them on "
        f"the Hugging Face Hub, or one CSV file (.csv.gz too), of which a tenth (at least 1 {thing}, chosen "
        "by the seed, its repeats dropped) becomes the test split and the rest the training split; "
    )
    group.add_argument("--source", type=Path, metavar="PATH", help=source + columns)
    group.add_argument("--generate", type=integer(at_least=1), metavar="N", help=generated)


def find_source_files(source: Path, *, output_dir: Path) -> list[Path]:
    """Finds the CSV file, or the two files of the folder, training first; plain or compressed.

    A folder on the Hub is downloaded first, into the Hub's cache.
    """
    if is_address(source):
        source = download_source(source, _choose_files, needed="train.csv and test.csv")
    if not source.exists():
        raise ValueError(f"--source {source} does not exist")
    files = []
    for split in SPLITS if source.is_dir() else ():
        found = [path for path in (source / f"{split}.csv", source / f"{split}.csv.gz") if path.is_file()]
        if not found:
            raise ValueError(f"{source / f'{split}.csv'} is missing, and there is no {split}.csv.gz either")
        if len(found) > 1:
            raise ValueError(f"{source} has both {split}.csv and {split}.csv.gz: remove one of them")
        files += found
    return keep_sources(files or [source], output_dir=output_dir)


def keep_sources(files: list[Path], *, output_dir: Path) -> list[Path]:
    """Returns the files. ValueError where the folder that will be replaced has one of them."""
    if any(path.resolve().is_relative_to(output_dir.resolve()) for path in files):
        raise ValueError(f"{output_dir} holds the source and would be replaced: choose another --output-dir")
    return files


def download_source(source: Path, choose: Callable[[list[str]], Sequence[str]], *, needed: str) -> Path:
    """Downloads files of a dataset repository of the Hub, hf://datasets/OWNER/NAME, and returns their folder.

    choose: as in `dataset.hub.download`. needed: what it chooses, for people. ValueError, one line.
    """
    address = parse_address(source, kind="dataset")
    by_hand = f"fetch {needed} of {address.url} by hand into a folder, and give --source FOLDER"
    return download(address, choose, by_hand=by_hand)


def _choose_files(names: list[str]) -> list[str]:
    chosen = [name for split in SPLITS for name in (f"{split}.csv", f"{split}.csv.gz") if name in names]
    for split in SPLITS:
        if not any(name.startswith(split) for name in chosen):
            raise ValueError(f"has no {split}.csv, and no {split}.csv.gz either")
    return chosen


@contextlib.contextmanager
def open_file(path: Path, mode: str, **options: Any) -> Iterator[IO]:
    """Opens a file, compressed (.gz) or not. ValueError where what is read is no whole gzip file."""
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, mode, **options) as file:
            yield file
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is no gzip file, or not a whole one ({error})") from None


def read_columns(
    path: Path, names: Sequence[str], *, read_others: bool = False
) -> Iterator[tuple[Sequence[int], dict[str, list[str]]]]:
    """Reads a CSV file in chunks: the line numbers of the rows, and the columns `names`, or with read_others
    all; the first line names the columns. ValueError, with file and line, for what is wrong.
    """
    with open_file(path, "rt", encoding="utf-8-sig", errors="replace", newline="") as file:
        reader = csv.reader(file)
        try:
            header = next(reader, [])
            if missing := ", ".join(name for name in names if name not in header):
                raise ValueError(f"{path}:1: no column {missing}: the first line names the columns")
            positions = {name: header.index(name) for name in (header if read_others else names)}
            numbered = ((reader.line_num, row) for row in reader if row)
            while chunk := list(itertools.islice(numbered, _CHUNK_ROWS)):
                for line, row in chunk:
                    if (num := len(row)) != len(header):
                        raise ValueError(f"{path}:{line}: {num} columns, but {len(header)} in the first line")
                lines, rows = zip(*chunk, strict=True)
                yield lines, {name: [row[position] for row in rows] for name, position in positions.items()}
        except csv.Error as error:
            raise ValueError(f"{path}:{reader.line_num}: no CSV ({error})") from None


def expect(path: Path, lines: Sequence[int], good: np.ndarray, message: str) -> None:
    """Raises ValueError with the first line that is not good. good: bool [len(lines)]."""
    if not good.all():
        raise ValueError(f"{path}:{lines[int(np.argmin(good))]}: {message}")


def codes_of(texts: Sequence[str], *, table: np.ndarray) -> np.ndarray:
    """Looks up each character of texts of equal length, not ASCII as '?': uint8 [len(texts), length]."""
    characters = np.frombuffer("".join(texts).encode("ascii", "replace"), np.uint8)
    return table[characters].reshape(len(texts), -1)
