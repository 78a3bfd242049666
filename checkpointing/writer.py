"""Writes checkpoint folders step_<N>, in a thread on each rank.

If processes are killed at any time, step_<N> is complete or does not exist:

1. `start` waits for the previous save. It copies the tensors of this rank to host memory. Training continues.
2. The thread of each rank writes its files into the temporary folder step_<N>.tmp-<nonce>, and flushes them.
3. The thread of rank 0 collects the sizes and SHA-256 hashes of the files of all ranks. It writes them, and
   a hash of them, to manifest.json. Then it renames the folder to step_<N>. If the number of checkpoints is
   limited (config key `keep_checkpoints`), it removes older ones.

The threads communicate through the key-value store of torch.distributed. They do not use collectives, because
all ranks must call collectives in the same order, and threads cannot guarantee that.
"""

import contextlib
import hashlib
import json
import mmap
import os
import secrets
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from checkpointing.files import MANIFEST_FILE, checkpoints_in, manifest_text, step_of
from checkpointing.tensors import save_section
from distributed import log
from distributed.collectives import broadcast_object
from distributed.shards import Shard, Tensors, tensor_of
from distributed.world import connect_store, is_main, rank, world_size
from runtime.writing import flush

_OTHERS_SECONDS = 600.0  # how long rank 0 waits for the other ranks, after it has written its own files
_POLL_SECONDS = 0.05


class CheckpointWriter:
    """Writes checkpoints in a thread, one at a time. All ranks have a writer, and call `start` together.

    run_folder: Folder that gets the checkpoint folders step_<N>.
    keep: Number of newest checkpoints to keep, in addition to the best one. If None, all are kept.
    best_of: Function. `best_of(steps)` returns which of some training steps has the best evaluation, or None
        if this is unknown. The writing thread may call it.

    On rank 0, `failure` is the reason why the last save failed, or None if it succeeded. `saved` contains the
    folders of the checkpoints that were written, oldest first. The caller may remove entries of `saved`.
    """

    def __init__(self, run_folder: Path, *, keep: int | None, best_of: Callable[[Iterable[int]], int | None]):
        self._run_folder, self._keep, self._best_of = run_folder, keep, best_of
        self._thread: threading.Thread | None = None
        self._copies: dict[str, Tensors] = {}  # by section
        self._others_seconds, self._continues = 0.0, True
        self.failure: str | None = None
        self.saved: deque[Path] = deque()

    def start(self, step: int, sections: dict[str, Tensors], contents: dict[str, bytes]) -> None:
        """Copies this rank's tensors to host memory, and starts a thread that writes them to disk.

        Waits for the previous save first. If the checkpoint of `step` already exists, does nothing more. All
        ranks call it. A failure only causes a warning.

        sections: {section, such as "optimizer": {name: full tensor or shard}}. Only rank 0 writes the full
            tensors.
        contents: {file name, such as "state.json": content} of small files that the thread also writes. Empty
            except on rank 0.
        """
        self.wait()
        target = self._run_folder / f"step_{step}"
        unfinished = None
        if is_main() and not target.exists():
            unfinished = _unfinished_folder(target)
            try:
                unfinished.mkdir()
            except OSError as error:
                self._fail(target, _describe(error))
                unfinished = None
        unfinished = broadcast_object(unfinished)
        if unfinished is None:
            return
        failure = ""
        try:
            self._copy_to_host(sections)
        except Exception as error:  # for example, out of memory
            failure = _describe(error)
        self._others_seconds = _OTHERS_SECONDS
        arguments = (unfinished, target, contents, failure)
        self._thread = threading.Thread(target=self._write, args=arguments, daemon=True)
        self._thread.start()

    def _copy_to_host(self, sections: dict[str, Tensors]) -> None:
        # Later saves reuse the memory of the copies.
        for section, tensors in sections.items():
            copies = self._copies.setdefault(section, {})
            for name, value in local_part(tensors).items():
                tensor = tensor_of(value)  # the elements on this rank
                if name not in copies:
                    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
                    copies[name] = value._replace(tensor=copy) if isinstance(value, Shard) else copy
                tensor_of(copies[name]).copy_(tensor, non_blocking=tensor.is_cuda)
        if torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()

    def _write(self, unfinished: Path, target: Path, contents: dict[str, bytes], failure: str) -> None:
        # The thread of each rank runs this. With a `failure` of any rank, the checkpoint is not saved.
        written = {"failure": failure} if failure else _write_local(unfinished, self._copies, contents)
        if not is_main():
            try:
                _send_to_rank_0(unfinished.name, written)
            except Exception as error:  # rank 0 then reaches its time limit
                reason = f"{unfinished.name}: cannot reach rank 0 ({_describe(error)})"
                log.warning(f"{reason}. This checkpoint is not saved.{self._what_continues}")
            return
        try:
            files = self._files_of_all(unfinished.name, written)
            manifest = unfinished / MANIFEST_FILE
            manifest.write_bytes(manifest_text(files).encode())
            flush(manifest)
            with contextlib.suppress(OSError):  # some file systems cannot flush a folder
                flush(unfinished)
            unfinished.rename(target)
            with contextlib.suppress(OSError):
                flush(self._run_folder)
        except Exception as error:
            self._fail(target, _describe(error))
            shutil.rmtree(unfinished, ignore_errors=True)
            return
        self.failure = None
        self.saved.append(target)
        self.remove_old()

    def _files_of_all(self, name: str, of_rank_0: dict[str, Any]) -> dict[str, dict[str, Any]]:
        """Waits until all ranks have written their files. Only rank 0 calls it.

        Returns {file name: {"bytes": size, "sha256": hash}} with the files of all ranks. Raises RuntimeError
        if any rank failed, or did not report its files in time.

        name: Name of the temporary folder. Ranks other than 0 report their files under this name.
        of_rank_0: What `_write_local` returned on rank 0.
        """
        of_ranks = [of_rank_0]
        if world_size() > 1:
            store, keys = connect_store(), [f"{name}/{index}" for index in range(1, world_size())]
            began = time.monotonic()
            while not store.check(keys):
                if time.monotonic() - began > self._others_seconds:  # `wait` may have lowered the limit
                    missing = [index for index, key in enumerate(keys, start=1) if not store.check([key])]
                    ranks, seconds = log.name_ranks(missing), self._others_seconds
                    raise RuntimeError(f"{ranks} did not report written files within {seconds:g} s")
                time.sleep(_POLL_SECONDS)
            of_ranks += [json.loads(text) for text in store.multi_get(keys)]
            for key in keys:
                store.delete_key(key)
        for index, written in enumerate(of_ranks):
            if written["failure"]:
                raise RuntimeError(f"rank {index}: {written['failure']}")
        return {file: entry for written in of_ranks for file, entry in written["files"].items()}

    def remove_old(self) -> None:
        """Removes all checkpoints except the `keep` newest and the best. If `keep` is None, removes none.

        Only rank 0 calls it.
        """
        if self._keep is None:
            return
        folders = {step_of(path): path for path in checkpoints_in(self._run_folder)}
        best = self._best_of(folders)
        for step, folder in [*folders.items()][: -self._keep]:
            if step != best:
                try:  # rename first, so that a kill cannot leave a damaged checkpoint
                    shutil.rmtree(folder.rename(_unfinished_folder(folder)))
                except OSError as error:
                    log.warning(f"cannot remove the old checkpoint {folder} ({error}).{self._what_continues}")

    def _fail(self, target: Path, reason: str) -> None:
        self.failure = reason
        failed = f"checkpoint not saved: {target} ({reason})"
        log.warning(f"{failed}.{self._what_continues} Earlier checkpoints are not removed.")

    @property
    def _what_continues(self) -> str:
        return " Training continues." if self._continues else ""

    def wait(
        self,
        *,
        is_last: bool = False,
        timeout_seconds: float | None = None,
        others_seconds: float | None = None,
    ) -> None:
        """Waits until the current save has ended. Ranks other than 0 wait only for their own files.

        is_last: Whether the training has ended, so that warnings do not say that it continues.
        timeout_seconds: Limit of the whole wait. If None, there is no limit.
        others_seconds: New limit in seconds for how long rank 0 waits for the files of other ranks, after it
            has written its own. If None, the limit does not change.
        """
        self._continues = not is_last
        if others_seconds is not None:
            self._others_seconds = others_seconds
        if self._thread is not None:
            self._thread.join(timeout_seconds)
            if not self._thread.is_alive():
                self._thread = None


