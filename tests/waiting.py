"""Waits for other processes in tests, and reads what they have written so far."""

import time
from collections.abc import Callable
from pathlib import Path

PATIENCE = 180  # seconds, on a busy machine


def wait_for(condition: Callable[[], object], what: str, *, output: Path | None = None) -> None:
    """Waits until the condition is true. Raises AssertionError after `PATIENCE` seconds.

    what: Message of the error. output: File with the output of a process. The message contains its end.
    """
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"{what}: {read(output)[-3000:] if output else ''}"
        time.sleep(0.1)


def read(path: Path) -> str:
    """Returns the text of a file, "" if the file does not exist."""
    return path.read_text() if path.exists() else ""
