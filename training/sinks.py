"""Where the numbers of a run go: metrics.jsonl, W&B, and the console. Rank 0 only.

A logger must never end a training run: what fails here is told once, and the others go on.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from tqdm import tqdm

from checkpointing.files import METRICS_FILE
from config.schema import PretrainConfig
from parallel import log
from parallel.process_group import is_main
from training.wandb import WandbSink


class _Sink(Protocol):
    """A place where rows of metrics go."""

    name: str

    def log(self, step: int, metrics: dict[str, float]) -> None: ...

    def step_done(self) -> None: ...

    def close(self, *, has_failed: bool) -> None: ...


class Sinks:
    """All places where rows of metrics go. On ranks other than 0 there are none.

    steps: from the number of steps done before this start to the one where it will stop. facts, tags: of the
    run, for W&B, beside its config.
    """

    def __init__(self, config: PretrainConfig, *, steps: range, facts: dict[str, Any], tags: Sequence[str]):
        self._sinks: list[_Sink] = []
        self._wandb: WandbSink | None = None
        self._failed: set[str] = set()
        if not is_main():
            return
        folder = Path(config.checkpoint_path)
        with self._told_once(_MetricsFile.name):
            self._sinks.append(_MetricsFile(folder))
        with self._told_once(_Console.name):
            self._sinks.append(_Console(steps))
        with self._told_once(WandbSink.name):
            self._wandb = WandbSink(config, facts=facts, tags=tags, tolerate=self._told_once)
            self._sinks.append(self._wandb)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Logs one line of metrics; called once for a step."""
        self._each(lambda sink: sink.log(step, metrics))

    def step_done(self) -> None:
        self._each(lambda sink: sink.step_done())

    @property
    def takes_pictures(self) -> bool:
        return self._wandb is not None and self._wandb.takes_pictures

    def log_puzzles(self, step: int, draw: Callable[[], str]) -> None:
        """Logs pictures of puzzles, before the row of their step; `draw` is called only if W&B takes HTML."""
        if self._wandb is not None:
            with self._told_once("W&B's pictures"):
                self._wandb.log_puzzles(step, draw)

    def log_checkpoint(self, folder: Path) -> None:
        """Notes a checkpoint that is saved, after the row of its step."""
        if self._wandb is not None:
            with self._told_once("W&B's checkpoints"):
                self._wandb.log_checkpoint(folder)

    def __enter__(self) -> Sinks:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Sends what is left, and whether the run has failed."""
        self._each(lambda sink: sink.close(has_failed=kind is not None))

    def _each(self, action: Callable[[_Sink], None]) -> None:
        for sink in self._sinks:
            with self._told_once(sink.name):
                action(sink)

    @contextlib.contextmanager
    def _told_once(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if name not in self._failed:
                self._failed.add(name)
                log.warning(f"{name} fails, the run goes on without it ({type(error).__name__}: {error})")


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


_SHOWN = {
    "lm_loss": "loss",
    "accuracy": "accuracy",
    "exact_accuracy": "exact",
    "exact_accuracy_after_step_1": "exact@1",
}


class _Console:
    """A progress bar with loss, accuracies, steps per second and the time left; evaluations above it.

    "exact" is at halting, where the Q head believes in the answer; "exact@1" of all puzzles after one step.
    """

    name = "the progress bar"

    def __init__(self, steps: range):
        self._bar = tqdm(
            total=steps.stop,
            initial=steps.start,
            unit="step",
            mininterval=0.2 if sys.stderr.isatty() else 10.0,  # a log file needs no moving bar
            dynamic_ncols=True,
        )
        self._shown: dict[str, str] = {}

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for name, label in _SHOWN.items():
            if f"train/{name}" in metrics:
                self._shown[label] = f"{metrics[f'train/{name}']:.3f}"
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
