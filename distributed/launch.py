"""Launches a program on all ranks: config, device, process group and watchdog.

Only rank 0 reads the command line. This module also checks that all nodes have the same code, run folder and
dataset.
"""

from runtime.environment import num_cores

import contextlib
import ctypes
import dataclasses
import json
import os
import platform
import secrets
import socket
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from distributed import log
from distributed.backend import (
    choose_backend,
    choose_device,
    device_type,
    process_group,
    set_cpu_threads,
    use_deterministic_algorithms,
)
from distributed.collectives import broadcast_object, gather_objects
from distributed.errors import (
    EXIT_FAILURE,
    collective_errors,
    connection_errors,
    local_errors,
    path_errors,
)
from distributed.number_format import Choice, choose_format
from distributed.watchdog import Watchdog
from distributed.world import (
    agent_serves_store,
    is_elastic,
    is_main,
    leave_store,
    local_world_size,
    num_nodes,
    rank,
    read_launcher,
    rendezvous_store,
    set_node_variables,
    world_size,
)
from runtime.plugins import load_plugins, plugin_files
from runtime.reading import sha256_of

REPOSITORY = Path(__file__).resolve().parent.parent
NOT_RUN = {"tests", "benchmarks", "records", "launch"}
_OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
_MAX_NAMED = 3  # files in one warning

_LARGEST_KEPT = 2**25  # bytes: the largest threshold that every version of glibc accepts
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h

Config = TypeVar("Config")  # a pydantic model with the keys of the machine


@dataclasses.dataclass(frozen=True)
class Program(Generic[Config]):
    """What the context manager `launch` yields on each rank.

    Attributes:
        config: The config, equal on all ranks.
        device: Device of this rank.
        watchdog: Ends all ranks if one of them hangs (`distributed.watchdog`).
    """

    config: Config
    device: torch.device
    watchdog: Watchdog


@contextlib.contextmanager
def launch(schema: type[Config], compose: Callable[[], Config | None]) -> Iterator[Program[Config]]:
    """Context manager for a program that runs on all ranks. Yields a `Program`.

    All ranks enter it. With several ranks, the process group of torch.distributed exists inside the block.
    If `compose` raises ValueError, all ranks exit with status 1.

    Args:
        schema: Class of the config.
        compose: Function that returns the config. Only rank 0 calls it. If it returns None, for example after
            printing a help text, all ranks exit with status 0.
    """
    log.capture_library_warnings()
    with local_errors():
        read_launcher()
        text = _broadcast_config(compose)
        load_plugins(json.loads(text).get("plugins", []))
        config = schema.model_validate_json(text)
    wait_for_all_ranks(config.device, timeout_seconds=config.init_timeout_seconds)
    with local_errors():
        device = choose_device(config.device)
        choose_backend(config.backend, device)
    _warn_of_threads(set_cpu_threads(config.cpu_threads))
    if config.deterministic:
        use_deterministic_algorithms()
    keep_freed_memory(device)
    watchdog = Watchdog(
        init_timeout_seconds=config.init_timeout_seconds, step_timeout_seconds=config.step_timeout_seconds
    )
    with watchdog, process_group(device, config.backend), connection_errors(watchdog.is_alarmed):
        yield Program(config, device, watchdog)


def _broadcast_config(compose: Callable[[], Any]) -> str:
    # It works without a process group.
    if is_main():
        text, status, reason = None, EXIT_FAILURE, ""
        try:
            with path_errors():
                config = compose()
            if config is not None:
                choose_backend(config.backend, choose_device(config.device))  # so that only rank 0 prints
                text = config.model_dump_json()
            status = 0
        except ValueError as error:
            log.error(error)
            reason = str(error)
        except SystemExit as error:  # the reason has been printed
            status = error.code if isinstance(error.code, int) else EXIT_FAILURE
        finally:
            if world_size() > 1:
                rendezvous_store().set(
                    "decision", json.dumps({"text": text, "status": status, "reason": reason})
                )
    else:
        decision = json.loads(rendezvous_store().get("decision"))  # waits until rank 0 has decided
        text, status = decision["text"], decision["status"]
        if decision["reason"]:
            log.error(decision["reason"], on_console=False)  # torchrun may see this rank end before rank 0
    if text is None:
        leave_store(range(world_size()))
        raise SystemExit(status)
    return text


