"""Sources of puzzles: the options that name them, and functions that find and read their files.

A source is a file, a folder or a dataset repository of the Hugging Face Hub.
"""

import argparse
import csv
import importlib
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType

import numpy as np

from dataset.metadata import SPLITS
from runtime.command_line import integer
from runtime.hub import download, is_address, parse_address
from runtime.reading import printable, read_lines

_CHUNK_ROWS = 1 << 15
_ENDINGS = (".csv", ".tsv", ".txt", ".sdm", ".sdk", ".ss")
_TABLES = _ENDINGS[:2]
_OF_A_SPLIT = re.compile(r"(train|valid|validation|val|dev|eval|test)\b.*")
_KNOWN = {  # other names of a column
    "question": ("puzzle", "puzzles", "quizzes", "quiz", "sudoku", "maze", "problem", "unsolved", "input"),
    "answer": ("solution", "solutions", "answers", "solved", "output"),
    "rating": ("difficulty",),
}

# Each builder adds these options itself, because the manifest lists options in the order in which they are
# added.
_KEEP = "keep K random training puzzles of the source"
SUBSAMPLE_SIZE = {"type": integer(at_least=1), "metavar": "K", "help": _KEEP}
_WRITE_OUT = "write all variants to disk, as the public tools do (default: make them when they are read)"
MATERIALIZE = {"action": "store_true", "help": _WRITE_OUT}
_SO_MANY = "number of test puzzles to generate; with --source, keep T random test puzzles of the source"
NUM_TEST = {"type": integer(at_least=1), "metavar": "T", "help": _SO_MANY}


def add_source_options(parser: argparse.ArgumentParser, *, thing: str, columns: str, generated: str) -> None:
    """Adds the options --source, --generate and --columns to the parser of a dataset builder.

    thing: Word for a puzzle in the help texts, such as "maze". columns: Help text that describes the columns
    of a source file. generated: Help text of --generate.
    """
    group = parser.add_mutually_exclusive_group(required=True)
    source = (
        "a folder with train.csv and test.csv; such a folder on the Hugging Face Hub, "
        "hf://datasets/OWNER/NAME[@REVISION]; or one CSV file. Files may be .csv.gz. A random tenth of a "
        f"single file (at least 1 {thing}) becomes the test split. The rest becomes the training split, "
        "without copies of test puzzles. A file has the "
    )
    group.add_argument("--source", type=Path, metavar="PATH", help=source + columns)
    names = "names of the columns in the CSV files of the source, if they are not the usual ones"
    parser.add_argument("--columns", metavar="QUESTION,ANSWER", default=argparse.SUPPRESS, help=names)
    group.add_argument("--generate", type=integer(at_least=1), metavar="N", help=generated)


def find_source_files(
    source: Path, choose: Callable[[list[str]], Sequence[str]], *, needed: str, output_dir: Path
) -> list[Path]:
    """Returns the paths of the puzzle files to read. Downloads the files of an address of the Hub.

    source: A file, a folder, or an address of the Hugging Face Hub, hf://datasets/OWNER/NAME. choose:
    Function that gets the names of all files in the folder or on the Hub, and returns the names of the files
    to read. It raises ValueError if a file is missing. If `source` is a file, `choose` is not called. needed:
    Names of the needed files for messages, such as "train.csv and test.csv". output_dir: Folder that the
    builder will replace. If this folder contains the files, raises ValueError.
    """
    if is_address(source):
        address = parse_address(source, kind="dataset")
        by_hand = f"download {needed} of {address.url} into a folder, and pass --source FOLDER"
        return download(address, lambda names: _choose_and_tell(names, choose), by_hand=by_hand)
    files = [source]
    if source.is_dir():
        try:
            names = [path.name + "/" * path.is_dir() for path in source.iterdir()]
            names = [name for name in names if not name.startswith("._")]  # files of macOS
            names = _choose_and_tell(names, choose)
        except ValueError as error:
            raise ValueError(f"{source} {error}") from None
        files = [source / name for name in names]
    check_source(source, *files, output_dir=output_dir)
    return files


def import_package(package: str, *, needed_by: Path | str) -> ModuleType:
    try:
        return importlib.import_module(package)
    except ImportError:
        name = package.partition(".")[0]
        raise ValueError(f"{needed_by} needs the package {name}. Install it: pip install {name}") from None