def local_part(tensors: Tensors) -> Tensors:
    """Returns {name: tensor or shard} with what this rank writes. Only rank 0 writes full tensors.

    If a lower rank holds the same shard, only that rank writes it. The result then contains an empty shard of
    the same name.

    tensors: {name: full tensor or shard} of this rank. The names of the shards must be equal on all ranks.
    """
    local_tensors = {}
    for name, value in tensors.items():
        if isinstance(value, Shard):
            nothing = value.tensor.reshape(-1)[:0]
            local_tensors[name] = value._replace(tensor=nothing, spans=()) if value.is_copy else value
        elif is_main():
            local_tensors[name] = value
    return local_tensors


def _write_local(folder: Path, sections: dict[str, Tensors], contents: dict[str, bytes]) -> dict[str, Any]:
    """Writes the files of this rank into a folder, and flushes them.

    Returns {"files": {file name: {"bytes": size, "sha256": hash}}, "failure": ""}, or {"failure": reason}.
    An error is not raised, because rank 0 collects the results of all ranks.

    sections: {section: {name: full tensor or shard}}. contents: {file name: content} of small files.
    """
    try:
        paths = [path for name, tensors in sections.items() for path in save_section(tensors, folder, name)]
        for name, content in contents.items():
            paths.append(folder / name)
            paths[-1].write_bytes(content)
        return {"files": {path.name: _close_file(path) for path in paths}, "failure": ""}
    except Exception as error:
        return {"failure": _describe(error)}


def _close_file(path: Path) -> dict[str, Any]:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        os.fsync(file.fileno())
        # Hash the file in one call. It releases Python's global lock, so that training continues meanwhile.
        return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _send_to_rank_0(name: str, written: dict[str, Any]) -> None:
    connect_store().set(f"{name}/{rank()}", json.dumps(written))


def _unfinished_folder(target: Path) -> Path:
    return target.with_name(f"{target.name}.tmp-{secrets.token_hex(4)}")