def wait_for_all_ranks(device: str, *, timeout_seconds: float) -> None:
    """Waits until all ranks have started, and warns about machines that differ from rank 0's machine.

    Warns if a machine has other code or another version of torch, or if bfloat16 is fast on only some of the
    machines. Also warns about options of torchrun that prevent a restart. Sets LOCAL_RANK and other variables
    that the launcher has not set (`set_node_variables`). All ranks call it, before the process group exists.
    If a rank does not start in time, the other ranks exit with status 1.

    device: Value of the config key `device`. timeout_seconds: Time limit.
    """
    if world_size() == 1:
        _warn_of_restarts([socket.gethostname()] if agent_serves_store() else [])
        return
    store, timeout = rendezvous_store(), timedelta(seconds=timeout_seconds)
    keys = [f"started/{number}" for number in range(world_size())]
    start = {"host": socket.gethostname(), "code": _code(), "has_agent_store": agent_serves_store()}
    start["format"] = _format_of(device)
    store.set(keys[rank()], json.dumps(start))
    if is_main():
        with contextlib.suppress(RuntimeError):  # timeout: the error below names the missing ranks
            store.wait(keys, timeout)
        missing = [number for number, key in enumerate(keys) if not store.check([key])]
        if missing:
            log.error(
                f"{log.name_ranks(missing)} of {world_size()} did not start within {timeout_seconds:g} s "
                "(init_timeout_seconds). Check that all nodes are up, and start the program on every node."
            )
        else:
            starts = [json.loads(value) for value in store.multi_get(keys)]
            _warn_of_other_code(starts)
            _warn_of_other_formats(starts)
            _warn_of_restarts(sorted({start["host"] for start in starts if start["has_agent_store"]}))
            store.set("hosts", json.dumps([start["host"] for start in starts]))
        store.set("missing", json.dumps(missing))
    else:
        try:
            store.wait(["missing"], 2 * timeout)  # twice: rank 0 itself waits for one timeout
        except RuntimeError:
            log.error(
                f"rank 0 did not respond within {2 * timeout_seconds:g} s. Check rank 0's output.",
                failed_rank=rank(),
            )
            raise SystemExit(EXIT_FAILURE) from None
    if missing := json.loads(store.get("missing")):
        leave_store(set(range(world_size())) - set(missing))
        raise SystemExit(EXIT_FAILURE)
    set_node_variables(json.loads(store.get("hosts")))


def code_files() -> list[Path]:
    folders = [path.parent for path in REPOSITORY.glob("*/__init__.py") if path.parent.name not in NOT_RUN]
    paths = [*REPOSITORY.glob("*.py"), *(path for folder in folders for path in folder.rglob("*"))]
    return [path for path in paths if path.suffix in (".py", ".yaml") and path.is_file()]


def hash_code() -> dict[str, str]:
    """Returns {name: SHA-256 of the file} for the code that a run uses, without plugins."""
    return {path.relative_to(REPOSITORY).as_posix(): sha256_of(path) for path in code_files()}


def _code() -> dict[str, str]:
    plugins = {name: sha256_of(path) for name, path in plugin_files()}
    return {f"torch {torch.__version__}": ""} | hash_code() | plugins


def _warn_of_threads(threads: int) -> None:
    count = local_world_size()
    if is_main() and threads > 1 and threads * count > 2 * num_cores():
        log.warning(
            f"{count} processes with {threads} threads each share only {num_cores()} cores, so they slow "
            "each other down. Unset cpu_threads and OMP_NUM_THREADS."
        )


def _warn_of_other_code(starts: list[dict]) -> None:
    first, ranks = starts[0]["code"], defaultdict(list)
    for number, start in enumerate(starts):
        code = start["code"]
        names = sorted(name for name in first | code if first.get(name) != code.get(name))
        ranks[start["host"], tuple(names)].append(number)
    for (host, names), numbers in ranks.items():
        if names:
            more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
            log.warning(
                f"{log.name_ranks(numbers)} on {host}: code differs from rank 0 in "
                f"{', '.join(names[:_MAX_NAMED])}{more}. Use the same commit and torch version on all nodes."
            )


