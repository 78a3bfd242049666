"""Writes files atomically, without following symbolic links. Makes standard streams safe to use.

A standard stream may be closed before the program starts, or lose its reader while the program runs.
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
    """Context manager that opens a temporary file. At the end of the block, this file replaces `path`.

    The replacement is atomic, and happens after the content is on disk (fsync). If the block raises an
    exception, `path` does not change. Raises OSError if the file cannot be written.

    mode: "w" (text, UTF-8) or "wb" (bytes).
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
    """Writes a text to a file atomically. Raises OSError if that fails."""
    with replace_file(path) as file:
        file.write(text)


def write_json(path: Path, value: Any, *, indent: int | None = 1) -> None:
    """Writes a value to a JSON file atomically. Raises OSError if that fails.

    indent: Indentation in spaces. If None, the file is one line.
    """
    separators = (",", ":") if indent is None else None
    write_text(path, json.dumps(value, indent=indent, separators=separators) + "\n")


def to_yaml(value: Any, **options: Any) -> str:
    """Returns a value as YAML text. Keys keep their order.

    The text has no aliases (*name), because `runtime.reading` refuses files with aliases.

    options: Options of yaml.dump.
    """
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, **options)


def open_to_append(path: Path) -> IO[bytes]:
    """Opens a file to append bytes without a buffer. Creates it if necessary.

    Raises OSError if the path is a symbolic link.
    """
    return open(os.open(path, _FLAGS | os.O_APPEND | os.O_WRONLY, 0o666), "ab", buffering=0)


def flush(path: Path) -> None:
    """Calls fsync on a file or a folder, so that its content survives a power loss. May raise OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def remove_unfinished_files(folder: Path) -> None:
    """Removes the temporary files of `replace_file` that killed processes left in a folder.

    No other process may be writing into the folder.
    """
    for path in folder.glob(f".*{_ENDING}"):
        path.unlink(missing_ok=True)


def prepare_streams() -> None:
    """Makes stdin, stdout and stderr safe to use.

    A stream that was closed before the program started becomes /dev/null. A character that stdout or stderr
    cannot encode is written as an escape, instead of raising an error.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))
    for stream in (sys.stdout, sys.stderr):
        if getattr(stream, "errors", "") in ("strict", "surrogateescape"):
            stream.reconfigure(errors="backslashreplace")


def check_working_folder() -> None:
    """Raises ValueError if the working directory was removed. Importing torch would then fail."""
    try:
        os.getcwd()
    except OSError as error:
        reason = f"the working folder does not exist ({error.strerror})"
        raise ValueError(f"{reason}. Change to another folder, and start again.") from None


class Patient:
    """Wraps an output stream, so that no error occurs after the reader of the stream has ended.

    Example: `program | head`. After `head` has ended, the output of the program is discarded.
    """

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
