"""Records on disk: records/<rung>/record.json, and the log of each seed with fewer rows.

record.json has a list of entries, one for each instruction set and number format. The logs of an entry are in
records/<rung>/<instruction set>_<number format>/.
"""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import REPOSITORY
from report.run import Row
from runtime.reading import MissingFileError, parse_json, read_json, read_lines
from runtime.writing import write_json, write_text

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
    """Writes an entry of a rung, in place of the one with its instruction set and number format.

    A summary of the replaced entry goes into `history`. Other entries and their logs stay as they are.

    result: the last line of JSON that `python -m records` prints. rows: {seed: rows of the log}. change: a
    sentence on what is new. command: the command that made the record. Returns the folder of the logs.
    """
    folder = folder / result["rung"]
    entries = read_entries(folder)
    places = [number for number, entry in enumerate(entries) if logs_of(entry) == logs_of(result)]
    before = entries[places[0]] if places else None
    history = before["history"] if before else []
    if before and before["change"] != change:  # an equal sentence: the same record is written again
        history = [*history, {name: before[name] for name in _OF_HISTORY if name in before}]
    logs = folder / logs_of(result)
    logs.mkdir(parents=True, exist_ok=True)
    for path in logs.glob("seed_*.jsonl"):
        path.unlink()
    for seed, of_seed in rows.items():
        lines = (f"{json.dumps(row)}\n" for row in thin(of_seed))
        write_text(logs / f"seed_{seed}.jsonl", "".join(lines))
    entry = {
        **{name: value for name, value in result.items() if name != "rung"},
        "mean": result[f"{result['metric']}_mean"],
        "recipe": f"config/experiment/{result['rung']}.yaml",
        "command": command,
        "change": change,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "history": history,
    }
    place = places[0] if places else len(entries)
    entries = [*entries[:place], entry, *entries[place + 1 :]]
    write_json(folder / "record.json", {"rung": result["rung"], "entries": entries})
    return logs


def read_entries(folder: Path) -> list[dict[str, Any]]:
    """Reads the entries of a rung's folder; [] without record.json. ValueError for invalid JSON."""
    try:
        return read_json(folder / "record.json")["entries"]
    except MissingFileError:
        return []


def best_entry(entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the entry with most seeds; of several, the newest."""
    return max(entries, key=lambda entry: (entry["seeds"], entry["date"]))


def logs_of(entry: Mapping[str, Any]) -> str:
    """Returns the name of the folder with the logs of an entry."""
    return f"{entry['instruction_set']}_{entry['forward_dtype']}"


def read_rows(folder: Path, entry: Mapping[str, Any], seed: int) -> list[Row]:
    """Returns the rows in the log of a seed. folder: The folder of the rung."""
    lines = read_lines(folder / logs_of(entry) / f"seed_{seed}.jsonl")
    return [parse_json(line, where="a row") for line in lines]


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
