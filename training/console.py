"""The console of a run: a progress bar, and a line for each evaluated set."""

import os
import sys
import time
from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta

from config.schema import PretrainConfig
from distributed import log
from distributed.progress import Progress
from evaluation.metric_tables import is_count, is_share, metrics_by_set, written_value
from evaluation.names import written_name
from runtime.reading import printable
from training.best import goal_of

_TRAINED = ("lm_loss", "exact_accuracy", "accuracy")  # on the progress bar
_EVALUATED = ("wrong", "undecided", "accuracy", "lm_loss", "act_steps")
_UNSEEN = ("trained_on", "unseen/exact_accuracy")
_SPLITS = ("validation", "eval", "eval_raw", "test")
# After so many seconds of training, a line says when the run ends. From so many hours on, it is a warning.
_FORECAST_SECONDS, _MANY_HOURS = 60, 48
_SMALL = ("demo", "sudoku_9x9_easy", "maze_15x15")  # experiments for two CPU cores, minutes each
_MOST = 4  # maximum number of metrics on the progress bar
_FAINT, _BOLD, _GOOD = "2", "1", "1;32"  # ANSI codes


class Console:
    """Logger that shows the progress of a run on the terminal.

    A progress bar shows the newest training metrics. Each evaluation prints a line for each test and
    validation set.

    steps: range(start, stop). `start` is the number of training steps that were already done when this
        process started, 0 for a new training. `stop` is the last step that this process does.
    """

    name = "the progress bar"

    def __init__(self, config: PretrainConfig, steps: range):
        self._bar = Progress(desc="training", total=steps.stop, initial=steps.start, unit="steps")
        self._began, self._has_forecast = time.monotonic(), False
        self._keep_best = config.keep_best
        self._has_colors = sys.stderr.isatty() and not os.environ.get("NO_COLOR")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        trained = {name.removeprefix("train/"): value for name, value in metrics.items() if "train/" in name}
        known = [name for name in _TRAINED if name in trained]
        shown = known or list(trained)[:_MOST]  # a network without these metrics shows its first ones
        self._bar.set_postfix_str(
            "  ".join(f"{written_name(name)} {trained[name]:.3f}" for name in shown), refresh=False
        )
        sets = {
            (split, name): set_metrics
            for split in _SPLITS
            for name, set_metrics in metrics_by_set(metrics, split).items()
        }
        width = max((len(f"{split}/{printable(name)}") for split, name in sets), default=0)
        for (split, name), set_metrics in sets.items():
            where = f"  {split}/{printable(name)}".ljust(width + 2) if len(sets) > 1 else ""
            chooses = split == ("validation" if metrics.get("best/selected_by") == "validation" else "eval")
            is_best = chooses and metrics.get("best/step") == step and not self._is_worst(metrics)
            self._show_evaluation(
                step, where, dict(_shown_metrics(set_metrics, self._keep_best)), is_best=is_best
            )

    def _is_worst(self, metrics: Mapping[str, float]) -> bool:
        # An accuracy of 0 is not marked as the best.
        best = metrics.get(f"best/{self._keep_best}")
        return best == 0 and goal_of(self._keep_best) == "max"

    def _show_evaluation(self, step: int, where: str, texts: dict[str, str], *, is_best: bool) -> None:
        """Prints one line with the results of a test or validation set.

        where: Name of the set, such as "  eval/all". "" if only one set was evaluated. texts: {short name of
        a metric: value as text}, such as {"accuracy": "0.913"}. is_best: Whether to mark the first value as
        the best so far.
        """
        elapsed = self._bar.format_interval(self._bar.format_dict["elapsed"])
        head = f"step {step:>{len(str(self._bar.total))}}  {elapsed:>6}{where}"
        line, colored = [head], [self._paint(head, _FAINT)]
        for index, (name, value) in enumerate(texts.items()):
            mark = "" if index or not self._keep_best else " (best)" if is_best else " " * len(" (best)")
            line.append(f"{name} {value}{mark}")
            code = "" if index else _GOOD if is_best else _BOLD
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
    hours, minutes = divmod(max(1, round(seconds / 60)), 60)
    if hours < _MANY_HOURS:
        end = datetime.now() + timedelta(seconds=seconds)
        time_left = f"{hours} h {minutes} min" if hours else f"{minutes} min"
        log.note(f"about {time_left} of training remain, until {end:%Y-%m-%d %H:%M}")
        return
    log.warning(
        f"this run takes about {hours / 24:,.0f} more days on this machine. Training continues. Smaller "
        f"experiments: {', '.join(f'experiment={name}' for name in _SMALL)}."
    )


def _shown_metrics(metrics: Mapping[str, float], keep_best: str | None) -> Iterator[tuple[str, str]]:
    """Selects metrics of a test set to show on the console. Yields (short name, value as text) of each.

    If the set contains ARC puzzles without labels, it has no accuracy. The first pair is then, for example,
    ("64", "answers, no labels") for 64 answers of the model. The console shows "64 answers, no labels".

    metrics: {metric: value} of the test set.
    keep_best: Name of the metric that selects the best checkpoint, or None. This metric comes first.
    """
    of_kind = [name for name in metrics if "/" in name and is_share(name) and "unseen/" not in name]
    of_kind = [name for name in of_kind if not name.endswith("/exact_accuracy")][:2]  # pass@1, pass@2
    names = [name for name in ("exact_accuracy", *of_kind, *_EVALUATED) if name in metrics]
    if not names:  # a network without these metrics
        names = [name for name in metrics if not is_count(name)][:_MOST]
    if not names and "arc/votes" in metrics:
        yield f"{metrics['arc/votes']:.0f}", "answers, no labels"
    names += [name for name in _UNSEEN if metrics.get("trained_on") and name in metrics]
    chosen = [name for name in metrics if keep_best and f"/{keep_best}".endswith(f"/{name}")]
    # Example: "exact_accuracy" and "unseen/exact_accuracy" are both ends of keep_best=unseen/exact_accuracy.
    for name in dict.fromkeys([*sorted(chosen, key=len)[-1:], *names]):
        value = metrics[name]
        is_whole = name == "trained_on" or name.endswith("steps")
        yield written_name(name), written_value(name, value) if is_whole else f"{value:.3f}"
