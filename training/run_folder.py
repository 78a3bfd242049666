"""The folder of a run: a lock, so that only one launch at a time uses it, and small files of rank 0."""

from runtime.environment import num_cores

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import shlex
import socket
import sys
import tempfile
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from checkpointing.files import CONFIG_FILE, IDENTITIES_FILE, STARTS_FILE, newest_checkpoint
from config.architecture import Architecture
from config.schema import PretrainConfig
from dataset.identities import identities_of
from dataset.metadata import Dataset
from distributed import log
from distributed.errors import collective_errors
from distributed.launch import check_folder_is_shared, hash_code
from distributed.processor import describe_processor
from distributed.world import is_main, is_under_torchrun, local_world_size, world_size
from evaluation.known import has_rows_to_match
from runtime.metrics_file import read_rows
from runtime.plugins import plugin_files
from runtime.reading import read_json, read_text, sha256_of
from runtime.writing import open_to_append, remove_unfinished_files, replace_file, write_json, write_text
from training.code import code_diff, git_commit
from training.run_config import describe_changes, read_stored_config

STATUS_FILE = "status"
REPORT_FILE = "report.html"
HEARTBEAT_FILE = "heartbeat"
_LOCK_FILE = "lock"


def open_run_folder(config: PretrainConfig) -> None:
    """Creates the folder of a run if necessary, and locks it until this process ends. All ranks call it.

    Each rank also opens a log file in the folder. An error on rank 0 ends all ranks with a message.
    """
    folder = Path(config.checkpoint_path)
    with collective_errors():
        if is_main():
            claim_run_folder(config)
    check_folder_is_shared(folder)
    log.open_rank_file(folder)


def claim_run_folder(config: PretrainConfig) -> None:
    """Creates the folder of a run if necessary, and locks it until this process ends. Only rank 0 calls it.

    Removes temporary files that killed processes have left in the folder. Raises ValueError if the folder is
    not writable, if another process has locked it, or if it contains a run with another config.
    """
    folder = Path(config.checkpoint_path)
    with writing_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock_folder(folder, other=config.folder_key)
        stored = read_stored_config(folder)
        if stored is not None and (changes := describe_changes(stored.values, config)):
            where = f"{stored.folder} contains a run with another config"
            newest = None if re.search(r"(^|, )arch\.", changes) else newest_checkpoint(folder)
            hint = f"To start it with the weights of this run, also add init_from={newest}." if newest else ""
            raise ValueError(f"{where} ({changes}). Choose another {config.folder_key}. {hint}".strip())
        with tempfile.TemporaryFile(dir=folder):
            pass
        if stored is None:
            _name_runs_of_other_projects(config)
        remove_unfinished_files(folder)


def _name_runs_of_other_projects(config: PretrainConfig) -> None:
    # Example: the data folder was renamed. The default project name contains its name.
    if config.folder_key != "run_name":
        return
    folder = Path(config.checkpoint_path)
    others = sorted(path / folder.name for path in folder.parents[1].iterdir() if path != folder.parent)
    for other in others:
        if os.path.isfile(other / CONFIG_FILE):  # False, not an error, in a folder of another user
            log.info(f"{other} has the same run_name. To continue it, add checkpoint_path={other}.")
            return


@contextlib.contextmanager
def writing_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        what = f"cannot write into the run folder {folder} ({error.strerror or error})"
        raise ValueError(f"{what}. Choose another checkpoint_path.") from None


def lock_folder(folder: Path, *, other: str) -> None:
    """Locks a folder until this process ends.

    Raises ValueError if another process has locked the folder. If the file system has no locks, only warns.

    other: Config key with which the user can choose another folder, for the error message.
    """
    # A POSIX lock (fcntl) works between nodes on NFS. Closing any descriptor of the file would release it, so
    # there is only one descriptor, and it stays open.
    descriptor = _open_lock(folder, os.O_CREAT)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        owner = os.read(descriptor, 1000).decode(errors="replace").strip() or "another process"
        os.close(descriptor)
        if error.errno in (errno.EACCES, errno.EAGAIN):
            message = f"{folder} is in use by {owner}. Wait until it ends, or choose another {other}."
            raise ValueError(message) from None
        log.warning(f"cannot lock {folder} ({error.strerror}). Do not start a second run in it.")
        return
    with contextlib.suppress(OSError):  # other processes print this text in their error message
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())


def _open_lock(folder: Path, flags: int = 0) -> int:
    return os.open(folder / _LOCK_FILE, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o666)


def is_in_use(folder: Path) -> bool:
    try:
        descriptor = _open_lock(folder)
    except FileNotFoundError:
        return False
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in (errno.EACCES, errno.EAGAIN)
    finally:
        os.close(descriptor)
    return False


@contextlib.contextmanager
def disk_errors_warn(path: Path) -> Iterator[Path]:
    """Context manager that turns an OSError in its block, such as a full disk, into a warning.

    Yields `path`, the file that the block writes.
    """
    try:
        yield path
    except OSError as error:
        log.warning(f"cannot write {path} ({error.strerror or error}). The program continues without it.")


