"""The one way to write a file: whole or not at all, through no link, as readable as the umask says.

And the standard streams, which may be closed before a program begins, or have a reader that leaves.
"""

import contextlib
import errno
import json
import os
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, TextIO

import yaml

_FLAGS = os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
_ENDING = ".unfinished"


@contextlib.contextmanager
def replace_file(path: Path, mode: str = "w") -> Iterator[IO[Any]]:
    """Opens a new file, "w" (UTF-8) or "wb", that replaces `path` once the block has ended and it is on disk.

    After an exception, `path` is as it was. Raises OSError.
    """
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}{_ENDING}")
    try:
        descriptor = os.open(unfinished, _FLAGS | os.O_EXCL | os.O_WRONLY, 0o666)
        with open(descriptor, mode, encoding=None if "b" in mode else "utf-8") as file:
            yield file
            file.flush()
            os.fsync(descriptor)
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Replaces a file by a text. Raises OSError."""
    with replace_file(path) as file:
        file.write(text)


def write_json(path: Path, value: Any, *, indent: int | None = 1) -> None:
    """Replaces a file by a value as JSON, in one line without an indent. Raises OSError."""
    separators = (",", ":") if indent is None else None
    write_text(path, json.dumps(value, indent=indent, separators=separators) + "\n")


def to_yaml(value: Any, **options: Any) -> str:
    """Writes a value as YAML in the order of its keys, without aliases, which are not read."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, **options)


def open_to_append(path: Path) -> IO[bytes]:
    """Opens a file, made where it is missing, for bytes at its end. Raises OSError where it is a link."""
    return open(os.open(path, _FLAGS | os.O_APPEND | os.O_WRONLY, 0o666), "ab", buffering=0)


def flush(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def remove_unfinished_files(folder: Path) -> None:
    """Removes what killed processes left in a folder. Nobody may be writing there."""
    for path in folder.glob(f".*{_ENDING}"):
        path.unlink(missing_ok=True)


def open_closed_streams() -> None:
    """Opens each standard stream that was closed before the program began on nothing."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))


class Patient:
    """A stream that leads nowhere once nobody reads any more, as behind `| head` or on a closed terminal."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> None:
        with self._patience():
            self._stream.write(text)

    def flush(self) -> None:
        with self._patience():
            self._stream.flush()

    @contextlib.contextmanager
    def _patience(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO):
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
