"""Writes and reads the folder with the results of an evaluation.

measured.json               options and data that determine the results (`measured_with`). If output_dir is
                            set, also the path of the checkpoint
metrics.json                {test set: {metric: value}}
scaling.json                accuracies for several numbers of thinking steps and of samples, if asked for
<test set>__outputs.npz     arrays, such as the predictions, if asked for
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from checkpointing.finding import Checkpoint
from config.compose import config_with
from config.programs import EvaluateConfig
from dataset.kinds.evaluator import SUBMISSION_FILE, TASKS_FILE
from dataset.mixture import fingerprint_of
from distributed import log
from evaluation.known import is_trained_on
from evaluation.metric_tables import (
    Columns,
    independent_count,
    interval_of,
    is_share,
    metrics_table,
    scaling_table,
    setting_metrics,
    summarize,
    with_intervals,
)
from evaluation.passes import SetResult
from runtime.reading import read_json
from runtime.writing import replace_file, write_json

EVALUATION_FILE, SCALING_FILE = "metrics.json", "scaling.json"
MEASURED_FILE, SUMMARY_FILE = "measured.json", "summary.json"

_SCALING_KEYS = ("halting", "noise", "init_noise", "damping", "sde_noise", "loops")
_SCALING_KEYS += ("decision_cell", "decision_value", "eval_conflict_threshold", "retry_samples", "seed")
# All options that change results.
_OPTIONS = (*_SCALING_KEYS, "halt_max_steps", "samples", "select", "raw", "forward_dtype")


def open_output_folder(folder: Path) -> Path:
    """Creates a folder for results, and returns it. Raises ValueError if it is not writable."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(13, "permission denied")
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(f"cannot write into {folder} ({reason}). Choose another output_dir.") from None
    return folder


def measured_with(config: EvaluateConfig, data: Sequence[Path], checkpoint: Checkpoint) -> dict[str, Any]:
    """Returns the options and data that determine the results of an evaluation.

    They are stored in measured.json. Example: {"test": "1a2b...", "samples": [8]}. The keys are:

    - "test": Hash of the test splits.
    - each option that differs from its default, such as "samples"
    - "data": Paths of the dataset folders. The key is missing if they are the folders of the training, with
      the same test splits.

    data: Dataset folders of the evaluation.
    """
    usual = config_with(EvaluateConfig, checkpoint=config.checkpoint)
    changed = [name for name in _OPTIONS if getattr(config, name) != getattr(usual, name)]
    paths = [folder.resolve() for folder in data]
    measured = {"test": fingerprint_of(data, ("test",))}
    trained_paths = [folder.resolve() for folder in checkpoint.find_data()]
    if checkpoint.test_fingerprint is None:  # an earlier version saved the checkpoint
        has_same_tests = is_trained_on(checkpoint, data)
    else:
        has_same_tests = checkpoint.test_fingerprint == measured["test"]
    if paths != trained_paths or not has_same_tests:
        measured["data"] = [str(path) for path in paths]
    return measured | {name: getattr(config, name) for name in changed}


def name_of(measured: Mapping[str, Any], checkpoint: Checkpoint) -> str:
    """Returns the name of the default folder for the results of an evaluation.

    The name is "step_120", for example, if all options have their defaults, and the evaluation reads the test
    splits of the folders that the run was trained on, unchanged since then. Otherwise, the name ends with a
    hash of `measured`, such as "step_120_1a2b3c4d".

    measured: The options and data that determine the results, from `measured_with`. Example: {"test":
    "1a2b...", "samples": [8]}.
    """
    if "data" not in measured:  # the test splits are those of the training, so their hash adds nothing
        measured = {key: value for key, value in measured.items() if key != "test"}
    digest = hashlib.sha256(json.dumps(measured, sort_keys=True).encode()).hexdigest()[:8]
    return f"{checkpoint.name}_{digest}" if measured else checkpoint.name


def write_measured(
    folder: Path, measured: Mapping[str, Any], data: Sequence[Path], *, checkpoint: str | None
) -> None:
    """Writes the options and data of an evaluation to measured.json in a folder.

    If the folder contains results with other options, other data or another checkpoint, deletes these results
    first.

    measured: Options and data that determine the results, such as {"samples": [8]}, from `measured_with`.
    data: Dataset folders of the evaluation.
    checkpoint: Path or address of the checkpoint, which is also stored. None for the default folder of the
    checkpoint (`name_of`). If a default folder has no measured.json, its results count as results with
    default options.
    """
    path, is_default_folder = folder / MEASURED_FILE, checkpoint is None
    measured = dict(measured) if is_default_folder else {**measured, "checkpoint": checkpoint}
    try:
        before = read_json(path) if path.exists() or not is_default_folder else {}
        is_same = ({"test": measured["test"]} if is_default_folder else {}) | before == measured
    except (ValueError, TypeError):
        is_same = False
    if not is_same:
        _remove_results(folder, data)
    write_json(path, measured)


def _remove_results(folder: Path, data: Sequence[Path]) -> None:
    old = [*folder.glob("*__outputs.npz")]
    old += [folder / name for name in (EVALUATION_FILE, SCALING_FILE, "scaling.svg")]
    places = [folder, *(folder / dataset.resolve().name for dataset in data)]
    old += [place / name for place in places for name in (SUBMISSION_FILE, TASKS_FILE)]
    for file in old:
        file.unlink(missing_ok=True)


