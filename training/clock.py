"""Measures the time of training steps and of waits, and profiles a few steps."""

import contextlib
import functools
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from distributed import log
from distributed.collectives import all_ranks
from distributed.world import is_main, rank
from runtime.writing import write_text

WAITS = ("data_wait", "sync")  # waits within a step: for the batch, and for the other ranks
# A rank is slow if its steps compute more than 1.5 times as long as the median of the other ranks, and at
# least 0.05 s longer. It is a straggler if it was slow in every row of the log, for 3 rows and 100 steps.
# Example: on a shared machine, other programs make rank 0 slow in one row, and rank 1 in the next.
_SLOW = 1.5
_NOTICEABLE_SECONDS = 0.05
_STRAGGLER_ROWS, _STRAGGLER_STEPS = 3, 100
# Before a trace, up to this number of steps is traced and discarded: starting the profiler takes time.
_WARMUP = 2


class StepClock:
    """Measures how long the training steps of this rank take.

    Call `stop` before any work that is not part of a training step.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._seconds, self._steps, self._since = 0.0, 0, None
        self._waits = dict.fromkeys(WAITS, 0.0)
        self._sync_events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self.stragglers = Stragglers()

    def start(self) -> None:
        if self._since is None:
            self._since = time.perf_counter()

    def stop(self) -> None:
        """Waits until the device has completed all steps so far, then stops the clock."""
        if self._since is not None:
            if self._device.type != "cpu":
                getattr(torch, self._device.type).synchronize()
            self._seconds += time.perf_counter() - self._since
            self._since = None

    def count_step(self) -> None:
        self._steps += 1

    @contextlib.contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Context manager that measures how long a training step waits in the block.

        name: "data_wait" if the block waits for the next batch, "sync" if it waits for other ranks.
        """
        if name == "sync" and self._device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            yield
            end.record()
            self._sync_events.append((begin, end))
            return
        begin_seconds = time.perf_counter()
        yield
        self._waits[name] += time.perf_counter() - begin_seconds

    def pop(self) -> dict[str, float]:
        """Stops the clock. Returns the mean times of the steps since the last call, in seconds.

        The keys are "steps" (number of steps), "step_seconds", "data_wait_seconds", "sync_seconds" (wait for
        other ranks) and "compute_seconds" (time without both waits). Returns {} if no step was timed.
        """
        self.stop()
        self._waits["sync"] += sum(begin.elapsed_time(end) for begin, end in self._sync_events) / 1000
        seconds, steps, waits = self._seconds, self._steps, self._waits
        self._seconds, self._steps, self._waits = 0.0, 0, dict.fromkeys(WAITS, 0.0)
        self._sync_events.clear()
        if not steps or not seconds:
            return {}
        return {
            "steps": steps,
            "step_seconds": seconds / steps,
            **{f"{name}_seconds": waits[name] / steps for name in WAITS},
            "compute_seconds": max(0.0, seconds - sum(waits.values())) / steps,
        }


class Stragglers:
    """Finds a straggler: a rank that is much slower than the others for many training steps.

    Only rank 0 uses this class.
    """

    def __init__(self) -> None:
        self._rank, self._rows, self._steps = 0, 0, 0  # the slow rank, and since when it is slow

    def add_row(self, compute: Sequence[float], *, steps: int) -> str | None:
        """Adds the step times of all ranks. Returns a warning if a rank has just become a straggler, or None.

        compute: Mean seconds that each rank computes in a step, without waits.
        steps: Number of steps since the last call.
        """
        slowest = compute.index(max(compute))
        usual = median([*compute[:slowest], *compute[slowest + 1 :]] or compute)
        is_slow = max(compute) > max(_SLOW * usual, usual + _NOTICEABLE_SECONDS)
        if not is_slow or slowest != self._rank:
            self._rank, self._rows, self._steps = slowest, 0, 0
        was_straggler = self._is_straggler()
        self._rows, self._steps = self._rows + is_slow, self._steps + steps * is_slow
        if was_straggler or not self._is_straggler():
            return None
        return (
            f"rank {slowest} is a straggler: for {self._steps} steps, it computed more than {_SLOW} times as "
            "long as the median of the other ranks (train/compute_seconds_slowest_rank). The other ranks "
            "wait for it. Check what else runs on its machine."
        )

    def _is_straggler(self) -> bool:
        return self._rows >= _STRAGGLER_ROWS and self._steps >= _STRAGGLER_STEPS


