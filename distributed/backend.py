"""Device, communication backend, process group and CPU threads of this process."""

from runtime.environment import num_cores

import contextlib
import gc
import os
import socket
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

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
_MOST_THREADS = 2**31  # OpenMP ignores larger values of OMP_NUM_THREADS


@contextlib.contextmanager
def process_group(
    device: torch.device, backend: str = "auto", *, timeout: timedelta = _GROUP_TIMEOUT
) -> Iterator[None]:
    """Context manager inside which the process group of torch.distributed exists.

    All ranks enter it together. With only one rank, it does nothing.

    device: Device of this rank. backend: Value of the config key `backend`: "auto", "nccl" or "gloo".
    timeout: Time limit of each collective.
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


def open_group(backend: str, **options: object) -> None:
    # If threads of gloo still run while Python exits, they sometimes abort the process. `close_group` ends
    # them, if no reference to the group is left. The functions of torch.distributed.nn would keep one,
    # because their default arguments are evaluated when they are imported. So import them before the group
    # exists.
    import torch.distributed.nn.functional  # noqa: F401

    dist.init_process_group(backend, **options)


def close_group() -> None:
    # DistributedDataParallel is a reference cycle that holds the group. If the garbage collector destroyed
    # the group later, it would wait for gloo's threads while it holds Python's lock. The threads may need the
    # lock: a deadlock.
    gc.collect()
    dist.destroy_process_group()


def choose_backend(name: str, device: torch.device) -> str:
    """Returns the backend for init_process_group: "gloo", "cpu:gloo,cuda:nccl" or "cpu:gloo,cuda:gloo".

    Tensors on the CPU always use gloo. Raises ValueError if torch or the device does not support the backend.
    With several ranks, also raises ValueError if the environment variable GLOO_SOCKET_IFNAME names a network
    interface that does not exist.

    name: Value of the config key `backend`: "auto", "nccl" or "gloo". "auto" means NCCL if the device is a
    CUDA GPU and torch has NCCL. Otherwise, "auto" means gloo. device: Device of this rank.
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
    return getattr(dist, f"is_{name}_available")()


def choose_device(name: str) -> torch.device:
    """Returns the device of this process. If it is a CUDA GPU, calls torch.cuda.set_device.

    With CUDA, each process of a machine gets its own GPU. Raises ValueError if the device does not exist, if
    a machine has more processes than GPUs, or if several processes would use mps.

    name: Value of the config key `device`: "cuda", "mps", "cpu" or "auto". "auto" means cuda on a machine
    with a CUDA GPU, mps for a single process on a machine with an Apple GPU, and cpu in all other cases.
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
    """Returns the device type for a value of the config key `device`: "cuda", "mps" or "cpu".

    name: "cuda", "mps", "cpu" or "auto". If this machine has a CUDA GPU, "auto" means "cuda". If it has an
    Apple GPU and the run has only one process, "auto" means "mps". In all other cases, "auto" means "cpu".
    The other values are returned unchanged, even if the machine has no such device.
    """
    if name != "auto":
        return name
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() and world_size() == 1 else "cpu"


def use_deterministic_algorithms() -> None:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it at its first product
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False


def set_cpu_threads(threads: int | str) -> int:
    """Calls torch.set_num_threads, and returns the number of threads.

    threads: Number of threads, or "auto". If the user has set OMP_NUM_THREADS, "auto" means this number.
    Otherwise, "auto" means the number of cores divided by the number of processes on this machine.
    """
    if threads == "auto":
        threads = omp_threads_of_the_user() or max(1, num_cores() // local_world_size())
    torch.set_num_threads(int(threads))
    return int(threads)


def omp_threads_of_the_user() -> int | None:
    # torchrun sets OMP_NUM_THREADS=1 if the user has not set it.
    chosen = os.environ.get("OMP_NUM_THREADS", "")
    if chosen == "1" and is_under_torchrun():
        try:
            environment = Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\0")
        except OSError:  # no /proc: assume that torchrun set the 1
            return None
        if not any(entry.startswith(b"OMP_NUM_THREADS=") for entry in environment):
            return None
    return int(chosen) if chosen.isdecimal() and 0 < int(chosen) < _MOST_THREADS else None
