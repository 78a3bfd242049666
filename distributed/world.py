"""Rank, number of ranks and nodes, and the key-value store of all ranks, from the launcher's variables.

The launcher is torchrun, srun or a script that sets RANK and WORLD_SIZE. Without one, there is one rank.
"""

import contextlib
import functools
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

_STORE_TIMEOUT = timedelta(minutes=10)
_NAME_SECONDS = 30  # time limit for resolving the host name of rank 0
_FAREWELL = timedelta(minutes=1)  # how long rank 0 waits for others to read the store before it ends
_MOST_RANKS = 2**20
# Launchers that do not set WORLD_SIZE: (name, variable with the number of processes, variable with the own
# number). mpirun may start its processes with srun, so its own variables come first.
_LAUNCHERS = (
    ("mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    ("mpirun", "PMI_SIZE", "PMI_RANK"),
)
_store_lock = threading.Lock()


def rank() -> int:
    return _read_number("RANK", 0)


def world_size() -> int:
    return _read_number("WORLD_SIZE", 1)


def local_rank() -> int:
    return _read_number("LOCAL_RANK", 0)


def local_world_size() -> int:
    return _read_number("LOCAL_WORLD_SIZE", 1)


def num_nodes() -> int:
    return _read_number("GROUP_WORLD_SIZE", 1)


def is_elastic() -> bool:
    """Returns whether torchrun may continue with another number of machines (`--nnodes MIN:MAX`).

    The range may also come from the environment variable PET_NNODES of torchrun. On systems without /proc,
    returns False.
    """
    with contextlib.suppress(OSError):
        path = Path(f"/proc/{os.getppid()}/cmdline")
        command = path.read_text(encoding="utf-8", errors="replace").replace("\0", " ")
        nodes = os.environ.get("PET_NNODES", "") if is_under_torchrun() else ""
        if given := re.search(r"--nnodes[= ]([\d:]+) ", command):
            nodes = given[1]
        least, _, most = nodes.partition(":")
        return most not in ("", least)
    return False


def is_under_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def read_launcher() -> None:
    """Checks the environment variables of the launcher. After srun, sets RANK, WORLD_SIZE and others.

    Call it at the start of a program, before the other functions of this module. Without a launcher, the
    program runs on one rank. With srun, nothing is set if RANK is already set, or if there is only one
    process. If variables are missing, or if several processes have the same rank, raises ValueError. If the
    number in a variable is not valid, exits with status 1.
    """
    _check_number("WORLD_SIZE", range(1, _MOST_RANKS))
    _check_number("RANK", range(_MOST_RANKS))
    launchers = (entry for entry in _LAUNCHERS if os.environ.get(entry[1], "1") != "1")
    launcher, count_name, rank_name = next(launchers, ("", "", ""))
    count, launcher_rank = os.environ.get(count_name), os.environ.get(rank_name)
    if launcher == "srun" and "RANK" not in os.environ and os.environ.get("WORLD_SIZE", count) == count:
        _set_slurm_variables()
    elif launcher and "WORLD_SIZE" not in os.environ:
        raise ValueError(
            f"{launcher} started {count} processes, but WORLD_SIZE is not set. Start one torchrun on each "
            "node, as launch/slurm.sbatch does (docs/many_machines.md). If each process is a separate run, "
            "set WORLD_SIZE=1."
        )
    elif launcher and not is_under_torchrun() and str(world_size()) == count and str(rank()) != launcher_rank:
        raise ValueError(
            f"several processes have the same rank: RANK={rank()}, but {rank_name}={launcher_rank}. "
            f"{launcher} started {count} processes. Set RANK=${rank_name} in each process, not once for all."
        )
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing and world_size() > 1:
        raise ValueError(f"WORLD_SIZE={world_size()} needs {', '.join(missing)}. Set them, or use torchrun.")
    _check_number("RANK", range(world_size()))
    if world_size() > 1:
        _check_number("MASTER_PORT", range(1, 2**16))


def _check_number(name: str, valid: range) -> None:
    text = os.environ.get(name, str(valid.start))
    try:
        is_valid = int(text) in valid
    except ValueError:
        is_valid = False
    if not is_valid:  # sys.exit prints it. The log cannot, because it reads RANK and WORLD_SIZE.
        limits = f"an integer from {valid.start} to {valid.stop - 1}"
        sys.exit(f"error: {name}={text!r} is not {limits}. Correct it, or use torchrun.")


def _read_number(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError:  # solve.py does not call `read_launcher`
        sys.exit(f"error: {name}={text!r} is not an integer. Correct it, or unset it.")


def _set_slurm_variables() -> None:
    # The first node of the job step serves the key-value store.
    nodes, job = os.environ["SLURM_STEP_NODELIST"], int(os.environ["SLURM_JOB_ID"])
    if "MASTER_ADDR" not in os.environ:
        command = ["scontrol", "show", "hostnames", nodes]
        try:
            listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        except (OSError, subprocess.CalledProcessError) as error:
            raise ValueError(
                f"cannot list the nodes of the job: {' '.join(command)} failed ({error}). Set MASTER_ADDR to "
                "the first node."
            ) from None
        os.environ["MASTER_ADDR"] = listed[0]
    os.environ.setdefault("MASTER_PORT", str(20000 + job % 10000))
    names = {"RANK": "SLURM_PROCID", "LOCAL_RANK": "SLURM_LOCALID", "WORLD_SIZE": "SLURM_STEP_NUM_TASKS"}
    os.environ |= {name: os.environ[slurm_name] for name, slurm_name in names.items()}


def set_node_variables(hosts: list[str]) -> None:
    """Sets LOCAL_RANK, LOCAL_WORLD_SIZE and GROUP_WORLD_SIZE if the launcher has not set them.

    hosts: Host name of each rank. Ranks with the same host are on one machine.
    """
    if "LOCAL_WORLD_SIZE" not in os.environ:
        before = [number for number, host in enumerate(hosts) if host == hosts[rank()]]
        os.environ["LOCAL_WORLD_SIZE"] = str(len(before))
        os.environ.setdefault("LOCAL_RANK", str(before.index(rank())))
    os.environ.setdefault("GROUP_WORLD_SIZE", str(len(set(hosts))))


def is_main() -> bool:
    return rank() == 0


def rendezvous_store() -> dist.Store:
    """Returns the key-value store that all ranks share (`torch.distributed.Store`).

    This function does not need a process group, and all threads may call it. With only one rank, do not call
    it.
    """
    with _store_lock:  # so that only one thread starts a server
        return _rendezvous_store()


@functools.cache
def _rendezvous_store() -> dist.Store:
    return _open_store(is_server=is_main() and not agent_serves_store())


def connect_store() -> dist.Store:
    """Opens a new connection to the key-value store that all ranks share.

    A connection handles only one call at a time, so a thread needs its own connection.
    """
    rendezvous_store()  # starts the server if rank 0 serves the store
    return _open_store(is_server=False)


def agent_serves_store() -> bool:
    """Returns whether torchrun serves the key-value store of the ranks. Otherwise rank 0 serves it."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def may_restart() -> bool:
    """Returns whether torchrun may restart the processes, for example after one has failed."""
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) > 0 or is_elastic()


def value_of_launch(key: str, value: str) -> str:
    """Returns one value for all processes of a torchrun job. Example: the random name of a run.

    It is the `value` of the process that calls first with this key. After torchrun has restarted the
    processes, they get the same value again. torchrun must serve the key-value store
    (`agent_serves_store`).
    """
    # Only torchrun's store outlives the processes.
    key = f"{key}/{os.environ.get('TORCHELASTIC_RUN_ID', '')}"
    return _open_tcp_store(is_server=False).compare_set(key, "", value).decode()


def _open_tcp_store(*, is_server: bool) -> dist.TCPStore:
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    _wait_for_name(address)
    options = {"is_master": is_server, "wait_for_workers": False, "timeout": _STORE_TIMEOUT}
    try:
        return dist.TCPStore(address, port, **options)
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise ValueError(f"MASTER_PORT {port} is in use on {address}. Choose another port.") from None


def _open_store(*, is_server: bool) -> dist.Store:
    store = _open_tcp_store(is_server=is_server)
    if is_main():
        store.set("agent_serves", str(agent_serves_store()))
    if store.get("agent_serves") == b"False":
        return store  # rank 0's store is new after every restart
    # torchrun's store keeps its keys when the workers restart. Give each restart a new key prefix, so that
    # workers do not read the addresses of dead processes (pytorch#135712). Each agent counts restarts itself.
    # The counts agree on one node, or if all nodes took part since the first start.
    return dist.PrefixStore(f"attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)


def _wait_for_name(host: str) -> None:
    # Example: the name of a Kubernetes pod that has just started does not resolve yet.
    deadline = time.monotonic() + _NAME_SECONDS
    while True:
        try:
            socket.getaddrinfo(host, None)
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise ValueError(
                    f"cannot resolve MASTER_ADDR={host} on {socket.gethostname()} ({error.strerror}). On "
                    "rank 0's node, pass torchrun a --local-addr that all nodes can resolve."
                ) from None
            time.sleep(1)


def leave_store(ranks: Iterable[int]) -> None:
    """Makes rank 0 wait until the other ranks no longer need the key-value store.

    All of `ranks` call it before they exit, in a program that never called init_process_group. Rank 0 waits
    at most a minute. If torchrun serves the store, rank 0 does not wait.

    ranks: Ranks that call this function.
    """
    if world_size() == 1:
        return
    store = rendezvous_store()
    if not is_main():
        store.set(f"left/{rank()}", "")
    elif not agent_serves_store():
        with contextlib.suppress(RuntimeError):  # timeout: a rank has ended
            store.wait([f"left/{number}" for number in ranks if number != rank()], _FAREWELL)
