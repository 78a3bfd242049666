"""Intervals and tables of metrics, and which metrics are fractions or counts.

Two ranges are shown. The 95 % interval of an accuracy says how much it varies over test puzzles. The standard
deviation of a metric over several checkpoints says how much it varies over seeds of the training.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from evaluation.intervals import mean_and_deviation, wilson_interval
from evaluation.names import both_names
from evaluation.selection import ORACLE

INTERVAL_ENDS = ("low", "high")
TEXTS = ("selected_by", "forward_dtype")  # entries of metrics.json that are texts

_MOST_PUZZLES = 10**15  # a log may contain any number
_SETTING = "@steps="  # in names such as exact_accuracy@steps=4,samples=1

Columns = Mapping[str, Mapping[str, float | str]]  # {test set: {metric: value}}


def with_intervals(values: Mapping[str, float]) -> dict[str, float]:
    """Returns a copy of the metrics of a test set, with the 95 % interval of each accuracy.

    Example: {"accuracy": 0.9, "count": 100} also gets "accuracy_low" and "accuracy_high". If the number of
    puzzles ("count") is unknown, the accuracy gets no interval.
    """
    completed = {}
    for name, value in values.items():
        completed[name] = value
        evaluator, slash, _ = name.rpartition("/")
        if is_share(name) and (count := independent_count(values, f"{evaluator}{slash}")) > 0:
            completed |= interval_of(name, value, count)
    return completed


def independent_count(values: Mapping[str, float], evaluator: str = "") -> int:
    """Returns the number of independent puzzles behind an accuracy, for its confidence interval.

    If the accuracy is a mean over examples, equal puzzles count once: returns "distinct_count", times the
    fraction of the examples in the mean. Otherwise, returns the "count" of the accuracy, such as the number
    of ARC tasks. Returns 0 if the number is unknown.

    values: {metric: value} of one test set.
    evaluator: Name of the accuracy up to the last slash, such as "unseen/sudoku/" for
    "unseen/sudoku/valid_accuracy". "" for an accuracy such as "exact_accuracy".
    """
    count, num_rows = values.get(f"{evaluator}count", 0), values.get("count", 0)
    num_examples = values.get("unseen/count" if evaluator.startswith("unseen/") else "count", 0)
    counts_examples = count == num_examples
    if count > 0 and num_rows > 0 and counts_examples and (distinct := values.get("distinct_count")):
        count = max(distinct * count / num_rows, 1)
    return round(min(max(count, 0), _MOST_PUZZLES))


def interval_of(metric: str, share: float, count: int) -> dict[str, float]:
    """Returns the 95 % interval of an accuracy: {"<metric>_low": value, "<metric>_high": value}.

    share: Accuracy over `count` independent puzzles, in [0, 1].
    """
    ends = zip(INTERVAL_ENDS, wilson_interval(share, count), strict=True)
    return {with_suffix(metric, end): value for end, value in ends}


def summarize(runs: Sequence[Columns]) -> dict[str, dict[str, float]]:
    """Returns mean and standard deviation of each metric over several evaluations, for each test set.

    The format is {test set: {metric: mean, "<metric>_deviation": standard deviation}}. Counts get no
    deviation. Metrics that one of the evaluations lacks are left out. A metric that is a text, such as
    "selected_by", gets the different texts instead of a mean: "test, validation".
    """
    summary: dict[str, dict[str, float]] = {}
    for name in runs[0]:
        columns = [run.get(name, {}) for run in runs]
        for metric in columns[0]:
            if _has_suffix(metric, *INTERVAL_ENDS) or not all(metric in column for column in columns):
                continue
            values, means = [column[metric] for column in columns], summary.setdefault(name, {})
            if metric in TEXTS:
                means[metric] = ", ".join(sorted(set(values)))
                continue
            means[metric], deviation = mean_and_deviation(values)
            if deviation is not None and not is_count(metric):
                means[with_suffix(metric, "deviation")] = deviation
    return summary


def metrics_table(metrics: Columns, *, title: str) -> str:
    """Returns a table with one line per metric and one column per test set.

    The first line is `title`. A line starts with the name of the metric for people and its name in
    metrics.json: "solved (exact_accuracy)". A cell contains the value, and its interval or standard
    deviation, if there is one.
    """
    names = metric_names(metrics)
    columns = [["", *map(both_names, names)]]
    for set_name, values in metrics.items():
        cells = [metric_cell(values, name) for name in names]
        columns.append([set_name.rjust(max(12, *map(len, cells), len(set_name))), *cells])
    widths = [max(map(len, column)) for column in columns]
    rows = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in zip(*columns, strict=True)]
    return "\n".join([title, *rows])


def metric_names(metrics: Columns) -> list[str]:
    """Returns the names of the metrics of all test sets, each once.

    Leaves out names that end in _low, _high or _deviation. Example: "accuracy_low" is an end of the interval
    of "accuracy".
    """
    names = dict.fromkeys(metric for values in metrics.values() for metric in values)
    return [name for name in names if not _has_suffix(name, *INTERVAL_ENDS, "deviation")]


def metric_cell(values: Mapping[str, float | str], name: str) -> str:
    """Returns a metric as text, such as "0.9  [0.8812, 0.9184]", or "" if missing.

    The number is padded with spaces to 12 characters. A deviation is written as "0.9  +- 0.012".
    """
    if name not in values:
        return ""
    value = values[name]
    text = f"{value:>12}" if isinstance(value, str) else f"{value:>12.6g}"
    low, high, deviation = (values.get(with_suffix(name, suffix)) for suffix in (*INTERVAL_ENDS, "deviation"))
    if low is not None:
        text += f"  [{low:.4f}, {high:.4f}]"
    if deviation is not None:
        text += f"  +- {deviation:.4g}"
    return text


def scaling_table(scaling: Mapping[str, Any]) -> str:
    """Returns the content of scaling.json as a text table.

    Each line is for one number of thinking steps and one number of samples. Each rule that selects a sample,
    such as "vote", has a column with its accuracy. The column "any" counts a puzzle as solved if any sample
    is right. The network calls and the GFLOP of a puzzle are means over all puzzles, for the rule of the
    first column. (Rules may differ: with first_to_halt, all samples of a puzzle end when the first one
    halts.) For a search (LDT), the last two columns contain the fraction of wrong answers and the fraction of
    puzzles without an answer, instead of "any".
    """
    lines = []
    for set_name, content in scaling["sets"].items():
        ways = content["corners"][0]["ways"]
        is_search = any("undecided" in fractions for fractions in ways.values())
        names = "".join(f"  {name:>15}" for name in (*ways, *(("wrong", "undecided") if is_search else ())))
        lines += [set_name, f"steps  samples  calls/puzzle  GFLOP/puzzle{names}"]
        for setting in content["corners"]:
            ways = [*setting["ways"].values()]
            fractions = [values["exact_accuracy"] for values in ways]
            if is_search:
                undecided = ways[0]["undecided"]
                fractions += [1 - fractions[0] - undecided, undecided]
            cells = "".join(f"  {fraction:>15.4f}" for fraction in fractions)
            calls, gigaflops = ways[0]["calls"], ways[0]["calls"] * content["gigaflops_per_step"]
            lines.append(
                f"{setting['steps']:>5}  {setting['samples']:>7}  {calls:>12.6g}  {gigaflops:>12.4g}{cells}"
            )
    return "\n".join(lines)


def setting_metrics(scaling: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Converts the content of scaling.json to {test set: {metric: value}}.

    Example of a metric: "exact_accuracy@steps=64,samples=8". This is the accuracy with at most 64 thinking
    steps and 8 samples of each puzzle, of which the first rule in the file selects one. For any other rule,
    its name is appended, such as ",select=vote". With the prefix "any_", a puzzle counts as solved if any
    sample is right.
    """
    metrics: dict[str, dict[str, float]] = {}
    for set_name, content in scaling["sets"].items():
        columns = metrics.setdefault(set_name, {})
        for setting in content["corners"]:
            where = f"@steps={setting['steps']},samples={setting['samples']}"
            for index, (rule, fractions) in enumerate(setting["ways"].items()):
                chosen = f",select={rule}" if index and rule != ORACLE else ""
                for metric, value in fractions.items():
                    columns[f"{'any_' if rule == ORACLE else ''}{metric}{where}{chosen}"] = value
    return metrics


