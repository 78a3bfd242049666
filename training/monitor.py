"""Logs the metrics of a run, measures its speed, and ends the run if loss or gradients are not finite."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from config.schema import PretrainConfig
from distributed import log
from distributed.collectives import broadcast_object
from distributed.errors import collective_errors
from distributed.launch import Program
from distributed.world import is_main, rank, world_size
from optimizers.learning_rate import peak_learning_rates
from runtime.reading import read_json
from training.checkpoints import CheckpointManager
from training.clock import StepClock, gather_timing, traced_steps
from training.data import RunData
from training.loggers import LoggedRun, Loggers
from training.metrics import FiniteCheck, training_metrics
from training.model import count_steps
from training.run_folder import HEARTBEAT_FILE, STATUS_FILE, record_start, write_status
from training.state import TrainState
from training.strategy import StepResult

_OF_START = ("num_parameters", "gigaflops_per_step", "gradient_sync")  # keys of `_run_info` for starts.jsonl


class Monitor:
    """Logs the metrics of a run, measures its speed, and ends the run if loss or gradients are not finite.

    A monitor is a context manager around the training steps. All ranks call the methods together.

    program: Config, device and watchdog of this process. The watchdog ends a run that hangs.
    state: State of the run at the start of this process.
    data: Data of the run.
    checkpoints: Checkpoint manager of the run.
    is_logged: Whether the log (metrics.jsonl) already contains the metrics of step `state.step`.
    """

    def __init__(
        self,
        program: Program[PretrainConfig],
        state: TrainState,
        data: RunData,
        checkpoints: CheckpointManager,
        *,
        is_logged: bool,
    ):
        self.clock = StepClock(program.device)
        self._config, self._schedule, self._watchdog = program.config, data.schedule, program.watchdog
        self._checkpoints = checkpoints
        self._device, self._finite = program.device, FiniteCheck(program.device)
        self._step, self._logged_step = state.step, state.step if is_logged else None
        self._remaining = range(state.step, data.schedule.end_step)
        self._data = data
        self._seq_len = state.carry.data.inputs.shape[-1]
        self._counter = count_steps(program.config, data.dataset.metadata)
        with collective_errors():
            flops_of_step = self._counter.flops(state.model.eval_reasoning("max"))
            total = data.schedule.petaflops(data.schedule.total_steps, self._counter)
        self._run_info = {
            "num_parameters": state.weights.num_parameters,
            "gigaflops_per_step": flops_of_step / 1e9,
            "dataset_fingerprint": data.fingerprint,
            "world_size": world_size(),
            "gradient_sync": state.strategy.name,
        }
        # A checkpoint is usually saved before its step is logged, so it contains the metric sums of its row.
        # If the row is logged, the sums start again at 0. Exception: the previous launch ended here because
        # of `max_steps`, and logged a row for this reason. This launch has no row at this step, so the sums
        # continue.
        if is_logged and data.schedule.has_row(state.step):
            state.metrics.reset()
        rates = ", ".join(f"{name} {rate:.3g}" for name, rate in peak_learning_rates(program.config).items())
        sync = f", sync by {state.strategy.name}" if world_size() > 1 else ""
        layout = "" if state.mesh.is_plain else f" ({state.mesh})"
        log.info(
            f"{data.schedule.describe(state.step)}\n{state.weights.num_parameters:,} parameters "
            f"on {world_size()} x {self._device.type}{layout}{sync}; {rates}\n{self._slots(state)}\n"
            f"{total:.3g} PFLOP (1e15 operations) of training, "
            f"{flops_of_step / 1e9:.3g} GFLOP a thinking step"
        )

    def __enter__(self) -> "Monitor":
        folder = Path(self._config.checkpoint_path)
        step = self._remaining.start
        write_status(folder, "running", step=step)
        if is_main():
            self._schedule.warn_of_unsaved_best()
            described = {name: self._run_info[name] for name in _OF_START}
            record_start(folder, step=step, device=self._device, **described)
            self._watchdog.keep_record(folder / HEARTBEAT_FILE, on_hang=self._record_hang)
        self._stack = contextlib.ExitStack()
        self._loggers = Loggers(LoggedRun(self._config, self._remaining, self._run_info, self._tags()))
        self._stack.push(self._loggers.close)
        traced = traced_steps(
            folder / "profile",
            is_enabled=self._config.profile and rank() in self._config.profile_ranks,
            first_step=step,
            steps=self._config.profile_steps,
            details=self._config.profile_details,
        )
        self._trace_step = self._stack.enter_context(traced)
        return self

    def __exit__(self, *error: Any) -> None:
        if any(error):
            write_status(Path(self._config.checkpoint_path), "failed", step=self._step)
        self._stack.__exit__(*error)

    def _record_hang(self) -> None:
        # If the status is, for example, "finished", a rank hangs after the last checkpoint. Keep it.
        folder = Path(self._config.checkpoint_path)
        if read_json(folder / STATUS_FILE)["status"] == "running":
            write_status(folder, "failed", step=self._step)

    def _slots(self, state: TrainState) -> str:
        # Examples: "96 slots on each of 8 processes", or "at most 96 slots ..." if the last ranks have fewer.
        slots, size = len(state.carry.halted), self._config.global_batch_size
        most = "" if slots * state.ranks.size == size else "at most "
        where = "one process" if world_size() == 1 else f"each of {world_size()} processes"
        return f"{most}{slots} slots on {where}"

    def _tags(self) -> tuple[str, ...]:
        kinds = [info.kind for info in self._data.infos.values()]
        return (*dict.fromkeys(kind.name for kind in kinds if kind), self._config.arch.name)

    def close(self) -> None:
        """Sends the last checkpoints to the loggers, then closes the loggers and ends profiling.

        Call it after the last checkpoint is saved. A second call does nothing.
        """
        self._send_checkpoints()
        self._stack.close()

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Context manager that measures how long the block waits for the next batch.

        If the clock of the training steps is stopped, starts the clock first.
        """
        self.clock.start()
        with self.clock.measure("data_wait"):
            yield

    def step_done(self, step: int, result: StepResult, *, set_name: str) -> None:
        """Records that a training step is done. Does not wait for a GPU, unless the run is profiled.

        step: Number of training steps done. result: Loss, gradient norm and stop requests of the step, from
        `train_step`. set_name: Training set of the batch, for messages.
        """
        self._step = step
        if result.steps:
            self._finite.add(step, set_name=set_name, loss=result.loss, grad_norm=result.grad_norm)
        self.clock.count_step()
        self._watchdog.step_done(step)
        if self._config.profile:
            self.clock.stop()  # do not count the time to write the trace
        self._trace_step()
        self._send_checkpoints()
        self._loggers.step_done()

    @contextlib.contextmanager
    def paused(self, activity: str = "training") -> Iterator[None]:
        """Context manager for work other than training steps, such as saving a checkpoint.

        The time of the block is not counted as time of training steps. During the block, the watchdog has no
        time limit. Before the block, ends the run if a loss or gradient norm was not finite.

        activity: First word of the progress bar during the block, such as "evaluating".
        """
        self.clock.stop()
        self._finite.check()
        self._loggers.set_activity(activity)
        with self._watchdog.paused():
            yield
        self._loggers.set_activity("training")

    def is_row_due(self, step: int) -> bool:
        """Returns whether the metrics of training step `step` must be logged, and are not logged yet.

        The result is equal on all ranks.
        """
        return self._schedule.has_row(step) and step != self._logged_step

    def reduce(self, state: TrainState) -> dict[str, float]:
        """Returns metrics of the training steps since the last logged row, as {"train/<name>": value}.

        The metrics include times, learning rates and the epoch. All ranks call it. The result is correct only
        on rank 0. Ends the run if a loss or gradient norm was not finite.
        """
        self._finite.check()
        size = self._config.global_batch_size
        sums, steps = state.metrics.reduce(), state.metrics.steps
        row = training_metrics(state.model.network, sums, steps=steps, global_batch_size=size)
        timing, straggler = gather_timing(self.clock, global_batch_size=size)
        if straggler:
            log.warning(straggler)
        row |= timing | self._checkpoints.pop_stall_seconds() | self._watchdog.pop_recovery()
        row |= self._schedule.learning_rates(state.step) | {"epoch": self._schedule.epochs(state.step)}
        row["petaflops"] = self._schedule.petaflops(state.step, self._counter)
        return {f"train/{name}": value for name, value in row.items()}

    def show_puzzles(self, state: TrainState) -> None:
        """Logs pictures of the model's answers to some test puzzles. All ranks call it.

        The config key `wandb_log_puzzles` is the number of puzzles, also for loggers other than W&B.
        """
        count = self._config.wandb_log_puzzles
        if not count or not broadcast_object(self._loggers.take_pictures):
            return
        from training.pictures import think_of_puzzles  # import it only if a logger needs pictures

        with self.paused(), state.averaged():
            self._loggers.log_puzzles(state.step, think_of_puzzles(state, self._data, count=count))

    def log(self, state: TrainState, row: dict[str, float]) -> None:
        """Logs the metrics of training step `state.step`, and resets their sums in `state.metrics`.

        row: {name of a metric: value}. If the row contains results of an evaluation, the best value so far of
            the metric that the config key `keep_best` names is also logged.
        """
        self._loggers.log(state.step, row | self._checkpoints.best.record(state.step, row))
        self._logged_step = state.step
        state.metrics.reset()

    def _send_checkpoints(self) -> None:
        for folder in self._checkpoints.pop_saved():
            self._loggers.log_checkpoint(folder)
