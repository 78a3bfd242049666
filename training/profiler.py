"""Profile of training steps: a trace of three early steps of rank 0, and torch's table of the top operators.

The trace opens in chrome://tracing and in ui.perfetto.dev. A failure of it is a warning.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from parallel import log

if TYPE_CHECKING:
    from torch.profiler import profile

_NUM_SKIPPED = 2  # the first steps allocate, compile and fill caches
_NUM_WARMUP = 2  # traced and thrown away: starting to trace takes time of its own
_NUM_TRACED = 3
_NUM_OPERATORS = 10


class StepProfiler:
    """Context in which steps 5 to 7 after a start are traced into `folder`; `step` is called after each step.

    steps: from the number of steps done before this start to the one where it will stop. With fewer than
    seven steps, those of the three are traced that there are. What the run does between two steps counts to
    the later one. After the trace, and where it is not enabled, the profiler costs nothing.
    """

    def __init__(self, folder: Path, *, enabled: bool, steps: range):
        self._folder, self._steps, self._num_done = folder, steps, 0
        self._profile: profile | None = None
        if enabled:
            with self._disabled_by_failure():
                self._profile = _start_profile()

    def step(self) -> None:
        if self._profile is not None:
            with self._disabled_by_failure():
                self._profile.step()
                self._num_done += 1
                if self._num_done == min(_NUM_SKIPPED + _NUM_WARMUP + _NUM_TRACED, len(self._steps)):
                    self._finish()

    def __enter__(self) -> StepProfiler:
        return self

    def __exit__(self, *_: object) -> None:
        if self._profile is not None:
            with self._disabled_by_failure():
                self._finish()

    def _finish(self) -> None:
        finished, self._profile = self._profile, None
        finished.stop()
        first, last = (self._steps.start + n for n in (_NUM_SKIPPED + _NUM_WARMUP + 1, self._num_done))
        if last < first:
            log.warning(f"profile=true: nothing was traced, step {first} is the first that would have been")
            return
        operators = finished.key_averages()
        is_on_device = any(row.self_device_time_total for row in operators)
        sort_by = "self_device_time_total" if is_on_device else "self_cpu_time_total"
        table = operators.table(sort_by=sort_by, row_limit=_NUM_OPERATORS)
        log.info(f"steps {first} to {last} of rank 0:\n{table}")  # before the disk can fail
        path = self._folder / f"rank_0_steps_{first}_{last}.json.gz"
        self._folder.mkdir(parents=True, exist_ok=True)
        path.with_name(path.name.replace(".json.gz", ".txt")).write_text(table)
        finished.export_chrome_trace(str(path))
        log.info(f"trace: {path}")

    @contextlib.contextmanager
    def _disabled_by_failure(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._profile = None
            log.warning(f"profiling fails, the run goes on without it ({type(error).__name__}: {error})")


def _start_profile() -> profile:
    import torch
    import torch._inductor  # the profiler does, which takes seconds: better before the first step than in one
    from torch.profiler import ProfilerActivity, profile, schedule

    started = profile(
        activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_initialized(),
        schedule=schedule(wait=_NUM_SKIPPED, warmup=_NUM_WARMUP, active=_NUM_TRACED, repeat=1),
        acc_events=True,  # without it torch 2.11 warns of what several cycles would lose; there is one
    )
    started.start()
    return started