def with_suffix(metric: str, suffix: str) -> str:
    """Appends _<suffix> to the name of a metric, before "@steps=...".

    Example: with_suffix("accuracy@steps=4", "low") is "accuracy_low@steps=4".
    """
    name, at, setting = metric.partition(_SETTING)
    return f"{name}_{suffix}{at}{setting}"


def _has_suffix(metric: str, *suffixes: str) -> bool:
    return metric.partition(_SETTING)[0].endswith(tuple(f"_{suffix}" for suffix in suffixes))


def metrics_by_set(row: Mapping[str, Any], split: str = "eval") -> dict[str, dict[str, Any]]:
    """Extracts the metrics of an evaluation from a line of the training log.

    Returns {test set: {metric: value}}. Example: {"eval/all/exact_accuracy": 0.9, "lr": 1e-4} gives {"all":
    {"exact_accuracy": 0.9}} for the split "eval".
    """
    metrics: dict[str, dict[str, Any]] = {}
    for name, value in row.items():
        first, _, rest = name.partition("/")
        set_name, slash, metric = rest.partition("/")
        if first == split and slash:
            metrics.setdefault(set_name, {})[metric] = value
    return metrics


def written_value(metric: str, value: float) -> str:
    """Formats the value of a metric for people.

    The first rule that applies is used: an accuracy has three decimals ("0.913"). A whole number has none
    ("1,000"). A metric with a name that ends in "steps" has two. All others have four significant digits.
    """
    if is_share(metric):
        return f"{value:.3f}"
    if float(value).is_integer():
        return f"{value:,.0f}"
    return f"{value:,.2f}" if metric.endswith("steps") else f"{value:,.4g}"


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def is_count(metric: str) -> bool:
    """Returns whether a metric does not rate the answers.

    These are metrics whose name ends in "count", such as "count" (number of puzzles), and "test_inputs",
    "votes", "samples", "trained_on" and "trained_on_rate".
    """
    name = metric.rpartition("/")[2]
    others = ("test_inputs", "votes", "samples", "trained_on", "trained_on_rate")
    return name.endswith("count") or name in others


def is_share(metric: str) -> bool:
    """Returns whether a metric is an accuracy, such as "exact_accuracy" or "arc/pass@2".

    Returns False for the ends of an interval, such as "accuracy_low".
    """
    is_end = _has_suffix(metric, *INTERVAL_ENDS, "deviation")
    return not is_end and (metric.endswith("accuracy") or metric.rpartition("/")[2].startswith("pass@"))
