"""What this machine and its torch offer a run, and which ranks of a launch do not reach each other.

    python -m parallel.info
    torchrun --nproc-per-node N -m parallel.info [--quick] [--timeout SECONDS]

Ranks report through the store of torchrun, beside the network that may be at fault; the watchdog names a rank
that hangs, and ends all. `python -m torch.utils.collect_env` tells more of the software.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import functools
import io
import json
import os
import platform
import socket
import struct
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from parallel import log
from parallel import process_group as group
from parallel.launch import wait_for_all_ranks
from parallel.process_group import is_main, rank, world_size
from parallel.watchdog import Watchdog

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCH", "NCCL_", "GLOO_", "OMP_", "CUDA_", "HIP_")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m parallel.info", description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda", "mps"])
    parser.add_argument("--backend", default="auto", choices=["auto", "nccl", "gloo", "mpi"])
    parser.add_argument("--timeout", default=30.0, type=float, metavar="SECONDS", help="of each step (30)")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller messages")
    out, err = (sys.stdout, sys.stderr) if is_main() else (io.StringIO(), io.StringIO())  # rank 0's will do
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        options = parser.parse_args()
        if options.timeout <= 0:
            parser.error(f"--timeout {options.timeout:g} is not above 0")
    log.info(describe_process())
    if world_size() > 1:
        check_ranks(options)


def describe_process() -> str:
    """Returns a line for each fact and each environment variable that concerns processes and networks."""
    bf16 = [name for name, value in torch.cpu.get_capabilities().items() if value and "bf16" in name]
    return _table(
        ("python", f"{platform.python_version()} ({sys.executable})"),
        ("torch", f"{torch.__version__} (CUDA {torch.version.cuda}, ROCm {torch.version.hip})"),
        ("backends", ", ".join(filter(group.has_backend, ("gloo", "nccl", "mpi", "ucc")))),
        ("host", f"{socket.gethostname()} ({platform.platform()})"),
        ("memory", f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB"),
        ("threads", f"{group.set_cpu_threads('auto')} on {group.num_cores()} cores for this process"),
        ("cpu", f"{torch.backends.cpu.get_cpu_capability()}, bf16 by {', '.join(bf16) or 'emulation: slow'}"),
        *((f"cuda:{i}", torch.cuda.get_device_properties(i)) for i in range(torch.cuda.device_count())),
        *(pair for pair in sorted(os.environ.items()) if pair[0].startswith(_VARIABLES)),
    )


def check_ranks(options: argparse.Namespace) -> None:
    """Prints all ranks, which of them cannot be reached, and how fast they exchange messages.

    All ranks call it. Ends them with status 1 where a rank fails or does not start, 124 where one hangs.
    """
    limit = options.timeout
    watchdog = Watchdog(init_timeout_seconds=3 * limit, step_timeout_seconds=limit)
    with watchdog, contextlib.ExitStack() as stack:
        wait_for_all_ranks(timeout_seconds=limit)
        watchdog.step_done(0)

        def set_up() -> list[Any]:
            device = group.choose_device(options.device)
            group.choose_backend(options.backend, device)
            address, port, *_ = stack.enter_context(listen_like_gloo()).getsockname()
            host, threads = socket.gethostname(), group.set_cpu_threads("auto")
            return [host, os.getpid(), str(device), threads, address, port]

        rows = _on_all_ranks("set up", set_up)
        names = ("rank", "host", "pid", "device", "threads", "address", "port")
        log.info("\n" + _table(names, *((number, *row) for number, row in enumerate(rows))))
        connect = functools.partial(_try_address, timeout_seconds=limit / 2)
        faults = _on_all_ranks("try the others", lambda: list(ThreadPoolExecutor(128).map(connect, rows)))
        for number, (host, *_, address, _) in enumerate(rows):
            if (callers := [caller for caller, texts in enumerate(faults) if texts[number]]) and is_main():
                log.warning(
                    f"rank {number} ({host}, {address}) cannot be reached by {log.name_ranks(callers)} "
                    f"({faults[callers[0]][number]}): look at GLOO_SOCKET_IFNAME and at its firewall"
                )
        watchdog.step_done(1)
        device = group.choose_device(options.device)
        opened = group.process_group(device, options.backend, timeout=timedelta(seconds=limit / 2))
        _on_all_ranks("open the group", lambda: stack.enter_context(opened))
        is_nccl = "nccl" in group.choose_backend(options.backend, device)  # gloo sends from the CPU alone
        _measure(device if is_nccl else torch.device("cpu"), is_quick=options.quick, watchdog=watchdog)


def _on_all_ranks(name: str, action: Callable[[], Any]) -> list[Any]:
    """Returns what `action` returns on each rank, sent as JSON. Where it fails on one, all end with status 1.

    All ranks call it, once for each name. The wait for a rank that hangs is ended by the watchdog.
    """
    try:
        outcome = (action(), None)
    except Exception as error:
        outcome = (None, f"{type(error).__name__}: {error}".removeprefix("ValueError: "))
    store, keys = group.rendezvous_store(), [f"{name}/{number}" for number in range(world_size())]
    store.set(keys[rank()], json.dumps(outcome))
    store.wait(keys)
    results, errors = zip(*map(json.loads, store.multi_get(keys)), strict=True)
    if failed := [number for number, error in enumerate(errors) if error is not None]:
        if is_main():
            log.error(f"{log.name_ranks(failed)} of {world_size()} did not {name}: {errors[failed[0]]}")
            store.set("printed", "")
        with contextlib.suppress(RuntimeError):  # rank 0, which may serve the store, prints before it goes
            store.wait(["printed"])
        raise SystemExit(1)
    return list(results)


def listen_like_gloo() -> socket.socket:
    """Returns a server on the interface GLOO_SOCKET_IFNAME, else where the host's name leads, else here."""
    interface, host = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0], socket.gethostname()
    if interface:
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
                request = struct.pack("256s", interface.encode())
                host = socket.inet_ntoa(fcntl.ioctl(asking, 0x8915, request)[20:24])  # Linux's SIOCGIFADDR
        except OSError as error:
            there = [name for _, name in socket.if_nameindex()]
            raise ValueError(f"GLOO_SOCKET_IFNAME={interface}: {error.strerror}; there are {there}") from None
    with contextlib.suppress(OSError):
        family, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=world_size())
    return socket.create_server(("127.0.0.1", 0), backlog=world_size())


