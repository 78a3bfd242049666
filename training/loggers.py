"""The loggers of a run: metrics.jsonl, the console and W&B. A failing logger only causes a warning."""

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from config.schema import PretrainConfig
from distributed import log
from distributed.process_group import is_main
from distributed.progress import Progress
from evaluation.passes import WORDS
from evaluation.results import is_share, metrics_by_set
from runtime.metrics_file import MetricsFile
from runtime.reading import printable

_TRAINED = ("lm_loss", "exact_accuracy", "accuracy")  # on the progress bar
_SPLITS = ("validation", "eval", "eval_raw", "test")
# After so many seconds of training, a line says when the run ends. From so many hours on, it is a warning.
_FORECAST_SECONDS, _MANY_HOURS = 60, 48
_SMALL = ("demo", "sudoku_9x9_easy", "maze_15x15")  # experiments for two CPU cores, minutes each
_MOST = 4  # maximum number of metrics on the progress bar
_FAINT, _BOLD, _GOOD = "2", "1", "1;32"  # ANSI codes


class Loggers:
    """The loggers of a run: metrics.jsonl, the console and W&B. Only rank 0 has loggers.

    steps: range(number of steps done, last step of this launch).
    run_info: Values that W&B's config contains in addition to the config.
    tags: Tags of the run at W&B.
    """

    def __init__(
        self, config: PretrainConfig, steps: range, *, run_info: dict[str, Any], tags: Sequence[str]
    ):
        self._all: list[Any] = []  # objects with name, log, close, and perhaps step_done, set_activity
        self.wandb: Any = None  # a WandbRun, unless W&B is disabled
        if not is_main():
            return
        with log.warn_once(MetricsFile.name):
            self._all.append(MetricsFile(Path(config.checkpoint_path)))
        with log.warn_once(Console.name):
            self._all.append(Console(config, steps))
        mode = config.wandb_mode if config.wandb_mode != "auto" else os.environ.get("WANDB_MODE")
        if mode != "disabled":
            with log.warn_once("W&B"):
                from training.wandb import WandbRun  # here, because importing the client takes time

                self.wandb = WandbRun(config, run_info=run_info, tags=tags)
                self._all.append(self.wandb)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Logs one row of metrics, at most once for each step."""
        self._call("log", step, metrics)

    def step_done(self) -> None:
        self._call("step_done")

    def set_activity(self, name: str) -> None:
        """Changes the first word of the progress bar."""
        self._call("set_activity", name)

    def close(self, error_type: type[BaseException] | None = None, *_: object) -> None:
        """Closes the loggers. error_type: Type of the exception that ended the run. None without one."""
        self._call("close", has_failed=error_type is not None)

    def _call(self, method: str, *arguments: Any, **options: Any) -> None:
        for logger in self._all:
            with log.warn_once(logger.name):
                if hasattr(logger, method):
                    getattr(logger, method)(*arguments, **options)


class Console:
    """Shows a progress bar with training metrics, and above it a line for each evaluated set.

    In training, "solved" is the exact accuracy of slots when they halt.

    steps: range(number of steps done, last step of this launch).
    """

    name = "the progress bar"

    def __init__(self, config: PretrainConfig, steps: range):
        self._bar = Progress(desc="training", total=steps.stop, initial=steps.start, unit="step")
        self._began, self._has_forecast = time.monotonic(), False
        self._keep_best = config.keep_best
        self._has_colors = sys.stderr.isatty() and not os.environ.get("NO_COLOR")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        trained = {name.removeprefix("train/"): value for name, value in metrics.items() if "train/" in name}
        known = [name for name in _TRAINED if name in trained]
        shown = known or list(trained)[:_MOST]  # a network without these metrics shows its first ones
        self._bar.set_postfix_str(
            "  ".join(f"{WORDS.get(name, name)} {trained[name]:.3f}" for name in shown), refresh=False
        )
        sets = {
            (split, name): each for split in _SPLITS for name, each in metrics_by_set(metrics, split).items()
        }
        width = max((len(f"{split}/{printable(name)}") for split, name in sets), default=0)
        for (split, name), each in sets.items():
            where = f"  {split}/{printable(name)}".ljust(width + 2) if len(sets) > 1 else ""
            chooses = split == ("validation" if metrics.get("best/selected_by") == "validation" else "eval")
            is_best = chooses and metrics.get("best/step") == step
            self._show_evaluation(step, where, dict(_shown_metrics(each, self._keep_best)), is_best=is_best)

    def _show_evaluation(self, step: int, where: str, words: dict[str, str], *, is_best: bool) -> None:
        """Prints the line of an evaluated set.

        words: {name: value}. is_best: Whether the first is the best.
        """
        elapsed = self._bar.format_interval(self._bar.format_dict["elapsed"])
        head = f"step {step:>{len(str(self._bar.total))}}  {elapsed:>6}{where}"
        line, colored = [head], [self._paint(head, _FAINT)]
        for number, (name, value) in enumerate(words.items()):
            mark = "" if number or not self._keep_best else " (best)" if is_best else " " * len(" (best)")
            line.append(f"{name} {value}{mark}")
            code = "" if number else _GOOD if is_best else _BOLD
            colored.append(f"{name} {self._paint(value + mark, code)}")
        log.note("   ".join(line).rstrip(), colored="   ".join(colored) if self._has_colors else None)

    def _paint(self, text: str, code: str) -> str:
        return f"\033[{code}m{text}\033[0m" if code else text

    def step_done(self) -> None:
        self._bar.update()
        if self._has_forecast:
            return
        now, num_steps = time.monotonic(), self._bar.n - self._bar.initial
        if num_steps == 1:
            self._first_end = now
        if now - self._began >= _FORECAST_SECONDS:
            self._has_forecast = True
            # The first step is slower than others, because it allocates and compiles.
            is_first = num_steps == 1
            seconds = now - self._began if is_first else (now - self._first_end) / (num_steps - 1)
            _show_end(seconds * (self._bar.total - self._bar.n))

    def set_activity(self, name: str) -> None:
        self._bar.set_description_str(name, refresh=sys.stderr.isatty())

    def close(self, *, has_failed: bool) -> None:
        self._bar.close()


def _show_end(seconds: float) -> None:
    """Says when the run ends. seconds: Time of the remaining steps."""
    end = datetime.now() + timedelta(seconds=seconds)
    hours, minutes = divmod(round(seconds / 60), 60)
    if hours < _MANY_HOURS:
        log.note(f"about {hours} h {minutes} min of training remain, until {end:%Y-%m-%d %H:%M}")
        return
    log.warning(
        f"this run takes about {hours / 24:,.0f} more days on this machine. Training continues. Smaller "
        f"experiments: {', '.join(f'experiment={name}' for name in _SMALL)}."
    )


def _shown_metrics(metrics: Mapping[str, float], keep_best: str | None) -> Iterator[tuple[str, str]]:
    """Yields (short name, value) of the metrics that the console shows for a set, `keep_best` first."""
    of_kind = [name for name in metrics if "/" in name and is_share(name)]
    of_kind = [name for name in of_kind if not name.endswith("/exact_accuracy")][:2]  # pass@1, pass@2
    names = [name for name in ("exact_accuracy", *of_kind, *WORDS) if name in metrics]
    if not names:  # a network without these metrics
        names = [name for name in metrics if name != "count"][:_MOST]
    chosen = [name for name in metrics if keep_best and f"/{keep_best}".endswith(f"/{name}")]
    for name in dict.fromkeys([*chosen[:1], *names]):
        usual = name.rpartition("/")[2].removesuffix("_accuracy")
        yield WORDS.get(name, printable(usual)), f"{metrics[name]:.{1 if 'steps' in name else 3}f}"
