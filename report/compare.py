"""Several runs on one page: curves over steps, examples, operations and seconds, and a table over seeds.

Runs with configs that differ only in seed and name are one group, with a mean and a deviation.
"""

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from config.files import flatten
from evaluation.results import mean_and_deviation
from report.charts import Chart, Line, fraction, line_chart
from report.page import check_output, check_packages, duration, render, short, write_page
from report.run import Curve, RunRecord, read_run

_OF_ONE_RUN = ("seed", "run_name", "project_name", "checkpoint_path")
_AXES = ("steps", "examples", "petaflops", "seconds")
_METRICS = (  # title, metric, options of the chart
    ("Puzzles solved, test", "eval/{set}/exact_accuracy", {"share": True, "from_zero": True}),
    ("Cells right, test", "eval/{set}/accuracy", {"share": True}),
    ("Loss, training", "train/lm_loss", {"log_y": True}),
    ("Steps until halting, training", "train/steps", {}),
    ("Gradient norm", "train/grad_norm", {"log_y": True}),
    ("Examples a second", "train/examples_per_second", {"from_zero": True}),
)
_MOST_DIFFERENCES = 4  # named in a label


def write_comparison(folders: Sequence[Path], *, output: Path, warn: Callable[[str], None]) -> Path:
    """Writes the page that compares runs; returns its path.

    ValueError, one line, where a folder has no run, or the page cannot be written.
    """
    check_packages()
    if len({each.resolve() for each in folders}) < len(folders):
        raise ValueError("the same run is given twice: give each run folder once")
    check_output(output)
    runs = [read_run(folder) for folder in folders]
    for text in (text for run in runs for text in run.warnings):
        warn(text)
    write_page(output, _comparison_page(runs))
    return output


@dataclasses.dataclass(frozen=True)
class Group:
    """Runs that differ only in their seed. label: how they differ from other groups. role: their colour."""

    label: str
    role: str
    runs: list[RunRecord]


def group_runs(runs: Sequence[RunRecord]) -> list[Group]:
    """Puts runs that are repetitions of each other together, in the order in which they come."""
    groups: dict[str, list[RunRecord]] = {}
    for number, run in enumerate(runs):
        settings = {key: value for key, value in run.config.items() if key not in _OF_ONE_RUN}
        # A run without its config might be anything.
        key = json.dumps(settings, sort_keys=True, default=str) if run.config else f"run {number}"
        groups.setdefault(key, []).append(run)
    labels = _labels([members[0] for members in groups.values()])
    return [
        Group(label, f"series{number % 8 + 1}", members)
        for number, (label, members) in enumerate(zip(labels, groups.values(), strict=True))
    ]


def _labels(runs: Sequence[RunRecord]) -> list[str]:
    """Names each run by the keys in which it differs from the others, or by its own name."""
    configs = [flatten(run.config) for run in runs]
    names = dict.fromkeys(key for config in configs for key in config if key not in _OF_ONE_RUN)
    differing = [key for key in names if len({str(config.get(key)) for config in configs}) > 1]
    labels = []
    for run, config in zip(runs, configs, strict=True):
        named = [f"{key.removeprefix('arch.')}={config[key]}" for key in differing if key in config]
        is_short = named and len(differing) <= _MOST_DIFFERENCES
        labels.append(", ".join(named) if is_short else run.name)
    repeated = {label for label in labels if labels.count(label) > 1}
    return [str(run.folder) if label in repeated else label for label, run in zip(labels, runs, strict=True)]


def _comparison_page(runs: Sequence[RunRecord]) -> str:
    groups = group_runs(runs)
    count = f"{len(runs)} runs" + (f" in {len(groups)} groups" if len(groups) < len(runs) else "")
    return render(
        "comparison.html.jinja",
        title="Runs side by side",
        subtitle=f"{count}; runs that differ only in their seed are one group, their mean is the heavy line",
        axes=[(name, comparison_charts(groups, name)) for name in _AXES],
        columns=COLUMNS,
        rows=[table_row(group) for group in groups],
        notes=[note for run in runs for note in run.warnings],
        runs=[(group, run) for group in groups for run in group.runs],
    )


