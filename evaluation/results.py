"""Writes the files of an evaluation (metrics.json, saved outputs, scaling.json), and prints its tables.

Every accuracy has a 95 % interval, for the variation over other test puzzles. With several checkpoints, every
metric has a mean and a standard deviation, for the variation over seeds of the training.
"""

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from checkpointing.pretrained import Checkpoint
from config.compose import config_with
from config.programs import EvaluateConfig
from dataset.kinds.kind import SUBMISSION_FILE, TASKS_FILE
from dataset.mixture import fingerprint_of
from distributed import log
from evaluation.intervals import mean_and_deviation, wilson_interval
from evaluation.names import both_names
from evaluation.passes import SetResult
from evaluation.selection import ORACLE
from runtime.reading import read_json
from runtime.writing import replace_file, write_json

EVALUATION_FILE, SCALING_FILE = "metrics.json", "scaling.json"
MEASURED_FILE = "measured.json"  # the identity of results (`measured_with`)
INTERVAL_ENDS = ("low", "high")
TEXTS = ("selected_by", "forward_dtype")  # entries of metrics.json that are texts

_SETTING = "@steps="  # in names such as exact_accuracy@steps=4,samples=1
_ASKED = ("halting", "noise", "init_noise", "damping", "decision_cell", "decision_value")
_ASKED += ("eval_conflict_threshold", "seed")
_OPTIONS = (
    *_ASKED,
    "halt_max_steps",
    "samples",
    "select",
    "raw",
    "forward_dtype",
)  # all options that change results

_Columns = Mapping[str, Mapping[str, float | str]]  # by set, by metric


