"""Which process this is, on which device, and the group of all of them; without torchrun a world of one."""

from parallel.environment import num_cores

import contextlib
import functools
import gc
import os
import re
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_STORE_TIMEOUT = timedelta(minutes=10)
_NAME_SECONDS = 30  # for the name of rank 0's node to resolve
_FAREWELL = timedelta(minutes=1)  # ranks of one start are that far apart at most, and mostly seconds
# What says how many processes a launcher has started, where that is not WORLD_SIZE.
_LAUNCHERS = {"SLURM_STEP_NUM_TASKS": "srun", "OMPI_COMM_WORLD_SIZE": "mpirun", "PMI_SIZE": "mpirun"}
_store_lock = threading.Lock()
# While one rank evaluates or saves, the others wait in a collective, where torch would end them after 10
# minutes (NCCL) or 30 (gloo). To end a hung rank is the watchdog's work: it knows what each of them is at.
_GROUP_TIMEOUT = timedelta(days=1)


def rank() -> int:
    return int(os.environ.get("RANK", 0))


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", 1))


def local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", 0))


def local_world_size() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def num_nodes() -> int:
    """Returns on how many nodes torchrun has started processes."""
    return int(os.environ.get("GROUP_WORLD_SIZE", 1))


def is_elastic() -> bool:
    """Returns whether torchrun goes on when nodes leave and join (`--nnodes MIN:MAX`), as Linux shows it."""
    with contextlib.suppress(OSError):
        command = Path(f"/proc/{os.getppid()}/cmdline").read_text(errors="replace").replace("\0", " ")
        nodes = re.search(r"--nnodes[= ](\d+):(\d+) ", command)
        return nodes is not None and nodes[1] != nodes[2]
    return False


def check_launcher() -> None:
    """Raises ValueError where this is one of several processes, but not told which, or where they meet."""
    if "WORLD_SIZE" not in os.environ:
        for variable, launcher in _LAUNCHERS.items():
            if (count := os.environ.get(variable, "1")) != "1":
                raise ValueError(
                    f"{launcher} has started {count} processes, which would all train alone: let it start "
                    "one torchrun on each node, as launch/slurm.sbatch does (docs/many_machines.md), or set "
                    "WORLD_SIZE=1 where each is a run of its own"
                )
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing and world_size() > 1:
        raise ValueError(f"WORLD_SIZE is {world_size()}, but {', '.join(missing)} not set: use torchrun")


def count_nodes(hosts: list[str]) -> None:
    """Sets what torchrun says of nodes, and another launcher may not. hosts: of all ranks, in their order."""
    if "LOCAL_WORLD_SIZE" not in os.environ:
        before = [number for number, host in enumerate(hosts) if host == hosts[rank()]]
        os.environ["LOCAL_WORLD_SIZE"] = str(len(before))
        os.environ.setdefault("LOCAL_RANK", str(before.index(rank())))
    os.environ.setdefault("GROUP_WORLD_SIZE", str(len(set(hosts))))


def is_main() -> bool:
    return rank() == 0


def rendezvous_store() -> dist.Store:
    """Returns the key-value store that is there before and beside the process group: torchrun's, or rank 0's.

    Only for a world of several; every rank may call it at any time, from any thread.
    """
    with _store_lock:  # or two threads would both serve it
        return _rendezvous_store()


@functools.cache
def _rendezvous_store() -> dist.Store:
    return _open_store(is_server=is_main() and not agent_serves_store())


def connect_store() -> dist.Store:
    """Connects once more to that store: a connection that waits for a key makes others wait for it."""
    rendezvous_store()  # where no agent serves it, rank 0 does
    return _open_store(is_server=False)


def agent_serves_store() -> bool:
    """Returns whether torchrun's agent serves the store, as far as this node's torchrun knows."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _open_store(*, is_server: bool) -> dist.Store:
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    _wait_for_name(address)
    options = {"is_master": is_server, "wait_for_workers": False, "timeout": _STORE_TIMEOUT}
    try:
        store = dist.TCPStore(address, port, **options)
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise ValueError(f"MASTER_PORT {port} is taken on {address}: choose another") from None
    if is_main():
        store.set("agent_serves", str(agent_serves_store()))
    if store.get("agent_serves") == b"False":
        return store  # a new one in every attempt
    # The agent's store outlives its workers, and a restarted attempt must not meet the addresses of the dead
    # one (pytorch#135712). Each agent counts the attempts by itself, so that this is for the agents of one
    # node, or of nodes that all live.
    return dist.PrefixStore(f"attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)


def _wait_for_name(host: str) -> None:
    """Waits until a name resolves, as that of a pod may only after a while. ValueError where it does not."""
    deadline = time.monotonic() + _NAME_SECONDS
    while True:
        try:
            socket.getaddrinfo(host, None)
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise ValueError(
                    f"{host}, where all ranks meet, does not resolve on {socket.gethostname()} "
                    f"({error.strerror}): give torchrun there one that all know, by --local-addr"
                ) from None
            time.sleep(1)


def leave_store(ranks: Iterable[int]) -> None:
    """Waits, where rank 0 serves the store, until these ranks have read what they need; all of them call it.

    For a program that ends before there is a process group: the store ends with rank 0.
    """
    if world_size() == 1:
        return
    store = rendezvous_store()
    if not is_main():
        store.set(f"left/{rank()}", "")
    elif not agent_serves_store():
        with contextlib.suppress(RuntimeError):  # one that is gone needs nothing
            store.wait([f"left/{number}" for number in ranks if number != rank()], _FAREWELL)


@contextlib.contextmanager
def process_group(
    device: torch.device, backend: str = "auto", *, timeout: timedelta = _GROUP_TIMEOUT
) -> Iterator[None]:
    """Opens the group of all ranks, and closes it whatever ends the block. All ranks enter together.

    backend: the config's name, as `choose_backend` takes it.
    """
    if world_size() == 1:
        yield
        return
    options = {"store": dist.PrefixStore("group", rendezvous_store()), "timeout": timeout}
    open_group(choose_backend(backend, device), **options, rank=rank(), world_size=world_size())
    try:
        yield
    finally:
        close_group()


def all_gather_objects(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Gathers the values of all ranks of a group in their order, pickled.

    group: None: of all ranks. Before there is a process group, returns [value].
    """
    if not dist.is_initialized():
        return [value]
    gathered = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group=group)
    return gathered


