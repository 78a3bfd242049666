"""The folders step_<N> of a run: written while the run continues; verified, chosen, listed and removed.

Only the copy to host memory takes time of the run. Each rank writes its own files into
`step_<N>.tmp-<nonce>/`, in a thread. Rank 0 then receives the sizes and hashes of all files, adds the
manifest, and renames the folder: so `step_<N>` is complete or does not exist, whenever processes are killed.
The threads use the key-value store and no collectives, because ranks must issue collectives in one order. The
store also works after an error of the disk.

The manifest has the size and the sha256 of every file, and a digest of itself: any changed byte is noticed.
"""

import contextlib
import hashlib
import json
import mmap
import os
import re
import secrets
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from checkpointing.tensors import save_section
from distributed import log
from distributed.collectives import broadcast_object
from distributed.process_group import connect_store, is_main, rank, world_size
from distributed.shards import Shard, Tensors, tensor_of
from runtime.reading import MissingFileError, parse_json, read_bytes, read_json, sha256_of
from runtime.writing import flush, remove_unfinished_files

WEIGHTS, EMA_WEIGHTS = "weights", "ema_weights"  # sections of a checkpoint (`checkpointing.tensors`)
CONFIG_FILE = "config.yaml"
STATE_FILE = "state.json"
MANIFEST_FILE = "manifest.json"
STARTS_FILE = "starts.jsonl"  # in a run folder: command, code and hardware of each start of the run
SHARED_CONFIG_FILE = "config.json"  # these two files are a checkpoint that `share push` makes
SHARED_WEIGHTS_FILE = "model.safetensors"

_OTHERS_SECONDS = 600.0  # how long rank 0, when its own files are written, waits for those of other ranks
_POLL_SECONDS = 0.05