def open_output_folder(folder: Path) -> Path:
    """Creates the folder. Raises ValueError if it is not writable. Call it before the evaluation."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(13, "permission denied")
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(f"cannot write into {folder} ({reason}). Choose another output_dir.") from None
    return folder


def measured_with(config: EvaluateConfig, data: Sequence[Path], checkpoint: Checkpoint) -> dict[str, Any]:
    """Returns the identity of results, {key: value}. Results of two identities are never mixed.

    The keys are `test`, the fingerprint of the test splits, the options that differ from their defaults, and
    `data`, the data folders. `data` is missing if the folders are those of the run, and their test splits
    have not changed since the training.
    """
    usual = config_with(EvaluateConfig, checkpoint=config.checkpoint)
    others = [name for name in _OPTIONS if getattr(config, name) != getattr(usual, name)]
    paths = [each.resolve() for each in data]
    measured = {"test": fingerprint_of(data, ("test",))}
    own = [each.resolve() for each in checkpoint.find_data()]
    if paths != own or not _has_same_tests(checkpoint, data, measured["test"]):
        measured["data"] = [str(each) for each in paths]
    return measured | {name: getattr(config, name) for name in others}


def _has_same_tests(checkpoint: Checkpoint, data: Sequence[Path], found: str) -> bool:
    """Returns whether `found`, the fingerprint of the test splits, is that of the training.

    Older checkpoints contain only a fingerprint of all splits. It must then be that of the training.
    """
    if checkpoint.test_fingerprint is None:
        return _is_trained_on(checkpoint, data)
    return checkpoint.test_fingerprint == found


def _is_trained_on(checkpoint: Checkpoint, data: Sequence[Path]) -> bool:
    """Returns whether the folders have the content that the checkpoint was trained on, as far as it says."""
    try:
        return checkpoint.fingerprint == fingerprint_of(data)
    except ValueError:  # no training split
        return False


def name_of(measured: Mapping[str, Any], checkpoint: Checkpoint) -> str:
    """Returns the name of the folder for results: step_<N>, or step_<N>_<digest>.

    A default evaluation on the data of the run has no digest.
    """
    if "data" not in measured:  # the checkpoint determines the test splits
        measured = {key: value for key, value in measured.items() if key != "test"}
    digest = hashlib.sha256(json.dumps(measured, sort_keys=True).encode()).hexdigest()[:8]
    return f"{checkpoint.name}_{digest}" if measured else checkpoint.name


def write_measured(
    folder: Path, measured: Mapping[str, Any], data: Sequence[Path], *, is_default_folder: bool
) -> None:
    """Writes `measured` to measured.json. First removes results in the folder that had another identity.

    data: Data folders. If there are several, the evaluators of each write into a subfolder of its name.
    is_default_folder: Whether `name_of` named the folder. It is then the folder of this identity, also if
    training or an older version wrote results without an identity.
    """
    path = folder / MEASURED_FILE
    try:
        before = read_json(path) if path.exists() or not is_default_folder else {}
        is_same = ({"test": measured["test"]} if is_default_folder else {}) | before == measured
    except (ValueError, TypeError):
        is_same = False
    if not is_same:
        old = [*folder.glob("*__outputs.npz")]
        old += [folder / name for name in (EVALUATION_FILE, SCALING_FILE, "scaling.svg")]
        places = [folder, *(folder / each.name for each in data)]
        old += [place / name for place in places for name in (SUBMISSION_FILE, TASKS_FILE)]
        for each in old:
            each.unlink(missing_ok=True)
    write_json(path, measured)


def tell_of_other_format(folder: Path, forward_dtype: str, *, stored: str) -> None:
    """Logs a message if an evaluation replaces results that were computed in another number format.

    stored: Number format of the training. Older versions always evaluated in it, and did not record it.
    """
    try:
        before = {str(values.get("forward_dtype", stored)) for values in read_results(folder).values()}
    except (ValueError, AttributeError):
        return  # there are no results, or they are damaged
    if before - {forward_dtype}:
        old = ", ".join(sorted(before))
        log.info(f"{folder}: results in {old} are replaced by results in {forward_dtype}")


def warn_of_new_data(checkpoint: Checkpoint, folders: list[Path]) -> None:
    """Warns if the dataset folders of the run have changed since its training."""
    if checkpoint.fingerprint is not None and not _is_trained_on(checkpoint, folders):
        names = ", ".join(map(str, folders))
        log.warning(
            f"{names}: rebuilt since {checkpoint} was trained. Its training may have used these test puzzles."
        )


def write_results(
    folder: Path,
    results: Mapping[str, SetResult],
    config: EvaluateConfig,
    *,
    title: str,
    selected_by: str | None,
    forward_dtype: str,
) -> tuple[dict[str, dict[str, float | str]], dict[str, Any] | None]:
    """Writes the files of an evaluation into a folder, and prints tables. Only rank 0 calls it.

    Returns ({set: {metric: value}} with the metrics of every setting, content of scaling.json or None).
    selected_by: Puzzles that selected this checkpoint as the best of its run, "validation" or "test", or
    None. forward_dtype: Number format in which the model computed.
    """
    texts = {"selected_by": selected_by, "forward_dtype": forward_dtype}
    metrics, scaling = all_metrics(results, **texts), None
    write_outputs(folder, results)
    log.info(metrics_table(metrics, title=title))
    if config.asks_for_settings:
        scaling = scaling_of(results, config)
        log.info(scaling_table(scaling))
        write_json(folder / SCALING_FILE, scaling)
        for name, values in setting_metrics(scaling).items():
            metrics[name] |= values
    write_json(folder / EVALUATION_FILE, metrics)
    log.info(f"wrote {folder}")
    return metrics, scaling


def read_results(folder: Path) -> dict[str, dict[str, float | str]]:
    """Reads {set: {metric: value}} from a folder that `write_results` wrote."""
    return read_json(folder / EVALUATION_FILE)


def write_summary(metrics: Sequence[_Columns], checkpoints: Sequence[str], *, output_dir: str | None) -> None:
    """Prints mean and deviation over several checkpoints. If output_dir is set, writes summary.json."""
    summary = summarize(metrics)
    log.info(metrics_table(summary, title=f"mean and standard deviation of {len(metrics)} checkpoints"))
    if output_dir:
        folder = open_output_folder(Path(output_dir))
        write_json(folder / "summary.json", {"checkpoints": checkpoints, "sets": summary})
        log.info(f"wrote {folder}")


def all_metrics(
    results: Mapping[str, SetResult], *, selected_by: str | None = None, forward_dtype: str | None = None
) -> dict[str, dict[str, float | str]]:
    """Returns {set: {metric: value}}. <metric>_low and <metric>_high are the interval of an accuracy.

    selected_by: Puzzles that selected this checkpoint. forward_dtype: Number format in which the model
    computed. Both texts are added to every set, unless they are None.
    """
    metrics, texts = {}, zip(TEXTS, (selected_by, forward_dtype), strict=True)
    named = {name: text for name, text in texts if text is not None}
    for name, result in results.items():
        values = {**result.metrics, "count": int(result.metrics.get("count", 0))}
        if "distinct_count" in values:
            values["distinct_count"] = int(values["distinct_count"])
        for step, value in enumerate(result.exact_accuracy_after_each_step, 1):
            values[f"exact_accuracy_after_step_{step}"] = value
        metrics[name] = with_intervals(values) | named
    return metrics


def with_intervals(values: Mapping[str, float]) -> dict[str, float]:
    """Returns metrics with <metric>_low and <metric>_high after each accuracy, if its count is known."""
    completed = {}
    for name, value in values.items():
        completed[name] = value
        evaluator, slash, _ = name.rpartition("/")
        if is_share(name) and (count := independent_count(values, f"{evaluator}{slash}")) > 0:
            completed |= _interval(name, min(max(value, 0.0), 1.0), count)
    return completed


def independent_count(values: Mapping[str, float], evaluator: str = "") -> int:
    """Returns the number of independent test puzzles, for the interval of a set's accuracy. 0 if unknown.

    Equal puzzles, and the views of an ARC test input, are not independent. If a metric counts examples, this
    is the number of different puzzles among them.

    values: Metrics of the set. evaluator: Start of the metric's name, such as "unseen/" or "sudoku/".
    """
    count, num_rows = values.get(f"{evaluator}count", 0), values.get("count", 0)
    counts_examples = evaluator in ("", "unseen/") or count == num_rows
    if count and counts_examples and (distinct := values.get("distinct_count")):
        return max(round(distinct * count / num_rows), 1)
    return int(count)


def _interval(metric: str, share: float, count: int) -> dict[str, float]:
    ends = zip(INTERVAL_ENDS, wilson_interval(share, count), strict=True)
    return {with_suffix(metric, end): value for end, value in ends}


def write_outputs(folder: Path, results: Mapping[str, SetResult]) -> None:
    """Writes the outputs of every set to <set>__outputs.npz, in dataset order, without padding."""
    for name, result in results.items():
        if result.outputs:
            folder.mkdir(parents=True, exist_ok=True)
            with replace_file(folder / f"{name}__outputs.npz", "wb") as file:
                np.savez(file, **result.outputs)


def summarize(runs: Sequence[_Columns]) -> dict[str, dict[str, float]]:
    """Computes {set: {metric: mean, <metric>_deviation: ...}} over runs.

    runs: {set: {metric: value}} of each run. A set must be in the first run. Metrics that a run lacks are
    left out.
    """
    summary: dict[str, dict[str, float]] = {}
    for name in runs[0]:
        columns = [run.get(name, {}) for run in runs]
        for metric in columns[0]:
            if _has_suffix(metric, *INTERVAL_ENDS) or not all(metric in column for column in columns):
                continue
            if metric in TEXTS:
                summary.setdefault(name, {})[metric] = ", ".join(sorted({each[metric] for each in columns}))
                continue
            mean, deviation = mean_and_deviation([column[metric] for column in columns])
            summary.setdefault(name, {})[metric] = mean
            if deviation is not None and not metric.endswith("count"):
                summary[name][with_suffix(metric, "deviation")] = deviation
    return summary


def metrics_table(metrics: _Columns, *, title: str) -> str:
    """Returns a table as text: one line per metric, one column per set.

    Accuracies have their interval or deviation. Metrics have both their names.
    """
    names = metric_names(metrics)
    columns = [["", *map(both_names, names)]]
    for set_name, values in metrics.items():
        cells = [metric_cell(values, name) for name in names]
        columns.append([set_name.rjust(max(12, *map(len, cells), len(set_name))), *cells])
    widths = [max(map(len, column)) for column in columns]
    rows = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in zip(*columns, strict=True)]
    return "\n".join([title, *rows])


def metric_names(metrics: _Columns) -> list[str]:
    """Lists the names of the metrics of all sets, without those of intervals and deviations."""
    names = dict.fromkeys(metric for values in metrics.values() for metric in values)
    return [name for name in names if not _has_suffix(name, *INTERVAL_ENDS, "deviation")]


def metric_cell(values: Mapping[str, float | str], name: str) -> str:
    """Returns the table cell of a metric, with the interval or deviation if `values` contains one."""
    if name not in values:
        return ""
    value = values[name]
    text = f"{value:>12}" if isinstance(value, str) else f"{value:>12.6g}"
    low, high, deviation = (values.get(with_suffix(name, each)) for each in (*INTERVAL_ENDS, "deviation"))
    if low is not None:
        text += f"  [{low:.4f}, {high:.4f}]"
    if deviation is not None:
        text += f"  +- {deviation:.4g}"
    return text


def with_suffix(metric: str, suffix: str) -> str:
    """Appends to a metric's name: accuracy -> accuracy_low, accuracy@steps=4 -> accuracy_low@steps=4."""
    name, at, setting = metric.partition(_SETTING)
    return f"{name}_{suffix}{at}{setting}"


