"""How fast a run goes."""

import time


class StepClock:
    """Wall time of the steps: started before each, stopped before whatever else takes time in between."""

    def __init__(self):
        self._seconds, self._steps, self._since = 0.0, 0, None

    def start(self) -> None:
        if self._since is None:
            self._since = time.perf_counter()

    def stop(self) -> None:
        if self._since is not None:
            self._seconds += time.perf_counter() - self._since
            self._since = None

    def count_step(self) -> None:
        self._steps += 1

    def read(self, *, global_batch_size: int) -> dict[str, float]:
        """Since the last reading: seconds of a step, and slots processed per second over all ranks.

        Stops the clock. Empty where no step was timed.
        """
        self.stop()
        seconds, steps = self._seconds, self._steps
        self._seconds, self._steps = 0.0, 0
        if not steps or not seconds:
            return {}
        return {"step_seconds": seconds / steps, "examples_per_second": global_batch_size * steps / seconds}
