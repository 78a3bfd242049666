"""Finds, chooses and verifies the checkpoints of a run. A checkpoint is a folder step_<N> in a run folder.

checkpointing/writer.py writes checkpoints. docs/checkpoints.md lists the files of a checkpoint. One of them,
manifest.json, contains the size and the SHA-256 hash of every other file, and a hash of these entries. So
`verify_checkpoint` detects every changed byte.
"""

import hashlib
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from config.schema import PretrainConfig
from distributed import log
from runtime.metrics_file import METRICS_FILE, is_step, read_rows
from runtime.reading import (
    MissingFileError,
    PointerFileError,
    open_regular,
    parse_json,
    read_bytes,
    read_json,
    sha256_of,
)

WEIGHTS, EMA_WEIGHTS = "weights", "ema_weights"  # sections of a checkpoint (checkpointing/tensors.py)
CONFIG_FILE = "config.yaml"
STATE_FILE = "state.json"
MANIFEST_FILE = "manifest.json"
STARTS_FILE = "starts.jsonl"  # in a run folder: command, code and hardware of each launch of the run
TRAINED_FILE = "trained_on.safetensors"  # hashes of the training examples (dataset/equal.py)
IDENTITIES_FILE = "identities.npz"  # in a run folder: the puzzle of each embedding (dataset/identities.py)
SHARED_CONFIG_FILE = "config.json"  # `python -m share push` writes a checkpoint as these two files
SHARED_WEIGHTS_FILE = "model.safetensors"
BEST_STEP, SELECTED_BY = "best/step", "best/selected_by"  # in rows of metrics.jsonl, next to best/<metric>

_RUNS = Path("checkpoints")  # the default folder of runs (`checkpoint_path`)
_MOST_NAMED = 5  # runs or checkpoints in a message


def step_of(path: Path) -> int | None:
    """Returns N if a path is named step_<N> or step_<N>.pt, otherwise None.

    step_<N> is a checkpoint folder, or a file of weights that the authors of a model published. The authors
    of URM named such files step_<N>.pt.
    """
    match = re.fullmatch(r"step_(\d+)(?:\.pt)?", path.absolute().name)
    return int(match[1]) if match else None


def follow_step_link(path: Path) -> Path:
    """If a path, such as RUN_FOLDER/newest, is a link to a checkpoint step_<N>, returns the target.

    Returns any other path unchanged, also a link that is itself named step_<N>.
    """
    target = Path(os.path.realpath(path))
    return target if step_of(path) is None and step_of(target) is not None else path


def checkpoints_in(run_folder: Path) -> list[Path]:
    """Returns the checkpoint folders step_<N> in a run folder, in the order of steps. Some may be damaged."""
    folders = [path for path in run_folder.glob("step_*") if step_of(path) is not None and path.is_dir()]
    return sorted(folders, key=step_of)


def newest_checkpoint(run_folder: Path) -> Path | None:
    """Returns the newest checkpoint folder in a run folder, or None if there is none.

    Folders without manifest.json are ignored. The files are not verified, so the checkpoint may be damaged.
    """
    complete = [path for path in checkpoints_in(run_folder) if (path / MANIFEST_FILE).is_file()]
    return complete[-1] if complete else None


def best_checkpoint(run_folder: Path) -> tuple[Path, str]:
    """Returns (folder of the best checkpoint of a run, "validation" or "test").

    The best checkpoint has the best value of the metric that the config key `keep_best` names. The second
    value is the data on which this metric was computed: puzzles held out for validation, or the test split.
    Raises ValueError if metrics.jsonl, the log of the run, names no best checkpoint, or if the folder is
    missing.
    """
    rows = [values for values, _ in read_rows(run_folder) if is_step(values.get(BEST_STEP))]
    if not rows:
        raise ValueError(
            f"{run_folder / METRICS_FILE} names no best checkpoint. A run with keep_best=<metric> has one "
            "after its first evaluation. Pass the run folder or a step_<N> folder instead of best."
        )
    folder = run_folder / f"step_{rows[-1][BEST_STEP]}"
    if not folder.is_dir():
        raise ValueError(
            f"best checkpoint not found: {folder}. Train with checkpoint_every_eval=true and "
            "keep_best=<metric> to keep it."
        )
    return folder, "validation" if rows[-1].get(SELECTED_BY) == "validation" else "test"


