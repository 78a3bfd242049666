"""The dataset folder: its vocabulary, and reading and writing it with every check.

`<folder>/{train,test}/dataset.json` holds the metadata, and `<set>__<field>.npy` beside it five arrays for
each set. The layout is the one of the public HRM and TRM tools, so folders go both ways. Invariant: what
`open_split` returns is consistent (shapes, dtypes, offsets, identifiers), so nobody downstream checks again;
what `write_dataset` leaves on disk is a whole dataset or nothing.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import torch  # the builders run without it

SPLITS = ("train", "test")
IGNORE_LABEL_ID = -100  # in a batch, the label of a cell that counts nowhere
MANIFEST = "manifest.json"
FIELDS = ("inputs", "labels", "puzzle_identifiers", "puzzle_indices", "group_indices")

_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_CHUNK_ROWS = 1 << 16


class Batch(NamedTuple):
    """One rank's share of a global batch, as tensors; the carry keeps the same for what its slots work on.

    inputs              int32 [batch, seq_len] labels              int32 [batch, seq_len]; IGNORE_LABEL_ID
    where a cell counts nowhere puzzle_identifiers  int32 [batch] rows                int64 [batch]: the
    example's place in its set; -1 in the rows that only fill up a short batch
    """

    inputs: torch.Tensor
    labels: torch.Tensor
    puzzle_identifiers: torch.Tensor
    rows: torch.Tensor

    @property
    def is_real(self) -> torch.Tensor:
        """bool [batch]: False in padding."""
        return self.rows >= 0

    def to(self, device: torch.device) -> Batch:
        return Batch(*(tensor.to(device, non_blocking=True) for tensor in self))


@dataclasses.dataclass(frozen=True)
class Metadata:
    """What `dataset.json` says of a split. Token and identifier ids are integers >= 0."""

    pad_id: int
    ignore_label_id: int | None
    blank_identifier_id: int
    vocab_size: int
    seq_len: int
    num_puzzle_identifiers: int
    total_groups: int
    mean_puzzle_examples: float
    sets: tuple[str, ...]
    total_puzzles: int | None = None  # only the TRM tools write it


@dataclasses.dataclass(frozen=True)
class PuzzleSet:
    """One set of a split. The two big arrays are memory-mapped.

    inputs, labels      [num_examples, seq_len], any integer dtype puzzle_identifiers  [num_puzzles]
    puzzle_indices      [num_puzzles + 1]: puzzle p owns the examples puzzle_indices[p] .. puzzle_indices[p +
    1] group_indices       [num_groups + 1]: group g owns the puzzles group_indices[g] .. group_indices[g + 1]
    """

    inputs: np.ndarray
    labels: np.ndarray
    puzzle_identifiers: np.ndarray
    puzzle_indices: np.ndarray
    group_indices: np.ndarray

    @property
    def num_examples(self) -> int:
        return len(self.inputs)


@dataclasses.dataclass(frozen=True)
class Split:
    metadata: Metadata
    sets: dict[str, PuzzleSet]


@dataclasses.dataclass(frozen=True)
class Dataset:
    folder: Path
    splits: dict[str, Split]

    @property
    def metadata(self) -> Metadata:
        """That of the first opened split; in what all of them must share it holds for all."""
        return next(iter(self.splits.values())).metadata


# ----------------------------------------------------------------------------------------------------------
# reading


def open_dataset(folder: Path, *, splits: tuple[str, ...] = SPLITS, read_everything: bool) -> Dataset:
    """Opens and checks the splits, which must agree on their tokens; `read_everything` adds the check of
    every token.

    Raises ValueError, one line naming the file, what is wrong with it and what to do.
    """
    opened = {split: open_split(folder, split) for split in splits}
    first = opened[splits[0]].metadata
    for split, data in opened.items():
        for field in ("vocab_size", "seq_len", "num_puzzle_identifiers"):
            value, expected = getattr(data.metadata, field), getattr(first, field)
            if value != expected:
                raise ValueError(f"{folder}: {field} is {expected} in {splits[0]}, but {value} in {split}")
        if read_everything:
            check_tokens(folder, split, data)
    return Dataset(folder, opened)


def open_split(folder: Path, split: str) -> Split:
    """Memory-maps one split and checks everything but the tokens (`check_tokens` reads those).

    Raises ValueError, one line naming the file, what is wrong with it and what to do.
    """
    if not folder.is_dir():
        raise ValueError(
            f"data folder {folder} does not exist: build it, for example with "
            f"python -m dataset.build_sudoku --output-dir {folder} --generate 4000 --box 2x2 "
            "(for experiment=demo), or set data_path"
        )
    metadata = load_metadata(folder, split)
    return Split(metadata, {name: _open_set(folder / split, name, metadata) for name in metadata.sets})


def load_metadata(folder: Path, split: str) -> Metadata:
    """Reads `<folder>/<split>/dataset.json`. ValueError where it is missing, malformed or incomplete."""
    path = folder / split / "dataset.json"
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(
            f"{path} is missing: {folder} is no dataset, or its {split} split was not built"
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}): build the dataset again") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object: build the dataset again")
    values = {}
    for field in dataclasses.fields(Metadata):
        if field.name not in content and field.default is dataclasses.MISSING:
            raise ValueError(f"{path} has no field {field.name!r}: build the dataset again, or add the field")
        values[field.name] = _metadata_value(path, field.name, content.get(field.name))
    metadata = Metadata(**values)
    if metadata.pad_id >= metadata.vocab_size:
        raise ValueError(f"{path}: pad_id is {metadata.pad_id}, but vocab_size is {metadata.vocab_size}")
    if metadata.blank_identifier_id >= metadata.num_puzzle_identifiers:
        raise ValueError(
            f"{path}: blank_identifier_id is {metadata.blank_identifier_id}, "
            f"but num_puzzle_identifiers is {metadata.num_puzzle_identifiers}"
        )
    return metadata


def _metadata_value(path: Path, name: str, value):
    if name == "sets":
        if not isinstance(value, list) or not value or not all(isinstance(item, str) for item in value):
            raise ValueError(f"{path}: 'sets' must be a list of set names, not {value!r}")
        if len(set(value)) != len(value):
            raise ValueError(f"{path}: 'sets' names a set twice: {value!r}")
        for item in value:
            if not _SAFE_NAME.fullmatch(item):
                raise ValueError(
                    f"{path}: {item!r} cannot be a set's name (letters, digits, '_', '-' and '.')"
                )
        return tuple(value)
    if name == "mean_puzzle_examples":
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(f"{path}: {name!r} must be a number, not {value!r}")
        return float(value)
    if value is None and name in ("ignore_label_id", "total_puzzles"):
        return None
    at_least = {
        "vocab_size": 1,
        "seq_len": 1,
        "num_puzzle_identifiers": 1,
        "ignore_label_id": IGNORE_LABEL_ID,
    }
    at_least = at_least.get(name, 0)
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise ValueError(f"{path}: {name!r} must be an integer of at least {at_least}, not {value!r}")
    return value


def _open_set(folder: Path, name: str, metadata: Metadata) -> PuzzleSet:
    arrays = {field: _open_array(folder / f"{name}__{field}.npy") for field in FIELDS}
    path = {field: folder / f"{name}__{field}.npy" for field in FIELDS}

    def expect(condition: bool, field: str, message: str) -> None:
        if not condition:
            raise ValueError(f"{path[field]}: {message}; build the dataset again")

    for field, array in arrays.items():
        expect(array.dtype.kind in "iu", field, f"dtype is {array.dtype}, expected an integer type")
    for field in ("inputs", "labels"):
        shape = arrays[field].shape
        expect(
            len(shape) == 2 and shape[1] == metadata.seq_len,
            field,
            f"shape is {list(shape)}, expected [examples, seq_len = {metadata.seq_len}]",
        )
    inputs, labels = arrays["inputs"], arrays["labels"]
    expect(len(labels) == len(inputs), "labels", f"{len(labels)} examples, but the inputs have {len(inputs)}")
    identifiers = arrays["puzzle_identifiers"]
    expect(
        identifiers.ndim == 1, "puzzle_identifiers", f"shape is {list(identifiers.shape)}, expected [puzzles]"
    )
    for field, entries, things in (
        ("puzzle_indices", len(inputs), "examples"),
        ("group_indices", len(identifiers), "puzzles"),
    ):
        offsets = arrays[field]
        expect(
            offsets.ndim == 1 and len(offsets) > 1, field, f"shape is {list(offsets.shape)}, expected [n + 1]"
        )
        rising = offsets[0] == 0 and bool((offsets[1:] > offsets[:-1]).all())
        expect(rising, field, "the offsets must start at 0 and rise")
        expect(
            int(offsets[-1]) == entries,
            field,
            f"ends at {int(offsets[-1])}, but there are {entries} {things}",
        )
    expect(
        len(arrays["puzzle_indices"]) == len(identifiers) + 1,
        "puzzle_indices",
        f"{len(arrays['puzzle_indices'])} offsets, expected one more than the {len(identifiers)} puzzles",
    )
    lowest, highest = int(identifiers.min()), int(identifiers.max())
    expect(
        lowest >= 0 and highest < metadata.num_puzzle_identifiers,
        "puzzle_identifiers",
        f"identifiers run from {lowest} to {highest}, "
        f"but num_puzzle_identifiers is {metadata.num_puzzle_identifiers}",
    )
    return PuzzleSet(**arrays)


def _open_array(path: Path) -> np.ndarray:
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise ValueError(f"{path} is missing: build the dataset again") from None
    except (ValueError, OSError, EOFError) as error:
        raise ValueError(f"{path} cannot be read, it is empty, truncated or no .npy file ({error})") from None


def check_tokens(folder: Path, split: str, data: Split) -> None:
    """Reads every token once (about 1 GB/s): inputs in [0, vocab_size), labels likewise or `ignore_label_id`.

    Raises ValueError naming the file, the row and the token.
    """
    vocab_size, ignored = data.metadata.vocab_size, data.metadata.ignore_label_id
    for name, puzzle_set in data.sets.items():
        for field in ("inputs", "labels"):
            array = getattr(puzzle_set, field)
            for start in range(0, len(array), _CHUNK_ROWS):
                chunk = array[start : start + _CHUNK_ROWS]
                if chunk.min() >= 0 and chunk.max() < vocab_size:
                    continue
                bad = (chunk < 0) | (chunk >= vocab_size)
                if field == "labels" and ignored is not None:
                    bad &= chunk != ignored
                if not bad.any():
                    continue
                row, column = np.argwhere(bad)[0]
                raise ValueError(
                    f"{folder / split / f'{name}__{field}.npy'}: token {chunk[row, column]} in row "
                    f"{start + row} is outside 0..{vocab_size - 1} (vocab_size); build the dataset again"
                )


def fingerprint(folder: Path) -> str:
    """Identifies the content of a dataset: a sha256 over the sha256 of every file of its splits.

    Read from the manifest where there is one whose file sizes still hold, else computed (about 1 GB/s).
    """
    files = _manifest_files(folder)
    if files is None:
        paths = sorted(path for split in SPLITS for path in (folder / split).glob("*") if path.is_file())
        files = {path.relative_to(folder).as_posix(): sha256_of(path) for path in paths}
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def _manifest_files(folder: Path) -> dict[str, str] | None:
    try:
        entries = json.loads((folder / MANIFEST).read_text())["files"]
        digests = {}
        for split in SPLITS:
            for path in (folder / split).glob("*"):
                name = path.relative_to(folder).as_posix()
                if entries[name]["bytes"] != path.stat().st_size:
                    return None
                digests[name] = str(entries[name]["sha256"])
        return digests
    except (OSError, ValueError, KeyError, TypeError):
        return None


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


# ----------------------------------------------------------------------------------------------------------
# writing


def write_dataset(
    folder: Path,
    *,
    splits: dict[str, Split],
    identifiers: list[str],
    builder: dict,
) -> None:
    """Writes a dataset folder and its manifest: first beside the goal, then renamed, so that it is whole or
    absent.

    `builder` (module and arguments, JSON values, nothing of this machine) is recorded in the manifest; equal
    arguments give equal bytes. A folder that a builder made before is replaced; any other non-empty folder is
    refused (ValueError).
    """
    check_output_folder(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = folder.with_name(f"{folder.name}.tmp-{os.getpid()}")
    try:
        for split, data in splits.items():
            (unfinished / split).mkdir(parents=True)
            for name, puzzle_set in data.sets.items():
                for field in FIELDS:
                    np.save(unfinished / split / f"{name}__{field}.npy", getattr(puzzle_set, field))
            values = {
                key: value for key, value in dataclasses.asdict(data.metadata).items() if value is not None
            }
            values.setdefault("ignore_label_id", None)
            _write_json(unfinished / split / "dataset.json", values)
        _write_json(unfinished / "identifiers.json", identifiers)
        counts = {
            split: {name: len(puzzle_set.inputs) for name, puzzle_set in data.sets.items()}
            for split, data in splits.items()
        }
        files = {path.relative_to(unfinished).as_posix(): path for path in _files_below(unfinished)}
        digests = {
            name: {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
            for name, path in sorted(files.items())
        }
        _write_json(unfinished / MANIFEST, {"builder": builder, "examples": counts, "files": digests})
        if folder.exists():
            shutil.rmtree(folder)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def check_output_folder(folder: Path) -> None:
    """Raises ValueError where `write_dataset` would not write: call it before the work of building."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file: choose another --output-dir")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / MANIFEST).is_file():
        raise ValueError(f"{folder} is not empty and was not made by a builder: choose another --output-dir")
    parent = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    if not os.access(parent, os.W_OK):
        raise ValueError(f"cannot write into {parent}: choose another --output-dir")


def _files_below(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


def _write_json(path: Path, content) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")
