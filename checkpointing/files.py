"""The checkpoint folders step_<N> of a run: write, list, choose, verify and remove them.

docs/checkpoints.md lists the files of a checkpoint. The functions stand in the order of their calls: first
`CheckpointWriter` and the functions that save, then the functions that resume.

Saving delays training until the previous save has ended and the tensors are copied to host memory. Each rank
then writes its files into `step_<N>.tmp-<nonce>/`, in a thread. Rank 0 collects the sizes and hashes of all
files, writes the manifest, and renames the folder. If processes are killed at any time, `step_<N>` is
complete or does not exist.

The threads communicate through the key-value store of torch.distributed. They do not use collectives, because
all ranks must call collectives in the same order, and threads cannot guarantee that.

The manifest contains the size and the SHA-256 hash of every file, and a hash of itself. Verification detects
every changed byte.
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
from runtime.reading import (
    MissingFileError,
    PointerFileError,
    open_regular,
    parse_json,
    read_bytes,
    read_json,
    sha256_of,
)
from runtime.writing import flush, remove_unfinished_files

WEIGHTS, EMA_WEIGHTS = "weights", "ema_weights"  # sections of a checkpoint (checkpointing/tensors.py)
CONFIG_FILE = "config.yaml"
STATE_FILE = "state.json"
MANIFEST_FILE = "manifest.json"
STARTS_FILE = "starts.jsonl"  # in a run folder: command, code and hardware of each launch of the run
TRAINED_FILE = "trained_on.safetensors"  # hashes of the training examples (dataset/equal.py)
IDENTITIES_FILE = "identities.npz"  # in a run folder: the puzzle of each embedding (dataset/identities.py)
SHARED_CONFIG_FILE = "config.json"  # `python -m share push` writes a checkpoint as these two files
SHARED_WEIGHTS_FILE = "model.safetensors"

_RUNS = Path("checkpoints")  # the default folder of runs (`checkpoint_path`)
_MOST_NAMED = 5  # runs or checkpoints in a message
_OTHERS_SECONDS = 600.0  # how long rank 0 waits for the other ranks, after it has written its own files
_POLL_SECONDS = 0.05


class CheckpointWriter:
    """Writes checkpoints in a thread, one at a time. All ranks have a writer, and call `start` together.

    keep: Number of newest checkpoints to keep, in addition to the best one. If None, all are kept.
    best_of: Returns the best of several steps, or None. The writer's thread calls it.

    On rank 0, `failure` is the reason why the last save failed, or None if it succeeded. `saved` contains the
    folders of completed checkpoints.
    """

    def __init__(self, run_folder: Path, *, keep: int | None, best_of: Callable[[Iterable[int]], int | None]):
        self._run_folder, self._keep, self._best_of = run_folder, keep, best_of
        self._thread: threading.Thread | None = None
        self._copies: dict[str, Tensors] = {}  # by section
        self._others_seconds = 0.0
        self.failure: str | None = None
        self.saved: deque[Path] = deque()

    def start(self, step: int, sections: dict[str, Tensors], contents: dict[str, bytes]) -> None:
        """Copies this rank's tensors to host memory, and starts a thread that writes them.

        Waits for the previous save first. Does nothing if a checkpoint of this step exists. A failure, here
        or in the thread, only causes a warning.

        contents: {file name: content} of files that the thread also writes. Empty except on rank 0.
        """
        self.wait()
        goal = self._run_folder / f"step_{step}"
        unfinished = broadcast_object(self._make_folder(goal) if is_main() else None)
        if unfinished is None:
            return
        failure = ""
        try:
            self._copy_to_host(sections)
        except Exception as error:  # for example, out of memory
            failure = _describe(error)
        self._others_seconds = _OTHERS_SECONDS
        arguments = (unfinished, goal, contents, failure)
        self._thread = threading.Thread(target=self._write, args=arguments, daemon=True)
        self._thread.start()

    def wait(self, *, timeout_seconds: float | None = None, others_seconds: float | None = None) -> None:
        """Waits until the current save has ended. Ranks other than 0 wait only for their own files.

        timeout_seconds: Limit of the whole wait. If None, there is no limit.
        others_seconds: How long rank 0 waits for the other ranks, after it has written its own files. If
            None, the limit does not change.
        """
        if others_seconds is not None:
            self._others_seconds = others_seconds
        if self._thread is not None:
            self._thread.join(timeout_seconds)
            if not self._thread.is_alive():
                self._thread = None

    def _make_folder(self, goal: Path) -> Path | None:
        """Creates the temporary folder. Returns None if the checkpoint exists, or if this fails."""
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
        """Copies tensors into host buffers, pinned for CUDA tensors. Later saves reuse the buffers."""
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

    def _write(self, unfinished: Path, goal: Path, contents: dict[str, bytes], failure: str) -> None:
        # The thread runs this function.
        written = {"failure": failure} if failure else _write_own(unfinished, self._copies, contents)
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
        """Waits until all ranks have written their files. Returns {file name: manifest entry}.

        Raises RuntimeError if a rank failed, or did not report its files in time.
        """
        of_ranks = [own]
        if world_size() > 1:
            store, keys = connect_store(), [f"{name}/{other}" for other in range(1, world_size())]
            began = time.monotonic()
            while not store.check(keys):
                if time.monotonic() - began > self._others_seconds:  # `wait` may have lowered the limit
                    missing = [other for other, key in enumerate(keys, start=1) if not store.check([key])]
                    ranks, seconds = log.name_ranks(missing), self._others_seconds
                    raise RuntimeError(f"{ranks} did not report their files within {seconds:g} s")
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
        log.warning(
            f"checkpoint not saved: {goal} ({reason}). Training continues. Earlier checkpoints are not "
            "removed."
        )

    def remove_old(self) -> None:
        """Removes all checkpoints except the `keep` newest and the best. Only rank 0 calls it."""
        if self._keep is None:
            return
        folders = {step_of(path): path for path in checkpoints_in(self._run_folder)}
        best = self._best_of(folders)
        for step, folder in [*folders.items()][: -self._keep]:
            if step != best:
                try:  # rename first, so that a kill cannot leave a damaged checkpoint
                    shutil.rmtree(folder.rename(_unfinished_folder(folder)))
                except OSError as error:
                    log.warning(f"cannot remove the old checkpoint {folder} ({error}). Training continues.")


def _unfinished_folder(goal: Path) -> Path:
    """Returns the path of a temporary folder next to `goal`, with a random suffix, without creating it."""
    return goal.with_name(f"{goal.name}.tmp-{secrets.token_hex(4)}")


def local_part(tensors: Tensors) -> Tensors:
    """Returns the tensors that this rank writes: its shards, and on rank 0 also the full tensors.

    A shard that an earlier rank also holds (`is_copy`) becomes empty. All ranks must pass shards of the same
    names. Together, the shards that are not copies must contain each element of a tensor exactly once.
    """
    own = {}
    for name, kept in tensors.items():
        if isinstance(kept, Shard):
            nothing = kept.tensor.reshape(-1)[:0]
            own[name] = kept._replace(tensor=nothing, spans=()) if kept.is_copy else kept
        elif is_main():
            own[name] = kept
    return own


def _write_own(folder: Path, sections: dict[str, Tensors], contents: dict[str, bytes]) -> dict[str, Any]:
    """Writes the files of this rank. Returns {"files": manifest entries, "failure": reason or ""}."""
    try:
        paths = [path for name, tensors in sections.items() for path in save_section(tensors, folder, name)]
        for name, content in contents.items():
            paths.append(folder / name)
            paths[-1].write_bytes(content)
        return {"files": {path.name: _close_file(path) for path in paths}, "failure": ""}
    except Exception as error:
        return {"failure": _describe(error)}


def _close_file(path: Path) -> dict[str, Any]:
    """Flushes a written file to disk. Returns its entry of the manifest."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        os.fsync(file.fileno())
        # Hash the file in one call. It releases Python's global lock, so that training continues meanwhile.
        return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _send_to_rank_0(name: str, written: dict[str, Any]) -> None:
    try:
        connect_store().set(f"{name}/{rank()}", json.dumps(written))
    except Exception as error:  # rank 0 then reaches its time limit
        log.warning(f"{name}: cannot reach rank 0 ({_describe(error)}). This checkpoint will not be saved.")