def explain_missing(path: Path) -> str:
    """Returns an error message for a missing checkpoint or run folder.

    Example: "checkpoints/demo/step_7 does not exist. checkpoints/demo has step_10, step_5." If the name of
    the path is not step_<N>, or if no other checkpoint is in the same folder, the message names the newest
    runs in checkpoints/ instead.
    """
    if step_of(path) is not None and (steps := checkpoints_in(path.parent)):
        names = ", ".join(step.name for step in steps[::-1][:_MOST_NAMED])
        return f"{path} does not exist. {path.parent} has {names}."
    configs = [config_file for depth in ("*", "*/*") for config_file in _RUNS.glob(f"{depth}/{CONFIG_FILE}")]
    folders = [config_file.parent for config_file in configs if step_of(config_file.parent) is None]
    folders.sort(key=lambda folder: folder.stat().st_mtime, reverse=True)
    runs = ", ".join(map(str, folders[:_MOST_NAMED]))
    newest = f" The newest of {_RUNS}/ are {runs}." if runs else f" {_RUNS}/ contains no run."
    return f"{path} does not exist. Pass a run folder, or a step_<N> folder in one.{newest}"


def choose_checkpoint(run_folder: Path, config: PretrainConfig) -> Path | None:
    """Returns the folder of the checkpoint that the config key `resume` selects, or None for a new run.

    The files of the checkpoint are verified. The values of `resume` are:

    - auto: Selects the newest undamaged checkpoint in `run_folder`. Newer damaged ones are renamed to
      <name>.corrupt. If all are damaged, raises ValueError.
    - must: Selects the same checkpoint as auto. If there is none, raises ValueError.
    - never: Selects none. If there is a checkpoint, raises ValueError, because the run would overwrite it.
    - a path, if `run_folder` has checkpoints: Selects the same checkpoint as auto. If the path is another
      checkpoint in `run_folder`, raises ValueError.
    - a path, if `run_folder` has no checkpoint: Selects the checkpoint at the path. If the path is the folder
      of another run, selects its newest undamaged checkpoint.
    """
    checkpoints = checkpoints_in(run_folder)
    if config.resume == "never":
        if checkpoints:
            raise ValueError(
                f"resume=never, but {run_folder} already contains {checkpoints[-1].name}. Choose another "
                f"{config.folder_key}, or set resume=auto."
            )
        return None
    advice = f"Delete the damaged ones to start from step 0, or choose another {config.folder_key}."
    newest = newest_intact(checkpoints, renames_damaged=True, advice=advice)
    if config.resume == "must" and newest is None:
        raise ValueError(f"resume=must, but {run_folder} has no checkpoint. Set resume=auto for a new run.")
    if config.resume in ("auto", "must"):
        return newest
    return _choose_from(follow_step_link(Path(config.resume)), run_folder, newest, key=config.folder_key)


def _choose_from(path: Path, run_folder: Path, newest: Path | None, *, key: str) -> Path:
    if newest is not None:
        if path.resolve().parent == run_folder.resolve() and path.resolve() != newest.resolve():
            raise ValueError(
                f"resume={path} is not the newest checkpoint of this run ({newest.name}). Choose another "
                f"{key} to start a new run from it."
            )
        log.info(f"resume={path} has no effect, because {run_folder} already has checkpoints")
        return newest
    if not path.exists():
        raise ValueError(f"resume={explain_missing(path)}")
    if not path.is_dir():
        raise ValueError(
            f"resume={path} is not a folder. Set resume to auto, never, must, a run folder, or a step_<N> "
            "folder in one."
        )
    if step_of(path) is not None and not checkpoints_in(path):  # a run folder may have such a name too
        verify_checkpoint(path)
        return path
    if original := re.fullmatch(r"(step_\d+)\.corrupt(-\d+)?", path.name):
        raise ValueError(
            f"resume={path} was renamed, because its files did not match the manifest. If the files are "
            f"complete again, rename it to {original[1]}."
        )
    found = newest_intact(checkpoints_in(path), renames_damaged=False, advice="Choose another folder.")
    if found is None:
        raise ValueError(f"resume={path} contains no checkpoint step_<N>. Choose another folder.")
    return found