def remove_other_format(folder: Path, data: Sequence[Path], forward_dtype: str, *, stored: str) -> None:
    """Deletes results that were computed in another dtype than the new ones, and logs a message.

    data: Dataset folders of the evaluation.
    forward_dtype: Dtype of the new evaluation, such as "float32".
    stored: Dtype of the training. Old results that do not name their dtype count as computed in this dtype.
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
        _remove_results(folder, data)


def warn_of_new_data(checkpoint: Checkpoint, folders: list[Path]) -> None:
    if checkpoint.fingerprint is not None and not is_trained_on(checkpoint, folders):
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
    """Writes the result files of an evaluation, and prints tables. Only rank 0 calls it.

    Returns (content of metrics.json, content of scaling.json). The second is None if halt_max_steps is not a
    list of several numbers, and samples, select and retry_samples have their defaults.

    selected_by: Split that selected this checkpoint as the best of its run, "validation" or "test". None if
    it was not selected.
    forward_dtype: Dtype in which the model computed, such as "bfloat16".
    """
    metrics = all_metrics(results, selected_by=selected_by, forward_dtype=forward_dtype)
    scaling = None
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


def all_metrics(
    results: Mapping[str, SetResult], *, selected_by: str | None = None, forward_dtype: str | None = None
) -> dict[str, dict[str, float | str]]:
    """Returns the content of metrics.json: {test set: {metric: value}}.

    Contains the metrics of `results`, the 95 % interval of each accuracy ("accuracy_low" and
    "accuracy_high"), and the accuracy after each thinking step ("exact_accuracy_after_step_1").

    Also contains `selected_by` and `forward_dtype`, for every test set, unless they are None.

    selected_by: Split that selected this checkpoint as the best of its run. None if it was not selected.
    forward_dtype: Dtype in which the model computed, such as "bfloat16". None if it is unknown.
    """
    metrics, texts = {}, {"selected_by": selected_by, "forward_dtype": forward_dtype}
    named = {name: text for name, text in texts.items() if text is not None}
    for name, result in results.items():
        values = {**result.metrics, "count": int(result.metrics.get("count", 0))}
        if "distinct_count" in values:
            values["distinct_count"] = int(values["distinct_count"])
        for step, value in enumerate(result.exact_accuracy_after_each_step, 1):
            values[f"exact_accuracy_after_step_{step}"] = value
        metrics[name] = with_intervals(values) | named
    return metrics


def write_outputs(folder: Path, results: Mapping[str, SetResult]) -> None:
    """Writes the output arrays of each test set to <test set>__outputs.npz in a folder."""
    for name, result in results.items():
        if result.outputs:
            folder.mkdir(parents=True, exist_ok=True)
            with replace_file(folder / f"{name}__outputs.npz", "wb") as file:
                np.savez(file, **result.outputs)


def scaling_of(results: Mapping[str, SetResult], config: EvaluateConfig) -> dict[str, Any]:
    """Returns the content of scaling.json: accuracies for several numbers of steps and samples.

    The keys are:

    - the name of each option that is equal for all these numbers, such as "noise"
    - "sets": {test set: {"count": number of puzzles, "gigaflops_per_step": floating-point operations of a
      thinking step on one puzzle, in units of 1e9, "corners": list}}

    "corners" has an entry for each pair of a number of steps and a number of samples:

        {"steps": 16, "samples": 4, "ways": {"vote": {"exact_accuracy": 0.9, ...}, "any": {...}}}

    "vote" is a rule that selects one sample. "any" counts a puzzle as solved if any sample is right.
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
                    fractions |= interval_of(metric, total / count, num_independent)
            rows = [{"steps": key[0], "samples": key[1], "ways": corners[key]} for key in sorted(corners)]
            gigaflops = result.metrics["gigaflops_per_step"]
            sets[name] = {"count": count, "gigaflops_per_step": gigaflops, "corners": rows}
    return {**{name: getattr(config, name) for name in _SCALING_KEYS}, "sets": sets}


def read_results(folder: Path) -> dict[str, dict[str, float | str]]:
    """Reads metrics.json in a folder: {test set: {metric: value}}.

    Raises ValueError if the file is missing or damaged.
    """
    return read_json(folder / EVALUATION_FILE)


def write_summary(metrics: Sequence[Columns], checkpoints: Sequence[str], *, output_dir: str | None) -> None:
    """Prints the mean and the standard deviation of metrics over several checkpoints.

    Metrics that one of the checkpoints lacks are left out. Counts have no standard deviation.

    metrics: {test set: {metric: value}} for each checkpoint.
    output_dir: Folder for the file summary.json. If None, no file is written.
    """
    summary = summarize(metrics)
    log.info(metrics_table(summary, title=f"mean and standard deviation of {len(metrics)} checkpoints"))
    if output_dir:
        folder = open_output_folder(Path(output_dir))
        write_json(folder / SUMMARY_FILE, {"checkpoints": checkpoints, "sets": summary})
        log.info(f"wrote {folder}")
