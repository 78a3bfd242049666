"""Records on disk: records/<rung>/record.json, and of each seed its thinned log, seed_<n>.jsonl."""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import REPOSITORY
from evaluation.results import write_json
from report.run import Row

FOLDER = REPOSITORY / "records"
RECORD_FILE = "record.json"
MOST_LINES = 200  # of a thinned log

_KEPT = ("step", "seconds", "train/lm_loss", "train/accuracy", "train/exact_accuracy", "train/grad_norm")
_DIGITS = 5
_OF_HISTORY = ("date", "commit", "change", "seeds", "mean", "seconds_max", "goal_p", "cpu")


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
    before = read_record(folder / RECORD_FILE)
    history = []
    if before is not None:
        history = before["history"]
        if before["change"] != change:  # else it is the same record, written again
            history = [*history, {name: before[name] for name in _OF_HISTORY}]
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("seed_*.jsonl"):
        path.unlink()
    for seed, of_seed in rows.items():
        lines = (json.dumps(_rounded(row)) for row in thin(of_seed))
        (folder / f"seed_{seed}.jsonl").write_text("".join(f"{line}\n" for line in lines))
    record = {
        **result,
        "mean": result[f"{result['metric']}_mean"],
        "recipe": f"config/experiment/{result['rung']}.yaml",
        "command": command,
        "change": change,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "history": history,
    }
    write_json(folder / RECORD_FILE, record)
    return folder


def read_record(path: Path) -> dict[str, Any] | None:
    """Reads a record; None where there is none. ValueError where the file is no JSON."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ValueError(f"{path} is no record ({error}): write it again") from None


def read_rows(folder: Path, seed: int) -> list[Row]:
    return [json.loads(line) for line in (folder / f"seed_{seed}.jsonl").read_text().splitlines()]


def thin(rows: Sequence[Row], *, most: int = MOST_LINES) -> list[Row]:
    """Keeps the first row, the last, all with an evaluation, and of the others evenly what there is room for.

    Of evaluations alone that are more than `most`, some go, evenly. Of each row what curves need is kept.
    """
    ends = {0, len(rows) - 1} if rows else set()
    chosen = ends | {place for place, row in enumerate(rows) if any(map(_is_evaluated, row))}
    if len(chosen) > most:
        chosen = ends | set(_evenly(sorted(chosen - ends), most - len(ends)))
    else:
        others = [place for place in range(len(rows)) if place not in chosen]
        chosen |= set(_evenly(others, most - len(chosen)))
    return [
        {name: value for name, value in rows[place].items() if name in _KEPT or _is_evaluated(name)}
        for place in sorted(chosen)
    ]


def _evenly(places: Sequence[int], count: int) -> list[int]:
    count = min(count, len(places))
    return [places[number * len(places) // count] for number in range(count)]


def _is_evaluated(name: str) -> bool:
    return name.startswith(("eval/", "eval_raw/", "validation/"))


def _rounded(row: Row) -> Row:
    return {
        name: float(f"{value:.{_DIGITS}g}") if isinstance(value, float) and name != "seconds" else value
        for name, value in row.items()
    }
