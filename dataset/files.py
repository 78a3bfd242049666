"""The files of a dataset: their names, and `open_dataset`, which opens and checks them.

`<folder>/{train,test}/dataset.json` contains the metadata of a split. The files `<set>__<field>.npy` in the
same folder contain the arrays of each set (`dataset.sets`). The public HRM and TRM tools read and write the
same layout. They cannot read a dataset that has transforms instead of written-out variants.

Invariant: the result of `open_split` is consistent (shapes, dtypes, offsets, identifiers). Callers do not
check it again. The name of a set cannot lead to a file outside its folder, but a file may be a symbolic link.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pydantic

from dataset.augmentations import find_augmentation
from dataset.metadata import SPLITS, Dataset, Metadata, Split
from dataset.sets import FIELDS, PuzzleSet, fields_of
from runtime.reading import MissingFileError, PointerFileError, open_regular, read_json

METADATA = "dataset.json"
MANIFEST = "manifest.json"
IDENTIFIERS = "identifiers.json"  # the name of each puzzle identifier
DIGESTS = "digests.npy"  # the digest of the task of each puzzle identifier, if the builder knows the task

_CHUNK_ROWS = 1 << 16
_METADATA_FILE = pydantic.TypeAdapter(Metadata)
_KEYS_OF_NANO_TRM = {"num_puzzles", "num_groups"}
_OF_ONE_SPLIT = ("total_groups", "mean_puzzle_examples", "sets", "total_puzzles", "augmentation")


def array_path(folder: Path, split: str, set_name: str, field: str) -> Path:
    return folder / split / f"{set_name}__{field}.npy"


def open_dataset(folder: Path, *, splits: tuple[str, ...] = SPLITS, read_everything: bool) -> Dataset:
    """Opens the splits of a dataset folder, and checks that the files are valid.

    Raises ValueError, with a message of one line, if a file is missing or invalid. Also raises ValueError if
    the splits do not match, for example in the vocabulary size.

    read_everything: Whether to check the value of every token, too. All files are then read.
    """
    opened = {split: open_split(folder, split) for split in splits}
    first = opened[splits[0]].metadata
    for split, data in opened.items():
        for field, expected in vars(first).items():
            value = getattr(data.metadata, field)
            if value != expected and field not in _OF_ONE_SPLIT:
                path = folder / split / METADATA
                raise _broken(f"{path}: {field} is {value}, but {expected} in the {splits[0]} split")
        if read_everything:
            check_tokens(folder, split, data)
    return Dataset((folder,), opened)


def open_split(folder: Path, split: str) -> Split:
    """Opens one split ("train" or "test") of a dataset folder, without reading the tokens.

    The arrays are memory-mapped. Their shapes, dtypes and indices are checked. Use `check_tokens` to check
    the values of the tokens. Raises ValueError if a file is missing or invalid.
    """
    metadata = load_metadata(folder, split)
    return Split(
        metadata, {set_name: _open_set(folder, split, set_name, metadata) for set_name in metadata.sets}
    )


def read_builder(folder: Path) -> dict[str, Any] | None:
    """Returns the command that created a dataset, and its arguments.

    Example: {"name": "sudoku", "arguments": {...}} for `python -m dataset.build sudoku`. Reads the file
    manifest.json in the folder. Returns None if the file is missing or does not name a command.
    """
    try:
        builder = read_json(folder / MANIFEST)["builder"]
        return {"name": str(builder["name"]), "arguments": dict(builder["arguments"])}
    except (ValueError, KeyError, TypeError):
        return None


def splits_with_several_solutions(folder: Path) -> list[str]:
    """Returns the splits in which the builder found puzzles with several solutions, such as ["train"].

    Reads the file manifest.json in the folder. Returns [] if the file is missing or lists no splits. The
    builder of a Sudoku dataset checks at most 1000 puzzles of each split. So it may miss such puzzles.
    """
    try:
        found = read_json(folder / MANIFEST)["several_solutions"]
        return [split for split in SPLITS if split in found]
    except (ValueError, KeyError, TypeError):
        return []


def load_metadata(folder: Path, split: str) -> Metadata:
    """Reads the metadata of a split from the file <folder>/<split>/dataset.json.

    Raises ValueError if the file is missing or not valid.
    """
    if not folder.is_dir():
        problem = "is a file" if folder.exists() else "does not exist"
        raise ValueError(f"data folder {folder} {problem}. Build it (docs/data.md), or set data_path.")
    path = folder / split / METADATA
    try:
        values = read_json(path)
        found = _METADATA_FILE.validate_json(json.dumps(values), strict=True)
    except MissingFileError as error:
        problem = f"{folder} is not a dataset, or its {split} split was not built"
        raise ValueError(f"{error}: {problem}. Build it, or set data_path.") from None
    except PointerFileError:
        raise
    except pydantic.ValidationError as error:
        if isinstance(values, dict) and values.keys() >= _KEYS_OF_NANO_TRM:
            problem = f"{folder} is a dataset of nano-trm, in a format that this program cannot read"
            raise ValueError(
                f"{problem}. Build it with python -m dataset.build, and set data_path."
            ) from None
        first = error.errors()[0]
        raise _broken(": ".join(map(str, (path, *first["loc"], first["msg"])))) from None
    except ValueError as error:
        raise _broken(str(error)) from None
    for mistake in found.mistakes():
        raise _broken(f"{path}: {mistake}")
    return found


def _open_set(folder: Path, split: str, set_name: str, metadata: Metadata) -> PuzzleSet:
    paths = {field: array_path(folder, split, set_name, field) for field in fields_of(metadata.augmentation)}
    arrays = {field: _open_array(path) for field, path in paths.items()}
    inputs, labels, identifiers, puzzle_indices, group_indices = (arrays[field] for field in FIELDS)
    family = find_augmentation(metadata.augmentation)
    num_bytes = 0 if family is None else family.num_bytes(metadata.seq_len, metadata.vocab_size)

    def expect(condition: bool, field: str, problem: str) -> None:
        if not condition:
            raise _broken(f"{paths[field]}: {problem}")

    widths = {"transforms": num_bytes, "translations": 2}
    widths |= dict.fromkeys(("inputs", "labels"), metadata.seq_len)
    for field, array in arrays.items():
        num = len(array) if array.ndim else 0
        shape = (num, widths[field]) if field in widths else (num,)
        is_byte = family is not None and field in widths
        is_typed = array.dtype == np.uint8 if is_byte else array.dtype.kind in "iu"
        expect(is_typed, field, f"dtype is {array.dtype}, not {'uint8' if is_byte else 'an integer type'}")
        expect(array.shape == shape, field, f"shape is {list(array.shape)}, expected {list(shape)}")
        expect(num > 0, field, "empty, but a set has at least one group, puzzle and example")
    expect(len(labels) == len(inputs), "labels", f"{len(labels)} examples, but {len(inputs)} in the inputs")
    # If variants are made when they are read, only the offsets tell the number of examples.
    num_rows, num_puzzles = len(inputs) if family is None else int(puzzle_indices[-1]), len(identifiers)
    counts = (("puzzle_indices", num_rows, "examples"), ("group_indices", num_puzzles, "puzzles"))
    for field, num_entries, things in counts:
        offsets, last = arrays[field], int(arrays[field][-1])
        is_rising = int(offsets[0]) == 0 and bool((offsets[1:] > offsets[:-1]).all())
        expect(is_rising, field, "the offsets do not start at 0 and increase")
        expect(last == num_entries, field, f"ends at {last}, but there are {num_entries} {things}")
    problem = f"{len(puzzle_indices)} offsets, expected one more than the {num_puzzles} puzzles"
    expect(len(puzzle_indices) == num_puzzles + 1, "puzzle_indices", problem)
    lowest, highest, size = int(identifiers.min()), int(identifiers.max()), metadata.num_puzzle_identifiers
    problem = f"identifiers are from {lowest} to {highest}, but num_puzzle_identifiers is {size}"
    expect(lowest >= 0 and highest < size, "puzzle_identifiers", problem)
    if family is not None:
        for field, length in (("transforms", num_puzzles), ("translations", num_rows)):
            if field in arrays:
                expect(len(arrays[field]) == length, field, f"{len(arrays[field])} rows, expected {length}")
        sizes, group_sizes = np.diff(puzzle_indices), np.diff(group_indices)
        first_sizes = sizes[group_indices[:-1]]
        are_equal = bool((sizes == first_sizes.repeat(group_sizes)).all())
        expect(are_equal, "puzzle_indices", "the puzzles of a group differ in their number of examples")
        num_originals = int(first_sizes.sum())
        expect(num_originals == len(inputs), "inputs", f"{len(inputs)} originals, expected {num_originals}")
    return PuzzleSet(**arrays, augmentation=metadata.augmentation)


def _open_array(path: Path) -> np.ndarray:
    try:
        with open_regular(path):
            array = np.lib.format.open_memmap(path, mode="r")
        # The code adds offsets to int64. numpy converts int64 + uint64 to float64.
        return array.view(np.int64) if array.dtype == np.uint64 else array
    except MissingFileError as error:
        raise _broken(str(error)) from None
    except PointerFileError:
        raise
    except Exception as error:  # numpy's parser raises many types for a damaged header
        problem = " ".join(str(error).split())
        raise _broken(f"{path} is empty, truncated or not a .npy file of numbers ({problem})") from None


def check_tokens(folder: Path, split: str, data: Split) -> None:
    """Checks the values of all tokens of a split. Raises ValueError for an invalid token.

    Inputs must be from 0 to vocab_size - 1. Labels must be in the same range, or equal to `ignore_label_id`.
    A training split must have at least one label that is not `ignore_label_id`. Transforms must be valid.

    folder: Dataset folder, for the error message. split: "train" or "test".
    """
    vocab_size, ignored = data.metadata.vocab_size, data.metadata.ignore_label_id
    has_labels = split != "train"
    for set_name, puzzle_set in data.sets.items():
        if puzzle_set.augmentation is not None:
            is_valid = find_augmentation(puzzle_set.augmentation).is_valid
            for start, chunk in _chunks(puzzle_set.transforms):
                if not (valid := is_valid(chunk, data.metadata.seq_len)).all():
                    path = array_path(folder, split, set_name, "transforms")
                    raise _broken(f"{path}: row {start + int(valid.argmin())} is not a valid transform")
        for field in ("inputs", "labels"):
            for start, chunk in _chunks(getattr(puzzle_set, field)):
                has_labels = has_labels or (field == "labels" and bool((chunk != ignored).any()))
                if chunk.min() >= 0 and chunk.max() < vocab_size:
                    continue
                is_bad = (chunk < 0) | (chunk >= vocab_size)
                if field == "labels" and ignored is not None:
                    is_bad &= chunk != ignored
                if is_bad.any():
                    row, column = np.argwhere(is_bad)[0]
                    where = f"{array_path(folder, split, set_name, field)}: token {chunk[row, column]}"
                    outside = f"is outside 0..{vocab_size - 1} (vocab_size)"
                    raise _broken(f"{where} in row {start + row} {outside}")
    if not has_labels:
        raise _broken(f"{folder / split}: no cell has a label, so a model cannot learn anything")


def _chunks(array: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    return ((start, array[start : start + _CHUNK_ROWS]) for start in range(0, len(array), _CHUNK_ROWS))


def _broken(problem: str) -> ValueError:
    return ValueError(f"{problem}. Build the dataset again.")