def check_source(source: Path, *files: Path, output_dir: Path) -> None:
    """Raises ValueError if `source` does not exist, or if one of `files` is in `output_dir`."""
    if not source.exists():
        raise ValueError(f"--source {source} does not exist. Check the path.")
    if any(path.resolve().is_relative_to(output_dir.resolve()) for path in files):
        raise ValueError(f"{output_dir} contains the source. Choose another --output-dir.")


def _choose_and_tell(names: list[str], choose: Callable[[list[str]], Sequence[str]]) -> Sequence[str]:
    chosen = choose([name for name in names if not name.endswith("/")])
    # Print other files that look like puzzle files.
    endings = {_ending_of(name) for name in chosen} | {".csv", ".jsonl", ".parquet"}
    others = sorted(set(names).difference(chosen))
    if others := [name for name in others if _ending_of(name) in endings or _OF_A_SPLIT.fullmatch(name)]:
        print(f"files not used: {', '.join(map(printable, others))}")
    return chosen


def _ending_of(name: str) -> str:
    return Path(name.removesuffix(".gz")).suffix


def choose_puzzle_files(names: list[str]) -> list[str]:
    """Selects the puzzle files among the names of files in a folder.

    1. If there are a training file and a test file, returns both, such as ["train.csv", "test.csv.gz"].
    2. If there is neither, returns the only table (.csv or .tsv) in a list.
    3. If there is also no table, returns the only other puzzle file, such as ["puzzles.sdm"].

    In any other case, raises ValueError.
    """
    seen = [name for name in names if "/" not in name and not name.startswith(".")]
    endings = {name: Path(name.removesuffix(".gz")) for name in seen}
    found = {
        split: [name for name, path in endings.items() if path.stem == split and path.suffix in _ENDINGS]
        for split in SPLITS
    }
    for of_split in found.values():
        if len(of_split) > 1:
            raise ValueError(f"has both {' and '.join(sorted(of_split))}. Remove one of them.")
    if all(found.values()):
        return [of_split[0] for of_split in found.values()]
    tables = [name for name, path in endings.items() if path.suffix in _TABLES]
    alone = tables or [name for name, path in endings.items() if path.suffix in _ENDINGS]
    if any(found.values()) or len(alone) != 1:
        lacking = next(split for split in SPLITS if not found[split])
        raise ValueError(f"has no {lacking}.csv (or {', '.join(_ENDINGS[1:])}, or .gz of these).")
    return alone


def is_table(path: Path) -> bool:
    return _ending_of(path.name) in _TABLES  # other files are lists of puzzles


def read_columns(
    path: Path,
    names: Sequence[str],
    *,
    read_others: bool = False,
    column_names: str | None = None,
    optional: Sequence[str] = (),
    is_grid: Callable[[str], bool] | None = None,
) -> Iterator[tuple[Sequence[int], dict[str, list[str]]]]:
    """Reads columns of a CSV file in chunks of rows. Yields (line number of each row, {column: its texts}).

    Commas, semicolons or tabs separate the columns. The first line contains the names of the columns. Usual
    synonyms are accepted, such as "puzzle" for "question". Raises ValueError, with file and line, if the file
    is not valid.

    Args:
        names: Names of the columns to read.
        read_others: Whether to yield all columns of the file, under their names in the file.
        column_names: Value of the option --columns: the names of the columns in the file, separated by
            commas, in the order of `names`.
        optional: Names of columns that may be missing, unless `column_names` has a name for them.
        is_grid: Function that returns whether a text is a puzzle. If the first line contains puzzles, the
            file has no column names, and the columns with puzzles get the `names` in their order.
    """
    named = dict(zip(names, (column_names or "").split(","), strict=False))
    optional = [name for name in optional if not named.get(name)]
    content = read_lines(path)
    first = next(content, "")
    reader = csv.reader(itertools.chain([first], content), delimiter=max(",;\t", key=first.count))
    try:
        header = next(reader, [])
        if is_grid is not None and (
            grids := [position for position, field in enumerate(header) if is_grid(field)]
        ):
            if column_names is not None:
                raise ValueError(f"{path}:1: the first line has a puzzle, not names. Remove --columns.")
            positions, rows = dict(zip(names, grids, strict=False)), itertools.chain([header], reader)
        else:
            positions, rows = _find_columns(header, names, column_names, where=f"{path}:1"), reader
        if missing := ", ".join(name for name in names if name not in positions.keys() | set(optional)):
            there = ", ".join(header)[:200] or "nothing"
            hint = "" if is_grid is None else " Pass their names with --columns QUESTION,ANSWER."
            raise ValueError(f"{path}:1: no column {missing}. The first line has {there}.{hint}")
        if read_others:
            positions = {name: header.index(name) for name in header}
        numbered = ((reader.line_num, row) for row in rows if row)
        while chunk := list(itertools.islice(numbered, _CHUNK_ROWS)):
            for line, row in chunk:
                if (num := len(row)) != len(header):
                    raise ValueError(f"{path}:{line}: {num} columns, but {len(header)} in the first line.")
            lines, fields = zip(*chunk, strict=True)
            yield lines, {name: [row[position] for row in fields] for name, position in positions.items()}
    except csv.Error as error:
        raise ValueError(f"{path}:{reader.line_num}: not valid CSV ({error}).") from None