def open_group(backend: str, **options: object) -> None:
    """Opens a group as dist.init_process_group, so that its threads end with `close_group`.

    Functions of torch.distributed.nn hold the group in which they are imported. Threads of gloo that live on
    while Python leaves end the process by SIGABRT now and then. ValueError where gloo's interface is missing.
    """
    import torch.distributed.nn.functional  # noqa: F401

    there = [name for _, name in socket.if_nameindex()]
    for name in filter(None, os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")):
        if name not in there:
            raise ValueError(f"GLOO_SOCKET_IFNAME: no interface {name}; there are {', '.join(there)}")

    dist.init_process_group(backend, **options)


def close_group() -> None:
    """Closes the group as dist.destroy_process_group, after the garbage that holds it.

    As the last to hold a group, torch's DistributedDataParallel, a cycle, would wait for gloo's threads with
    Python's lock taken, for which one of them may wait.
    """
    gc.collect()
    dist.destroy_process_group()


def choose_backend(name: str, device: torch.device) -> str:
    """Chooses what dist.init_process_group opens for the config's name: auto, nccl or gloo.

    NCCL carries what lives on CUDA devices, and gloo the rest (also the small objects of a GPU run).
    ValueError where this torch or this device does not go with it.
    """
    is_cuda = device.type == "cuda"
    if name == "auto":
        name = "nccl" if is_cuda and has_backend("nccl") else "gloo"
    if name == "nccl" and not is_cuda:
        raise ValueError(
            f"backend=nccl needs CUDA devices, but device={device.type}: use device=cuda or backend=gloo"
        )
    if name == "nccl" and not has_backend("nccl"):
        raise ValueError(
            "backend=nccl, but this torch was built without NCCL: install a CUDA build of torch for Linux, "
            "or use backend=gloo"
        )
    if world_size() > 1 and not has_backend("gloo"):
        raise ValueError(
            f"{world_size()} processes, but this torch was built without gloo: install a torch from PyPI or "
            "pytorch.org, or use one process"
        )
    return f"cpu:gloo,cuda:{name}" if is_cuda else "gloo"


def has_backend(name: str) -> bool:
    """Returns whether this torch was built with nccl, gloo or ucc."""
    return dist.is_available() and getattr(dist, f"is_{name}_available")()


def choose_device(name: str) -> torch.device:
    """Chooses the device of this process; `auto` takes CUDA, else mps, else the CPU.

    ValueError where there is no such device.
    """
    has_cuda, has_mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    if name == "auto":
        name = "cuda" if has_cuda else "mps" if has_mps and world_size() == 1 else "cpu"
    if name == "cuda":
        if not has_cuda:
            raise ValueError("device=cuda, but torch sees no CUDA device here: use device=cpu or device=auto")
        if local_world_size() > torch.cuda.device_count():
            raise ValueError(
                f"{local_world_size()} processes on this node, but {torch.cuda.device_count()} CUDA devices: "
                "lower --nproc-per-node, or use device=cpu"
            )
        torch.cuda.set_device(local_rank())
        return torch.device("cuda", local_rank())
    if name == "mps":
        if not has_mps:
            raise ValueError("device=mps, but torch sees no Apple GPU here: use device=cpu or device=auto")
        if world_size() > 1:
            raise ValueError("device=mps works with one process: drop torchrun, or use device=cpu")
    return torch.device(name)


def use_deterministic_algorithms() -> None:
    """Makes torch take deterministic algorithms; it warns where an operator of the device has none."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read by cuBLAS at its first product
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False


def set_cpu_threads(threads: int | str) -> int:
    """Sets torch's threads of this process and returns their number.

    `auto`: the user's OMP_NUM_THREADS if set, else the cores of the node over its processes.
    """
    if threads == "auto":
        threads = omp_threads_of_the_user() or max(1, num_cores() // local_world_size())
    torch.set_num_threads(int(threads))
    return int(threads)


def omp_threads_of_the_user() -> int | None:
    """Returns OMP_NUM_THREADS of the user, from torchrun's environment: it sets 1 for its children."""
    chosen = os.environ.get("OMP_NUM_THREADS", "")
    if chosen == "1" and "TORCHELASTIC_RUN_ID" in os.environ:
        try:
            environment = Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\0")
        except OSError:  # no /proc: 1 is what torchrun sets, and rarely what a user does
            return None
        if not any(entry.startswith(b"OMP_NUM_THREADS=") for entry in environment):
            return None
    return int(chosen) if chosen.isdigit() and int(chosen) > 0 else None
