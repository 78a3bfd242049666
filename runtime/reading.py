"""Safe reading of untrusted files: text, JSON, YAML and .npz arrays, with size limits.

A JSON file may have at most 64 MiB, unless the caller allows more. A YAML file may have at most 256 KiB,
because its parser is slow. The values in both have at most 40 nested levels and no repeated key. YAML aliases
are refused, because with them a small text can make a huge value. Every error is a ValueError of one line
that starts with the path.
"""

import contextlib
import gzip
import hashlib
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

MOST_BYTES = 2**26  # size limit of a file that is read at once, and of a line
_MOST_YAML_BYTES = 2**18  # PyYAML needs seconds for these
_MOST_ARRAY_BYTES = 2**30  # size limit of all arrays of one file
_MOST_LEVELS = 40
_POINTER = b"version https://git-lfs.github.com/spec/"  # how a pointer file of Git LFS starts
_LARGEST = 2**64  # limit of integers: a Philox seed has 64 bits


class MissingFileError(ValueError):
    """Raised if a file does not exist."""


class PointerFileError(ValueError):
    """Raised if a file is only a pointer of Git LFS, because its content was not downloaded."""


@contextlib.contextmanager
def open_regular(path: Path) -> Iterator[IO[bytes]]:
    """Context manager that opens a file to read bytes.

    Raises ValueError if the file cannot be opened or read. Also raises ValueError for a folder, a special
    file (such as a pipe), and a pointer file of Git LFS.
    """
    try:
        # O_NONBLOCK: opening a FIFO must not wait for a writer; the check below refuses it.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise ValueError(f"{path} is not a regular file")
            if os.pread(descriptor, len(_POINTER), 0) == _POINTER:
                raise PointerFileError(
                    f"{path} is a pointer of Git LFS. To download it, run git lfs pull in {path.parent}."
                )
            yield file
    except (FileNotFoundError, NotADirectoryError):
        raise MissingFileError(f"{path} is missing") from None
    except IsADirectoryError:
        raise ValueError(f"{path} is a folder") from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is not a gzip file, or is truncated ({error})") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror})") from error


@contextlib.contextmanager
def _open_unpacked(path: Path) -> Iterator[IO[bytes]]:
    with open_regular(path) as file:
        yield gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with open_regular(path) as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def read_bytes(path: Path, *, most: int = MOST_BYTES) -> bytes:
    """Returns the content of a file. A file that ends in .gz is decompressed.

    Raises ValueError if the file cannot be read, or if its content has more than `most` bytes (for .gz, after
    decompression).
    """
    with _open_unpacked(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"{path} has more than {most:,} bytes. This is too large for such a file.")
    return content


def read_text(path: Path, *, most: int = MOST_BYTES) -> str:
    """Returns the text of a UTF-8 file. A file that ends in .gz is decompressed.

    Raises ValueError if the file cannot be read, has more than `most` bytes, or is not UTF-8.
    """
    try:
        return read_bytes(path, most=most).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text (byte {error.start})") from None


def read_lines(path: Path, *, most: int = MOST_BYTES, allows_zeros: bool = False) -> Iterator[str]:
    """Yields the lines of a UTF-8 file, with line ends.

    A file that ends in .gz is decompressed. Invalid bytes become U+FFFD. Raises ValueError if the file
    cannot be read, if a line has more than `most` characters, or if a line contains a zero byte.

    allows_zeros: If True, zero bytes are not an error. A power loss can leave them in a log.
    """
    with _open_unpacked(path) as file:
        text = io.TextIOWrapper(file, encoding="utf-8-sig", errors="replace", newline="")
        for line_number in itertools.count(1):
            line = text.readline(most + 1)
            if len(line) > most:
                raise ValueError(f"{path}:{line_number}: more than {most:,} characters in a line")
            if "\0" in line and not allows_zeros:
                raise ValueError(f"{path}:{line_number}: not UTF-8 text")
            if not line:
                return
            yield line