def write_status(folder: Path, status: str, *, step: int) -> None:
    """Writes the file `status` of a run folder on rank 0, such as {"status": "running", "step": 100}.

    If the file cannot be written, only warns.

    status: running, stopped, max_steps, failed or finished. step: Number of training steps done.
    """
    if is_main():
        with disk_errors_warn(folder / STATUS_FILE) as path:
            write_json(path, {"status": status, "step": step}, indent=None)


def has_ended(folder: Path, *, max_steps: int | None = None) -> bool:
    """Returns whether a run has ended as planned. Reads the file `status` of the run folder.

    If the status is "finished", returns True. If the status is "max_steps", returns whether at least
    `max_steps` training steps are done. Otherwise, and if the file is missing or damaged, returns False.

    max_steps: Planned value of the config key `max_steps`. If None, returns True only for "finished".
    """
    try:
        values = read_json(folder / STATUS_FILE)
        if values["status"] == "max_steps" and max_steps is not None:
            return values["step"] >= max_steps
        return values["status"] == "finished"
    except (ValueError, KeyError, TypeError):
        return False


def record_start(folder: Path, *, step: int, device: torch.device, **described: Any) -> None:
    """Adds a line to starts.jsonl of a run folder: command, code and hardware of this process.

    If the code has uncommitted changes, writes their diff to a separate file. If the run resumes with other
    code than its previous launch had, warns. Another commit with the same code causes no warning. If a file
    cannot be written, only warns.

    step: Number of training steps done before this start.
    described: More entries of the line, which is a JSON object.
    """
    start = {
        "step": step,
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": _command_line(),
        "git_commit": git_commit(),
        "code": hashlib.sha256(json.dumps(hash_code(), sort_keys=True).encode()).hexdigest(),
        "hardware": _describe_hardware(device),
        "processes": world_size(),
        "folder": str(folder.resolve()),
        "torch": torch.__version__,
        **described,
    }
    if plugins := {name: sha256_of(path) for name, path in plugin_files()}:
        start["plugins"] = plugins
    if diff := code_diff():
        start["changes"] = f"changes_{hashlib.sha256(diff.encode()).hexdigest()[:12]}.diff"
        with disk_errors_warn(folder / start["changes"]) as path:
            write_text(path, diff)
    if step and (changed := _changed_code(folder, start)):
        what = f"other code than in the previous launch of this run: {', '.join(changed)}"
        log.warning(f"{what}. Training continues with the current code.")
    with disk_errors_warn(folder / STARTS_FILE) as path, open_to_append(path) as file:
        file.write(f"{json.dumps(start)}\n".encode())


def _changed_code(folder: Path, start: dict[str, Any]) -> list[str]:
    # Returns what differs from the code of the previous launch: "this repository", or a file of a plugin.
    try:
        *_, (before, _) = read_rows(folder, STARTS_FILE)
    except (ValueError, OSError):  # the file is damaged, or has no line
        return []
    changed = ["this repository"] if before.get("code") != start["code"] else []
    hashes = before["plugins"] if isinstance(before.get("plugins"), dict) else {}
    return changed + [name for name, now in start.get("plugins", {}).items() if hashes.get(name, now) != now]


def write_identities(folder: Path, arch: Architecture, dataset: Dataset | None, *, is_new: bool) -> None:
    """Writes identities.npz into a run folder: which puzzle each puzzle embedding belongs to.

    Writes no file in these cases: the model has no puzzle embeddings, all puzzles share one embedding, the
    puzzles have no names, or `dataset` is None.

    is_new: Whether the run starts without a checkpoint. If True, an existing file is first removed. If False,
        an existing file is kept.
    """
    path = folder / IDENTITIES_FILE
    if is_new:
        path.unlink(missing_ok=True)
    if path.exists() or dataset is None or not has_rows_to_match(arch, dataset):
        return
    if (identities := identities_of(dataset)) is not None:
        with replace_file(path, "wb") as file:
            file.write(identities.to_bytes())


def find_original(folder: Path, name: str) -> Path | None:
    """Returns the run folder that `folder` was copied from, or None if there is none.

    The file starts.jsonl in `folder` contains the path of the original folder. The original must still exist
    there, and its file `name` must have the same content as that of `folder`.

    name: Name of a file with a value that no other run has, such as "wandb_run_id".
    """
    named = {start.get("folder") for start, _ in read_rows(folder, STARTS_FILE)}
    for original in [Path(path) for path in named if isinstance(path, str) and "\0" not in path]:
        with contextlib.suppress(ValueError, OSError):
            if not original.samefile(folder) and read_text(original / name) == read_text(folder / name):
                return original
    return None


def _command_line() -> str:
    # Example: "torchrun --nproc-per-node 2 pretrain.py lr=1e-3".
    program = ["python"]
    if is_under_torchrun():
        nodes, rest = divmod(world_size(), local_world_size())
        program = ["torchrun", *(["--nnodes", str(nodes)] if nodes > 1 and not rest else [])]
        program += ["--nproc-per-node", str(local_world_size())]
    return shlex.join([*program, Path(sys.argv[0]).name, *sys.argv[1:]])


def _describe_hardware(device: torch.device) -> str:
    # Examples: "8 x NVIDIA H100" for all processes, "2 cores of AMD EPYC (avx2)" for this process.
    if device.type == "cuda":
        return f"{world_size()} x {torch.cuda.get_device_name(device)}"
    return f"{num_cores()} cores of {describe_processor()}"
