"""How long a run was down when torchrun had to start it again, and what it has to do again."""

import time

from parallel import log
from parallel.process_group import is_main
from parallel.watchdog import failed_attempt


class Recovery:
    """Speaks once, after the first step of a start that follows a failure. Rank 0 only.

    step: the one that this start goes on from.
    """

    def __init__(self, step: int):
        self._resumed_at, self._seconds = step, None
        self._failure = failed_attempt() if is_main() else None

    def step_done(self, step: int) -> None:
        if self._failure is None:
            return
        self._seconds = time.time() - self._failure.time
        redone = max(0, (self._failure.step or 0) - self._resumed_at)
        log.info(
            f"recovered: step {step} is done {self._seconds:.1f} s after the failure, "
            f"{redone} steps done again"
        )
        self._failure = None

    def read(self) -> dict[str, float]:
        """`recovery_seconds` in the first line after a failure."""
        seconds, self._seconds = self._seconds, None
        return {} if seconds is None else {"recovery_seconds": seconds}