def manifest_text(files: dict[str, dict[str, Any]]) -> str:
    """Returns the text of a manifest. files: {file name: {"bytes": size, "sha256": hex digest}}."""
    digest = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
    return json.dumps({"files": files, "sha256": digest}, indent=1, sort_keys=True) + "\n"


def step_of(path: Path) -> int | None:
    """Returns N of a path named step_<N> or step_<N>.pt (URM's public code). None for other names."""
    match = re.fullmatch(r"step_(\d+)(?:\.pt)?", path.absolute().name)
    return int(match[1]) if match else None


def checkpoints_in(run_folder: Path) -> list[Path]:
    """Returns the folders step_<N> of a run, in the order of steps. They may be damaged."""
    folders = [path for path in run_folder.glob("step_*") if step_of(path) is not None and path.is_dir()]
    return sorted(folders, key=step_of)


def explain_missing(path: Path) -> str:
    """Returns a message for a checkpoint or run folder that does not exist: which ones do, newest first."""
    if step_of(path) is not None and (steps := checkpoints_in(path.parent)):
        names = ", ".join(step.name for step in steps[::-1][:_MOST_NAMED])
        return f"{path} does not exist. {path.parent} has {names}."
    configs = [each for depth in ("*", "*/*") for each in _RUNS.glob(f"{depth}/{CONFIG_FILE}")]
    folders = [each.parent for each in configs if step_of(each.parent) is None]
    folders.sort(key=lambda each: each.stat().st_mtime, reverse=True)
    runs = ", ".join(map(str, folders[:_MOST_NAMED]))
    newest = f" The newest of {_RUNS}/ are {runs}." if runs else f" {_RUNS}/ contains no run."
    return f"{path} does not exist. Pass a run folder, or a step_<N> folder in one.{newest}"


