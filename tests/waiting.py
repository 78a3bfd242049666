"""Waiting for what other processes do, and reading what they have written so far."""

import time
from collections.abc import Callable
from pathlib import Path

PATIENCE = 180  # seconds, on a busy machine


def wait_for(condition: Callable[[], object], what: str, *, output: Path | None = None) -> None:
    """Waits until the condition holds; `what` is wrong if it never does, and `output` tells why."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"{what}: {read(output)[-3000:] if output else ''}"
        time.sleep(0.1)


def read(path: Path) -> str:
    """The text of a file, empty where there is none yet."""
    return path.read_text() if path.exists() else ""
