"""The format of a dataset folder: names of files, metadata, and `open_dataset`, which opens and checks it.

`<folder>/{train,test}/dataset.json` contains the metadata of a split. The files `<set>__<field>.npy` in the
same folder contain the arrays of each set (`dataset.sets`). The public HRM and TRM tools read and write the
same layout. They cannot read a dataset that has transforms instead of written-out variants.

Invariant: the result of `open_split` is consistent (shapes, dtypes, offsets, identifiers). Callers do not
check it again. The name of a set cannot lead to a file outside its folder, but a file may be a symbolic link.
"""

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import pydantic
from pydantic import Field

from dataset.augmentations import AUGMENTATIONS, FIRST_SYMBOL, find_augmentation
from dataset.sets import FIELDS, PuzzleSet, fields_of
from runtime.reading import MissingFileError, PointerFileError, open_regular, read_json

SPLITS = ("train", "test")
IGNORE_LABEL_ID = -100  # in a batch, the label of a cell that is not scored
METADATA = "dataset.json"
MANIFEST = "manifest.json"
IDENTIFIERS = "identifiers.json"  # the name of each puzzle identifier
DIGESTS = "digests.npy"  # the digest of the task of each puzzle identifier, if the builder knows the task
BLANK = "<blank>"  # name of identifier 0, which puzzles without an embedding share

_MOST = (1 << 31) - 1  # batches are int32
_CHUNK_ROWS = 1 << 16
JOINER = "\u200d"  # zero-width joiner, which makes one emoji of two
_Number = Annotated[int, Field(ge=0, le=_MOST)]
_Size = Annotated[int, Field(ge=1, le=_MOST)]
_Length = Annotated[int, Field(ge=1, le=1 << 20)]  # limited, because the memory for one puzzle grows with it
# Assumed if no dataset is available. Only thousands of the many millions of weights depend on these sizes.
USUAL_SIZES = {"vocab_size": 12, "seq_len": 900, "num_puzzle_identifiers": 1}
_SIZE_OF_ID = {"pad_id": "vocab_size", "blank_identifier_id": "num_puzzle_identifiers"}
_SetName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]


def is_printable(symbol: str) -> bool:
    """Returns whether all characters of a symbol are printable. Zero-width joiners are allowed."""
    return symbol.replace(JOINER, "").isprintable()


@dataclasses.dataclass(frozen=True)
class Metadata:
    """The properties of a split (training or test), as in its file dataset.json.

    A puzzle identifier is the number of a puzzle embedding. A group is a puzzle with its augmented copies. A
    set is a named part of the split, with its own metrics.
    """

    pad_id: _Number
    ignore_label_id: Annotated[int, Field(ge=IGNORE_LABEL_ID, le=_MOST)] | None
    blank_identifier_id: _Number
    vocab_size: _Length
    seq_len: _Length
    num_puzzle_identifiers: _Size
    total_groups: _Number
    mean_puzzle_examples: Annotated[float, Field(ge=0, le=_MOST)]
    sets: Annotated[tuple[_SetName, ...], Field(min_length=1)]
    total_puzzles: _Number | None = None  # only the TRM tools write it
    augmentation: str | None = None  # not in public tools: the family of transforms, in `AUGMENTATIONS`
    symbols: tuple[str, ...] | None = None  # not in public tools: the texts of the tokens 2 and up
    num_columns: _Length | None = None  # not in public tools: columns of the field; set with `symbols`
    # The next three are not in the file. `with_candidates` sets them. candidates: token * vocab_size + label
    # for each pair (input token, label) of a training cell, ascending. The others are properties of the
    # kind's `Augmentation`.
    candidates: tuple[int, ...] | None = None
    may_turn: bool | None = None
    may_permute: bool | None = None

    def mistakes(self) -> Iterator[str]:
        """Yields an error message for each contradiction between the fields."""
        symbols, num_columns = self.symbols, self.num_columns
        for id_field, size_field in _SIZE_OF_ID.items():
            identifier, size = getattr(self, id_field), getattr(self, size_field)
            if identifier >= size:
                yield f"{id_field} is {identifier}, but {size_field} is {size}"
        if len(set(self.sets)) < len(self.sets):
            yield "sets contains a name twice"
        if self.augmentation is not None and find_augmentation(self.augmentation) is None:
            known = ", ".join(AUGMENTATIONS)
            yield f"augmentation={self.augmentation!r} is not one of {known}, and no imported plugin adds it"
        side = math.isqrt(self.seq_len)
        if self.augmentation in ("square", "sudoku") and side**2 != self.seq_len:
            yield f"augmentation={self.augmentation} needs a square, but seq_len is {self.seq_len}"
        elif self.augmentation == "sudoku" and self.vocab_size != FIRST_SYMBOL + side:
            expected = f"a Sudoku of {self.seq_len} cells has {FIRST_SYMBOL + side}"
            yield f"vocab_size is {self.vocab_size}, but {expected}"
        if (symbols is None) != (num_columns is None):
            yield "only one of symbols and num_columns is set"
        elif symbols is not None:
            if len(set(symbols)) < len(symbols) or not all(map(is_printable, symbols)):
                yield "symbols contains a text twice, or a text that is not printable"
            if len(symbols) > 256 - FIRST_SYMBOL:
                yield f"{len(symbols)} symbols, more than the {256 - FIRST_SYMBOL} that fit into a byte"
            if len(symbols) != self.vocab_size - FIRST_SYMBOL:
                yield f"{len(symbols)} symbols do not match vocab_size {self.vocab_size}"
            if self.seq_len % num_columns:
                yield f"seq_len {self.seq_len} is not a multiple of num_columns {num_columns}"


