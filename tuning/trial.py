"""Runs one trial of a search: one run of pretrain.py for each seed. Reads the metrics of the runs."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import optuna

from checkpointing.files import newest_checkpoint, step_of
from distributed.child import start_child, why_it_failed
from runtime.metrics_file import METRICS_FILE, read_rows
from runtime.writing import open_to_append
from training.best import Selection
from training.run_folder import has_ended, is_in_use

OUTPUT_FILE = "output.log"
_POLL_SECONDS = 0.2
_GRACE_SECONDS = 120  # a run that was asked to stop is killed after this time


class Trial:
    """Runs the trainings of one combination of hyper-parameters, one for each seed.

    The trainings are child processes, one after the other. If the caller sets `is_stopped` to True, the
    current training saves a checkpoint and ends, and no other training starts. `is_pruned` is for the caller:
    whether the trial was stopped because it is worse than others.

    drawn: Trial of Optuna with the chosen values.
    commands: {run folder: command that starts or continues the training}.
    selection: Metric by which trainings are compared.
    max_steps: Step at which each training ends. If None, it ends after all steps of its config.
    cores: CPU cores of the trainings. If None, all cores.
    """

    is_stopped = is_pruned = False

    def __init__(
        self,
        drawn: optuna.Trial,
        commands: Mapping[Path, Sequence[str]],
        selection: Selection,
        *,
        max_steps: int | None,
        cores: Sequence[int] | None = None,
    ):
        self.drawn, self.number = drawn, drawn.number
        self._commands, self._selection, self._cores = commands, selection, cores
        self._has_ended = functools.partial(has_ended, max_steps=max_steps)
        self._logs: dict[Path, tuple[object, dict[int, float]]] = {}

    async def run(self, on_poll: Callable[[Trial], None]) -> None:
        """Runs the trainings one after the other, until all have ended or `is_stopped` is True.

        If a training fails after it has saved a new checkpoint, it is started again. If it fails without a
        new checkpoint, raises ValueError.

        on_poll: Function that is called with this trial five times a second.
        """
        for folder, command in self._commands.items():
            while not (self.is_stopped or self._has_ended(folder)):
                # If the search was killed, the run may not have ended yet.
                if folder.is_dir() and is_in_use(folder):
                    on_poll(self)
                    await asyncio.sleep(_POLL_SECONDS)
                    continue
                step_before, log = _saved_step(folder), folder / OUTPUT_FILE
                begin = log.stat().st_size if log.exists() else 0
                status = await self._run_once(folder, command, on_poll)
                has_gone_on = self.is_stopped or _saved_step(folder) > step_before
                if not has_gone_on and not self._has_ended(folder):
                    output = log.read_bytes()[begin:].decode(errors="replace")
                    raise ValueError(f"{why_it_failed(output, status)} ({log})")

    async def _run_once(self, folder: Path, command: Sequence[str], on_poll: Callable[[Trial], None]) -> int:
        stop_signal, asked_at = _stop_signal(command), None
        folder.mkdir(parents=True, exist_ok=True)
        with open_to_append(folder / OUTPUT_FILE) as output:
            process = start_child(command, output, stop_signal=stop_signal, cores=self._cores)
        try:
            while process.poll() is None:
                on_poll(self)
                if self.is_stopped and asked_at is None:
                    asked_at = time.monotonic()
                    process.send_signal(stop_signal)
                if asked_at is not None and time.monotonic() > asked_at + _GRACE_SECONDS:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                await asyncio.sleep(_POLL_SECONDS)
        finally:
            if asked_at is None:  # an exception such as Ctrl-C
                process.send_signal(stop_signal)
        return process.returncode

    @property
    def is_complete(self) -> bool:
        return all(map(self._has_ended, self._commands))

    def values(self) -> list[float]:
        """Returns the values of the metric that the search compares, at all evaluations so far.

        The evaluations of the first training come first, then those of the next one.
        """
        return [value for folder in self._commands for value in self._evaluations(folder).values()]

    def score(self) -> float:
        """Returns the score of the combination of hyper-parameters.

        Each training contributes the best value of the metric among its evaluations. The score is the mean
        over the trainings. Raises ValueError if any training has no value.
        """
        best = []
        for folder in self._commands:
            values = self._evaluations(folder)
            if (step := self._selection.best_step(values)) is None:
                problem = f"{folder / METRICS_FILE} contains no value of {self._selection.metric}"
                raise ValueError(f"{problem}. Set keep_best to a metric of the evaluations.")
            best.append(values[step])
        return math.fsum(best) / len(best)

    def _evaluations(self, folder: Path) -> dict[int, float]:
        with contextlib.suppress(FileNotFoundError):
            stat = (folder / METRICS_FILE).stat()
            version = (stat.st_size, stat.st_mtime_ns)
            # A log that has not changed is not read again.
            if folder not in self._logs or self._logs[folder][0] != version:
                values = {row["step"]: self._selection.value(row) for row, _ in read_rows(folder)}
                values = {step: value for step, value in values.items() if value is not None}
                self._logs[folder] = (version, values)
        return self._logs[folder][1] if folder in self._logs else {}


def _stop_signal(command: Sequence[str]) -> signal.Signals:
    # SIGTERM would kill srun. Example of a command with env: env OMP_NUM_THREADS=2 srun python pretrain.py.
    launcher = next((word for word in command if "=" not in word and Path(word).name != "env"), "")
    return signal.SIGUSR1 if Path(launcher).name == "srun" else signal.SIGTERM


def share_of_cores(slot: int, num_slots: int) -> list[int] | None:
    """Divides the CPU cores evenly among `num_slots` trials that run at the same time.

    Returns the numbers of the cores for one of these trials, such as [0, 1, 2, 3]. Returns None if the trial
    may use all cores.

    slot: Index of the trial among those that run at the same time, from 0 to num_slots - 1.
    """
    if num_slots == 1 or not hasattr(os, "sched_setaffinity"):
        return None
    cores = sorted(os.sched_getaffinity(0))
    size = max(1, len(cores) // num_slots)
    return [cores[(slot * size + index) % len(cores)] for index in range(size)]


def _saved_step(folder: Path) -> int:
    newest = newest_checkpoint(folder)
    return -1 if newest is None else step_of(newest)
