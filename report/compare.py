"""Several runs on one page: curves over steps, examples and seconds, and a table over seeds.

Runs whose configs differ only in their seed and their name are one group, of which mean and deviation are
told.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from evaluation.results import mean_and_deviation
from report.charts import Chart, Line, fraction, line_chart
from report.page import check_output, check_packages, duration, render, short, write_page
from report.run import RunRecord, read_run

_OF_ONE_RUN = ("seed", "run_name", "project_name", "checkpoint_path")
_METRICS = (  # title, metric in training, metric of the test split, options of the chart
    ("Puzzles solved, test", None, "exact_accuracy", {"share": True, "from_zero": True}),
    ("Cells right, test", None, "accuracy", {"share": True}),
    ("Loss, training", "lm_loss", None, {"log_y": True}),
    ("Steps until halting, training", "steps", None, {}),
    ("Gradient norm", "grad_norm", None, {"log_y": True}),
    ("Examples a second", "examples_per_second", None, {"from_zero": True}),
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
    for run in runs:
        for text in run.warnings:
            warn(text)
    write_page(output, _comparison_page(runs))
    return output


@dataclasses.dataclass(frozen=True)
class Group:
    """Runs that differ only in their seed: what tells them from the other groups, and their colour."""

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
    configs = [_flat(run.config) for run in runs]
    names = dict.fromkeys(key for config in configs for key in config if key not in _OF_ONE_RUN)
    differing = [key for key in names if len({str(config.get(key)) for config in configs}) > 1]
    labels = []
    for run, config in zip(runs, configs, strict=True):
        told = [f"{key.removeprefix('arch.')}={config[key]}" for key in differing if key in config]
        is_short = told and len(differing) <= _MOST_DIFFERENCES
        labels.append(", ".join(told) if is_short else run.name)
    repeated = {label for label in labels if labels.count(label) > 1}
    return [str(run.folder) if label in repeated else label for label, run in zip(labels, runs, strict=True)]


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        is_mapping = isinstance(value, dict)
        flat |= _flat(value, f"{prefix}{key}.") if is_mapping else {prefix + key: value}
    return flat


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


# ------------------------------------------------------------------------------------------------------ table


def table_row(group: Group) -> dict[str, Any]:
    """Returns a group's line of the table: (mean, deviation) as texts of each column."""

    def told(values: Sequence[float | None], text: Callable[[float], str]) -> tuple[str, str]:
        known = [value for value in values if value is not None]
        if not known:
            return "\u2013", ""
        mean, deviation = mean_and_deviation(known)
        return text(mean), "" if deviation is None else f"\u00b1 {text(deviation)}"

    def last(name: str) -> list[float | None]:
        return [values[-1] if (values := run.curve(name)[1]) else None for run in group.runs]

    def mean(name: str) -> list[float | None]:
        return [sum(values) / len(values) if (values := run.curve(name)[1]) else None for run in group.runs]

    finals, bests = zip(*(_last_and_best(run, "exact_accuracy") for run in group.runs), strict=True)
    cells = [_last_and_best(run, "accuracy")[0] for run in group.runs]
    seconds = [list(run.seconds().values())[-1] if run.rows else None for run in group.runs]
    return {
        "group": group,
        "seeds": str(len(group.runs)),
        "cells": [
            told(finals, fraction),
            told(bests, fraction),
            told(cells, fraction),
            told(last("train/lm_loss"), lambda value: f"{value:.3g}"),
            told([run.last_step for run in group.runs], lambda value: f"{value:,.0f}"),
            told(seconds, duration),
            told(mean("train/examples_per_second"), short),
        ],
    }


COLUMNS = ("solved", "best", "cells right", "training loss", "steps", "training time", "examples a second")


def _last_and_best(run: RunRecord, metric: str) -> tuple[float | None, float | None]:
    """Returns the last and the largest value of a metric of the test split in the log, mean over the sets."""
    curves = [run.curve(f"eval/{name}/{metric}")[1] for name in run.eval_sets()]
    curves = [values for values in curves if values]
    if not curves:
        return None, None
    means = [sum(values) / len(values) for values in zip(*curves, strict=False)]
    return means[-1], max(means)


# ----------------------------------------------------------------------------------------------------- curves


def _over_steps(run: RunRecord, steps: Sequence[float]) -> list[float]:
    return list(steps)


def _over_examples(run: RunRecord, steps: Sequence[float]) -> list[float]:
    size = run.config.get("global_batch_size")
    return [step * size for step in steps] if isinstance(size, int) else []


def _over_seconds(run: RunRecord, steps: Sequence[float]) -> list[float]:
    seconds = run.seconds()
    return [seconds[step] for step in steps] if seconds and any(seconds.values()) else []


_AXES: dict[str, Callable[[RunRecord, Sequence[float]], list[float]]] = {
    "steps": _over_steps,
    "examples": _over_examples,
    "seconds": _over_seconds,
}


def comparison_charts(groups: Sequence[Group], axis: str) -> list[Chart]:
    """Draws each metric of all runs over steps, examples or seconds of training."""
    drawn = []
    own = dict.fromkeys(name for group in groups for run in group.runs for name in run.own_metrics)
    for title, in_training, in_test, options in (
        *_METRICS,
        *((f"{name}, training", name, None, {}) for name in own),
    ):
        lines = []
        for group in groups:
            curves = []
            for run in group.runs:
                names = (
                    [f"eval/{name}/{in_test}" for name in run.eval_sets()[:1]]
                    if in_test
                    else [f"train/{in_training}"]
                )
                for name in names:
                    steps, values = run.curve(name)
                    x = _AXES[axis](run, steps)
                    if x:
                        curves.append((x, values))
            is_several = len(curves) > 1
            lines += [
                Line(
                    "", x, values, group.role, has_dots=bool(in_test) and not is_several, is_faint=is_several
                )
                if is_several
                else Line(group.label, x, values, group.role, has_dots=bool(in_test))
                for x, values in curves
            ]
            if is_several:
                lines.append(_mean_line(group, curves, has_dots=bool(in_test)))
        chart = line_chart(title, lines, x_label=axis, **options)
        if chart:
            drawn.append(chart)
    return drawn


def _mean_line(group: Group, curves: Sequence[tuple[list[float], list[float]]], *, has_dots: bool) -> Line:
    """Returns the mean over the runs of a group, row by row, as far as all of them go."""
    length = min(len(x) for x, _ in curves)
    columns = [
        [sum(each[place] for each in column) / len(column) for place in range(length)]
        for column in ([x for x, _ in curves], [y for _, y in curves])
    ]
    return Line(group.label, *columns, group.role, has_dots=has_dots)
