"""What a person sees of a run: rows of metrics, warnings, a trace, and the end where a step is not finite.

A logger must never end a training run: where one fails, the others go on.
"""

import contextlib
import functools
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from checkpointing.files import METRICS_FILE
from config.schema import PretrainConfig
from dataset.description import read_info
from dataset.format import load_metadata
from optimizers.schedule import learning_rates, peak_learning_rates
from parallel import log
from parallel.collectives import broadcast_object
from parallel.launch import Run
from parallel.process_group import is_main, world_size
from training.clock import StepClock, gather_timing, traced_steps
from training.data import RunData, Schedule
from training.metrics import FiniteCheck, training_metrics
from training.run_folder import HEARTBEAT_FILE, record_start, write_status
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
        self._device, quoted = run.device, (*state.model.network.metrics, "grad_norm", "lr")
        self._finite = FiniteCheck(run.device, quoted=quoted)
        self._reported_step = state.step if is_reported else None
        self._remaining = range(state.step, schedule.last_step)
        self._data = data
        self._run_info = {
            "num_parameters": state.weights.num_parameters,
            "dataset_fingerprint": data.fingerprint,
            "world_size": world_size(),
            "gradient_sync": state.strategy.name,
        }
        if is_reported and schedule.is_logged(state.step):
            state.metrics.reset()
        rates = ", ".join(f"{name} {rate:.3g}" for name, rate in peak_learning_rates(run.config).items())
        sync = f", sync by {state.strategy.name}" if world_size() > 1 else ""
        log.info(
            f"{schedule.describe(state.step)}; {state.weights.num_parameters:,} parameters "
            f"on {world_size()} x {run.device.type}{sync}; {rates}"
        )

    def __enter__(self) -> "Monitor":
        folder = Path(self._config.checkpoint_path)
        if is_main():
            step = self._remaining.start
            described = {name: self._run_info[name] for name in ("num_parameters", "gradient_sync")}
            write_status(folder, "running", step=step)
            record_start(folder, step=step, device=self._device, **described)
            self._watchdog.keep_record(folder / HEARTBEAT_FILE)
        self._stack = contextlib.ExitStack()
        self._loggers = Loggers(self._config, self._remaining, run_info=self._run_info, tags=self._tags())
        self._stack.push(self._loggers.close)
        is_profiled = self._config.profile and is_main()
        traced = traced_steps(folder / "profile", is_enabled=is_profiled, first_step=self._remaining.start)
        self._trace_step = self._stack.enter_context(traced)
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
        """Records a step; waits for the device only on a CPU."""
        synced = result.synced
        if synced.steps:
            self._finite.add(step, set_name=set_name, loss=synced.loss, grad_norm=synced.grad_norm)
        self.clock.count_step()
        self._watchdog.step_done(step)
        if self._config.profile:
            self.clock.stop()  # tracing and writing are no part of a step
        self._trace_step()
        self._loggers.step_done()

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
        """Returns whether the row of a step is still to be logged; the same answer on all ranks."""
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
        row |= timing | others | self._watchdog.pop_recovery()
        row |= learning_rates(self._config, state.step, total_steps=self._schedule.total_steps)
        row = {f"train/{name}": value for name, value in row.items()}
        self._finite.record_row(state.step, row)
        return row

    def show_puzzles(self, state: TrainState) -> None:
        """Logs pictures of what the model thinks of a few test puzzles, before the row of the step.

        All ranks call it: with EMA the sharded averages must be gathered.
        """
        count, wandb = self._config.wandb_log_puzzles, self._loggers.wandb
        if not count or not broadcast_object(wandb is not None and wandb.takes_pictures):
            return
        from training.pictures import draw_puzzles, fetch_shown_rows  # with the drawing, for W&B alone

        with self.paused(), state.averaged():
            fetch_shown_rows(state, self._data, count=count)
            if is_main():
                draw = functools.partial(draw_puzzles, self._config, state, self._data, count=count)
                with log.warn_once("W&B's pictures"):
                    wandb.log_puzzles(state.step, draw)

    def record_checkpoints(self, folders: Iterable[Path]) -> None:
        """Sends saved checkpoints to W&B, after the rows of their steps."""
        for folder in folders if self._loggers.wandb is not None else ():
            with log.warn_once("W&B's copy of a checkpoint"):
                self._loggers.wandb.log_checkpoint(folder)

    def log(self, state: TrainState, row: dict[str, float]) -> None:
        """Logs the row of a step, from rank 0; the sums begin anew."""
        self._loggers.log(state.step, row)
        self._reported_step = state.step
        state.metrics.reset()


