"""The one way to read what strangers may have written: JSON and YAML from regular files, bounded before use.

Invariant: a value read here has at most 64 MiB of text and 40 levels, no key twice, and no YAML aliases, so
that it is as large as its text. A mistake is a ValueError of one line that begins with where it is.
"""

import contextlib
import gzip
import io
import itertools
import json
import os
import stat
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import yaml

MOST_BYTES = 2**26  # of a file that is read as a whole, and of a line
_MOST_ARRAY_BYTES = 2**30  # of the arrays that are read of a file
_MOST_LEVELS = 40
_LARGEST = 2**64  # beside a seed of Philox


class MissingFileError(ValueError):
    """The error of a file that is not there."""


@contextlib.contextmanager
def open_regular(path: Path) -> Iterator[IO[bytes]]:
    """Opens a regular file. ValueError where it is missing, something else, or the block cannot read it."""
    try:
        # A FIFO without a writer does not hold up the opening, and its kind is known before it is read.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise ValueError(f"{path} is no regular file")
            yield file
    except (FileNotFoundError, NotADirectoryError):
        raise MissingFileError(f"{path} is missing") from None
    except IsADirectoryError:
        raise ValueError(f"{path} is a folder") from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is no gzip file, or not a whole one ({error})") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror})") from error


@contextlib.contextmanager
def _open_unpacked(path: Path) -> Iterator[IO[bytes]]:
    with open_regular(path) as file:
        yield gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file


def read_bytes(path: Path, *, most: int = MOST_BYTES) -> bytes:
    """Reads a regular file; a .gz is unpacked. ValueError as `open_regular`, and where it is too large."""
    with _open_unpacked(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"{path} has more than {most:,} bytes, too many for what it should be")
    return content


def read_text(path: Path, *, most: int = MOST_BYTES) -> str:
    """Reads a UTF-8 text, without its byte order mark. ValueError as `read_bytes`."""
    try:
        return read_bytes(path, most=most).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no UTF-8 text (byte {error.start})") from None


def read_lines(path: Path, *, most: int = MOST_BYTES) -> Iterator[str]:
    """Yields the lines of a UTF-8 text with their ends; bytes that are no UTF-8 become U+FFFD.

    ValueError as `read_bytes`, but only a line may be too large.
    """
    with _open_unpacked(path) as file:
        text = io.TextIOWrapper(file, encoding="utf-8-sig", errors="replace", newline="")
        for number in itertools.count(1):
            line = text.readline(most + 1)
            if len(line) > most:
                raise ValueError(f"{path}:{number}: more than {most:,} characters in a line")
            if "\0" in line:
                raise ValueError(f"{path}:{number}: no UTF-8 text")
            if not line:
                return
            yield line


def read_json(path: Path, *, most: int = MOST_BYTES) -> Any:
    """Reads a JSON file. ValueError as `read_bytes`, and as `parse_json`."""
    return parse_json(read_bytes(path, most=most), where=str(path))


def parse_json(text: str | bytes, *, where: str) -> Any:
    """Parses JSON, UTF-8 in bytes. ValueError, which begins with `where`, for a mistake, a key twice, or too
    many levels.
    """
    try:
        text = text.decode("utf-8-sig") if isinstance(text, bytes) else text
        value = json.loads(text, object_pairs_hook=_without_repeats)
        _check_value(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not valid JSON ({error})") from None
    return value


def read_arrays(path: Path, names: Sequence[str], *, most: int = _MOST_ARRAY_BYTES) -> list[np.ndarray]:
    """Reads arrays of a .npz file. ValueError as `open_regular`, where one is missing, or they are too large.

    What the file says of their sizes is looked at before they are unpacked.
    """
    try:
        with open_regular(path) as file, zipfile.ZipFile(file) as archive:
            members = [archive.getinfo(f"{name}.npy") for name in names]
            if sum(member.file_size for member in members) > most:
                raise ValueError(f"its arrays have more than {most:,} bytes")
            contents = (io.BytesIO(archive.read(member)) for member in members)
            return [np.lib.format.read_array(content, allow_pickle=False) for content in contents]
    except MissingFileError:
        raise
    except Exception as error:  # numpy's parser raises almost anything where a header is damaged
        raise ValueError(f"{path} has no such arrays ({' '.join(str(error).split())})") from None


def read_yaml(path: Path) -> dict[str, Any]:
    """Reads a YAML mapping. ValueError as `read_bytes`, and for aliases, a key twice, or too many levels."""
    text = read_text(path)
    try:
        value = yaml.load(text, _Loader)
        _check_value(value)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())  # YAML's messages have several lines
        raise ValueError(f"{path} is not valid YAML ({reason})") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds no config")
    return value


def printable(text: str) -> str:
    """Returns a text of strangers as a terminal may show it: control characters become escapes."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() or each in "\n\t" else ascii(each)[1:-1] for each in text)


class _Loader(yaml.SafeLoader):
    """YAML's safe loader without aliases, which make a value larger than its text."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases are not read")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [(self.construct_object(key, deep=True), None) for key, _ in node.value]
        try:
            _without_repeats(names)
        except (TypeError, ValueError) as error:
            raise yaml.YAMLError(str(error)) from None
        return super().construct_mapping(node, deep)


def _without_repeats(items: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    content = {}
    for key, value in items:
        if key in content:
            raise ValueError(f"{key!r} is there twice")
        content[key] = value
    return content


def _check_value(value: Any) -> None:
    level, levels = [("it", value)], 0
    while level:
        for name, each in level:
            if isinstance(each, int) and abs(each) > _LARGEST:
                raise ValueError(f"{name} has a number of more than 64 bits")
        containers = [(name, each) for name, each in level if isinstance(each, (dict, list))]
        levels += bool(containers)
        if levels > _MOST_LEVELS:
            raise ValueError(f"it has more than {_MOST_LEVELS} levels")
        level = []
        for name, each in containers:
            level += each.items() if isinstance(each, dict) else ((name, inner) for inner in each)
