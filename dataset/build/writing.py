"""Replaces a folder, such as a dataset, as a whole. It never contains a mixture of the old and the new one.

The process creates and locks a scratch folder, `<name>.unfinished`, next to the destination. It writes the
new folder into the scratch folder, and flushes it to disk. Then it moves the old folder into the scratch
folder, moves the new folder to the destination, and removes the scratch folder. If the process is killed
between the two moves, the destination is missing, but the scratch folder contains both folders. The next
attempt first moves the old folder back.
"""

import contextlib
import dataclasses
import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dataset.files import (
    DIGESTS,
    IDENTIFIERS,
    MANIFEST,
    METADATA,
    array_path,
    load_metadata,
    open_dataset,
    read_builder,
)
from dataset.metadata import Split
from dataset.sets import fields_of
from runtime.reading import read_json, sha256_of
from runtime.writing import flush, write_json

_LOCK = "lock"


def write_dataset(
    folder: Path,
    *,
    splits: dict[str, Split],
    identifiers: list[str],
    builder: dict,
    digests: np.ndarray | None = None,
    extra_files: dict[str, Any] | None = None,
    several_solutions: Sequence[str] = (),
) -> None:
    """Writes a dataset folder. Checks the new dataset before it replaces an existing folder.

    Args:
        folder: Folder to write. If it contains a dataset of the same builder, it is replaced.
        splits: {"train": split, "test": split}.
        identifiers: Names of the puzzle identifiers 0, 1, ...
        builder: {"name": "sudoku", "arguments": {...}}, for the file manifest.json. Use values that do not
            depend on the machine, so that equal arguments give equal files.
        digests: Hash of the ARC task of each identifier, uint64 [identifiers]. 0 if a task is unknown. If
            None, all are unknown.
        extra_files: Other files to write, as {file name: JSON value}.
        several_solutions: Names of the splits that have puzzles with several solutions.

    Raises:
        ValueError: The folder may not be replaced, or the dataset is not valid.
        OSError: A file cannot be written, for example because the disk is full.
    """
    destination = check_output_folder(folder, builder=builder.get("name"))
    try:
        with replaced_folder(destination) as new:
            _write(new, splits, identifiers=identifiers, extra_files=extra_files or {})
            if digests is not None:
                np.save(new / DIGESTS, digests, allow_pickle=False)
            _write_manifest(new, splits, builder=builder, several_solutions=several_solutions)
            open_dataset(new, splits=tuple(splits), read_everything=True)
    except OSError as error:
        # On a full disk, numpy raises an error without a number: "80040 requested and 13280 written".
        reason = error.strerror or f"incomplete write, {error}"
        is_full = error.errno in (None, errno.ENOSPC, errno.EDQUOT)
        advice = f"Free space on the disk of {destination.parent}, or choose" if is_full else "Choose"
        raise OSError(f"cannot write {folder} ({reason}). {advice} another --output-dir.") from error


@contextlib.contextmanager
def replaced_folder(folder: Path) -> Iterator[Path]:
    """Context manager that yields an empty folder, and replaces `folder` by it at the end.

    If the `with` block raises an error, or if the process is killed in it, `folder` is not changed. Raises
    ValueError if another process is writing `folder`. On a file system without locks, this is not noticed.
    Also raises ValueError if the scratch folder (`<name>.unfinished`) contains files, but not the lock file
    of this function.

    folder: Path without symbolic links, as returned by `check_output_folder`.
    """
    scratch = folder.with_name(f"{folder.name}.unfinished")
    new, old = scratch / "new", scratch / "old"
    if scratch.exists() and any(scratch.iterdir()) and not (scratch / _LOCK).exists():
        raise ValueError(
            f"cannot create {scratch}: a folder of that name exists, and no builder made it. Move or delete "
            "it."
        )
    scratch.mkdir(parents=True, exist_ok=True)
    with (scratch / _LOCK).open("wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another process is writing {folder}. Wait until it has finished.") from None
        except OSError:
            pass  # the file system has no locks, so continue without one
        try:
            _clear_up(new, old, folder)
            new.mkdir()
            yield new
            for path in (*new.rglob("*"), new, scratch):
                flush(path)
            if folder.exists():
                folder.rename(old)
            new.rename(folder)
            flush(folder.parent)
        finally:
            _clear_up(new, old, folder)
            shutil.rmtree(scratch, ignore_errors=True)


