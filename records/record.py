"""Records on disk: records/<rung>/record.json, and of each seed its thinned log."""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import REPOSITORY
from config.reading import MissingFileError, parse_json, read_json, read_lines
from config.writing import write_json, write_text
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
