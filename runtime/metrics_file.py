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
    """Appends the metrics of a training run to metrics.jsonl, one JSON object a line, without a buffer.

    If a row cannot be written, for example because the disk is full, `log` raises OSError. The object keeps
    the row, and writes it before the next one.
    """

    name = METRICS_FILE

    def __init__(self, run_folder: Path):
        self._file = open_to_append(run_folder / METRICS_FILE)
        self._waiting: list[bytes] = []  # rows that are not written yet, in order

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._waiting.append(f"{json.dumps({'step': step, **metrics})}\n".encode())
        self._write_waiting()

    def close(self, *, has_failed: bool) -> None:
        """Writes the waiting rows. Raises OSError if a row remains that cannot be written."""
        try:
            self._write_waiting()
        finally:
            self._file.close()

    def _write_waiting(self) -> None:
        while self._waiting:
            row, size = self._waiting[0], os.fstat(self._file.fileno()).st_size
            if self._file.write(row) < len(row):
                self._file.truncate(size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            del self._waiting[0]


def read_rows(run_folder: Path, name: str = METRICS_FILE) -> Iterator[tuple[dict[str, Any], str]]:
    """Yields (JSON object, text of the line) for each line of metrics.jsonl.

    Skips lines that are not a JSON object with a valid `step`. If the file does not exist, yields nothing.

    name: Name of another file of the same form.
    """
    with contextlib.suppress(MissingFileError):
        for line in read_lines(run_folder / name, allows_zeros=True):
            with contextlib.suppress(ValueError):
                line = line.replace("\0", "")  # of a power loss
                values = parse_json(line, where="the line")
                if isinstance(values, dict) and is_step(values.get("step")):
                    yield values, line.rstrip()


def is_step(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**53


def cut_back_rows(run_folder: Path, *, step: int) -> list[dict[str, Any]]:
    """Removes the lines of metrics.jsonl for steps after `step`. Returns the other lines, parsed.

    A run that resumes at `step` calls this function, because the run will log the later steps again. Lines
    that are not valid are removed too. Weights & Biases (W&B) cannot remove rows that it has received.
    Therefore the highest step that was ever removed is stored in a file. `last_wandb_step` reads it.
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
    # For a run folder that continues as a new run at Weights & Biases.
    (run_folder / _WANDB_STEP_FILE).unlink(missing_ok=True)


def last_wandb_step(run_folder: Path) -> int:
    """Returns the highest step whose line was ever removed from metrics.jsonl. If none was removed, 0.

    A run that resumes from an earlier step removes the lines of later steps, and logs these steps again.
    Weights & Biases (W&B) cannot remove rows, so it may already have rows up to the returned step.
    """
    path = run_folder / _WANDB_STEP_FILE
    text = read_text(path).strip() if path.exists() else ""
    return int(text) if text.isdecimal() else 0  # the file is empty after a power loss