_METADATA_FILE = pydantic.TypeAdapter(Metadata)
_KEYS_OF_NANO_TRM = {"num_puzzles", "num_groups"}
_OF_ONE_SPLIT = ("total_groups", "mean_puzzle_examples", "sets", "total_puzzles", "augmentation")


def columns_of(metadata: Metadata, *, needed_by: str) -> int:
    """Returns the number of columns of a dataset's grids.

    It is `num_columns` if the metadata set it. Otherwise the grid is a square. Raises ValueError if seq_len
    is not a square.

    needed_by: Config key that needs a grid, for the message.
    """
    if metadata.num_columns is not None:
        return metadata.num_columns
    side = math.isqrt(metadata.seq_len)
    if side**2 != metadata.seq_len:
        raise ValueError(
            f"{needed_by} needs a grid, but the dataset has no num_columns, and its seq_len "
            f"{metadata.seq_len} is not a square"
        )
    return side


@dataclasses.dataclass(frozen=True)
class Split:
    metadata: Metadata
    sets: dict[str, PuzzleSet]


def usual_metadata(*, vocab_size: int, seq_len: int, num_puzzle_identifiers: int, **others: Any) -> Metadata:
    """Returns metadata of a split with one set, "all".

    Uses the values of the dataset builders of this repository. Token 0 is padding, and the label 0 is not
    scored. Puzzle identifier 0 is for puzzles without an embedding.

    others: More fields of `Metadata`, such as `num_columns`. They may also replace the sets and the numbers
    of groups and examples.
    """
    usual = {"total_groups": 1, "mean_puzzle_examples": 1.0, "sets": ("all",), **others}
    return Metadata(0, 0, 0, vocab_size, seq_len, num_puzzle_identifiers, **usual)


def one_set_split(puzzles: PuzzleSet, *, vocab_size: int, num_identifiers: int, **others: Any) -> Split:
    """Returns a split whose only set, "all", contains these puzzles. Its metadata match them.

    vocab_size: Number of different tokens. num_identifiers: Number of puzzle identifiers in the dataset.
    others: More fields of the split's `Metadata`, such as `num_columns`.
    """
    num_puzzles = len(puzzles.puzzle_identifiers)
    metadata = usual_metadata(
        vocab_size=vocab_size,
        seq_len=puzzles.inputs.shape[1],
        num_puzzle_identifiers=num_identifiers,
        total_groups=len(puzzles.group_indices) - 1,
        mean_puzzle_examples=puzzles.num_examples / num_puzzles,
        total_puzzles=num_puzzles,
        augmentation=puzzles.augmentation,
        **others,
    )
    return Split(metadata, {"all": puzzles})