def gather_timing(clock: StepClock, *, global_batch_size: int) -> tuple[dict[str, float], str | None]:
    """Gathers the step times and the memory of all ranks. All ranks call it.

    Returns (metrics, warning), for example ({"step_seconds": 0.12, ...}, None). The warning names a rank that
    has become much slower than the others. On ranks other than 0, and if no step was timed, the result is
    ({}, None).

    clock: Clock of this rank. Its times are reset. global_batch_size: Number of examples of a training step.
    """
    local, ranks = clock.pop(), all_ranks()
    if not local:
        return {}, None
    local["peak_memory_bytes"] = peak_memory_bytes(clock._device)
    numbers = torch.tensor([list(local.values())], dtype=torch.float64)
    by_rank = ranks.all_gather_rows(numbers, [1] * ranks.size)
    if not is_main():
        return {}, None
    values = dict(zip(local, by_rank.t().tolist(), strict=True))
    compute, memory = values["compute_seconds"], values["peak_memory_bytes"]
    metrics = {
        "examples_per_second": global_batch_size / local["step_seconds"],
        "step_seconds": local["step_seconds"],
        "sync_seconds": sum(values["sync_seconds"]) / ranks.size,
        "sync_share": sum(values["sync_seconds"]) / sum(values["step_seconds"]),
        "data_wait_seconds": max(values["data_wait_seconds"]),
        "compute_seconds_slowest_rank": max(compute),
        "compute_seconds_fastest_rank": min(compute),
        "slowest_rank": compute.index(max(compute)),
        "peak_memory_bytes": int(max(memory)),
        "peak_memory_rank": memory.index(max(memory)),
    }
    return metrics, clock.stragglers.add_row(compute, steps=local["steps"])


def peak_memory_bytes(device: torch.device) -> int:
    """Returns the largest memory that this process has used so far, in bytes.

    On CUDA, it is the memory of tensors on the device. Otherwise, it is the resident memory of the process.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return resident if sys.platform == "darwin" else resident * 1024


@contextlib.contextmanager
def traced_steps(
    folder: Path,
    *,
    is_enabled: bool,
    first_step: int,
    steps: Sequence[int] = (5, 7),
    details: Sequence[str] = (),
) -> Iterator[Callable[[], None]]:
    """Context manager that profiles some training steps of this rank, if `is_enabled`.

    Yields a function that must be called after each step. After the last profiled step, or if the block ends
    earlier, writes a trace for chrome://tracing or ui.perfetto.dev into `folder`, and logs the ten slowest
    operators.

    first_step: Number of training steps that the run had done before this process started, for the file name.
    steps: First and last step to profile. (5, 7) means steps 5 to 7 after the start of this process.
    details: "shapes" adds the shapes of inputs to the trace, and "stacks" the lines of the source.
    """
    if not is_enabled:
        yield lambda: None
        return
    import torch._inductor  # takes seconds, and the profiler would otherwise import it during a step

    name, (first, last) = "profile=true", steps
    warmup = min(_WARMUP, first - 1)
    profiled = profile(
        activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_initialized(),
        schedule=schedule(wait=first - 1 - warmup, warmup=warmup, active=last - first + 1, repeat=1),
        on_trace_ready=functools.partial(_write_trace, folder, first_step, first),
        record_shapes="shapes" in details,
        with_stack="stacks" in details,
        acc_events=True,  # otherwise torch 2.11 warns about lost events, although there is only one cycle
    )
    with log.warn_once(name):
        profiled.start()

    def step_done() -> None:
        with log.warn_once(name):
            profiled.step()

    try:
        yield step_done
    finally:
        with log.warn_once(name):
            profiled.stop()
            if profiled.step_num < first:
                log.warning(
                    f"{name}: no step was traced. Tracing starts at step {first} of this launch, but it "
                    f"ended after {profiled.step_num} steps. Change profile_steps."
                )


def _write_trace(folder: Path, first_step: int, first_traced: int, profiled: profile) -> None:
    first, last = first_step + first_traced, first_step + profiled.step_num
    if last < first:
        return
    operators = profiled.key_averages()
    is_on_device = any(row.self_device_time_total for row in operators)
    sort_by = "self_device_time_total" if is_on_device else "self_cpu_time_total"
    table = operators.table(sort_by=sort_by, row_limit=10)
    log.info(f"steps {first} to {last} of rank {rank()}:\n{table}")  # before the disk can fail
    path = folder / f"rank_{rank()}_steps_{first}_{last}"
    folder.mkdir(parents=True, exist_ok=True)
    write_text(path.with_suffix(".txt"), table)
    profiled.export_chrome_trace(f"{path}.json.gz")
    log.info(f"trace: {path}.json.gz")
