"""A file by which a start knows that the one before it has failed, and when."""

import contextlib
import json
import time
from pathlib import Path

from parallel import log


class FailureRecord:
    """A file that tells the next start when this one failed.

    It is there while steps are done, and stays where they end by an error or not at all, whatever becomes of
    processes and machines. Where it is there already, an earlier start has failed. That it cannot be written
    is never in the way of a run. Rank 0 alone has one.
    """

    def __init__(self, path: Path):
        self._path = path
        self._failure: tuple[float, int] | None = None  # of an earlier start: when, and at which step
        self._recovery_seconds: float | None = None
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):  # none, or not readable any more
            record = json.loads(path.read_text())
            self._failure = float(record["time"]), int(record["step"])

    def tell_recovery(self, step: int) -> None:
        """Tells, after the first step, how long ago an earlier start failed, and removes what it has left."""
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
        """Returns `recovery_seconds`, once after a failure, else nothing."""
        seconds, self._recovery_seconds = self._recovery_seconds, None
        return {} if seconds is None else {"recovery_seconds": seconds}

    def write(self, step: int, *, silent_seconds: float) -> None:
        """Writes the file, whole or not at all. silent_seconds: since the last sign of life of all ranks."""
        unfinished = self._path.with_name(self._path.name + ".tmp")
        with contextlib.suppress(OSError):
            unfinished.write_text(json.dumps({"time": time.time() - silent_seconds, "step": step}) + "\n")
            unfinished.replace(self._path)

    def remove(self) -> None:
        with contextlib.suppress(OSError):
            self._path.unlink()
