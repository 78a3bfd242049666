"""Checkpoint folders of a run: names, manifest, verification, removal; also the rows of the run's log.

The manifest has the size and the sha256 of every file, and a digest of its own content: any changed byte is
noticed. A folder gets the name `step_<N>` only after all its files are written.
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

WEIGHTS, EMA_WEIGHTS = "weights", "ema_weights"  # files of tensors (`checkpointing.tensors`), without suffix
CONFIG_FILE = "config.yaml"
STATE_FILE = "state.json"
MANIFEST_FILE = "manifest.json"
METRICS_FILE = "metrics.jsonl"
STARTS_FILE = "starts.jsonl"  # in a run folder: command, code and hardware of each start of the run
SHARED_CONFIG_FILE = "config.json"  # these two files are a checkpoint that `share push` makes
SHARED_WEIGHTS_FILE = "model.safetensors"
BEST_STEP, SELECTED_BY = "best/step", "best/selected_by"  # in rows of the log; and best/<metric>


class CorruptCheckpointError(ValueError):
    """The error for a checkpoint with a missing or changed file. The message has the word "corrupt"."""


def step_of(path: Path) -> int | None:
    """Returns N of a path named step_<N>, or step_<N>.pt as in URM's public code; None for other names."""
    match = re.fullmatch(r"step_(\d+)(?:\.pt)?", path.absolute().name)
    return int(match[1]) if match else None


def read_state(folder: Path) -> dict[str, Any]:
    """Reads state.json of a checkpoint; {} if the file is missing, as where somebody copied only weights.

    Raises ValueError if the file holds no JSON object.
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
    """Returns the folders step_<N> of a run, newest last, damaged ones included."""
    folders = [path for path in run_folder.glob("step_*") if step_of(path) is not None and path.is_dir()]
    return sorted(folders, key=step_of)


def newest_checkpoint(run_folder: Path) -> Path | None:
    """Returns the checkpoint with a manifest and the highest step, unverified; None if there is none."""
    complete = [path for path in checkpoints_in(run_folder) if (path / MANIFEST_FILE).is_file()]
    return complete[-1] if complete else None


def read_rows(run_folder: Path, name: str = METRICS_FILE) -> Iterator[tuple[dict[str, Any], str]]:
    """Yields (values, text) of each row of a run's log, or of the file `name`; skips an unfinished line."""
    with contextlib.suppress(MissingFileError):
        for line in read_lines(run_folder / name):
            with contextlib.suppress(ValueError):
                values = parse_json(line, where="the line")
                if isinstance(values, dict) and _is_step(values.get("step")):
                    yield values, line.rstrip()


def _is_step(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**53


def best_checkpoint(run_folder: Path) -> tuple[Path, str]:
    """Returns the best checkpoint by a run's log, and the puzzles that chose it, "validation" or "test".

    Raises ValueError if there is none.
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
    """Returns the text of a manifest. files: {name: {"bytes": size, "sha256": hex digest}}."""
    digest = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
    return json.dumps({"files": files, "sha256": digest}, indent=1, sort_keys=True) + "\n"


def verify_checkpoint(folder: Path) -> None:
    """Compares every file of a checkpoint with the manifest.

    Raises CorruptCheckpointError if anything differs, ValueError if permission to read is missing.
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
    """Returns a random temporary name, beside `goal`, for a checkpoint that is not complete."""
    return goal.with_name(f"{goal.name}.tmp-{secrets.token_hex(4)}")


def remove_unfinished(run_folder: Path) -> None:
    """Removes unfinished checkpoints and files that killed processes have left. No process may be writing."""
    remove_unfinished_files(run_folder)
    for path in run_folder.glob("step_*.tmp*"):
        shutil.rmtree(path, ignore_errors=True)


def remove_checkpoint(folder: Path) -> None:
    """Removes a checkpoint; first renames it, so that a kill leaves no damaged checkpoint. Raises OSError."""
    shutil.rmtree(folder.rename(unfinished_folder(folder)))


def set_aside(folder: Path) -> Path:
    """Renames the folder of a damaged checkpoint to <name>.corrupt; returns the new path. Raises OSError."""
    number, goal = 1, folder.with_name(f"{folder.name}.corrupt")
    while goal.exists():
        number += 1
        goal = folder.with_name(f"{folder.name}.corrupt-{number}")
    return folder.rename(goal)


def newest_whole(folders: list[Path], *, are_ours: bool) -> Path | None:
    """Returns the newest undamaged checkpoint among `folders` (newest last); None without folders.

    Warns of newer, damaged ones, and renames them if `are_ours`. Raises ValueError if all are damaged, so
    that the user decides whether to start again.
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