class Origin(NamedTuple):
    """Where a test set comes from, if several dataset folders are mixed.

    folder: Dataset folder. set_name: Name of the set in the folder. first_identifier: Start of the folder's
    range of puzzle identifiers (numbers of embeddings) in the mixture.
    """

    folder: Path
    set_name: str
    first_identifier: int


@dataclasses.dataclass(frozen=True)
class Dataset:
    """The opened dataset folder, or a mixture of several folders.

    folders: Paths of the folders. splits: {"train" or "test": split}. origins: For each test set of a
    mixture, the folder that contains it, its name there, and the first puzzle identifier of this folder. {}
    for one folder.
    """

    folders: tuple[Path, ...]
    splits: dict[str, Split]
    origins: dict[str, Origin] = dataclasses.field(default_factory=dict)

    def origin(self, set_name: str) -> Origin:
        """Returns where a test set comes from: its folder, its name there, and the folder's first identifier.

        An identifier is the number of a puzzle embedding. In a mixture of folders, each folder has its own
        range.
        """
        return self.origins[set_name] if self.origins else Origin(self.folders[0], set_name, 0)

    def test_set(self, folder: Path, set_name: str) -> str:
        """Returns the name in this dataset of a test set that comes from `folder`.

        In a mixture of several folders, it is "<folder>.<set>". Otherwise it is `set_name`, the name in the
        folder.
        """
        names = (name for name, origin in self.origins.items() if origin[:2] == (folder, set_name))
        return next(names, set_name)

    @property
    def metadata(self) -> Metadata:
        """Metadata of the first split.

        The values about tokens and puzzle identifiers are equal in all splits.
        """
        return next(iter(self.splits.values())).metadata


def array_path(folder: Path, split: str, set_name: str, field: str) -> Path:
    return folder / split / f"{set_name}__{field}.npy"


def open_dataset(folder: Path, *, splits: tuple[str, ...] = SPLITS, read_everything: bool) -> Dataset:
    """Opens the splits of a dataset folder and checks them.

    All splits must have the same vocabulary size, sequence length and number of puzzle identifiers. Raises
    ValueError, one line with file, error and fix.

    read_everything: Whether to read and check every token too.
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
    """Opens the arrays of one split memory-mapped, and checks everything except the tokens.

    `check_tokens` checks the tokens. Raises ValueError if the split is not valid. split: "train" or "test".
    """
    metadata = load_metadata(folder, split)
    return Split(
        metadata, {set_name: _open_set(folder, split, set_name, metadata) for set_name in metadata.sets}
    )


def read_builder(folder: Path) -> dict[str, Any] | None:
    """Returns which builder made a dataset: {"name": "sudoku", "arguments": {...}}.

    Reads the manifest, a JSON file in the folder. Returns None if the file is missing or does not name the
    builder.
    """
    try:
        builder = read_json(folder / MANIFEST)["builder"]
        return {"name": str(builder["name"]), "arguments": dict(builder["arguments"])}
    except (ValueError, KeyError, TypeError):
        return None


def splits_with_several_solutions(folder: Path) -> list[str]:
    """Returns the splits in which the builder found puzzles with several solutions, such as ["train"].

    Reads them from the manifest, a JSON file in the folder. Returns [] if it does not list any.
    """
    try:
        found = read_json(folder / MANIFEST)["several_solutions"]
        return [split for split in SPLITS if split in found]
    except (ValueError, KeyError, TypeError):
        return []


def load_metadata(folder: Path, split: str) -> Metadata:
    """Reads the file <folder>/<split>/dataset.json.

    Raises ValueError if it is missing or not valid.
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
    """Reads and checks all tokens of a split, and all transforms of its augmentation (about 1 GB/s).

    Inputs must be in [0, vocab_size). Labels must be in the same range, or `ignore_label_id`. A training
    split must have a cell with a scored label. Raises ValueError with the file and the row.
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