def _clear_up(new: Path, old: Path, folder: Path) -> None:
    # A process was killed while it replaced the folder: move the old one back.
    if old.exists() and new.exists() and not folder.exists():
        old.rename(folder)
    for path in (new, old):
        shutil.rmtree(path, ignore_errors=True)


def check_output_folder(
    folder: Path,
    *,
    builder: str | None = None,
    is_made: Callable[[Path], bool] = lambda folder: has_keys(folder / MANIFEST, "builder", "files"),
    maker: str = "a builder",
    key: str = "--output-dir",
) -> Path:
    """Checks that a folder may be replaced. Returns its path without symbolic links.

    A folder may be replaced if it is missing or empty, or if `is_made` returns True. Raises ValueError if the
    folder may not or cannot be replaced.

    builder: Name of the builder that writes the folder. It must not replace a dataset of another builder. If
    None, this is not checked. is_made: Function that returns whether `maker` wrote a folder. maker: Program,
    for messages. key: Name of the option that sets the folder, for messages.
    """
    destination, another = Path(os.path.realpath(folder)), f"Choose another {key}."
    if destination.is_symlink():
        raise ValueError(f"{folder} is a symbolic link to itself. {another}")
    if destination.exists() and not destination.is_dir():
        raise ValueError(f"{folder} is a file. {another}")
    if destination.is_dir() and any(destination.iterdir()) and not is_made(destination):
        raise ValueError(f"{folder} is not empty and was not made by {maker}. {another}")
    made = read_builder(destination)
    if builder is not None and made is not None and made["name"] != builder:
        raise ValueError(
            f"{folder} was made by dataset.build {made['name']}, not {builder}. Delete it, or choose another "
            f"{key}."
        )
    if Path.cwd().is_relative_to(destination):
        advice = f"Change to another directory, or choose another {key}."
        raise ValueError(f"cannot replace {folder}: it contains the current directory. {advice}")
    if os.path.ismount(destination):
        raise ValueError(f"{folder} is a mount point and cannot be replaced. Choose a folder in it.")
    above = next(path for path in destination.parents if path.exists())
    for path in (destination, above) if destination.exists() else (above,):
        if not path.is_dir() or not os.access(path, os.W_OK | os.X_OK):
            raise ValueError(f"cannot write into {path}. {another}")
    return destination


def has_keys(path: Path, *keys: str) -> bool:
    """Returns whether a file contains a JSON object with these keys."""
    try:
        values = read_json(path)
    except ValueError:
        return False
    return isinstance(values, dict) and values.keys() >= {*keys}


def _write(folder: Path, splits: dict[str, Split], *, identifiers: list[str], extra_files: dict) -> None:
    for split, data in splits.items():
        (folder / split).mkdir(parents=True)
        values = {key: value for key, value in dataclasses.asdict(data.metadata).items() if value is not None}
        values.setdefault("ignore_label_id", None)
        write_json(folder / split / METADATA, values)
        assert load_metadata(folder, split) == data.metadata  # no name of a set leads to another folder
        assert set(data.metadata.sets) == set(data.sets)
        for set_name in data.metadata.sets:
            for field in fields_of(data.metadata.augmentation):
                array = getattr(data.sets[set_name], field)
                np.save(array_path(folder, split, set_name, field), array, allow_pickle=False)
    write_json(folder / IDENTIFIERS, identifiers)
    for file_name, content in extra_files.items():  # in one line: they contain thousands of numbers
        write_json(folder / file_name, content, indent=None)


def _write_manifest(
    folder: Path, splits: dict[str, Split], *, builder: dict, several_solutions: Sequence[str]
) -> None:
    counts = {
        split: {set_name: puzzle_set.num_examples for set_name, puzzle_set in data.sets.items()}
        for split, data in splits.items()
    }
    files = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
        for path in sorted(path for path in folder.rglob("*") if path.is_file())
    }
    found = {"several_solutions": list(several_solutions)} if several_solutions else {}
    write_json(folder / MANIFEST, {"builder": builder, **found, "examples": counts, "files": files})
