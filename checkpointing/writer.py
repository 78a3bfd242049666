"""Writes checkpoints while the run goes on: a save takes no more of a step's time than a copy to host memory.

All ranks write into `step_<N>.tmp-<nonce>/`, each its own files. Rank 0 learns their sizes and hashes, adds
the manifest, and renames the folder. So `step_<N>` is whole or not there, at whatever instant processes are
killed. Each rank does its part in a thread. The threads issue no collectives, which all ranks must issue in
one order: they talk through the store, which also works where it is the disk that failed.
"""

import contextlib
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpointing.files import MANIFEST_FILE, manifest_text, unfinished_folder
from parallel import log
from parallel.collectives import broadcast_object
from parallel.process_group import connect_store, is_main, rank, world_size

_PART_LIMIT = timedelta(minutes=10)  # for another rank to have written its files, once rank 0 has
_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class CheckpointWriter:
    """Saves one checkpoint at a time. All ranks have one, and call `start` together.

    failure: on rank 0, why the newest save failed; None where it did not.
    after_commit: called on rank 0, in the thread, when there is a new checkpoint.
    """

    def __init__(self, run_folder: Path, *, after_commit: Callable[[], None]):
        self._run_folder, self._after_commit = run_folder, after_commit
        self._thread: threading.Thread | None = None
        self._copies: dict[str, dict[str, Tensor]] = {}
        self.failure: str | None = None

    def start(self, step: int, tensors: dict[str, dict[str, Tensor]], texts: dict[str, str]) -> None:
        """Copies the tensors (by file, then name) of this rank; they are written, beside the texts, later.

        Waits for the save before. What fails is told, here or later, and ends nothing. A step that is there
        is not saved again.
        """
        self.wait()
        goal = self._run_folder / f"step_{step}"
        unfinished = broadcast_object(self._make_folder(goal) if is_main() else None)
        if unfinished is None:
            return
        copies, failure = {}, None
        try:
            copies = self._copy_to_host(tensors)
        except Exception as error:  # no memory left
            failure = _describe(error)
        self._thread = threading.Thread(
            target=self._write, args=(unfinished, goal, copies, texts, failure), daemon=True
        )
        self._thread.start()

    def wait(self, *, timeout_seconds: float | None = None) -> None:
        """Until the save under way is there, or has failed; on ranks other than 0, until their part is."""
        if self._thread is not None:
            self._thread.join(timeout_seconds)
            if not self._thread.is_alive():
                self._thread = None

    def _make_folder(self, goal: Path) -> Path | None:
        """On rank 0 the folder to write into; None where there is nothing to write, or nowhere."""
        if goal.exists():
            return None
        unfinished = unfinished_folder(goal)
        try:
            unfinished.mkdir()
        except OSError as error:
            self._fail(goal, _describe(error))
            return None
        return unfinished

    def _copy_to_host(self, tensors: dict[str, dict[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
        """Copies into memory that is kept from save to save, and pinned for a CUDA device."""
        for file, named in tensors.items():
            copies = self._copies.setdefault(file, {})
            for name, tensor in named.items():
                if name not in copies:
                    is_cuda = tensor.device.type == "cuda"
                    copies[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=is_cuda)
                copies[name].copy_(tensor, non_blocking=tensor.is_cuda)
        if any(tensor.is_cuda for named in tensors.values() for tensor in named.values()):
            torch.cuda.current_stream().synchronize()
        return self._copies

    # ------------------------------------------------------------------------------------- in the thread

    def _write(
        self,
        unfinished: Path,
        goal: Path,
        copies: dict[str, dict[str, Tensor]],
        texts: dict[str, str],
        failure: str | None,
    ) -> None:
        part = {"failure": failure}
        if failure is None:
            part = _write_part(unfinished, copies, texts)
        if is_main():
            self._commit(unfinished, goal, part)
        else:
            _tell_rank_0(unfinished.name, part)

    def _commit(self, unfinished: Path, goal: Path, part: dict[str, Any]) -> None:
        try:
            files = _files_of_all(unfinished.name, part)
            _write_file(unfinished / MANIFEST_FILE, manifest_text(files).encode())
            _sync(unfinished)
            unfinished.rename(goal)
            _sync(self._run_folder)
        except Exception as error:
            self._fail(goal, _describe(error))
            shutil.rmtree(unfinished, ignore_errors=True)
        else:
            self.failure = None
            self._after_commit()

    def _fail(self, goal: Path, reason: str) -> None:
        self.failure = reason
        log.warning(f"THE CHECKPOINT {goal} COULD NOT BE SAVED, the run goes on without it ({reason})")


def _tell_rank_0(name: str, part: dict[str, Any]) -> None:
    try:
        connect_store().set(f"{name}/{rank()}", json.dumps(part))
    except Exception as error:  # rank 0 will notice
        log.warning(f"{name}: rank 0 cannot be told ({_describe(error)})")


def _files_of_all(name: str, own: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What all ranks have written, once they have. Raises RuntimeError where one could not."""
    parts = [own]
    if world_size() > 1:
        store = connect_store()
        for other in range(1, world_size()):
            key = f"{name}/{other}"
            try:
                store.wait([key], _PART_LIMIT)
            except RuntimeError as error:
                raise RuntimeError(f"rank {other} has not written its part ({error})") from None
            parts.append(json.loads(store.get(key)))
            store.delete_key(key)
    for number, part in enumerate(parts):
        if part["failure"] is not None:
            raise RuntimeError(f"rank {number}: {part['failure']}")
    return {file: entry for part in parts for file, entry in part["files"].items()}


def _write_part(folder: Path, tensors: dict[str, dict[str, Tensor]], texts: dict[str, str]) -> dict[str, Any]:
    """Writes the files of this rank; returns their entries in the manifest, or why there are none."""
    try:
        files = {name: write_tensors(folder / name, named) for name, named in tensors.items()}
        files |= {name: _write_file(folder / name, text.encode()) for name, text in texts.items()}
        return {"files": files, "failure": None}
    except Exception as error:
        return {"failure": _describe(error)}


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Writes contiguous CPU tensors as safetensors, onto the disk, and returns the entry in the manifest.

    safetensors' own `save_file`, before 0.8, holds Python still while it writes: training would wait. And so
    writing and hashing are one pass, and the hash is that of what was meant, not of what came out.
    """
    # As in safetensors: the largest elements first, so that all are aligned.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header, end = {}, 0
    for name in names:
        tensor, begin = tensors[name], end
        end += tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    data = (tensors[name].reshape(-1).view(torch.uint8).numpy() for name in names)
    return _write_file(path, len(text).to_bytes(8, "little"), text, *data)


def _write_file(path: Path, *pieces: Any) -> dict[str, Any]:
    """Writes the pieces, anything with a buffer, onto the disk; returns the entry in the manifest."""
    digest, size = hashlib.sha256(), 0
    with path.open("xb") as file:
        for piece in pieces:
            file.write(piece)
            digest.update(piece)
            size += memoryview(piece).nbytes
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": size, "sha256": digest.hexdigest()}


def _sync(folder: Path) -> None:
    """Makes the names in a folder last, where the file system knows how to."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