class Loggers:
    """The receivers of a run's rows: metrics.jsonl, the progress bar and W&B; none on ranks other than 0.

    steps: from the number of steps done before this start to the one where it will stop. run_info, tags: of
    the run, for W&B, beside its config.
    """

    def __init__(
        self, config: PretrainConfig, steps: range, *, run_info: dict[str, Any], tags: Sequence[str]
    ):
        self._all: list[Any] = []  # each has a name, log, step_done and close
        self.wandb: Any = None  # a WandbRun, where W&B is not disabled
        if not is_main():
            return
        with log.warn_once(_MetricsFile.name):
            self._all.append(_MetricsFile(Path(config.checkpoint_path)))
        with log.warn_once(_ProgressBar.name):
            self._all.append(_ProgressBar(steps))
        mode = config.wandb_mode if config.wandb_mode != "auto" else os.environ.get("WANDB_MODE")
        if mode != "disabled":
            with log.warn_once("W&B"):
                from training.wandb import WandbRun  # which loads the client, in a third of a second

                self.wandb = WandbRun(config, run_info=run_info, tags=tags)
                self._all.append(self.wandb)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Logs one row of metrics; called once for a step."""
        for logger in self._all:
            with log.warn_once(logger.name):
                logger.log(step, metrics)

    def step_done(self) -> None:
        for logger in self._all:
            with log.warn_once(logger.name):
                logger.step_done()

    def close(self, error_type: type[BaseException] | None = None, *_: object) -> None:
        """Sends what is left, and whether the run has failed."""
        for logger in self._all:
            with log.warn_once(logger.name):
                logger.close(has_failed=error_type is not None)


class _MetricsFile:
    """metrics.jsonl: one JSON object a line, `step` first, on disk as soon as it is logged."""

    name = METRICS_FILE

    def __init__(self, folder: Path):
        self._file = (folder / METRICS_FILE).open("a")

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._file.write(json.dumps({"step": step, **metrics}) + "\n")
        self._file.flush()

    def step_done(self) -> None:
        pass

    def close(self, *, has_failed: bool) -> None:
        self._file.close()


_LABELS = {"lm_loss": "loss", "accuracy": "accuracy", "exact_accuracy": "exact"}
_LABELS |= {"exact_accuracy_after_step_1": "exact@1"}


class _ProgressBar:
    """A progress bar with loss, accuracies, steps per second and the time left; evaluations above it.

    "exact" is at halting, where the Q head believes in the answer; "exact@1" of all puzzles after one step.
    """

    name = "the progress bar"

    def __init__(self, steps: range):
        self._bar = tqdm(
            total=steps.stop,
            initial=steps.start,
            unit="step",
            mininterval=log.bar_interval(),
            dynamic_ncols=True,
        )
        self._shown: dict[str, str] = {}

    def log(self, step: int, metrics: dict[str, float]) -> None:
        trained = {name.removeprefix("train/"): value for name, value in metrics.items() if "train/" in name}
        labels = {name: label for name, label in _LABELS.items() if name in trained}
        for name in labels or list(trained)[: len(_LABELS)]:  # a network that has others begins with its own
            self._shown[labels.get(name, name)] = f"{trained[name]:.3f}"
        self._bar.set_postfix(self._shown, refresh=False)
        evaluated = {
            name: value for name, value in metrics.items() if name.startswith(("eval/", "validation/"))
        }
        if evaluated:
            shown = [f"{name.removeprefix('eval/')} {value:.4g}" for name, value in evaluated.items()]
            self._bar.write(f"step {step}: {'  '.join(shown)}", file=sys.stderr)

    def step_done(self) -> None:
        self._bar.update()

    def close(self, *, has_failed: bool) -> None:
        self._bar.close()