def _try_address(row: Sequence[Any], timeout_seconds: float) -> str:
    """Returns why the address that ends the row cannot be reached; an empty text where it can."""
    try:
        socket.create_connection(tuple(row[-2:]), timeout=timeout_seconds).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _measure(device: torch.device, *, is_quick: bool, watchdog: Watchdog) -> None:
    """Prints latency and bandwidth of each pair with rank 0 and of neighbours, then of all ranks together."""
    size, repeats, large = world_size(), 10 if is_quick else 100, 2**20 if is_quick else 2**24  # large: bytes

    def seconds(num_bytes: int, repeats: int, *calls: Callable[[torch.Tensor], Any]) -> float:
        message, times = torch.zeros(num_bytes // 4, device=device), []
        for _ in range(repeats + 1):
            started = time.perf_counter()
            for call in calls:
                call(message)
            message[0].item()  # until a GPU is through
            times.append(time.perf_counter() - started)
        return sorted(times[1:])[repeats // 2]

    def exchange(a: int, b: int) -> list[float]:
        peer = a + b - rank()
        calls = [functools.partial(dist.send, dst=peer), functools.partial(dist.recv, src=peer)]
        calls = calls if rank() == a else calls[::-1]
        return [seconds(4, repeats, *calls), seconds(large, 3, *calls)] if rank() in (a, b) else []

    log.info(f"\n{device.type} tensors: 4 bytes there and back, and {large >> 20} MiB")
    for a, b in [(0, other) for other in range(1, size)] + [(a, a + 1) for a in range(1, size - 1)]:
        action = functools.partial(exchange, a, b)
        latency, duration = _on_all_ranks(f"exchange messages (rank {a} with rank {b})", action)[a]
        log.info(f"{f'{a} <-> {b}':<14} {latency * 1e6:8.0f} us {2 * large / duration / 1e9:8.2f} GB/s")
        watchdog.step_done(2)
    times = _on_all_ranks("all-reduce", lambda: [seconds(num, 3, dist.all_reduce) for num in (4, large)])
    latency, duration = map(max, zip(*times, strict=True))
    bandwidth = 2 * (size - 1) / size * large / duration
    log.info(f"{'all-reduce':<14} {latency * 1e6:8.0f} us {bandwidth / 1e9:8.2f} GB/s on the bus")
    log.info(f"\nall {size} ranks reach each other")
    dist.barrier()  # rank 0, which may serve the store, leaves when nobody needs it any more


def _table(*rows: Sequence[object]) -> str:
    texts = [list(map(str, row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in texts)


if __name__ == "__main__":
    main()