class CheckpointWriter:
    """A writer of one checkpoint at a time. All ranks have one, and call `start` together.

    keep: how many of the newest checkpoints stay, beside the best; None: all. best_of: returns the best of
    some steps, or None; called by the writer's thread. failure: on rank 0, why the last save failed; None if
    it did not. saved: on rank 0, the folders of completed checkpoints.
    """

    def __init__(self, run_folder: Path, *, keep: int | None, best_of: Callable[[Iterable[int]], int | None]):
        self._run_folder, self._keep, self._best_of = run_folder, keep, best_of
        self._thread: threading.Thread | None = None
        self._copies: dict[str, Tensors] = {}  # by section
        self._others_seconds = 0.0
        self.failure: str | None = None
        self.saved: deque[Path] = deque()

    def start(self, step: int, sections: dict[str, Tensors], texts: dict[str, str]) -> None:
        """Copies the tensors of this rank to the host; a thread then writes these copies and the texts.

        Waits first for the previous save. A failure only causes a warning, now or later. Does nothing if a
        checkpoint of the step exists. texts: {file: content}, on rank 0 only.
        """
        self.wait()
        goal = self._run_folder / f"step_{step}"
        unfinished = broadcast_object(self._make_folder(goal) if is_main() else None)
        if unfinished is None:
            return
        failure = ""
        try:
            self._copy_to_host(sections)
        except Exception as error:  # no memory left
            failure = _describe(error)
        self._others_seconds = _OTHERS_SECONDS
        arguments = (unfinished, goal, texts, failure)
        self._thread = threading.Thread(target=self._write, args=arguments, daemon=True)
        self._thread.start()

    def wait(self, *, timeout_seconds: float | None = None, others_seconds: float | None = None) -> None:
        """Waits until the current save has ended; ranks other than 0 wait for their own files only.

        timeout_seconds: for the whole wait; None: without limit. others_seconds: how long rank 0, when its
        own files are written, waits for those of other ranks; None: unchanged.
        """
        if others_seconds is not None:
            self._others_seconds = others_seconds
        if self._thread is not None:
            self._thread.join(timeout_seconds)
            if not self._thread.is_alive():
                self._thread = None

    def _make_folder(self, goal: Path) -> Path | None:
        """Creates the temporary folder; None if the checkpoint exists, or this fails."""
        if goal.exists():
            return None
        unfinished = _unfinished_folder(goal)
        try:
            unfinished.mkdir()
        except OSError as error:
            self._fail(goal, _describe(error))
            return None
        return unfinished

    def _copy_to_host(self, sections: dict[str, Tensors]) -> None:
        """Copies tensors into host buffers, which later saves use again; pinned memory for CUDA tensors."""
        for section, tensors in sections.items():
            copies = self._copies.setdefault(section, {})
            for name, kept in local_part(tensors).items():
                tensor = tensor_of(kept)
                if name not in copies:
                    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
                    copies[name] = kept._replace(tensor=copy) if isinstance(kept, Shard) else copy
                tensor_of(copies[name]).copy_(tensor, non_blocking=tensor.is_cuda)
        if torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()

    def _write(self, unfinished: Path, goal: Path, texts: dict[str, str], failure: str) -> None:
        # Runs in the thread, with all functions that it calls.
        written = {"failure": failure} if failure else _write_own(unfinished, self._copies, texts)
        if not is_main():
            _send_to_rank_0(unfinished.name, written)
            return
        try:
            files = self._files_of_all(unfinished.name, written)
            (unfinished / MANIFEST_FILE).write_text(manifest_text(files))
            flush(unfinished / MANIFEST_FILE)
            with contextlib.suppress(OSError):  # some file systems cannot flush a folder
                flush(unfinished)
            unfinished.rename(goal)
            with contextlib.suppress(OSError):
                flush(self._run_folder)
        except Exception as error:
            self._fail(goal, _describe(error))
            shutil.rmtree(unfinished, ignore_errors=True)
            return
        self.failure = None
        self.saved.append(goal)
        self.remove_old()

    def _files_of_all(self, name: str, own: dict[str, Any]) -> dict[str, dict[str, Any]]:
        """Waits until all ranks have written; returns {file: manifest entry}. RuntimeError if one failed."""
        of_ranks = [own]
        if world_size() > 1:
            store, keys = connect_store(), [f"{name}/{other}" for other in range(1, world_size())]
            began = time.monotonic()
            while not store.check(keys):
                if time.monotonic() - began > self._others_seconds:  # `wait` may lower it meanwhile
                    missing = [other for other, key in enumerate(keys, start=1) if not store.check([key])]
                    raise RuntimeError(f"no word of {log.name_ranks(missing)} for {self._others_seconds:g} s")
                time.sleep(_POLL_SECONDS)
            of_ranks += [json.loads(each) for each in store.multi_get(keys)]
            for key in keys:
                store.delete_key(key)
        for number, written in enumerate(of_ranks):
            if written["failure"]:
                raise RuntimeError(f"rank {number}: {written['failure']}")
        return {file: entry for written in of_ranks for file, entry in written["files"].items()}

    def _fail(self, goal: Path, reason: str) -> None:
        self.failure = reason
        log.warning(f"THE CHECKPOINT {goal} COULD NOT BE SAVED, the run goes on without it ({reason})")

    def remove_old(self) -> None:
        """Removes all checkpoints but the newest and the best; to be called on rank 0."""
        if self._keep is None:
            return
        folders = {step_of(path): path for path in checkpoints_in(self._run_folder)}
        best = self._best_of(folders)
        for step, folder in [*folders.items()][: -self._keep]:
            if step != best:
                try:  # renamed first, so that a kill leaves no damaged checkpoint
                    shutil.rmtree(folder.rename(_unfinished_folder(folder)))
                except OSError as error:
                    log.warning(f"the old checkpoint {folder} cannot be removed ({error})")


def local_part(tensors: Tensors) -> Tensors:
    """Returns what this rank writes: rank 0 the whole tensors, every rank its shards, without copies.

    All ranks must give shards of the same names, some perhaps empty. Together, the shards that are no copies
    must hold every element of a whole tensor exactly once.
    """
    own = {}
    for name, kept in tensors.items():
        if isinstance(kept, Shard):
            nothing = kept.tensor.reshape(-1)[:0]
            own[name] = kept._replace(tensor=nothing, spans=()) if kept.is_copy else kept
        elif is_main():
            own[name] = kept
    return own