def newest_checkpoint(run_folder: Path) -> Path | None:
    """Returns the newest checkpoint with a manifest, without verifying it. None if there is none."""
    complete = [path for path in checkpoints_in(run_folder) if (path / MANIFEST_FILE).is_file()]
    return complete[-1] if complete else None


def newest_intact(folders: list[Path], *, are_ours: bool) -> Path | None:
    """Returns the newest intact checkpoint. None if `folders` is empty.

    Warns of each newer checkpoint, because it is damaged. Raises ValueError if all are damaged, so that the
    user decides whether to start again.

    folders: Checkpoints of one run, newest last.
    are_ours: Whether this run wrote them. If True, damaged checkpoints are renamed to <name>.corrupt.
    """
    damaged = []
    for folder in reversed(folders):
        try:
            verify_checkpoint(folder)
        except CorruptCheckpointError as error:
            damaged.append((folder, error))
            continue
        for other, error in damaged:
            renamed = f" It is renamed to {_set_aside(other).name}." if are_ours else ""
            log.warning(f"{error}.{renamed} Using {folder.name} instead.")
        return folder
    if damaged:
        raise ValueError(
            f"{damaged[0][1]}. No checkpoint in {damaged[0][0].parent} is intact. Delete the damaged ones to "
            "start from step 0, or choose another run_name."
        )
    return None


class CorruptCheckpointError(ValueError):
    """Raised if a file of a checkpoint is missing or changed. The message contains the word "corrupt"."""


def verify_checkpoint(folder: Path) -> None:
    """Compares every file of a checkpoint with the manifest.

    Raises CorruptCheckpointError if a file differs. Raises ValueError if this process may not read a file, or
    if a file is a pointer of Git LFS.
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


def _set_aside(folder: Path) -> Path:
    """Renames a damaged checkpoint to <name>.corrupt, or to <name>.corrupt-2, ... Returns the new path."""
    number, goal = 1, folder.with_name(f"{folder.name}.corrupt")
    while goal.exists():
        number += 1
        goal = folder.with_name(f"{folder.name}.corrupt-{number}")
    return folder.rename(goal)


def read_state(folder: Path) -> dict[str, Any]:
    """Reads state.json of a checkpoint. Returns {} if the file is missing.

    Example: somebody copied only the weights. Raises ValueError if the file does not contain a JSON object.
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


def remove_unfinished(run_folder: Path) -> None:
    """Removes the temporary folders and files of killed processes. No process may be writing."""
    remove_unfinished_files(run_folder)
    for path in run_folder.glob("step_*.tmp*"):
        shutil.rmtree(path, ignore_errors=True)
