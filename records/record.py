"""Records on disk: records/<rung>/record.json, and the log of each seed with fewer rows."""

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
MOST_P = 0.01  # a goal counts as reached where `goal_p` is below
_MOST_LINES = 200  # of a kept log, not counting rows with an evaluation
_KEPT = ("step", "seconds", "train/lm_loss", "train/accuracy", "train/exact_accuracy", "train/grad_norm")
_OF_HISTORY = ("date", "commit", "change", "seeds", "mean", "seconds_max", "goal_p", "cpu")
_OF_HISTORY += ("petaflops", "processor_hours_max")  # missing in older records


def write_record(
    result: Mapping[str, Any],
    rows: Mapping[int, Sequence[Row]],
    *,
    change: str,
    command: str,
    folder: Path = FOLDER,
) -> Path:
    """Writes the record of a rung; a summary of the previous record goes into `history`.

    result: the last line of JSON that `python -m records` prints. rows: {seed: rows of the log}. change: a
    sentence on what is new. command: the command that made the record. Returns the rung's folder.
    """
    folder = folder / result["rung"]
    before = read_record(folder)
    history = before["history"] if before else []
    if before and before["change"] != change:  # an equal sentence: the same record is written again
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
    """Reads record.json of a rung's folder; None where it is missing. ValueError for invalid JSON."""
    try:
        return read_json(folder / "record.json")
    except MissingFileError:
        return None


def read_rows(folder: Path, seed: int) -> list[Row]:
    return [parse_json(line, where="a row") for line in read_lines(folder / f"seed_{seed}.jsonl")]


def thin(rows: Sequence[Row]) -> list[Row]:
    """Keeps first and last row, rows with an evaluation, and others evenly; only keys for curves, rounded."""
    stride, kept = -(-len(rows) // _MOST_LINES), []
    for number, row in enumerate(rows):
        evaluated = [name for name in row if name.startswith(("eval/", "eval_raw/", "validation/"))]
        if number % stride == 0 or row is rows[-1] or evaluated:
            names = [name for name in row if name in _KEPT or name in evaluated]
            kept.append({name: _rounded(row[name]) for name in names})
    return kept


def _rounded(value: Any) -> Any:
    return float(f"{value:.5g}") if isinstance(value, float) else value
