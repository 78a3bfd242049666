"""A checkpoint on disk: its files, which are the ones of a run, and whether it is what was written. And the
log of the run, beside its checkpoints, which says which of them is the best.

The manifest has size and sha256 of every file, and a digest of its own content; there is one way to write it,
so that no byte of it can change unnoticed. A folder is named `step_<N>` only once all of it is there.
"""

import contextlib
import hashlib
import json
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from config.reading import MissingFileError, parse_json, read_bytes, read_json, read_lines
from config.writing import remove_unfinished_files
from dataset.format import sha256_of
from parallel import log

WEIGHTS, EMA_WEIGHTS = "weights", "ema_weights"  # parts of a checkpoint (`checkpointing.tensors`)
CONFIG_FILE = "config.yaml"
STATE_FILE = "state.json"
MANIFEST_FILE = "manifest.json"
METRICS_FILE = "metrics.jsonl"
STARTS_FILE = "starts.jsonl"  # of a run: with which command, code and hardware it began, and went on
SHARED_CONFIG_FILE = "config.json"  # these two are a checkpoint to share, on the Hub or as a folder
SHARED_WEIGHTS_FILE = "model.safetensors"
BEST_STEP, SELECTED_BY = "best/step", "best/selected_by"  # in rows of the log; and best/<metric>


class CorruptCheckpointError(ValueError):
    """A file of the checkpoint is missing, or not what was written. The message has the word "corrupt"."""


def step_of(path: Path) -> int | None:
    """Returns N of a path that is named step_<N>, as URM's code has it with .pt behind it; else None."""
    match = re.fullmatch(r"step_(\d+)(?:\.pt)?", path.absolute().name)
    return int(match[1]) if match else None


def read_state(folder: Path) -> dict[str, Any]:
    """Reads state.json; nothing where it is not there, as beside weights that somebody copied.

    ValueError, one line, where it is no JSON object.
    """
    path = folder / STATE_FILE
    try:
        state = read_json(path)
    except MissingFileError:
        return {}
    except ValueError as error:
        raise ValueError(f"{error}: choose another checkpoint") from None
    if not isinstance(state, dict):
        raise ValueError(f"{path} holds no JSON object: choose another checkpoint")
    return state


def checkpoints_in(run_folder: Path) -> list[Path]:
    """Lists the checkpoint folders of a run, the newest last, damaged ones too."""
    folders = [path for path in run_folder.glob("step_*") if step_of(path) is not None and path.is_dir()]
    return sorted(folders, key=step_of)


def newest_checkpoint(run_folder: Path) -> Path | None:
    """Finds the complete checkpoint with the highest step, without looking at its content."""
    complete = [path for path in checkpoints_in(run_folder) if (path / MANIFEST_FILE).is_file()]
    return complete[-1] if complete else None


def read_rows(run_folder: Path, name: str = METRICS_FILE) -> Iterator[tuple[dict[str, Any], str]]:
    """Yields values and text of all whole lines of the log: a killed process may have left one unfinished."""
    with contextlib.suppress(MissingFileError):
        for line in read_lines(run_folder / name):
            with contextlib.suppress(ValueError):
                values = parse_json(line, where="the line")
                if isinstance(values, dict) and _is_step(values.get("step")):
                    yield values, line.rstrip()


def _is_step(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**53


def best_checkpoint(run_folder: Path) -> tuple[Path, str]:
    """Finds the best checkpoint of a run, as its log has it; returns it, and which puzzles chose it.

    ValueError, one line, where there is none.
    """
    rows = [values for values, _ in read_rows(run_folder) if _is_step(values.get(BEST_STEP))]
    if not rows:
        raise ValueError(
            f"{run_folder / METRICS_FILE} names no best checkpoint: a run with keep_best has one after its "
            "first evaluation"
        )
    folder = run_folder / f"step_{rows[-1][BEST_STEP]}"
    if not folder.is_dir():
        raise ValueError(
            f"{folder}, the best of its run, is not there: checkpoint_every_eval and keep_best keep it"
        )
    return folder, "validation" if rows[-1].get(SELECTED_BY) == "validation" else "test"


def manifest_text(files: dict[str, dict[str, Any]]) -> str:
    """Makes the manifest of files given as {name: {"bytes": ..., "sha256": ...}}."""
    digest = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
    return json.dumps({"files": files, "sha256": digest}, indent=1, sort_keys=True) + "\n"


def verify_checkpoint(folder: Path) -> None:
    """Reads every file once and compares it with the manifest.

    Raises CorruptCheckpointError where anything differs, ValueError where something may not be read.
    """
    try:
        text = read_bytes(folder / MANIFEST_FILE)
        files = parse_json(text, where=MANIFEST_FILE)["files"]
        if text != manifest_text(files).encode():
            raise ValueError(f"{MANIFEST_FILE} differs from its own digest")
        for name, entry in files.items():
            if name != Path(name).name:
                raise ValueError(f"{MANIFEST_FILE} names {name!r}, which is no file of this folder")
            path = folder / name
            if path.stat().st_size != entry["bytes"] or sha256_of(path) != entry["sha256"]:
                raise ValueError(f"{name} differs from the manifest")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, PermissionError) or isinstance(error.__cause__, PermissionError):
            raise ValueError(f"checkpoint {folder} cannot be read ({error})") from None
        raise CorruptCheckpointError(f"checkpoint {folder} is corrupt ({error})") from None


def unfinished_folder(goal: Path) -> Path:
    """Names a folder to write a checkpoint into until it is complete."""
    return goal.with_name(f"{goal.name}.tmp-{secrets.token_hex(4)}")


def remove_unfinished(run_folder: Path) -> None:
    """Removes what killed processes left unfinished. Nobody may be writing."""
    remove_unfinished_files(run_folder)
    for path in run_folder.glob("step_*.tmp*"):
        shutil.rmtree(path, ignore_errors=True)


def remove_checkpoint(folder: Path) -> None:
    """Removes a checkpoint; what a kill leaves of it never passes for one. Raises OSError."""
    shutil.rmtree(folder.rename(unfinished_folder(folder)))


def set_aside(folder: Path) -> Path:
    """Renames a folder that is no good checkpoint to <name>.corrupt and returns that. Raises OSError."""
    number, goal = 1, folder.with_name(f"{folder.name}.corrupt")
    while goal.exists():
        number += 1
        goal = folder.with_name(f"{folder.name}.corrupt-{number}")
    return folder.rename(goal)


def newest_whole(folders: list[Path], *, are_ours: bool) -> Path | None:
    """Finds the last of the folders that is what was written; None without folders.

    Warns of damaged ones after it, and sets these aside if they `are_ours`. ValueError where all are damaged:
    to begin anew is for a person to decide.
    """
    damaged = []
    for folder in reversed(folders):
        try:
            verify_checkpoint(folder)
        except CorruptCheckpointError as error:
            damaged.append((folder, error))
            continue
        for other, error in damaged:
            what = f"it is now {set_aside(other).name}, and" if are_ours else "so"
            log.warning(f"{error}: {what} {folder.name} is used")
        return folder
    if damaged:
        raise ValueError(
            f"{damaged[0][1]}, and there is no whole one before it: remove it to begin anew, or choose "
            "another run_name"
        )
    return None
