"""The table that compares runs. Runs that differ only in the seed share one row.

A row contains the mean accuracy with its confidence interval, and the p-value of a t-test, among others.
"""

import csv
import dataclasses
import functools
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from config.files import flatten
from dataset.kinds.kind import kind_names
from evaluation.intervals import difference_p, mean_interval, wilson_interval
from evaluation.metric_tables import independent_count, is_number, metrics_by_set
from report.charts import duration, fraction, short
from report.page import check_output, write_page
from report.run import RunRecord, read_run
from training.best import Selection

NOTE = (
    "solved: mean over seeds [95 % interval of the mean (Student's t); for one seed, over test puzzles "
    "(Wilson)]. p: p-value of a two-sided t-test against the first row"
)
_NAMES = ("run_name", "project_name", "checkpoint_path", "wandb_group")
# Keys of what a run writes and checks. They do not change the training. _OUTPUT_WORDS start more such keys.
_OF_OUTPUT = ("loggers", "log_interval", "report", "save_outputs", "keep_checkpoints", "resume", "leaks")
_OF_OUTPUT += ("sanity_check", "replica_check_interval", "init_timeout_seconds", "step_timeout_seconds")
_OUTPUT_WORDS = ("checkpoint_", "profile", "wandb_")
_MOST_DIFFERENCES = 6  # with more differing keys, only _ALWAYS_SHOWN become columns, and none is in the label
_ALWAYS_SHOWN = ("arch.name", "halting")  # accuracies with other values of these keys are not comparable


@dataclasses.dataclass(frozen=True)
class Group:
    """A group of runs that train alike, except for the seed.

    label     name of the group in tables and legends
    role      name of the color of its lines in charts
    settings  {config key: value}, for keys that differ between the groups
    runs      the runs
    """

    label: str
    role: str
    settings: dict[str, str]
    runs: list[RunRecord]


def without_repeats(
    runs: Sequence[RunRecord], warn: Callable[[str], None] = lambda line: None
) -> list[RunRecord]:
    """Leaves out repeated runs: of several runs that are equal, returns only one.

    Two runs are equal if they have the same data and the same config, including the seed. Config keys that do
    not change the training, such as names and loggers, are not compared. Of equal runs, returns the newest
    finished one. If none has finished, returns the newest. A run without a config is equal to no other run.

    warn: Function that is called with a text for each run that is left out.
    """
    counted: dict[str, RunRecord] = {}
    for index, run in enumerate(runs):
        key = _key(run, index)
        if other := counted.get(key):
            run, left_out = sorted((other, run), key=_age, reverse=True)
            warn(f"{left_out.folder} repeats {run.folder} with the same config and seed. It is left out.")
        counted[key] = run
    return list(counted.values())


def _settings(run: RunRecord) -> dict[str, Any]:
    return {
        key: value
        for key, value in run.config.items()
        if key not in (*_NAMES, *_OF_OUTPUT) and not key.startswith(_OUTPUT_WORDS)
    }


# Equal for runs that differ only in what they are called and what they write. A run without a config has its
# own key. index: Index of the run.
def _key(run: RunRecord, index: int, *, without: str = "") -> str:
    settings = {key: value for key, value in _settings(run).items() if key != without}
    same = json.dumps([settings, run.fingerprint], sort_keys=True, default=str)
    return same if run.config else f"run {index}"


def _age(run: RunRecord) -> tuple[bool, str]:
    return run.status.get("status") == "finished", str((run.starts or [{}])[-1].get("time", ""))


def group_runs(runs: Sequence[RunRecord]) -> list[Group]:
    """Groups runs that train alike, except for the seed. The groups are in the order of their first runs.

    Config keys that do not change the training, such as names and loggers, are not compared. If a dataset was
    rebuilt between two runs, the runs are in different groups. A run without a config is the only run of its
    group.
    """
    groups: dict[str, list[RunRecord]] = {}
    for index, run in enumerate(runs):
        groups.setdefault(_key(run, index, without="seed"), []).append(run)
    configs = [flatten(_settings(members[0])) for members in groups.values()]
    _name_rebuilt_data(configs, [members[0].fingerprint for members in groups.values()])
    names = dict.fromkeys(key for config in configs for key in config if key != "seed")
    differing = [key for key in names if len({str(config.get(key)) for config in configs}) > 1]
    settings = [{key: str(config.get(key, "")) for key in differing} for config in configs]
    labels = [_label(*group) for group in zip(groups.values(), settings, strict=True)]
    repeated = {label for label in labels if labels.count(label) > 1}
    labels = [
        str(members[0].folder) if label in repeated else label
        for label, members in zip(labels, groups.values(), strict=True)
    ]
    roles = [f"series{index % 8 + 1}" for index in range(len(groups))]
    return [*map(Group, labels, roles, settings, groups.values())]