def _find_columns(
    header: Sequence[str], names: Sequence[str], column_names: str | None, *, where: str
) -> dict[str, int]:
    """Finds columns by their names in the first line of a table. Returns {name: position}.

    Columns that are not found are left out. Raises ValueError if two columns have the same name.

    column_names: The names of the columns in the file, separated by commas, in the order of `names`. For an
    empty or missing name, the usual synonyms are searched.
    """
    typed = [name.strip().lower() for name in header]
    there = {name: position for position, name in enumerate(typed)}
    candidates = {name: (name, *_KNOWN.get(name, ())) for name in names}
    candidates |= {
        name: (title.strip().lower(),)
        for name, title in zip(names, (column_names or "").split(","), strict=False)
        if title
    }
    found = {
        name: next((title for title in known if title in there), None) for name, known in candidates.items()
    }
    repeated = [name for position, name in enumerate(header) if name in header[:position]]
    repeated += [title for title in found.values() if typed.count(title) > 1]
    if repeated:
        raise ValueError(f"{where}: two columns are named {printable(repeated[0])!r}.")
    return {name: there[title] for name, title in found.items() if title is not None}


def expect(path: Path, lines: Sequence[int], is_valid: np.ndarray, message: str) -> None:
    """Raises ValueError "<file>:<line>: <message>." for the first row of a file that is not valid.

    lines: Line number of each row. is_valid: bool [n].
    """
    if not is_valid.all():
        raise ValueError(f"{path}:{lines[int(np.argmin(is_valid))]}: {message}.")


def _hint_of(text: str, num_cells: int, *, remark: str) -> str:
    # A spreadsheet may have changed the text.
    if text.startswith("'"):
        return ". Remove the apostrophe at its start. A spreadsheet has added it"
    if re.fullmatch(r"\d([.,]\d+)?E\+?\d+", text):
        return ". A spreadsheet has rounded it to a number. Format the column as text, and enter it again"
    if re.fullmatch(r"[\d.]+", text) and num_cells // 2 < len(text) < num_cells:  # zeros may be dots here
        remark += ". If a spreadsheet has removed zeros at its start, format the column as text"
    return remark


def parse_grids(
    columns: dict[str, list[str]],
    check: Callable[[np.ndarray, str], None],
    *,
    num_cells: int,
    token_of: dict[str, int],
    largest: Sequence[int],
    remark: str = "",
) -> list[np.ndarray]:
    """Converts the texts of puzzles and answers to tokens.

    Returns an array uint8 [n, num_cells] for each column.

    Args:
        columns: {name of a column: n texts}. The first column contains the puzzles.
        check: `check(is_valid, message)` raises ValueError with the message if an entry of `is_valid`, bool
            [n], is False.
        num_cells: Number of characters that each text must have.
        token_of: {character: token}.
        largest: Largest allowed token of each column.
        remark: End of the message for a text of the wrong length.
    """
    table, grids = np.full(256, 255, np.uint8), []
    table[list(map(ord, token_of))] = list(token_of.values())
    for (column, texts), last in zip(columns.items(), largest, strict=True):
        has_length = np.fromiter(map(len, texts), np.int64, len(texts)) == num_cells
        if not has_length.all():
            text = texts[int(np.argmin(has_length))]
            hint = _hint_of(text, num_cells, remark=remark)
            check(has_length, f"the {column} {printable(text)[:40]!r} does not have {num_cells} cells{hint}")
        characters = np.frombuffer("".join(texts).encode("ascii", "replace"), np.uint8)
        grids.append(table[characters].reshape(-1, num_cells))
        known = ", ".join(repr(character) for character, token in token_of.items() if token <= last)
        check((grids[-1] <= last).all(axis=1), f"the {column} has a character that is not one of {known}")
    return grids
