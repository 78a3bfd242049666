"""Where the time of a training step goes: a trace of a few early steps of rank 0, and its dearest operators.

The trace opens in chrome://tracing and in ui.perfetto.dev. Profiling must never end a run: what fails here is
told once, and the run goes on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from parallel import log

if TYPE_CHECKING:
    import torch

_WAIT_STEPS = 2  # the first steps allocate, compile and fill caches
_WARMUP_STEPS = 2  # traced and thrown away: starting to trace takes time of its own
_ACTIVE_STEPS = 3
_NUM_OPERATORS = 10


@contextlib.contextmanager
def profile_steps(
    enabled: bool, *, folder: Path, is_main: bool, steps: range
) -> Iterator[StepProfiler | NoProfiler]:
    """Traces three of the `steps` into `folder`; the block calls `step()` once after each of them.

    steps: from the number of steps done before this start to the one where it will stop.

    Once the three are through, their trace is written, the operators are shown, and the rest of the run pays
    nothing; with fewer steps, those of the three that there were. What the run does between two steps counts
    to the later one. Only rank 0 does anything.
    """
    profiler = StepProfiler(folder, steps) if enabled and is_main else NoProfiler()
    try:
        yield profiler
    finally:
        profiler.close()


class NoProfiler:
    """For ranks other than 0, and runs that are not profiled: costs nothing and imports nothing."""

    def step(self) -> None:
        pass

    def close(self) -> None:
        pass


class StepProfiler:
    """torch's profiler with its schedule: waits, warms up, is active, and is closed once that is over."""

    def __init__(self, folder: Path, steps: range):
        self._folder, self._steps_before = folder, steps.start
        self._last = min(_WAIT_STEPS + _WARMUP_STEPS + _ACTIVE_STEPS, len(steps))
        self._num_steps = 0
        self._profile = None
        with self._failure_is_told():
            self._profile = _start_profile()

    def step(self) -> None:
        if self._profile is None:
            return
        with self._failure_is_told():
            self._profile.step()
            self._num_steps += 1
            if self._num_steps == self._last:
                self.close()

    def close(self) -> None:
        profile, self._profile = self._profile, None
        if profile is None:
            return
        with self._failure_is_told():
            profile.stop()
            num_active = self._num_steps - _WAIT_STEPS - _WARMUP_STEPS
            if num_active > 0:
                self._write(profile, num_active)
            else:
                log.warning(
                    f"profile=true: nothing was traced in {self._num_steps} steps, it takes at least "
                    f"{_WAIT_STEPS + _WARMUP_STEPS + 1} after a start"
                )

    def _write(self, profile: torch.profiler.profile, num_active: int) -> None:
        last = self._steps_before + self._num_steps
        first = last - num_active + 1
        table = f"steps {first} to {last} of rank 0, {dearest_operators(profile, num_steps=num_active)}"
        log.info(table)  # before the disk can fail
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"rank_0_steps_{first}_{last}.json.gz"
        profile.export_chrome_trace(str(path))
        path.with_name(f"rank_0_steps_{first}_{last}.txt").write_text(f"{table}\n")
        log.info(f"trace: {path}")

    @contextlib.contextmanager
    def _failure_is_told(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._profile = None
            log.warning(f"profiling fails, the run goes on without it ({type(error).__name__}: {error})")


def _start_profile() -> torch.profiler.profile:
    import torch
    import torch._inductor  # the profiler does, which takes seconds: better before the first step than in one
    from torch.profiler import ProfilerActivity, profile, schedule

    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_initialized():
        activities.append(ProfilerActivity.CUDA)
    started = profile(
        activities=activities,
        schedule=schedule(wait=_WAIT_STEPS, warmup=_WARMUP_STEPS, active=_ACTIVE_STEPS, repeat=1),
        acc_events=True,  # without it torch 2.11 warns of what several cycles would lose; there is one
    )
    started.start()
    return started


def dearest_operators(profile: torch.profiler.profile, *, num_steps: int) -> str:
    """A table of the ten operators with the largest self time: milliseconds and calls per step.

    It is time of the device where one was traced, else of the CPU.
    """
    from torch.autograd import DeviceType

    # Kernels have rows of their own, but their time is also in the operator that launched them; and the marks
    # that the schedule sets around each step are no operators.
    operators = [
        row
        for row in profile.key_averages()
        if row.device_type == DeviceType.CPU and not row.key.startswith("ProfilerStep")
    ]
    is_on_device = any(row.self_device_time_total for row in operators)
    microseconds = {
        row: row.self_device_time_total if is_on_device else row.self_cpu_time_total for row in operators
    }
    total = sum(microseconds.values())
    dearest = sorted(operators, key=microseconds.get, reverse=True)[:_NUM_OPERATORS]
    lines = [
        f"self time on the {'device' if is_on_device else 'CPU'}:",
        " ms/step   share  calls/step  operator",
    ]
    for row in dearest:
        milliseconds, calls = microseconds[row] / 1000 / num_steps, row.count / num_steps
        share = microseconds[row] / max(total, 1e-9)
        lines.append(f"{milliseconds:8.3f}  {share:6.1%}  {calls:10.1f}  {row.key}")
    return "\n".join(lines)