def _send_to_rank_0(name: str, written: dict[str, Any]) -> None:
    try:
        connect_store().set(f"{name}/{rank()}", json.dumps(written))
    except Exception as error:  # rank 0 will run into its time limit
        log.warning(f"{name}: rank 0 cannot be reached ({_describe(error)})")


def _write_own(folder: Path, sections: dict[str, Tensors], texts: dict[str, str]) -> dict[str, Any]:
    """Writes the files of this rank; returns {"files": entries of the manifest, "failure": reason or ""}."""
    try:
        paths = [path for name, tensors in sections.items() for path in save_section(tensors, folder, name)]
        for name, text in texts.items():
            paths.append(folder / name)
            paths[-1].write_text(text, encoding="utf-8")
        return {"files": {path.name: _close_file(path) for path in paths}, "failure": ""}
    except Exception as error:
        return {"failure": _describe(error)}


def _close_file(path: Path) -> dict[str, Any]:
    """Flushes a written file to disk; returns its entry in the manifest."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        os.fsync(file.fileno())
        # One call of sha256, which releases Python's lock: training continues meanwhile.
        return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _unfinished_folder(goal: Path) -> Path:
    """Returns a random temporary name, beside `goal`, for a checkpoint that is not complete."""
    return goal.with_name(f"{goal.name}.tmp-{secrets.token_hex(4)}")


def manifest_text(files: dict[str, dict[str, Any]]) -> str:
    """Returns the text of a manifest. files: {name: {"bytes": size, "sha256": hex digest}}."""
    digest = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
    return json.dumps({"files": files, "sha256": digest}, indent=1, sort_keys=True) + "\n"


def step_of(path: Path) -> int | None:
    """Returns N of a path named step_<N>, or step_<N>.pt as in URM's public code; None for other names."""
    match = re.fullmatch(r"step_(\d+)(?:\.pt)?", path.absolute().name)
    return int(match[1]) if match else None


def checkpoints_in(run_folder: Path) -> list[Path]:
    """Returns the folders step_<N> of a run, newest last, damaged ones included."""
    folders = [path for path in run_folder.glob("step_*") if step_of(path) is not None and path.is_dir()]
    return sorted(folders, key=step_of)


def newest_checkpoint(run_folder: Path) -> Path | None:
    """Returns the checkpoint with a manifest and the highest step, unverified; None if there is none."""
    complete = [path for path in checkpoints_in(run_folder) if (path / MANIFEST_FILE).is_file()]
    return complete[-1] if complete else None


def remove_unfinished(run_folder: Path) -> None:
    """Removes unfinished checkpoints and files that killed processes have left. No process may be writing."""
    remove_unfinished_files(run_folder)
    for path in run_folder.glob("step_*.tmp*"):
        shutil.rmtree(path, ignore_errors=True)


def newest_intact(folders: list[Path], *, are_ours: bool) -> Path | None:
    """Returns the newest undamaged checkpoint among `folders` (newest last); None without folders.

    Warns of newer, damaged ones, and renames them to <name>.corrupt if `are_ours`. Raises ValueError if all
    are damaged, so that the user decides whether to start again.
    """
    damaged = []
    for folder in reversed(folders):
        try:
            verify_checkpoint(folder)
        except CorruptCheckpointError as error:
            damaged.append((folder, error))
            continue
        for other, error in damaged:
            what = f"it is now {_set_aside(other).name}, and" if are_ours else "so"
            log.warning(f"{error}: {what} {folder.name} is used")
        return folder
    if damaged:
        raise ValueError(
            f"{damaged[0][1]}, and there is no whole one before it: remove it to begin anew, or choose "
            "another run_name"
        )
    return None


def _set_aside(folder: Path) -> Path:
    number, goal = 1, folder.with_name(f"{folder.name}.corrupt")
    while goal.exists():
        number += 1
        goal = folder.with_name(f"{folder.name}.corrupt-{number}")
    return folder.rename(goal)


class CorruptCheckpointError(ValueError):
    """The error for a checkpoint with a missing or changed file. The message has the word "corrupt"."""


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