def read_json(path: Path, *, most: int = MOST_BYTES) -> Any:
    """Returns the value in a JSON file. A file that ends in .gz is decompressed.

    Raises ValueError if the file cannot be read, has more than `most` bytes, or is not valid JSON. JSON that
    repeats a key, has more than 40 nested levels, or contains an integer beyond 2^64 or -2^64 is not valid.
    """
    return parse_json(read_bytes(path, most=most), where=str(path))


def parse_json(text: str | bytes, *, where: str) -> Any:
    """Parses JSON from a text, or from UTF-8 bytes.

    Raises ValueError if the text is not valid JSON, repeats a key, has more than 40 nested levels, or
    contains an integer beyond 2^64 or -2^64.

    where: Name of the source, such as the path. The message starts with this name.
    """
    try:
        text = text.decode("utf-8-sig") if isinstance(text, bytes) else text
        value = json.loads(text, object_pairs_hook=_without_repeats)
        _check_value(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not valid JSON ({error})") from None
    return value


def read_arrays(path: Path, names: Sequence[str], *, most: int = _MOST_ARRAY_BYTES) -> list[np.ndarray]:
    """Returns the arrays `names` of an .npz file. If they cannot be read, raises ValueError.

    Arrays of Python objects are refused, because loading them could execute code. The size is checked before
    decompression.

    names: Names of the arrays, in the order of the result. most: Size limit of all these arrays together, in
    bytes.
    """
    try:
        with open_regular(path) as file, zipfile.ZipFile(file) as archive:
            members = [archive.getinfo(f"{name}.npy") for name in names]
            if sum(member.file_size for member in members) > most:
                raise ValueError(f"the arrays have more than {most:,} bytes")
            contents = (io.BytesIO(archive.read(member)) for member in members)
            return [np.lib.format.read_array(content, allow_pickle=False) for content in contents]
    except (MissingFileError, PointerFileError):
        raise
    except Exception as error:  # numpy raises many types for a damaged header
        raise ValueError(f"{path}: cannot read the arrays ({' '.join(str(error).split())})") from None


def read_yaml(path: Path) -> dict[str, Any]:
    """Returns the mapping in a YAML file.

    Raises ValueError if the file cannot be read, has more than 256 KiB, is not a valid mapping, has aliases
    or repeated keys, has more than 40 nested levels, or contains an integer beyond 2^64 or -2^64.
    """
    text = read_text(path, most=_MOST_YAML_BYTES)
    try:
        value = yaml.load(text, _Loader)
        _check_value(value)
    # PyYAML raises the last three for a value that does not fit its tag, such as `!!bool maybe`.
    except (yaml.YAMLError, ValueError, RecursionError, LookupError, AttributeError, TypeError) as error:
        reason = " ".join(str(error).split())  # YAML's messages have several lines
        raise ValueError(f"{path} is not valid YAML ({reason})") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} does not contain a config")
    return value


def printable(text: str) -> str:
    r"""Replaces characters that are unsafe to print on a terminal by escapes such as \x1b.

    These are all characters for which str.isprintable() is False, except tab and newline.
    """
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() or character in "\n\t" else ascii(character)[1:-1]
        for character in text
    )


class _Loader(yaml.SafeLoader):
    # It also refuses aliases and repeated keys.
    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases (*name) are not supported")
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
            raise ValueError(f"the key {key!r} occurs twice")
        content[key] = value
    return content


def _check_value(value: Any) -> None:
    level, levels = [("it", value)], 0
    while level:
        for name, item in level:
            if isinstance(item, int) and abs(item) > _LARGEST:
                raise ValueError(f"{name} has a number of more than 64 bits")
        containers = [(name, item) for name, item in level if isinstance(item, (dict, list))]
        levels += bool(containers)
        if levels > _MOST_LEVELS:
            raise ValueError(f"it has more than {_MOST_LEVELS} levels")
        level = []
        for name, item in containers:
            level += item.items() if isinstance(item, dict) else ((name, inner) for inner in item)