def _has_suffix(metric: str, *suffixes: str) -> bool:
    return metric.partition(_SETTING)[0].endswith(tuple(f"_{suffix}" for suffix in suffixes))


# ------------------------------------------------------------------------------------ accuracy over compute


def scaling_of(results: Mapping[str, SetResult], config: EvaluateConfig) -> dict[str, Any]:
    """Returns the content of scaling.json: the options of the evaluation, and `corners` of each labeled set.

    A corner is one setting: a number of steps and of samples. For each selection rule, it has accuracies with
    their intervals, and the network calls per puzzle. The last rule is the oracle `any`: it is right if any
    sample is right.
    """
    sets = {}
    for name, result in results.items():
        if count := int(result.metrics.get("count", 0)):
            num_independent = independent_count(result.metrics)
            corners: dict[tuple[int, int], dict[str, dict[str, float]]] = {}
            for (*setting, way, figure), number in result.scores.items():
                shares = corners.setdefault(tuple(setting), {}).setdefault(way, {})
                metric = f"{figure}_accuracy" if figure in ("exact", "valid") else figure
                shares[metric] = number / count
                if is_share(metric):
                    shares |= _interval(metric, number / count, num_independent)
            rows = [{"steps": key[0], "samples": key[1], "ways": corners[key]} for key in sorted(corners)]
            sets[name] = {"count": count, "corners": rows}
    return {**{name: getattr(config, name) for name in _ASKED}, "sets": sets}


