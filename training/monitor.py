"""What a person sees of a run: rows of metrics, warnings, a trace, and the end where a step is not finite."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from config.schema import PretrainConfig
from dataset.description import read_info
from dataset.format import load_metadata
from optimizers.schedule import learning_rates, peak_learning_rates
from parallel import log
from parallel.collectives import broadcast_object
from parallel.launch import Run
from parallel.process_group import is_main, world_size
from training.clock import StepClock, gather_timing
from training.data import RunData, Schedule
from training.evaluation import evaluated_weights
from training.metrics import FiniteCheck, training_metrics
from training.pictures import draw_puzzles, fetch_shown_rows
from training.profiler import StepProfiler
from training.run_folder import HEARTBEAT_FILE, record_start, write_status
from training.sinks import Sinks
from training.state import TrainState
from training.step import StepResult


class Monitor:
    """The observer of a run, entered around its steps. All ranks have one, and call its methods together.

    is_reported: whether the row of the step that the run goes on from is logged already.
    """

    def __init__(
        self,
        run: Run[PretrainConfig],
        state: TrainState,
        data: RunData,
        schedule: Schedule,
        *,
        is_reported: bool,
    ):
        self.clock = StepClock(run.device)
        self._config, self._schedule, self._watchdog = run.config, schedule, run.watchdog
        self._device, self._finite = (
            run.device,
            FiniteCheck(run.device, quoted=(*state.model.network.metrics, "grad_norm", "lr")),
        )
        self._reported_step = state.step if is_reported else None
        self._remaining = range(state.step, schedule.last_step)
        self._data = data
        self._facts = {
            "num_parameters": state.num_parameters,
            "dataset_fingerprint": data.fingerprint,
            "world_size": world_size(),
            "gradient_sync": state.gradients.name,
        }
        if is_reported and schedule.is_logged(state.step):
            state.metrics.reset()
        rates = ", ".join(f"{name} {rate:.3g}" for name, rate in peak_learning_rates(run.config).items())
        sync = f", sync by {state.gradients.name}" if world_size() > 1 else ""
        log.info(
            f"{schedule.describe(state.step)}; {state.num_parameters:,} parameters on {world_size()} x "
            f"{run.device.type}{sync}; {rates}"
        )

    def __enter__(self) -> Monitor:
        folder = Path(self._config.checkpoint_path)
        if is_main():
            step = self._remaining.start
            facts = {name: self._facts[name] for name in ("num_parameters", "gradient_sync")}
            write_status(folder, "running", step=step)
            record_start(folder, step=step, device=self._device, **facts)
            self._watchdog.keep_record(folder / HEARTBEAT_FILE)
        self._sinks = Sinks(self._config, steps=self._remaining, facts=self._facts, tags=self._tags())
        is_profiled = self._config.profile and is_main()
        self._profiler = StepProfiler(folder / "profile", enabled=is_profiled, steps=self._remaining)
        self._stack = contextlib.ExitStack()
        for part in (self._sinks, self._profiler):
            self._stack.enter_context(part)
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def _tags(self) -> list[str]:
        """Names the kinds of the puzzles, and the architecture."""
        folders = self._data.dataset.folders
        kinds = [read_info([each], load_metadata(each, "test")).kind for each in folders]
        return [*dict.fromkeys(kind.name for kind in kinds if kind), self._config.arch.name]

    def close(self) -> None:
        """Sends what is left; a second call does nothing."""
        self._stack.close()

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Surrounds the wait for the batch of a step, with which the step's time begins."""
        self.clock.start()
        with self.clock.measure("data_wait"):
            yield

    def step_done(self, step: int, result: StepResult, *, set_name: str) -> None:
        """Takes note of a step; waits for the device only on a CPU."""
        if result.loss is not None:
            self._finite.add(step, set_name=set_name, loss=result.loss, grad_norm=result.grad_norm)
        self.clock.count_step()
        self._watchdog.step_done(step)
        if self._config.profile:
            self.clock.stop()  # tracing and writing are no part of a step
        self._profiler.step()
        self._sinks.step_done()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Surrounds what may take any time between two steps: saving, evaluating, comparing replicas.

        The clock stands still, the watchdog waits, and a step that was not finite ends the run before.
        """
        self.clock.stop()
        self._finite.check()
        with self._watchdog.paused():
            yield

    def is_due(self, step: int) -> bool:
        """Tells whether the row of a step is still to be logged; the same answer on all ranks."""
        return self._schedule.is_logged(step) and step != self._reported_step

    def reduce(self, state: TrainState, others: dict[str, float]) -> dict[str, float]:
        """Returns the metrics since the last row, over all ranks, as they are logged on rank 0.

        others: more metrics of this rank, under their names without `train/`.
        """
        self._finite.check()
        size = self._config.global_batch_size
        sums, steps = state.metrics.reduce(), state.metrics.steps
        row = training_metrics(state.model.network, sums, steps=steps, global_batch_size=size)
        timing, straggler = gather_timing(self.clock, global_batch_size=size)
        if straggler:
            log.warning(straggler)
        row |= timing | others | self._watchdog.read_recovery()
        row |= learning_rates(self._config, state.step, total_steps=self._schedule.total_steps)
        row = {f"train/{name}": value for name, value in row.items()}
        self._finite.remember(state.step, row)
        return row

    def show_puzzles(self, state: TrainState) -> None:
        """Logs pictures of what the model thinks of a few test puzzles, before the row of the step.

        All ranks call it: with EMA the averages think, of which each has its share.
        """
        count = self._config.wandb_log_puzzles
        if not count or not broadcast_object(self._sinks.takes_pictures):
            return
        with self.paused(), evaluated_weights(state):
            fetch_shown_rows(state, self._data, count=count)
            if is_main():
                draw = functools.partial(draw_puzzles, self._config, state, self._data, count=count)
                self._sinks.log_puzzles(state.step, draw)

    def note_checkpoints(self, folders: Iterable[Path]) -> None:
        """Takes note of checkpoints that are saved, after the rows of their steps."""
        for folder in folders:
            self._sinks.log_checkpoint(folder)

    def log(self, state: TrainState, row: dict[str, float]) -> None:
        """Logs the row of a step, from rank 0; the sums begin anew."""
        self._sinks.log(state.step, row)
        self._reported_step = state.step
        state.metrics.reset()