def _tested(run: RunRecord, metric: str) -> list[float]:
    """Returns the mean over the sets of each evaluation."""
    curves = [run.curve(f"eval/{name}/{metric}")[1] for name in run.eval_sets()]
    return [fmean(values) for values in zip(*filter(None, curves), strict=False)]


# How a value is written, and the value of a run, None where it is not known.
COLUMNS: dict[str, tuple[Callable[[float], str], Callable[[RunRecord], float | None]]] = {
    "solved": (fraction, lambda run: (_tested(run, "exact_accuracy") or [None])[-1]),
    "best": (fraction, lambda run: max(_tested(run, "exact_accuracy"), default=None)),
    "cells right": (fraction, lambda run: (_tested(run, "accuracy") or [None])[-1]),
    "training loss": ("{:.3g}".format, lambda run: (run.curve("train/lm_loss")[1] or [None])[-1]),
    "steps": ("{:,.0f}".format, lambda run: run.last_step),
    "training time": (duration, lambda run: run.seconds().get(run.last_step)),
    "training PF": ("{:.3g}".format, lambda run: run.petaflops),
    "examples a second": (short, lambda run: fmean(run.curve("train/examples_per_second")[1] or [0]) or None),
}


def table_row(group: Group) -> dict[str, Any]:
    """Returns a group's line of the table: (mean, deviation) as texts of each column."""
    cells = []
    for text, value in COLUMNS.values():
        known = [found for run in group.runs if (found := value(run)) is not None]
        mean, deviation = mean_and_deviation(known) if known else (None, None)
        shown = "\u2013" if mean is None else text(mean)
        cells.append((shown, "" if deviation is None else f"\u00b1 {text(deviation)}"))
    return {"group": group, "seeds": str(len(group.runs)), "cells": cells}


def comparison_charts(groups: Sequence[Group], axis: str) -> list[Chart]:
    """Draws each metric of all runs over steps, examples, operations or seconds of training.

    Of several runs in a group the mean is drawn too, row by row, as far as all of them go.
    """
    drawn = []
    own = dict.fromkeys(name for group in groups for run in group.runs for name in run.other_metrics)
    of_networks = [(f"{name}, training", f"train/{name}", {}) for name in own]
    for title, metric, options in (*_METRICS, *of_networks):
        has_dots, lines = metric.startswith("eval/"), []
        for group in groups:
            curves = [curve for run in group.runs if (curve := _curve(run, metric, axis))]
            if len(curves) > 1:
                lines += [Line("", *curve, group.role, is_faint=True) for curve in curves]
                curves = [[list(map(fmean, zip(*part, strict=False))) for part in zip(*curves, strict=True)]]
            lines += [Line(group.label, *curve, group.role, has_dots=has_dots) for curve in curves]
        drawn.append(line_chart(title, lines, x_label=axis, **options))
    return [chart for chart in drawn if chart]


def _curve(run: RunRecord, metric: str, axis: str) -> Curve | None:
    """Returns a metric of a run over an axis; None where the log lacks either. {set}: the run's first one."""
    if "{set}" in metric and not run.eval_sets():
        return None
    steps, values = run.curve(metric.format(set=next(iter(run.eval_sets()), "")))
    if axis == "seconds":
        seconds = run.seconds()
        steps = [seconds[step] for step in steps] if any(seconds.values()) else []
    elif axis == "examples":
        size = run.config.get("global_batch_size")
        steps = [step * size for step in steps] if isinstance(size, int) else []
    elif axis == "petaflops":
        logged = dict(zip(*run.curve("train/petaflops"), strict=True))
        steps = [logged[step] for step in steps] if logged.keys() >= set(steps) else []
    return (steps, values) if steps else None