def setting_metrics(scaling: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Returns {set: {metric: value}} of all settings, with names such as exact_accuracy@steps=64,samples=8.

    Names for the oracle start with any_. Names for a selection rule other than the first end with
    ,select=NAME.
    """
    metrics: dict[str, dict[str, float]] = {}
    for set_name, content in scaling["sets"].items():
        columns = metrics.setdefault(set_name, {})
        for setting in content["corners"]:
            where = f"@steps={setting['steps']},samples={setting['samples']}"
            for number, (way, shares) in enumerate(setting["ways"].items()):
                chosen = f",select={way}" if number and way != ORACLE else ""
                for metric, value in shares.items():
                    columns[f"{'any_' if way == ORACLE else ''}{metric}{where}{chosen}"] = value
    return metrics


def scaling_table(scaling: Mapping[str, Any]) -> str:
    """Returns a table as text: one line per set and setting, with the exact accuracy of each selection rule.

    A search may end without an answer. Its table also has the fractions of wrong answers and of undecided
    puzzles.
    """
    lines = []
    for set_name, content in scaling["sets"].items():
        ways = content["corners"][0]["ways"]
        is_search = any("undecided" in shares for shares in ways.values())
        names = "".join(f"  {name:>15}" for name in (*ways, *(("wrong", "undecided") if is_search else ())))
        lines += [set_name, f"steps  samples  calls/puzzle{names}"]
        for setting in content["corners"]:
            ways = [*setting["ways"].values()]
            shares = [each["exact_accuracy"] for each in ways]
            if is_search:
                undecided = ways[0]["undecided"]
                shares += [1 - shares[0] - undecided, undecided]
            cells = "".join(f"  {share:>15.4f}" for share in shares)
            lines.append(f"{setting['steps']:>5}  {setting['samples']:>7}  {ways[0]['calls']:>12.6g}{cells}")
    return "\n".join(lines)


# ------------------------------------------------------------------------------------- numbers, files


def metrics_by_set(row: Mapping[str, Any], split: str = "eval") -> dict[str, dict[str, Any]]:
    """Returns {set: {metric: value}} of a log record, from its names <split>/<set>/<metric>."""
    metrics: dict[str, dict[str, Any]] = {}
    for name, value in row.items():
        first, _, rest = name.partition("/")
        set_name, slash, metric = rest.partition("/")
        if first == split and slash:
            metrics.setdefault(set_name, {})[metric] = value
    return metrics


def is_number(value: Any) -> bool:
    """Returns whether a value is a finite number, and not a bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def is_count(metric: str) -> bool:
    """Returns whether a metric is a number of puzzles, tasks or votes, and does not rate answers."""
    name = metric.rpartition("/")[2]
    return name.endswith("count") or name in ("test_inputs", "votes", "trained_on", "trained_on_rate")


def is_share(metric: str) -> bool:
    """Returns whether a metric is a fraction of puzzles or cells, so that it has an interval."""
    is_end = _has_suffix(metric, *INTERVAL_ENDS, "deviation")
    return not is_end and (metric.endswith("accuracy") or metric.rpartition("/")[2].startswith("pass@"))
