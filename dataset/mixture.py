"""Mixtures of several dataset folders, for runs that train on all of them, or on some of them in each stage.

Training sets with the same name are concatenated, so that every epoch mixes their groups. Test sets stay
separate, as `<folder>.<set>`. Each folder gets a separate range of puzzle identifiers, in the order of the
folders. So training on one folder does not change the puzzle embeddings of another. If there is only one
folder, its sets and identifiers stay as they are.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from dataset.files import MANIFEST, METADATA, array_path, load_metadata, open_dataset
from dataset.metadata import SPLITS, Dataset, Metadata, Origin, Split
from dataset.sets import ConcatenatedSet, fields_of
from runtime.reading import read_json, sha256_of

_SHARED = ("vocab_size", "seq_len", "pad_id", "ignore_label_id", "symbols", "num_columns")


def open_datasets(
    folders: Sequence[Path], *, splits: tuple[str, ...] = SPLITS, read_everything: bool
) -> Dataset:
    """Opens one or more dataset folders as one dataset, and checks their files.

    Several folders must have different names, and the same sequence length, number of columns, vocabulary,
    padding token and ignored label. Raises ValueError, with a message of one line, for every error.

    read_everything: Whether to check the value of every token, too. All files are then read.
    """
    opened = [open_dataset(folder, splits=splits, read_everything=read_everything) for folder in folders]
    if len(opened) == 1:
        return opened[0]
    for data in opened[1:]:
        check_same_tokens(opened[0], data)
    names = [folder.resolve().name for folder in folders]
    if len(set(names)) < len(names):
        raise ValueError(f"data folders must have different names: {', '.join(names)}. Rename one.")
    if "test" in splits:
        check_set_names(dict(zip(names, opened, strict=True)))
    sizes = [data.metadata.num_puzzle_identifiers for data in opened]
    first_identifiers = (np.cumsum(sizes) - sizes).tolist()
    mixed, origins = {}, {}
    for split in splits:
        parts = {}  # {name of the concatenated set: [(index of the folder, its set)]}
        for folder_index, data in enumerate(opened):
            for original_name, puzzle_set in data.splits[split].sets.items():
                set_name = original_name
                if split == "test":
                    set_name = f"{names[folder_index]}.{original_name}"
                    origins[set_name] = Origin(
                        folders[folder_index], original_name, first_identifiers[folder_index]
                    )
                parts.setdefault(set_name, []).append((folder_index, puzzle_set))
        sets = {}
        for set_name, members in parts.items():
            folder_indices, members = zip(*members, strict=True)
            first = [first_identifiers[index] for index in folder_indices]
            sets[set_name] = ConcatenatedSet(members, folders=folder_indices, first_identifiers=first)
        metadata = _mix_metadata([data.splits[split].metadata for data in opened], sets=tuple(sets))
        mixed[split] = Split(metadata, sets)
    return Dataset(tuple(folders), mixed, origins)


def check_set_names(datasets: Mapping[str, Dataset]) -> None:
    """Raises ValueError if two test sets have the same name `<folder>.<set>`.

    Example: the set b.c of folder a, and the set c of folder a.b. datasets: {name of the folder: its dataset}
    """
    names = [f"{folder}.{name}" for folder, data in datasets.items() for name in data.splits["test"].sets]
    for name in sorted(set(names)):
        if names.count(name) > 1:
            raise ValueError(f"two test sets have the name {name}. Rename one of {', '.join(datasets)}.")


def check_same_tokens(first: Dataset, data: Dataset) -> None:
    """Raises ValueError if one model cannot train on both datasets, because their tokens differ."""
    for field in _SHARED:
        expected, actual = getattr(first.metadata, field), getattr(data.metadata, field)
        if actual != expected:
            unequal = f"{field} is {actual}, but {expected} in {first.folders[0]}"
            raise ValueError(f"{data.folders[0]}: {unequal}. One model cannot train on both.")


def _mix_metadata(parts: Sequence[Metadata], *, sets: tuple[str, ...]) -> Metadata:
    return dataclasses.replace(
        parts[0],
        num_puzzle_identifiers=sum(part.num_puzzle_identifiers for part in parts),
        total_groups=sum(part.total_groups for part in parts),
        mean_puzzle_examples=float(np.mean([part.mean_puzzle_examples for part in parts])),
        sets=sets,
        total_puzzles=None,
        augmentation=None,
    )


def fingerprint_of(folders: Sequence[Path], splits: Sequence[str] = SPLITS) -> str:
    """Returns a hash (SHA-256, hexadecimal) of the arrays and metadata of one or several dataset folders.

    Uses the hashes of the files in manifest.json, which `dataset.build` writes. If the manifest is missing,
    or if a file is newer than the manifest or has another size, reads all files (about 1 GB/s). The order of
    the folders matters.

    splits: Splits to include, such as ["test"].
    """
    found = [_fingerprint(folder, splits) for folder in folders]
    return found[0] if len(found) == 1 else hashlib.sha256("".join(found).encode()).hexdigest()


def _fingerprint(folder: Path, splits: Sequence[str]) -> str:
    paths = []
    for split in splits:
        paths.append(folder / split / METADATA)
        metadata = load_metadata(folder, split)
        fields = fields_of(metadata.augmentation)
        paths += [
            array_path(folder, split, set_name, field) for set_name in metadata.sets for field in fields
        ]
    digests = _recorded_digests(folder, paths)
    if digests is None:
        digests = {path.relative_to(folder).as_posix(): sha256_of(path) for path in paths}
    return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()


def _recorded_digests(folder: Path, paths: list[Path]) -> dict[str, str] | None:
    manifest = folder / MANIFEST
    try:
        recorded = read_json(manifest)["files"]
        digests = {}
        for path in paths:
            name, now = path.relative_to(folder).as_posix(), path.stat()
            if now.st_size != recorded[name]["bytes"] or now.st_mtime_ns > manifest.stat().st_mtime_ns:
                return None
            digests[name] = str(recorded[name]["sha256"])
        return digests
    except (OSError, ValueError, KeyError, TypeError):
        return None