def _format_of(device: str) -> Choice | None:
    name = device_type(device)
    if name == "cuda" and not torch.cuda.is_available():
        return None
    return choose_format(torch.device(name))


def _warn_of_other_formats(starts: list[dict]) -> None:
    formats = [start["format"] and Choice(*start["format"]) for start in starts]
    if (first := formats[0]) is None:
        return
    others = [number for number, choice in enumerate(formats) if choice and choice.name != first.name]
    if not others:
        return
    hosts = ", ".join(dict.fromkeys(starts[number]["host"] for number in others))
    reasons = ", ".join(dict.fromkeys(formats[number].reason for number in others))
    if first.name == "bfloat16":
        what = f"bfloat16 is slow on {hosts}: {reasons}"
    else:
        what = f"bfloat16 is fast on {hosts}, but not on {starts[0]['host']} (rank 0): {first.reason}"
    log.warning(f"{what}. All ranks compute in the same format. Set arch.forward_dtype to choose it.")


def _warn_of_restarts(hosts: list[str]) -> None:
    # With torch 2.13, restarts fail if torchrun itself serves the ranks' key-value store on rank 0's node. A
    # node that returns then does not find the other nodes. `hosts`: nodes on which torchrun serves the store.
    has_restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) > 0
    if is_elastic() and not has_restarts:
        log.warning(
            "--nnodes MIN:MAX without --max-restarts: the run ends as soon as one node leaves. Pass "
            "--max-restarts to torchrun."
        )
    if not hosts or not has_restarts or (num_nodes() == 1 and not is_elastic()):
        return
    log.warning(
        f"restarts would fail after the loss of a node. Set {_OWN_STORE}, and pass --rdzv-backend c10d to "
        f"torchrun, on {', '.join(hosts)}."
    )


def check_folder_is_shared(folder: Path) -> None:
    """Checks that every machine sees the same folder as rank 0. All ranks call it.

    Rank 0 creates a temporary file in the folder. If rank 0 cannot create it, or if another machine does not
    see it, all ranks exit with status 1. With only one machine, nothing is checked.
    """
    if num_nodes() == 1:
        return
    token = folder / f".start_{secrets.token_hex(8)}"  # a new name, so that no node has cached it as missing
    with collective_errors():
        if is_main():
            try:
                token.touch()
            except OSError as error:
                advice = "Check the permissions and the free space."
                raise ValueError(f"cannot write {token} ({error.strerror}). {advice}") from None
    token = broadcast_object(token)
    advice = "Share it among all nodes at the same path, for example by NFS (docs/many_machines.md)."
    try:
        # os.path.exists, because Path.exists may raise OSError (no permission, a stale handle of NFS).
        _check_all(os.path.exists(token), f"rank 0's run folder {folder.absolute()} is not visible", advice)
    finally:
        if is_main():
            token.unlink(missing_ok=True)


def check_same_files(fingerprint: str, *, what: str, names: Sequence[str]) -> None:
    """Checks that all machines have the same files as rank 0. All ranks call it.

    If the files of any machine differ, all ranks exit with status 1.

    fingerprint: Text that identifies the files of this machine, such as their hash. One rank of each machine
    passes it. The other ranks may pass "".
    what, names: Noun and paths for the message, such as "data" and ["data/sudoku"].
    """
    is_same = fingerprint in ("", broadcast_object(fingerprint))
    advice = "Copy it to all nodes, or share the folder."
    _check_all(is_same, f"rank 0's {what} in {', '.join(names)} differs from the {what}", advice)


def _check_all(is_good: bool, what: str, advice: str) -> None:
    gathered = gather_objects((socket.gethostname(), is_good))
    with collective_errors():
        bad = {number: host for number, (host, found) in enumerate(gathered or ()) if not found}
        if bad:
            hosts = ", ".join(dict.fromkeys(bad.values()))
            raise ValueError(f"{what} on {log.name_ranks(list(bad))} ({hosts}). {advice}")


def keep_freed_memory(device: torch.device) -> None:
    """Makes the C library keep freed memory for later tensors, in blocks of up to 32 MiB each.

    On a CPU with the C library glibc, this makes a training step 3 to 20 % faster. On other devices and with
    other C libraries, it does nothing.
    """
    if device.type != "cpu" or platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT)
    libc.mallopt(_M_TRIM_THRESHOLD, -1)