def _name_rebuilt_data(configs: Sequence[dict[str, Any]], fingerprints: Sequence[str | None]) -> None:
    found: dict[str, set[str]] = {}
    names = [(fingerprint or "unknown")[:8] for fingerprint in fingerprints]
    for config, name in zip(configs, names, strict=True):
        found.setdefault(str(config.get("data_path")), set()).add(name)
    if any(len(group_names) > 1 for group_names in found.values()):
        for config, name in zip(configs, names, strict=True):
            config["data"] = name  # start of the dataset's hash


def _label(members: Sequence[RunRecord], settings: dict[str, str]) -> str:
    if settings and len(settings) <= _MOST_DIFFERENCES:
        return ", ".join(f"{key.removeprefix('arch.')}={value}" for key, value in settings.items() if value)
    return members[0].name + (f" and {len(members) - 1} more" if len(members) > 1 else "")


def _tested(run: RunRecord, metric: str) -> list[float]:
    # The mean over all test puzzles, for each evaluation.
    selection = Selection(metric, has_validation=False)
    rows = (
        {name: value for name, value in row.items() if name.startswith("eval/") and is_number(value)}
        for row in run.rows
    )
    return [value for row in rows if (value := selection.value(row)) is not None]


def _last_sets(run: RunRecord) -> list[str]:
    """Returns the names of the test sets in the last evaluation of the log."""
    return list(next(filter(None, map(metrics_by_set, reversed(run.rows))), {}))


def _solved(run: RunRecord) -> float | None:
    return (_tested(run, "exact_accuracy") or [None])[-1]


def _last_value(run: RunRecord, *, name: str) -> float | None:
    return (run.curve(name)[1] or _tested(run, name) or [None])[-1]


def _trained_on(run: RunRecord) -> dict[str, float]:
    curves = {set_name: run.curve(f"eval/{set_name}/trained_on")[1] for set_name in _last_sets(run)}
    return {set_name: values[-1] for set_name, values in curves.items() if values}


def _unseen(run: RunRecord) -> float | None:
    trained_on = _trained_on(run)
    if not any(trained_on.values()):
        return None
    solved, total = 0.0, 0.0  # over all test puzzles
    for set_name in _last_sets(run):
        start = f"eval/{set_name}/{'unseen/' if trained_on.get(set_name) else ''}"
        if shares := run.curve(f"{start}exact_accuracy")[1]:
            count = (run.curve(f"{start}count")[1] or [1])[-1]
            solved, total = solved + shares[-1] * count, total + count
    return solved / total if total else None


# {column: (function that formats a value, function that returns the value of a run or None)}.
_VALUES: dict[str, tuple[Callable[[float], str], Callable[[RunRecord], float | None]]] = {
    "best": (fraction, lambda run: max(_tested(run, "exact_accuracy"), default=None)),
    "trained on": ("{:,.0f}".format, lambda run: sum(_trained_on(run).values()) or None),
    "unseen": (fraction, _unseen),
    "cells right": (fraction, lambda run: (_tested(run, "accuracy") or [None])[-1]),
    "training loss": ("{:.3g}".format, lambda run: (run.curve("train/lm_loss")[1] or [None])[-1]),
    "training steps": ("{:,.0f}".format, lambda run: run.last_step),
    "training time": (duration, lambda run: run.seconds().get(run.last_step)),
    "training PF": ("{:.3g}".format, lambda run: run.petaflops),
    "examples/s": (short, lambda run: fmean(run.curve("train/examples_per_second")[1] or [0]) or None),
}