def newest_intact(folders: list[Path], *, renames_damaged: bool, advice: str) -> Path | None:
    """Verifies checkpoints, and returns the newest one that is not damaged. None if `folders` is empty.

    Warns of each damaged checkpoint that is newer than the returned one. Raises ValueError if all are
    damaged, so that the user decides whether to train again from step 0. Also raises ValueError if a file of
    the newest one cannot be read, for example without the permission.

    folders: Checkpoint folders of one run, newest last.
    renames_damaged: Whether to rename the newer damaged checkpoints to <name>.corrupt. Pass True only if the
        current run wrote them.
    advice: Last sentences of the message if all are damaged.
    """
    damaged = []
    for folder in reversed(folders):
        try:
            verify_checkpoint(folder)
        except CorruptCheckpointError as error:
            damaged.append((folder, error))
            continue
        for damaged_folder, error in damaged:
            renamed = f" It is renamed to {_set_aside(damaged_folder).name}." if renames_damaged else ""
            log.warning(f"{error}.{renamed} Using {folder.name} instead.")
        return folder
    if damaged:
        raise ValueError(f"{damaged[0][1]}. No checkpoint in {damaged[0][0].parent} is intact. {advice}")
    return None


def _set_aside(folder: Path) -> Path:
    suffix, target = 1, folder.with_name(f"{folder.name}.corrupt")
    while target.exists():
        suffix += 1
        target = folder.with_name(f"{folder.name}.corrupt-{suffix}")
    return folder.rename(target)


def manifest_text(files: dict[str, dict[str, Any]]) -> str:
    """Returns the content of manifest.json: the entries of all files, and a hash of these entries.

    files: {file name: {"bytes": size, "sha256": hexadecimal hash}}.
    """
    digest = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
    return json.dumps({"files": files, "sha256": digest}, indent=1, sort_keys=True) + "\n"


class CorruptCheckpointError(ValueError):
    """Raised if a file of a checkpoint is missing or changed. The message contains the word "corrupt"."""


def verify_checkpoint(folder: Path) -> None:
    """Compares the size and hash of every file that the manifest of a checkpoint folder lists.

    Raises CorruptCheckpointError if a file differs or is missing. Raises another ValueError if this process
    lacks the permission to read a file, or if a file is only a pointer of Git LFS.
    """
    try:
        text = read_bytes(folder / MANIFEST_FILE)
        files = parse_json(text, where=MANIFEST_FILE)["files"]
        if text != manifest_text(files).encode():
            raise ValueError(f"{MANIFEST_FILE} does not match its own hash")
        for name, entry in files.items():
            if name != Path(name).name:
                raise ValueError(f"{MANIFEST_FILE} lists {name!r}, but this is not a file name")
            path = folder / name
            with open_regular(path) as file:
                num_bytes = os.fstat(file.fileno()).st_size
            if num_bytes != entry["bytes"] or sha256_of(path) != entry["sha256"]:
                raise ValueError(f"{name} does not match the manifest")
    except PointerFileError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, PermissionError) or isinstance(error.__cause__, PermissionError):
            raise ValueError(
                f"checkpoint {folder} cannot be read ({error}). Check the permissions."
            ) from None
        raise CorruptCheckpointError(f"checkpoint {folder} is corrupt ({error})") from None


def read_state(folder: Path) -> dict[str, Any]:
    """Returns the content of a checkpoint's state.json, or {} if the file is missing.

    Raises ValueError if the file does not contain a JSON object.
    """
    path = folder / STATE_FILE
    try:
        state = read_json(path)
    except MissingFileError:
        return {}
    except PointerFileError:
        raise
    except ValueError as error:
        raise ValueError(f"{error}. Choose another checkpoint.") from None
    if not isinstance(state, dict):
        raise ValueError(f"{path} does not contain a JSON object. Choose another checkpoint.")
    return state


def remove_unfinished_checkpoints(run_folder: Path) -> None:
    """Removes unfinished checkpoints that killed processes have left in a run folder.

    Call it only while no process writes a checkpoint into the run folder.
    """
    for path in run_folder.glob("step_*.tmp*"):
        shutil.rmtree(path, ignore_errors=True)
