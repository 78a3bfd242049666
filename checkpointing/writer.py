"""Writes checkpoints while the run continues: only the copy to host memory takes time of the run.

Each rank writes its own files into `step_<N>.tmp-<nonce>/`, in a thread. Rank 0 then receives the sizes and
hashes of all files, adds the manifest, and renames the folder: so `step_<N>` is complete or does not exist,
whenever processes are killed. The threads use the key-value store and no collectives, because ranks must
issue collectives in one order. The store also works after an error of the disk.
"""

import contextlib
import hashlib
import json
import mmap
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from checkpointing.files import MANIFEST_FILE, manifest_text, unfinished_folder
from checkpointing.tensors import save_tensors
from config.writing import flush, write_text
from parallel import log
from parallel.collectives import broadcast_object
from parallel.process_group import connect_store, is_main, rank, world_size
from parallel.shards import Shard, Tensors, tensor_of

_Files = dict[str, Tensors]  # by name
_OTHERS_SECONDS = 600.0  # how long rank 0, when its own files are written, waits for those of other ranks
_POLL_SECONDS = 0.05


class CheckpointWriter:
    """A writer of one checkpoint at a time. All ranks have one, and call `start` together.

    failure: on rank 0, why the last save failed; None if it did not. after_commit: called on rank 0, in the
    writer's thread, with the folder of each new checkpoint.
    """

    def __init__(self, run_folder: Path, *, after_commit: Callable[[Path], None]):
        self._run_folder, self._after_commit = run_folder, after_commit
        self._thread: threading.Thread | None = None
        self._copies: _Files = {}
        self._others_seconds = 0.0
        self.failure: str | None = None

    def start(self, step: int, tensors: _Files, texts: dict[str, str]) -> None:
        """Copies the tensors of this rank to the host; a thread then writes these copies and the texts.

        Waits first for the previous save. A failure only causes a warning, now or later. Does nothing if a
        checkpoint of the step exists. tensors, texts: {file: content}; texts on rank 0 only.
        """
        self.wait()
        goal = self._run_folder / f"step_{step}"
        unfinished = broadcast_object(self._make_folder(goal) if is_main() else None)
        if unfinished is None:
            return
        failure = ""
        try:
            self._copy_to_host(tensors)
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
        unfinished = unfinished_folder(goal)
        try:
            unfinished.mkdir()
        except OSError as error:
            self._fail(goal, _describe(error))
            return None
        return unfinished

    def _copy_to_host(self, tensors: _Files) -> None:
        """Copies tensors into host buffers, which later saves use again; pinned memory for CUDA tensors."""
        for file, named in tensors.items():
            copies = self._copies.setdefault(file, {})
            for name, kept in named.items():
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
        if is_main():
            self._commit(unfinished, goal, written)
        else:
            _send_to_rank_0(unfinished.name, written)

    def _commit(self, unfinished: Path, goal: Path, written: dict[str, Any]) -> None:
        try:
            files = self._files_of_all(unfinished.name, written)
            write_text(unfinished / MANIFEST_FILE, manifest_text(files))
            with contextlib.suppress(OSError):  # some file systems cannot flush a folder
                flush(unfinished)
            unfinished.rename(goal)
            with contextlib.suppress(OSError):
                flush(self._run_folder)
        except Exception as error:
            self._fail(goal, _describe(error))
            shutil.rmtree(unfinished, ignore_errors=True)
        else:
            self.failure = None
            self._after_commit(goal)

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


def _send_to_rank_0(name: str, written: dict[str, Any]) -> None:
    try:
        connect_store().set(f"{name}/{rank()}", json.dumps(written))
    except Exception as error:  # rank 0 will run into its time limit
        log.warning(f"{name}: rank 0 cannot be reached ({_describe(error)})")


def _write_own(folder: Path, tensors: _Files, texts: dict[str, str]) -> dict[str, Any]:
    """Writes the files of this rank; returns {"files": entries of the manifest, "failure": reason or ""}."""
    try:
        for name, named in tensors.items():
            save_tensors(named, folder / name)
        for name, text in texts.items():
            write_text(folder / name, text)
        return {"files": {name: _close_file(folder / name) for name in (*tensors, *texts)}, "failure": ""}
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