@dataclasses.dataclass(frozen=True)
class Table:
    """A table that compares groups of runs.

    columns  names of the columns
    rows     cells as texts, one list for each group
    records  {column: value} for each group, for CSV. A value is None if it is unknown
    """

    columns: list[str]
    rows: list[list[str]]
    records: list[dict[str, Any]]

    def to_markdown(self) -> str:
        rows = [list(map(_markdown, row)) for row in (self.columns, *self.rows)]
        widths = [max(3, *map(len, column)) for column in zip(*rows, strict=True)]
        rows.insert(1, ["-" * width for width in widths])
        lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in rows]
        return "\n".join([*lines, "", NOTE + "."]) + "\n"

    def to_latex(self) -> str:
        """Returns the table as LaTeX. A document that includes it must load the package booktabs."""
        rows = [" & ".join(map(_latex, row)) + r" \\" for row in (self.columns, *self.rows)]
        head = [rf"\begin{{tabular}}{{{'l' * len(self.columns)}}}", r"\toprule", rows[0], r"\midrule"]
        return "\n".join([f"% {NOTE}", *head, *rows[1:], r"\bottomrule", r"\end{tabular}"]) + "\n"

    def to_csv(self) -> str:
        text = io.StringIO()
        writer = csv.DictWriter(text, list(self.records[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.records)
        return text.getvalue()


def build_table(groups: Sequence[Group], columns: Sequence[str] | None = None) -> Table:
    """Builds a table with one row for each group of runs.

    The column "p" is the p-value of a t-test. The test compares the accuracies of the runs in this row with
    the accuracies of the runs in the first row. Raises ValueError for an unknown column.

    groups: Groups of runs that differ only in the seed, from `group_runs`.
    columns: Columns to show. A column has a default name such as "solved", or is a metric of the log such as
    "train/lm_loss" or "accuracy" (mean over test puzzles). If None, all default columns that are not empty.
    """
    usual = ["seeds", "solved", "p", *_VALUES]
    values, runs = dict(_VALUES), [run for group in groups for run in group.runs]
    for column in columns or ():
        if column not in usual:
            values[column] = ("{:.4g}".format, functools.partial(_last_value, name=column))
            if all(_last_value(run, name=column) is None for run in runs):
                raise ValueError(_unknown_column(column, runs, usual))
    settings = list(groups[0].settings)
    is_labeled = not 0 < len(settings) <= _MOST_DIFFERENCES
    settings = [key for key in _ALWAYS_SHOWN if key in settings] if is_labeled else settings
    first = [share for run in groups[0].runs if (share := _solved(run)) is not None]
    rows, records = [], []
    for index, group in enumerate(groups):
        named = {"runs": group.label} if is_labeled else {}
        named |= {key: group.settings[key] for key in settings}
        shares = [share for run in group.runs if (share := _solved(run)) is not None]
        mean, ends = fmean(shares) if shares else None, _interval(group.runs, shares)
        p = difference_p(shares, first) if index and shares and first else None
        record = {**named, "seeds": len(group.runs), "solved": mean, "low": ends[0], "high": ends[1], "p": p}
        solved = "-" if mean is None else fraction(mean)
        solved += "" if ends[0] is None else f" [{fraction(ends[0])}, {fraction(ends[1])}]"
        cells = {**named, "seeds": str(len(group.runs)), "solved": solved}
        cells["p"] = "" if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}"
        for column, (text, value) in values.items():
            known = [found for run in group.runs if (found := value(run)) is not None]
            record[column] = fmean(known) if known else None
            cells[column] = "-" if record[column] is None else text(record[column])
        rows.append(cells)
        records.append(record)
    if columns is None:
        shown = [name for name in (*named, *usual) if any(row[name] not in ("", "-") for row in rows)]
    else:
        shown = [*named, *columns]
        of_csv = {*shown, *(("low", "high") if "solved" in columns else ())}
        records = [{name: value for name, value in record.items() if name in of_csv} for record in records]
    return Table(shown, [[row[name] for name in shown] for row in rows], records)


def _unknown_column(column: str, runs: Sequence[RunRecord], usual: Sequence[str]) -> str:
    kind = next((part for part in column.split("/")[:-1] if part in kind_names()), None)
    if kind and not any(f"/{kind}/" in name for run in runs for row in run.rows for name in row):
        return (
            f"--columns: no run has {column}, because the evaluator {kind} did not run in training. Train "
            f"with evaluators=[{kind}], or choose another column."
        )
    return f"--columns: no run has {column}. Choose from {', '.join(usual)}, or a metric of the log."


def _interval(runs: Sequence[RunRecord], shares: Sequence[float]) -> tuple[float | None, float | None]:
    """Returns (low, high), the 95 % confidence interval of the accuracy of a group of runs.

    With several runs, it is the interval of their mean accuracy (Student's t). With one run, it is the
    interval of the accuracy over test puzzles (Wilson). Returns (None, None) if the interval is unknown.

    shares: Accuracy of each run whose accuracy is known.
    """
    if len(shares) > 1:
        low, high = mean_interval(shares)
        return max(low, 0.0), min(high, 1.0)
    names = ("count", "distinct_count")
    sets = [
        {key: values[-1] for key in names if (values := run.curve(f"eval/{set_name}/{key}")[1])}
        for run in runs
        for set_name in _last_sets(run)
    ]
    count = sum(map(independent_count, sets))
    return wilson_interval(shares[0], count) if shares and count else (None, None)


def write_table(folders: Sequence[Path], path: Path, *, columns: Sequence[str] | None = None) -> None:
    """Writes the table that compares runs, as Markdown (.md), LaTeX (.tex) or CSV (.csv).

    Raises ValueError for another suffix, an unknown column, or a folder without a run.

    folders: Run folders.
    columns: Columns to show: default names such as "solved", or metrics of the log such as "train/lm_loss".
    If None, all default columns that are not empty.
    """
    formats = {".md": Table.to_markdown, ".tex": Table.to_latex, ".csv": Table.to_csv}
    if path.suffix not in formats:
        raise ValueError(f"unknown table format: --table {path}. Use the suffix {' or '.join(formats)}.")
    check_output(path)
    runs = without_repeats([read_run(folder) for folder in folders])
    table = build_table(group_runs(runs), columns)
    write_page(path, formats[path.suffix](table))


def _markdown(text: str) -> str:
    return " ".join(text.splitlines()).replace("|", "\\|")


_LATEX = {letter: "\\" + letter for letter in "&%_#${}"}
_LATEX |= {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
_LATEX |= {"<": "$<$", ">": "$>$"}


def _latex(text: str) -> str:
    return text.translate(str.maketrans(_LATEX))
