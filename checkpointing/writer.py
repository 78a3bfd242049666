"""Writes checkpoints while the run goes on: a save takes no more of a step's time than a copy to host memory.

All ranks write into `step_<N>.tmp-<nonce>/`, each its own files. Rank 0 learns their sizes and hashes, adds
the manifest, and renames the folder. So `step_<N>` is whole or not there, at whatever instant processes are
killed. Each rank does its part in a thread. The threads issue no collectives, which all ranks must issue in
one order: they talk through the store, which also works where it is the disk that failed.
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
_PART_SECONDS = 600.0  # for the other ranks to have written their files, once rank 0 has
_POLL_SECONDS = 0.05


class CheckpointWriter:
    """Saves one checkpoint at a time. All ranks have one, and call `start` together.

    failure: on rank 0, why the newest save failed; None where it did not.
    after_commit: called on rank 0, in the thread, with each new checkpoint.
    """

    def __init__(self, run_folder: Path, *, after_commit: Callable[[Path], None]):
        self._run_folder, self._after_commit = run_folder, after_commit
        self._thread: threading.Thread | None = None
        self._copies: _Files = {}
        self._part_seconds = 0.0
        self.failure: str | None = None

    def start(self, step: int, tensors: _Files, texts: dict[str, str]) -> None:
        """Copies the tensors of this rank; they are written, beside the texts, later.

        Waits for the save before. A failure is a warning, now or later, and ends nothing. A step that is
        there is not saved again.
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
        self._part_seconds = _PART_SECONDS
        arguments = (unfinished, goal, texts, failure)
        self._thread = threading.Thread(target=self._write, args=arguments, daemon=True)
        self._thread.start()

    def wait(self, *, timeout_seconds: float | None = None, part_seconds: float | None = None) -> None:
        """Waits until the save under way is there or has failed; on other ranks than 0 until their part is.

        part_seconds: how long rank 0, once its own files are written, still waits for other ranks' files.
        """
        if part_seconds is not None:
            self._part_seconds = part_seconds
        if self._thread is not None:
            self._thread.join(timeout_seconds)
            if not self._thread.is_alive():
                self._thread = None

    def _make_folder(self, goal: Path) -> Path | None:
        """Makes the folder to write into, on rank 0; None where there is nothing to write, or nowhere."""
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
        """Copies into memory that is kept from save to save, and pinned for a CUDA device."""
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
        # In the thread, as all that it calls.
        part = {"failure": failure} if failure else _write_part(unfinished, self._copies, texts)
        if is_main():
            self._commit(unfinished, goal, part)
        else:
            _send_to_rank_0(unfinished.name, part)

    def _commit(self, unfinished: Path, goal: Path, part: dict[str, Any]) -> None:
        try:
            files = self._files_of_all(unfinished.name, part)
            write_text(unfinished / MANIFEST_FILE, manifest_text(files))
            with contextlib.suppress(OSError):  # not every file system can
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
        """Collects what all ranks have written, once they have. RuntimeError where one could not."""
        parts = [own]
        if world_size() > 1:
            store, keys = connect_store(), [f"{name}/{other}" for other in range(1, world_size())]
            began = time.monotonic()
            while not store.check(keys):
                if time.monotonic() - began > self._part_seconds:  # which may have become less meanwhile
                    missing = [other for other, key in enumerate(keys, start=1) if not store.check([key])]
                    raise RuntimeError(f"no word of {log.name_ranks(missing)} for {self._part_seconds:g} s")
                time.sleep(_POLL_SECONDS)
            parts += [json.loads(part) for part in store.multi_get(keys)]
            for key in keys:
                store.delete_key(key)
        for number, part in enumerate(parts):
            if part["failure"]:
                raise RuntimeError(f"rank {number}: {part['failure']}")
        return {file: entry for part in parts for file, entry in part["files"].items()}

    def _fail(self, goal: Path, reason: str) -> None:
        self.failure = reason
        log.warning(f"THE CHECKPOINT {goal} COULD NOT BE SAVED, the run goes on without it ({reason})")


def _send_to_rank_0(name: str, part: dict[str, Any]) -> None:
    try:
        connect_store().set(f"{name}/{rank()}", json.dumps(part))
    except Exception as error:  # rank 0 will notice
        log.warning(f"{name}: rank 0 cannot be reached ({_describe(error)})")


def _write_part(folder: Path, tensors: _Files, texts: dict[str, str]) -> dict[str, Any]:
    """Writes the files of this rank; returns their entries in the manifest, or why there are none."""
    try:
        for name, named in tensors.items():
            save_tensors(named, folder / name)
        for name, text in texts.items():
            write_text(folder / name, text)
        return {"files": {name: _close_file(folder / name) for name in (*tensors, *texts)}, "failure": ""}
    except Exception as error:
        return {"failure": _describe(error)}


def _close_file(path: Path) -> dict[str, Any]:
    """Waits until a written file is on the disk; returns its entry in the manifest."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        os.fsync(file.fileno())
        # In one call, which does without the interpreter: training goes on meanwhile.
        return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
