"""The record of a run's last failure. The next launch computes the recovery time from it."""

import contextlib
import time
from pathlib import Path

from distributed import log
from runtime.reading import read_json
from runtime.writing import write_json


class FailureRecord:
    """File that records when a training run failed, to print the recovery time after a restart.

    After the first training step, rank 0 writes the file about twice a second, with the last time at which
    all ranks were alive. A normal end removes the file. After an error or a kill, it remains. A run with only
    one rank does not write the file. If a write fails, for example on a full disk, the old file is removed,
    and the run continues.
    """

    def __init__(self, path: Path):
        self._path = path
        self._failure: tuple[float, int] | None = None  # time and step of the failure of an earlier launch
        self._recovery_seconds: float | None = None
        with contextlib.suppress(ValueError, TypeError, KeyError, OverflowError):  # missing or damaged
            record = read_json(path)
            self._failure = float(record["time"]), int(record["step"])

    def record_recovery(self, step: int) -> None:
        """If an earlier launch of the run failed, prints how long ago, and removes the file.

        Call it after each training step. Only the first call has an effect.

        step: Number of training steps of the run that are done.
        """
        if self._failure is None:
            return
        (failed_at, step_then), self._failure = self._failure, None
        self._recovery_seconds = max(0.0, time.time() - failed_at)  # the clock may have been set back
        self.remove()
        log.info(
            f"recovered: step {step} is done {self._recovery_seconds:.1f} s after the failure, "
            f"{max(0, step_then - step + 1)} steps done again"
        )

    def pop_recovery(self) -> dict[str, float]:
        """Returns {"recovery_seconds": seconds} in the first call after a recovery, otherwise {}.

        The time is from the failure to the end of the first training step after the restart.
        """
        seconds, self._recovery_seconds = self._recovery_seconds, None
        return {} if seconds is None else {"recovery_seconds": seconds}

    def write(self, step: int, *, silent_seconds: float) -> None:
        try:
            write_json(self._path, {"time": time.time() - silent_seconds, "step": step}, indent=None)
        except OSError:
            self.remove()  # an old record would give the next launch a wrong time and number of steps

    def remove(self) -> None:
        with contextlib.suppress(OSError):
            self._path.unlink()
