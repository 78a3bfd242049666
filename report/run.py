"""Reads a run folder for reports and tables: config, log, launches and the last evaluation.

A missing or damaged config or log causes a warning, not an error. Example: a folder with only the log
(metrics.jsonl) is enough for a report.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from checkpointing.files import CONFIG_FILE, STARTS_FILE, checkpoints_in, explain_missing, read_state, step_of
from config.architecture import architectures
from config.files import fill_defaults
from evaluation.metric_tables import TEXTS, is_count, is_number, metrics_by_set, with_intervals
from evaluation.results import EVALUATION_FILE, MEASURED_FILE, SCALING_FILE
from models import network_class
from runtime.metrics_file import METRICS_FILE, read_rows
from runtime.reading import read_json, read_lines, read_yaml
from training.run_folder import STATUS_FILE

# Metrics that have a separate chart on the pages and the dashboard, or deliberately none.
_KNOWN_METRICS = (
    *("count", "accuracy", "exact_accuracy", "exact_accuracy_after_step_1", "steps"),
    *("lm_loss", "q_halt_accuracy", "q_halt_loss", "q_continue_loss"),
)

# Fields of starts.jsonl and of the status that the pages show, with their types.
_START = dict.fromkeys(("time", "command", "git_commit", "hardware", "gradient_sync", "torch"), str)
_START |= dict.fromkeys(("step", "processes", "num_parameters"), int)
_START["gigaflops_per_step"] = float
_STATUS = {"status": str, "step": int}
_DRAWN = ("calls", "exact_accuracy", "exact_accuracy_low", "exact_accuracy_high")  # of scaling.json

# Without accuracies that another chart shows, of unseen puzzles, and pass@3 and more of ARC.
_OF_EVALUATOR = re.compile(r"(?!unseen/)[^/@]+/(?!exact_accuracy$)(pass@[12]|[^/@]+)")
_MOST_OF_EVALUATORS = 8  # charts

Row = dict[str, Any]
Curve = tuple[list[float], list[float]]  # x and y


def other_metrics(arch: str) -> list[str]:
    """Returns the metrics of a model that the standard charts do not show, such as "kills" for "ldt".

    arch: Name of the model.
    """
    objective = network_class(arch).objective_class
    return [name for name in objective.metrics | objective.training_metrics if name not in _KNOWN_METRICS]


@dataclasses.dataclass(frozen=True)
class RunRecord:
    """The content of a run folder, for reports.

    config       content of config.yaml, with defaults for missing keys. Empty if the file is missing or
                 damaged
    rows         records of metrics.jsonl, {name: value}, sorted by training step
    starts       records of starts.jsonl: step, command, git_commit, hardware, ... There is one for each
                 launch
    status       {"status": such as "finished", "step": last training step}
    evaluation   {test set: {metric: value}} of the evaluation that `read_run` has chosen. Empty if there is
                 none
    scaling      newest scaling.json (accuracies for several numbers of thinking steps and of samples). None
                 if there is no such file
    fingerprint  hash of the dataset. None if it is unknown
    warnings     texts about problems, such as a missing file
    """

    folder: Path
    config: dict[str, Any]
    rows: list[Row]
    starts: list[Row]
    status: dict[str, Any]
    evaluation: dict[str, dict[str, Any]]
    scaling: dict[str, Any] | None
    fingerprint: str | None
    warnings: list[str]

    @property
    def name(self) -> str:
        return str(self.config.get("run_name") or self.folder.resolve().name)

    @property
    def _arch(self) -> str:
        arch = self.config.get("arch")
        return str(arch.get("name", "")) if isinstance(arch, dict) else ""

    @property
    def architecture(self) -> str:
        """The heading of the model, such as "HRM". If its plugin is not loaded, its arch.name."""
        return architectures()[self._arch].heading() if self._arch in architectures() else self._arch

    @property
    def other_metrics(self) -> list[str]:
        return other_metrics(self._arch) if self._arch in architectures() else []

    @property
    def evaluator_metrics(self) -> list[str]:
        """Up to 8 logged metrics of evaluators for charts, such as "sudoku/valid_accuracy".

        Leaves out counts, metrics of unseen puzzles, exact_accuracy (it has a chart), and pass@3 and more.
        """
        rows = [metrics_by_set(row, split) for row in self.rows for split in ("eval", "validation")]
        names = dict.fromkeys(name for row in rows for values in row.values() for name in values)
        own = [name for name in names if _OF_EVALUATOR.fullmatch(name) and not is_count(name)]
        return own[:_MOST_OF_EVALUATORS]

    @property
    def last_step(self) -> int:
        return self.rows[-1]["step"] if self.rows else 0

    @property
    def num_parameters(self) -> int | None:
        return self.starts[-1].get("num_parameters") if self.starts else None

    @property
    def petaflops(self) -> float | None:
        return (self.curve("train/petaflops")[1] or [None])[-1]

    def curve(self, name: str) -> Curve:
        """Returns (training steps, values) of a metric in the log.

        Leaves out NaN, infinity, and numbers beyond 1e100 in magnitude.

        name: Full name, such as "train/lm_loss".
        """
        points = [(row["step"], float(row[name])) for row in self.rows if _is_drawable(row.get(name))]
        return [step for step, _ in points], [value for _, value in points]

    def seconds(self) -> dict[int, float]:
        """Returns the training time up to each logged training step: {step: seconds}.

        The time of evaluations and checkpoints is not included.
        """
        total, before, seconds = 0.0, 0, {}
        for row in self.rows:
            step_seconds = row.get("train/step_seconds")
            total += (row["step"] - before) * step_seconds if _is_drawable(step_seconds) else 0.0
            before = row["step"]
            seconds[row["step"]] = total
        return seconds

    def eval_sets(self, split: str = "eval") -> list[str]:
        """Returns the names of the test sets in the log, such as "all" for "eval/all/accuracy".

        split: First part of the names of the metrics, such as "eval".
        """
        return list(dict.fromkeys(set_name for row in self.rows for set_name in metrics_by_set(row, split)))


def _is_drawable(value: Any) -> bool:
    return is_number(value) and abs(value) <= 1e100  # sums and axes of larger numbers overflow


def read_run(folder: Path, *, evaluation: Path | None = None) -> RunRecord:
    """Reads the config, the log and the last evaluation from a run folder.

    A missing or damaged config or log becomes a text in `RunRecord.warnings`. Raises ValueError if the folder
    does not exist. Without `evaluation`, also raises ValueError if the folder has no run.

    evaluation: Folder of the evaluation to report. If None, the newest one with default options, from
    evaluate.py or from the log of the run.
    """
    if not folder.is_dir():
        raise ValueError(explain_missing(folder))
    log, config_path = folder / METRICS_FILE, folder / CONFIG_FILE
    if evaluation is None and not (log.exists() or config_path.exists() or any(folder.glob("step_*"))):
        missing = f"{CONFIG_FILE} and {METRICS_FILE} are missing"
        raise ValueError(f"{folder} is not a run folder: {missing}. Pass a folder that pretrain.py wrote.")
    warnings: list[str] = []
    config: dict[str, Any] = {}
    try:
        config = fill_defaults(read_yaml(config_path))
    except ValueError as error:
        warnings.append(str(error))
    rows = {values["step"]: values for values, _ in read_rows(folder)}  # the last record of a step counts
    warnings += _broken_lines(log)
    ordered = [rows[step] for step in sorted(rows)]
    results, scaling = _read_evaluation(folder, evaluation, ordered, warnings)
    checkpoints = checkpoints_in(folder)
    return RunRecord(
        folder=folder,
        config=config,
        rows=ordered,
        starts=[_typed(values, _START) for values, _ in read_rows(folder, STARTS_FILE)],
        status=_typed(_read_json(folder / STATUS_FILE), _STATUS),
        evaluation=results or _logged_evaluation(ordered),
        scaling=scaling,
        fingerprint=_fingerprint(checkpoints[-1]) if checkpoints else None,
        warnings=warnings,
    )


def _broken_lines(log: Path) -> list[str]:
    """Returns [warning] if a log is missing or has damaged lines, otherwise [].

    An incomplete last line causes no warning, because a killed run may leave one.
    """
    if not log.exists():
        return [f"{log} is missing. The report has no learning curves."]
    lines = [line.replace("\0", "").rstrip() for line in read_lines(log, allows_zeros=True)]
    intact = {text for _, text in read_rows(log.parent)}
    broken = [line_number for line_number, line in enumerate(lines, 1) if line and line not in intact]
    if broken and broken[-1] == len(lines):
        broken.pop()
    if not broken:
        return []
    more = f" and {len(broken) - 1} more" if len(broken) > 1 else ""
    return [f"{log}, line {broken[0]}{more}: not a record of metrics. It is skipped."]


def _read_json(path: Path) -> Any:
    try:
        return read_json(path)
    except ValueError:
        return None


def _fingerprint(checkpoint: Path) -> str | None:
    try:
        found = read_state(checkpoint).get("dataset_fingerprint")
    except ValueError:
        return None
    return found if isinstance(found, str) else None


def _read_evaluation(
    folder: Path, evaluation: Path | None, rows: list[Row], warnings: list[str]
) -> tuple[dict[str, dict[str, Any]], dict[str, Any] | None]:
    """Reads the newest results of evaluate.py in a run folder.

    Returns (content of metrics.json, content of scaling.json). If metrics.json is missing or damaged, the
    first is {}. If scaling.json is missing or damaged, the second is None. Problems with metrics.json are
    appended to `warnings`.

    folder: Run folder. evaluation: Folder of the result files. If None, all folders in evaluation/ of the run
    that contain metrics.json are searched, and the newest result counts. There, metrics.json is skipped if it
    was computed with other options than the defaults. It is also skipped if it is older than the log and the
    log has an evaluation of a later training step. rows: Records of the log.
    """
    last = max((row["step"] for row in rows if metrics_by_set(row)), default=0)
    logged = (folder / METRICS_FILE).stat().st_mtime if last else 0.0
    files = [evaluation / EVALUATION_FILE] if evaluation else folder.glob(f"evaluation/*/{EVALUATION_FILE}")
    results, scaling = {}, None
    for path in sorted(files, key=lambda path: path.stat().st_mtime if path.exists() else 0):
        found, grid = _read_json(path), _read_json(path.with_name(SCALING_FILE))
        measured = _read_json(path.with_name(MEASURED_FILE))
        is_own = evaluation is not None or not isinstance(measured, dict) or measured.get("data") is None
        if evaluation and isinstance(measured, dict) and "data" in measured and rows:
            of_other = f"The results in {evaluation} are from other data than the log"
            warnings.append(f"{of_other}. The charts of the log do not show them.")
        if is_own and _can_be_drawn(grid):
            scaling = grid
        step = step_of(path.parent)
        if evaluation is None and (step is None or (step < last and path.stat().st_mtime < logged)):
            continue
        if isinstance(found, dict) and all(isinstance(values, dict) for values in found.values()):
            results = {
                set_name: {key: value for key, value in values.items() if _is_drawable(value) or key in TEXTS}
                for set_name, values in found.items()
            }
        else:
            warnings.append(f"cannot read {path}. Evaluate the run again.")
    return results, scaling


def _typed(row: Any, types: Mapping[str, type]) -> Row:
    row = row if isinstance(row, dict) else {}  # the file may be damaged
    return {name: value for name, value in row.items() if isinstance(value, types.get(name, ()))}


def _can_be_drawn(scaling: Any) -> bool:
    try:
        for content in scaling["sets"].values():
            by = next(iter(content["corners"][0]["ways"]))
            for setting in content["corners"]:
                shares = (setting["ways"][by][metric] for metric in _DRAWN)
                if not all(map(is_number, (setting["steps"], setting["samples"], *shares))):
                    return False
        return bool(scaling["sets"])
    except (KeyError, TypeError, AttributeError, IndexError, StopIteration):
        return False


def _logged_evaluation(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    for row in reversed(rows):
        if results := metrics_by_set({name: value for name, value in row.items() if _is_drawable(value)}):
            return {set_name: with_intervals(values) for set_name, values in results.items()}
    return {}
