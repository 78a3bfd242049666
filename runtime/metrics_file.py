"""The log of a run, metrics.jsonl: writes rows, reads them, and removes rows when a run resumes."""

import contextlib
import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from runtime.reading import MissingFileError, parse_json, read_lines, read_text
from runtime.writing import open_to_append, write_text

METRICS_FILE = "metrics.jsonl"
_WANDB_STEP_FILE = "wandb_step"


class MetricsFile:
    """Writes the metrics of a run to metrics.jsonl: one JSON object a line, with `step` first.

    Writes are not buffered.
    """

    name = METRICS_FILE

    def __init__(self, run_folder: Path):
        self._file, self._is_torn = open_to_append(run_folder / METRICS_FILE), False

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Appends one line: the step and the metrics.

        Raises OSError if the disk is full. After that, the next line starts on a new line.
        """
        row = f"{json.dumps({'step': step, **metrics})}\n".encode()
        row = b"\n" + row if self._is_torn else row
        self._is_torn = self._file.write(row) < len(row)
        if self._is_torn:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self, *, has_failed: bool) -> None:
        self._file.close()


def read_rows(run_folder: Path, name: str = METRICS_FILE) -> Iterator[tuple[dict[str, Any], str]]:
    """Yields (JSON object, text of the line) for each line of metrics.jsonl. Skips lines that are not valid.

    If the file does not exist, yields nothing. name: File name, if not metrics.jsonl.
    """
    with contextlib.suppress(MissingFileError):
        for line in read_lines(run_folder / name, allows_zeros=True):
            with contextlib.suppress(ValueError):
                line = line.replace("\0", "")  # of a power loss
                values = parse_json(line, where="the line")
                if isinstance(values, dict) and is_step(values.get("step")):
                    yield values, line.rstrip()


def is_step(value: Any) -> bool:
    """Returns whether a value from a file is a valid step number: an int from 0 to 2^53 - 1."""
    return type(value) is int and 0 <= value < 2**53


def cut_back_rows(run_folder: Path, *, step: int) -> list[dict[str, Any]]:
    """Removes the lines of metrics.jsonl after `step`. Returns the JSON objects of the other lines.

    For a run that resumes at `step` and will log the later steps again. W&B cannot remove lines, so this
    function stores the last step that W&B has (`last_wandb_step`).
    """
    path, rows = run_folder / METRICS_FILE, list(read_rows(run_folder))
    last = max((values["step"] for values, _ in rows), default=0)
    if last > max(step, last_wandb_step(run_folder)):
        write_text(run_folder / _WANDB_STEP_FILE, str(last))
    rows = [row for row in rows if row[0]["step"] <= step]
    if path.exists():
        write_text(path, "".join(f"{line}\n" for _, line in rows))
    return [values for values, _ in rows]


def forget_wandb_step(run_folder: Path) -> None:
    """Forgets which step W&B received last. For a run folder that continues as a new W&B run.

    `last_wandb_step` then returns 0.
    """
    (run_folder / _WANDB_STEP_FILE).unlink(missing_ok=True)


def last_wandb_step(run_folder: Path) -> int:
    """Returns the last step that W&B got before lines were removed from metrics.jsonl.

    Returns 0 if none were.
    """
    path = run_folder / _WANDB_STEP_FILE
    text = read_text(path).strip() if path.exists() else ""
    return int(text) if text.isdecimal() else 0  # the file is empty after a power loss
