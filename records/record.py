"""Records on disk: records/<rung>/record.json, and of each seed its thinned log; what they say of a goal.

Student's t with a whole number of degrees of freedom is a finite sum (Abramowitz and Stegun, Handbook of
Mathematical Functions, 26.7.3 and 26.7.4), so nothing beyond the standard library is needed.
"""

import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import REPOSITORY
from config.reading import MissingFileError, parse_json, read_json, read_lines
from config.writing import write_json, write_text
from evaluation.results import mean_and_deviation
from report.run import Row

FOLDER = REPOSITORY / "records"
MOST_P = 0.01  # a goal is held where the p of `goal_p` is below
_MOST_LINES = 200  # of a thinned log, beside those with an evaluation
_KEPT = ("step", "seconds", "train/lm_loss", "train/accuracy", "train/exact_accuracy", "train/grad_norm")
_OF_HISTORY = ("date", "commit", "change", "seeds", "mean", "seconds_max", "goal_p", "cpu")
_OF_HISTORY += ("petaflops", "processor_hours_max")  # not in older records


def write_record(
    result: Mapping[str, Any],
    rows: Mapping[int, Sequence[Row]],
    *,
    change: str,
    command: str,
    folder: Path = FOLDER,
) -> Path:
    """Writes the record of a rung in place of the one before, which goes into its history.

    result: the last line of a run of it. rows: by seed, of its log. change: what is new about it, in a
    sentence. command: that made it. Returns the folder of the rung.
    """
    folder = folder / result["rung"]
    before = read_record(folder)
    history = before["history"] if before else []
    if before and before["change"] != change:  # else it is the same record, written again
        history = [*history, {name: before[name] for name in _OF_HISTORY if name in before}]
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("seed_*.jsonl"):
        path.unlink()
    for seed, of_seed in rows.items():
        lines = (f"{json.dumps(row)}\n" for row in thin(of_seed))
        write_text(folder / f"seed_{seed}.jsonl", "".join(lines))
    record = {
        **result,
        "mean": result[f"{result['metric']}_mean"],
        "recipe": f"config/experiment/{result['rung']}.yaml",
        "command": command,
        "change": change,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "history": history,
    }
    write_json(folder / "record.json", record)
    return folder


def read_record(folder: Path) -> dict[str, Any] | None:
    """Reads the record of a rung; None where there is none. ValueError where the file is no JSON."""
    try:
        return read_json(folder / "record.json")
    except MissingFileError:
        return None


def read_rows(folder: Path, seed: int) -> list[Row]:
    return [parse_json(line, where="a row") for line in read_lines(folder / f"seed_{seed}.jsonl")]


def thin(rows: Sequence[Row]) -> list[Row]:
    """Keeps both ends, rows with an evaluation, and others evenly; of each what curves need, rounded."""
    stride, kept = -(-len(rows) // _MOST_LINES), []
    for number, row in enumerate(rows):
        evaluated = [name for name in row if name.startswith(("eval/", "eval_raw/", "validation/"))]
        if number % stride == 0 or row is rows[-1] or evaluated:
            names = [name for name in row if name in _KEPT or name in evaluated]
            kept.append({name: _rounded(row[name]) for name in names})
    return kept


def _rounded(value: Any) -> Any:
    return float(f"{value:.5g}") if isinstance(value, float) else value


def goal_p(values: Sequence[float], goal: float) -> float | None:
    """Computes the p of the one-sided one-sample t-test: the mean is above the goal, against not above it.

    None for fewer than two values. Values that are all the same have p 0 above the goal, else 1.
    """
    mean, deviation = mean_and_deviation(values)
    if deviation is None:
        return None
    if deviation == 0:
        return 0.0 if mean > goal else 1.0
    return t_tail((mean - goal) * math.sqrt(len(values)) / deviation, len(values) - 1)


def mean_interval(values: Sequence[float], *, confidence: float = 0.95) -> tuple[float, float] | None:
    """Computes the interval that the mean over all seeds lies in with this confidence; None for one value."""
    mean, deviation = mean_and_deviation(values)
    if deviation is None:
        return None
    low, high = 0.0, 1e6
    for _ in range(100):  # more than a float has bits
        middle = (low + high) / 2
        is_below = t_tail(middle, len(values) - 1) > (1 - confidence) / 2
        low, high = (middle, high) if is_below else (low, middle)
    half = high * deviation / math.sqrt(len(values))
    return mean - half, mean + half


def t_tail(t: float, freedom: int) -> float:
    """Computes P(T >= t) of Student's t with `freedom` (at least 1) degrees of freedom."""
    angle = math.atan2(t, math.sqrt(freedom))
    is_odd = freedom % 2
    term = total = (math.cos(angle) if freedom > 1 else 0.0) if is_odd else 1.0
    for number in range(2 + is_odd, freedom - 1, 2):
        term *= math.cos(angle) ** 2 * (number - 1) / number
        total += term
    within = 2 / math.pi * (angle + math.sin(angle) * total) if is_odd else math.sin(angle) * total
    return (1 - within) / 2
