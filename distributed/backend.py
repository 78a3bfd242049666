"""Device, communication backend, process group and CPU threads of this process."""

from runtime.environment import num_cores

import contextlib
import gc
import os
import socket
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from distributed.world import (
    is_under_torchrun,
    local_rank,
    local_world_size,
    rank,
    rendezvous_store,
    world_size,
)

# While one rank evaluates or saves, the others wait in a collective. By default, torch ends a collective
# after 10 minutes (NCCL) or 30 minutes (gloo). Here the watchdog ends hung ranks instead, because it knows
# what each rank is doing.
_GROUP_TIMEOUT = timedelta(days=1)


@contextlib.contextmanager
def process_group(
    device: torch.device, backend: str = "auto", *, timeout: timedelta = _GROUP_TIMEOUT
) -> Iterator[None]:
    """Context manager that opens the process group of all ranks, and closes it at the end.

    All ranks enter together. With one rank, opens none.

    backend: "auto", "nccl" or "gloo" (see `choose_backend`). timeout: Time limit of a collective.
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
    """Returns on every rank the list of all ranks' values (pickled). All ranks of the group call it.

    Without a process group, returns [value].

    group: Group that takes part. If None, all ranks.
    """
    if not dist.is_initialized():
        return [value]
    gathered = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group=group)
    return gathered


def open_group(backend: str, **options: object) -> None:
    """Calls dist.init_process_group, so that `close_group` can later end all threads of the group.

    If threads of gloo still run while Python exits, they sometimes abort the process. `close_group` ends
    them, if no reference to the group is left. The functions of torch.distributed.nn would keep one, because
    their default arguments are evaluated when they are imported. So import them before the group exists.
    """
    import torch.distributed.nn.functional  # noqa: F401

    dist.init_process_group(backend, **options)


def close_group() -> None:
    """Collects garbage, then calls dist.destroy_process_group.

    DistributedDataParallel is a reference cycle that holds the group. If the garbage collector destroyed the
    group later, it would wait for gloo's threads while it holds Python's lock. The threads may need the lock:
    a deadlock.
    """
    gc.collect()
    dist.destroy_process_group()


def choose_backend(name: str, device: torch.device) -> str:
    """Checks the config key `backend`, and returns the backend for dist.init_process_group.

    On a CUDA device, returns "cpu:gloo,cuda:nccl" or "cpu:gloo,cuda:gloo". Otherwise returns "gloo". Raises
    ValueError if this torch or this device does not support the backend, or if GLOO_SOCKET_IFNAME names a
    missing network interface.

    name: Value of the key: "auto", "nccl" or "gloo".
    """
    is_cuda = device.type == "cuda"
    if name == "auto":
        name = "nccl" if is_cuda and has_backend("nccl") else "gloo"
    if name == "nccl" and not is_cuda:
        raise ValueError(
            f"backend=nccl needs device=cuda, but device={device.type}. Set device=cuda or backend=gloo."
        )
    if name == "nccl" and not has_backend("nccl"):
        raise ValueError(
            "backend=nccl, but this torch was built without NCCL. Install a CUDA build of torch for Linux, "
            "or set backend=gloo."
        )
    if world_size() > 1 and not has_backend("gloo"):
        raise ValueError(
            f"{world_size()} processes, but this torch was built without gloo. Install torch from PyPI or "
            "pytorch.org, or use one process."
        )
    interfaces = [name for _, name in socket.if_nameindex()]
    for interface in filter(None, os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") * (world_size() > 1)):
        if interface not in interfaces:
            names = ", ".join(interfaces)
            raise ValueError(f"GLOO_SOCKET_IFNAME: no interface {interface}. Choose among {names}.")
    return f"cpu:gloo,cuda:{name}" if is_cuda else "gloo"


def has_backend(name: str) -> bool:
    """Returns whether this torch was built with the backend `name`: "nccl", "gloo" or "ucc"."""
    return dist.is_available() and getattr(dist, f"is_{name}_available")()


def choose_device(name: str) -> torch.device:
    """Checks the config key `device`, and returns the device of this process. Selects a CUDA device in torch.

    Raises ValueError if the device is missing.

    name: auto (CUDA, else mps for a single process, else cpu), cuda, mps or cpu.
    """
    name = device_type(name)
    if name == "cuda":
        if not torch.cuda.is_available():
            raise ValueError("device=cuda, but torch finds no CUDA device. Set device=cpu or device=auto.")
        if local_world_size() > torch.cuda.device_count():
            raise ValueError(
                f"{local_world_size()} processes on this node, but {torch.cuda.device_count()} CUDA devices. "
                "Lower --nproc-per-node, or set device=cpu."
            )
        torch.cuda.set_device(local_rank())
        return torch.device("cuda", local_rank())
    if name == "mps":
        if not torch.backends.mps.is_available():
            raise ValueError("device=mps, but torch finds no Apple GPU. Set device=cpu or device=auto.")
        if world_size() > 1:
            raise ValueError("device=mps supports only one process. Run without torchrun, or set device=cpu.")
    return torch.device(name)


def device_type(name: str) -> str:
    """Returns the device type that a value of the key `device` selects on this machine: cuda, mps or cpu."""
    if name != "auto":
        return name
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() and world_size() == 1 else "cpu"


def use_deterministic_algorithms() -> None:
    """Makes torch use deterministic algorithms. If an operator has none, torch prints a warning."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it at its first product
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False


def set_cpu_threads(threads: int | str) -> int:
    """Sets the number of torch's CPU threads in this process, and returns the number.

    threads: If "auto", the user's OMP_NUM_THREADS. If that is not set, the number of cores of the node
    divided by the number of processes on the node.
    """
    if threads == "auto":
        threads = omp_threads_of_the_user() or max(1, num_cores() // local_world_size())
    torch.set_num_threads(int(threads))
    return int(threads)


def omp_threads_of_the_user() -> int | None:
    """Returns the value of OMP_NUM_THREADS, if the user has set it. Otherwise returns None.

    torchrun sets OMP_NUM_THREADS=1 if the user has not set it. That value is ignored.
    """
    chosen = os.environ.get("OMP_NUM_THREADS", "")
    if chosen == "1" and is_under_torchrun():
        try:
            environment = Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\0")
        except OSError:  # no /proc: assume that torchrun set the 1
            return None
        if not any(entry.startswith(b"OMP_NUM_THREADS=") for entry in environment):
            return None
    return int(chosen) if chosen.isdigit() and int(chosen) > 0 else None
