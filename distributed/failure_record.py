"""The record of a run's last failure, from which the next start tells how long the recovery took."""

import contextlib
import time
from pathlib import Path

from distributed import log
from runtime.reading import read_json
from runtime.writing import write_json


class FailureRecord:
    """A file by which a start of a run learns, on rank 0, whether and when the previous start has failed.

    The file exists while steps run. A normal end removes the file; after an error or a kill the file stays,
    with the time of the last sign of life. If the file cannot be written, the run continues.
    """

    def __init__(self, path: Path):
        self._path = path
        self._failure: tuple[float, int] | None = None  # of an earlier start: when, and at which step
        self._recovery_seconds: float | None = None
        with contextlib.suppress(ValueError, TypeError, KeyError):  # no file, or a damaged one
            record = read_json(path)
            self._failure = float(record["time"]), int(record["step"])

    def record_recovery(self, step: int) -> None:
        """Prints, after a start's first step, how long ago an earlier start failed; removes the file."""
        if self._failure is None:
            return
        (failed_at, step_then), self._failure = self._failure, None
        self._recovery_seconds = time.time() - failed_at
        self.remove()
        log.info(
            f"recovered: step {step} is done {self._recovery_seconds:.1f} s after the failure, "
            f"{max(0, step_then - step + 1)} steps done again"
        )

    def pop_recovery(self) -> dict[str, float]:
        """Returns {"recovery_seconds": time since the failure} once, after a recovery; otherwise {}."""
        seconds, self._recovery_seconds = self._recovery_seconds, None
        return {} if seconds is None else {"recovery_seconds": seconds}

    def write(self, step: int, *, silent_seconds: float) -> None:
        """Writes the file atomically. silent_seconds: the age of the oldest among all ranks' heartbeats."""
        with contextlib.suppress(OSError):
            write_json(self._path, {"time": time.time() - silent_seconds, "step": step}, indent=None)

    def remove(self) -> None:
        with contextlib.suppress(OSError):
            self._path.unlink()
