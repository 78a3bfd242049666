"""Records on disk: records/<rung>/record.json, and a shortened log for each seed.

A rung is a benchmark task. record.json contains a list of entries (results), one for each instruction set and
dtype. The logs of an entry are in records/<rung>/<instruction set>_<dtype>/.
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
MOST_P = 0.01  # a goal counts as reached if `goal_p` is smaller
_MOST_LINES = 200  # maximum lines of a stored log, not counting evaluations
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
    """Stores the results of a benchmark task in record.json, and a log per seed.

    Replaces earlier results with the same instruction set and dtype. If their sentence `change` is another
    one, a summary of them is added to "history". Returns the folder of the logs.

    result: Statistics over the seeds and facts about the machine, such as {"rung": "maze", "goal": 0.9, ...}.
    `python -m records` prints them as JSON.
    rows: {seed: records of the log}. The stored logs are shortened.
    change: Sentence that says what has changed since the earlier results.
    folder: Folder that contains a folder for each task.
    """
    folder = folder / result["rung"]
    entries = read_entries(folder)
    places = [index for index, entry in enumerate(entries) if logs_of(entry) == logs_of(result)]
    before = entries[places[0]] if places else None
    history = before["history"] if before else []
    if before and before["change"] != change:  # with an equal sentence, the same record is written again
        history = [*history, {key: before[key] for key in _OF_HISTORY if key in before}]
    logs = folder / logs_of(result)
    logs.mkdir(parents=True, exist_ok=True)
    for path in logs.glob("seed_*.jsonl"):
        path.unlink()
    for seed, of_seed in rows.items():
        lines = (f"{json.dumps(row)}\n" for row in thin(of_seed))
        write_text(logs / f"seed_{seed}.jsonl", "".join(lines))
    entry = {
        **{key: value for key, value in result.items() if key != "rung"},
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
    """Returns the results of a benchmark task, one dict for each instruction set and dtype.

    Returns [] if there are none. Raises ValueError if record.json is damaged.
    """
    try:
        return read_json(folder / "record.json")["entries"]
    except MissingFileError:
        return []


def best_entry(entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the result with the most seeds. If several have as many, returns the newest of them."""
    return max(entries, key=lambda entry: (entry["seeds"], entry["date"]))


def logs_of(entry: Mapping[str, Any]) -> str:
    """Returns the name of the folder with the logs of a result, such as "amx_bf16_float32"."""
    return f"{entry['instruction_set']}_{entry['forward_dtype']}"


def read_rows(folder: Path, entry: Mapping[str, Any], seed: int) -> list[Row]:
    """Returns the stored log of a training, [{"step": 100, "train/lm_loss": 0.5}, ...].

    entry: Entry of record.json in `folder`.
    """
    lines = read_lines(folder / logs_of(entry) / f"seed_{seed}.jsonl")
    return [parse_json(line, where="a row") for line in lines]


def thin(rows: Sequence[Row]) -> list[Row]:
    """Returns a shortened copy of a log.

    It contains at most 200 evenly spaced records, the last record, and all records with an evaluation. Of the
    training metrics, it has only a few, such as "train/lm_loss". Values have five significant digits.
    """
    stride, thinned = -(-len(rows) // _MOST_LINES), []
    for index, row in enumerate(rows):
        evaluated = [key for key in row if key.startswith(("eval/", "eval_raw/", "validation/"))]
        if index % stride == 0 or row is rows[-1] or evaluated:
            names = [key for key in row if key in _KEPT or key in evaluated]
            thinned.append({key: _rounded(row[key]) for key in names})
    return thinned


def _rounded(value: Any) -> Any:
    return float(f"{value:.5g}") if isinstance(value, float) else value
