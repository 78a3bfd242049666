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
_SCALING_KEYS = ("halting", "noise", "init_noise", "damping", "sde_noise", "decision_cell")
_SCALING_KEYS += ("decision_value", "eval_conflict_threshold", "seed")
_OPTIONS = (
    *_SCALING_KEYS,
    "halt_max_steps",
    "samples",
    "select",
    "raw",
    "forward_dtype",
)  # all options that change results

_Columns = Mapping[str, Mapping[str, float | str]]  # by set, by metric


def open_output_folder(folder: Path) -> Path:
    """Creates a folder for results. Raises ValueError if it is not writable.

    Call it before an evaluation, so that the error comes early.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(13, "permission denied")
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(f"cannot write into {folder} ({reason}). Choose another output_dir.") from None
    return folder


def measured_with(config: EvaluateConfig, data: Sequence[Path], checkpoint: Checkpoint) -> dict[str, Any]:
    """Returns the choices that determine the results of an evaluation: {key: value}.

    Results with different choices are never mixed in one folder. The keys are "test" (hash of the test
    splits), the options that differ from their defaults (such as "samples"), and "data" (paths of the dataset
    folders). "data" is missing if the data are the unchanged data of the training.

    data: Dataset folders of the evaluation.
    """
    usual = config_with(EvaluateConfig, checkpoint=config.checkpoint)
    changed = [name for name in _OPTIONS if getattr(config, name) != getattr(usual, name)]
    paths = [folder.resolve() for folder in data]
    measured = {"test": fingerprint_of(data, ("test",))}
    trained_paths = [folder.resolve() for folder in checkpoint.find_data()]
    if paths != trained_paths or not _has_same_tests(checkpoint, data, measured["test"]):
        measured["data"] = [str(path) for path in paths]
    return measured | {name: getattr(config, name) for name in changed}


def _has_same_tests(checkpoint: Checkpoint, data: Sequence[Path], fingerprint: str) -> bool:
    """Returns whether the test splits are still the same as in the training.

    Older checkpoints have no hash of only the test splits. For them, no split may have changed.

    fingerprint: Hash of the test splits now.
    """
    if checkpoint.test_fingerprint is None:
        return _is_trained_on(checkpoint, data)
    return checkpoint.test_fingerprint == fingerprint


def _is_trained_on(checkpoint: Checkpoint, data: Sequence[Path]) -> bool:
    """Returns whether the dataset folders are unchanged since the training of the checkpoint."""
    try:
        return checkpoint.fingerprint == fingerprint_of(data)
    except ValueError:  # no training split
        return False


def name_of(measured: Mapping[str, Any], checkpoint: Checkpoint) -> str:
    """Returns the name of the folder for the results of a checkpoint.

    It is "step_120" for the default options and the data of the training. Otherwise a hash is added:
    "step_120_1a2b3c4d".

    measured: Result of `measured_with`.
    """
    if "data" not in measured:  # the checkpoint determines the test splits
        measured = {key: value for key, value in measured.items() if key != "test"}
    digest = hashlib.sha256(json.dumps(measured, sort_keys=True).encode()).hexdigest()[:8]
    return f"{checkpoint.name}_{digest}" if measured else checkpoint.name


def write_measured(
    folder: Path, measured: Mapping[str, Any], data: Sequence[Path], *, is_default_folder: bool
) -> None:
    """Writes the choices that determine the results to measured.json in the folder for results.

    If the folder contains results with other choices, they are deleted first.

    measured: Result of `measured_with`.
    data: Dataset folders of the evaluation.
    is_default_folder: Whether the folder has its name from `name_of`. Results there without a measured.json
    then count as results with default choices. Training and older versions write such results.
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
        places = [folder, *(folder / dataset.name for dataset in data)]
        old += [place / name for place in places for name in (SUBMISSION_FILE, TASKS_FILE)]
        for file in old:
            file.unlink(missing_ok=True)
    write_json(path, measured)


def warn_of_other_format(folder: Path, forward_dtype: str, *, stored: str) -> None:
    """Logs a message if the evaluation will replace results that were computed in another dtype.

    folder: Folder with the earlier results, if any.
    forward_dtype: Dtype of the new evaluation, such as "float32".
    stored: Dtype of the training. Earlier results that do not name their dtype have this one.
    """
    try:
        before = {str(values.get("forward_dtype", stored)) for values in read_results(folder).values()}
    except (ValueError, AttributeError):
        return  # there are no results, or they are damaged
    if before - {forward_dtype}:
        old = ", ".join(sorted(before))
        log.info(
            f"{folder}: results computed in {old} will be replaced by results computed in {forward_dtype}."
        )


def warn_of_new_data(checkpoint: Checkpoint, folders: list[Path]) -> None:
    """Warns if the dataset folders have changed since the checkpoint was trained on them."""
    if checkpoint.fingerprint is not None and not _is_trained_on(checkpoint, folders):
        names = ", ".join(map(str, folders))
        log.warning(
            f"{names}: built again after {checkpoint} was trained. Its training may have used puzzles that "
            "are now test puzzles."
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
    """Writes the result files of an evaluation into `folder`, and prints tables. Only rank 0 calls it.

    Returns ({test set: {metric: value}}, content of scaling.json). The second is None if only one number of
    model calls and one run of each puzzle was evaluated.

    title: Title of the printed table.
    selected_by: Split on which this checkpoint was the best of its training, "validation" or "test". None if
    it was not selected.
    forward_dtype: Dtype in which the model computed, such as "bfloat16".
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
    """Reads the metrics that `write_results` wrote into a folder: {test set: {metric: value}}."""
    return read_json(folder / EVALUATION_FILE)


def write_summary(metrics: Sequence[_Columns], checkpoints: Sequence[str], *, output_dir: str | None) -> None:
    """Prints the mean and the standard deviation of every metric over several checkpoints.

    metrics: {test set: {metric: value}} of each checkpoint.
    checkpoints: Paths of the checkpoints.
    output_dir: Folder for the file summary.json. If None, no file is written.
    """
    summary = summarize(metrics)
    log.info(metrics_table(summary, title=f"mean and standard deviation of {len(metrics)} checkpoints"))
    if output_dir:
        folder = open_output_folder(Path(output_dir))
        write_json(folder / "summary.json", {"checkpoints": checkpoints, "sets": summary})
        log.info(f"wrote {folder}")


def all_metrics(
    results: Mapping[str, SetResult], *, selected_by: str | None = None, forward_dtype: str | None = None
) -> dict[str, dict[str, float | str]]:
    """Returns the results of an evaluation as {test set: {metric: value}}, for the file metrics.json.

    An accuracy also gets its 95 % interval: "accuracy_low" and "accuracy_high". The accuracy after each step
    gets names such as "exact_accuracy_after_step_1".

    selected_by, forward_dtype: Texts that are added to the metrics of every test set, unless they are None.
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
    """Adds the 95 % interval of each accuracy: "accuracy_low" and "accuracy_high" after "accuracy".

    If the number of puzzles is unknown, an accuracy gets no interval.

    values: {metric: value} of one test set.
    """
    completed = {}
    for name, value in values.items():
        completed[name] = value
        evaluator, slash, _ = name.rpartition("/")
        if is_share(name) and (count := independent_count(values, f"{evaluator}{slash}")) > 0:
            completed |= _interval(name, min(max(value, 0.0), 1.0), count)
    return completed


def independent_count(values: Mapping[str, float], evaluator: str = "") -> int:
    """Returns the number of test puzzles for the confidence interval of an accuracy. 0 if it is unknown.

    The interval assumes independent puzzles. So puzzles with equal inputs count once.

    values: {metric: value} of one test set.
    evaluator: Prefix of the metrics of one evaluator, such as "sudoku/" in "sudoku/valid_accuracy", because
    an evaluator may count other puzzles. "" for metrics without a prefix.
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
    """Writes the output arrays of each test set to the file <test set>__outputs.npz in `folder`.

    The arrays are in dataset order, without padding examples.
    """
    for name, result in results.items():
        if result.outputs:
            folder.mkdir(parents=True, exist_ok=True)
            with replace_file(folder / f"{name}__outputs.npz", "wb") as file:
                np.savez(file, **result.outputs)


def summarize(runs: Sequence[_Columns]) -> dict[str, dict[str, float]]:
    """Computes the mean and the standard deviation of every metric over several evaluations.

    Returns {test set: {metric: mean, "<metric>_deviation": standard deviation}}. A metric that one of the
    evaluations lacks is left out.

    runs: {test set: {metric: value}} of each evaluation.
    """
    summary: dict[str, dict[str, float]] = {}
    for name in runs[0]:
        columns = [run.get(name, {}) for run in runs]
        for metric in columns[0]:
            if _has_suffix(metric, *INTERVAL_ENDS) or not all(metric in column for column in columns):
                continue
            if metric in TEXTS:
                summary.setdefault(name, {})[metric] = ", ".join(
                    sorted({column[metric] for column in columns})
                )
                continue
            mean, deviation = mean_and_deviation([column[metric] for column in columns])
            summary.setdefault(name, {})[metric] = mean
            if deviation is not None and not metric.endswith("count"):
                summary[name][with_suffix(metric, "deviation")] = deviation
    return summary


def metrics_table(metrics: _Columns, *, title: str) -> str:
    """Returns a text table with one line for each metric and one column for each set.

    A cell also shows the interval or the standard deviation of its metric. Known metrics are shown with both
    names, for example "solved (exact_accuracy)".
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
    """Lists the metrics of all sets, without derived entries such as "accuracy_low"."""
    names = dict.fromkeys(metric for values in metrics.values() for metric in values)
    return [name for name in names if not _has_suffix(name, *INTERVAL_ENDS, "deviation")]


def metric_cell(values: Mapping[str, float | str], name: str) -> str:
    """Formats a metric for a table, with its interval or standard deviation if `values` contains them.

    Example: "0.9  [0.88, 0.92]". Returns "" if the metric is missing.

    values: {metric: value} of one test set.
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


def with_suffix(metric: str, suffix: str) -> str:
    """Appends _<suffix> to the name of a metric, before the part that starts with "@", if there is one.

    Example: with_suffix("accuracy@steps=4", "low") is "accuracy_low@steps=4".
    """
    name, at, setting = metric.partition(_SETTING)
    return f"{name}_{suffix}{at}{setting}"


def _has_suffix(metric: str, *suffixes: str) -> bool:
    return metric.partition(_SETTING)[0].endswith(tuple(f"_{suffix}" for suffix in suffixes))


# ------------------------------------------------------------------------------------ accuracy over compute


def scaling_of(results: Mapping[str, SetResult], config: EvaluateConfig) -> dict[str, Any]:
    """Returns the content of scaling.json: accuracies for several numbers of model calls and of samples.

    A sample is one run of a puzzle. The format is {option: value, "sets": {test set: {"count": number of
    puzzles, "corners": list}}}. An entry of the list is {"steps": 16, "samples": 4, "ways": {"vote":
    {"exact_accuracy": 0.9, ...}}}. "vote" is a rule that selects one of the samples. The last rule, "any",
    counts a puzzle as solved if any sample is right.
    """
    sets = {}
    for name, result in results.items():
        if count := int(result.metrics.get("count", 0)):
            num_independent = independent_count(result.metrics)
            corners: dict[tuple[int, int], dict[str, dict[str, float]]] = {}
            for (*setting, rule, figure), total in result.scores.items():
                fractions = corners.setdefault(tuple(setting), {}).setdefault(rule, {})
                metric = f"{figure}_accuracy" if figure in ("exact", "valid") else figure
                fractions[metric] = total / count
                if is_share(metric):
                    fractions |= _interval(metric, total / count, num_independent)
            rows = [{"steps": key[0], "samples": key[1], "ways": corners[key]} for key in sorted(corners)]
            sets[name] = {"count": count, "corners": rows}
    return {**{name: getattr(config, name) for name in _SCALING_KEYS}, "sets": sets}


def setting_metrics(scaling: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Flattens the content of scaling.json to {test set: {metric: value}}.

    Example of a metric: "exact_accuracy@steps=64,samples=8". A name ends with ",select=vote" if the rule
    `vote` selected the sample. Names of the first rule lack this ending. A name starts with "any_" if a
    puzzle counts as solved when any sample is right.

    scaling: Content of scaling.json.
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


def scaling_table(scaling: Mapping[str, Any]) -> str:
    """Returns a text table of the accuracies in scaling.json.

    It has one line for each number of model calls and of samples (runs of a puzzle), and one column for each
    selection rule. For a search model (LDT), it also has the fractions of wrong answers and of puzzles
    without an answer.

    scaling: Content of scaling.json.
    """
    lines = []
    for set_name, content in scaling["sets"].items():
        ways = content["corners"][0]["ways"]
        is_search = any("undecided" in fractions for fractions in ways.values())
        names = "".join(f"  {name:>15}" for name in (*ways, *(("wrong", "undecided") if is_search else ())))
        lines += [set_name, f"steps  samples  calls/puzzle{names}"]
        for setting in content["corners"]:
            ways = [*setting["ways"].values()]
            fractions = [values["exact_accuracy"] for values in ways]
            if is_search:
                undecided = ways[0]["undecided"]
                fractions += [1 - fractions[0] - undecided, undecided]
            cells = "".join(f"  {fraction:>15.4f}" for fraction in fractions)
            lines.append(f"{setting['steps']:>5}  {setting['samples']:>7}  {ways[0]['calls']:>12.6g}{cells}")
    return "\n".join(lines)


# ------------------------------------------------------------------------------------- numbers, files


def metrics_by_set(row: Mapping[str, Any], split: str = "eval") -> dict[str, dict[str, Any]]:
    """Extracts {test set: {metric: value}} from a log record with names such as "eval/all/exact_accuracy".

    split: First part of the names, such as "eval". Other names are ignored.
    """
    metrics: dict[str, dict[str, Any]] = {}
    for name, value in row.items():
        first, _, rest = name.partition("/")
        set_name, slash, metric = rest.partition("/")
        if first == split and slash:
            metrics.setdefault(set_name, {})[metric] = value
    return metrics


def is_number(value: Any) -> bool:
    """Returns whether a value is a finite int or float. Bools do not count."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def is_count(metric: str) -> bool:
    """Returns whether a metric is a number of puzzles or similar, and not a quality of answers.

    Examples: True for "count" and "arc/votes", False for "accuracy".
    """
    name = metric.rpartition("/")[2]
    return name.endswith("count") or name in ("test_inputs", "votes", "trained_on", "trained_on_rate")


def is_share(metric: str) -> bool:
    """Returns whether a metric is a fraction of puzzles or cells, such as "accuracy" or "arc/pass@2".

    Such a metric gets a confidence interval. Returns False for the ends of an interval, such as
    "accuracy_low".
    """
    is_end = _has_suffix(metric, *INTERVAL_ENDS, "deviation")
    return not is_end and (metric.endswith("accuracy") or metric.rpartition("/")[2].startswith("pass@"))
