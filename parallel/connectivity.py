"""Whether all ranks of a launch reach each other, and how fast: the second half of `python -m parallel.info`.

torch is imported inside the functions: the command line answers before.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import socket
import statistics
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from parallel import log
from parallel.process_group import (
    choose_backend,
    choose_device,
    is_main,
    process_group,
    rank,
    set_cpu_threads,
    world_size,
)
from parallel.stages import Stages, name_ranks

if TYPE_CHECKING:
    import torch

_SIOCGIFADDR = 0x8915  # Linux's request for the IPv4 address of an interface


class ConnectivityCheck:
    """Of a launch of several ranks: every rank makes one and calls `run`.

    `options`: device, backend, timeout (seconds for each stage), quick.
    """

    def __init__(self, options: argparse.Namespace):
        self._options = options
        self._stages = Stages(timeout_seconds=options.timeout)
        self._group = contextlib.ExitStack()

    def run(self) -> None:
        """Prints on rank 0. Ends all ranks with status 1 where one fails, and names it."""
        rows = self._stages.run("come", self._introduce, show=_show_ranks)
        missed = self._stages.run("try the other ranks' addresses", lambda: self._try_addresses(rows))
        suspects = [
            f"rank {number} ({rows[number]['host']}, {_addresses(rows[number])}) {fault}: is this the "
            "network of all nodes (GLOO_SOCKET_IFNAME), and does its firewall let them through?"
            for number, fault in explain({(a, b): text for a in missed for b, text in missed[a]}).items()
        ]
        self._stages.run("open the group", self._open_group, suspects=suspects)
        if is_main():
            for suspect in suspects:  # who calls whom is up to the addresses
                log.warning(f"{suspect} (the group opened all the same, the other way round)")
        self._measure()
        self._stages.run("close the group", self._group.close)
        self._stages.leave()
        log.info(f"\nall {world_size()} ranks reach each other")

    def _introduce(self) -> dict[str, Any]:
        import torch

        self._device = choose_device(self._options.device)
        self._backend = choose_backend(self._options.backend, self._device)
        self._listeners = listen_like_gloo()
        return {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "device": str(self._device),
            "threads": set_cpu_threads("auto"),
            "torch": torch.__version__,
            "addresses": [listener.getsockname()[:2] for listener in self._listeners],
        }

    def _try_addresses(self, rows: dict[int, dict[str, Any]]) -> list[tuple[int, str]]:
        """The ranks that this one cannot reach, and why."""

        def try_rank(number: int) -> str | None:
            for host, port in rows[number]["addresses"]:
                try:
                    socket.create_connection((host, port), timeout=self._options.timeout / 2).close()
                except OSError as error:
                    return error.strerror or str(error)
            return None

        others = [number for number in rows if number != rank()]
        with ThreadPoolExecutor(min(len(others), 128)) as pool:
            faults = pool.map(try_rank, others)
            return [(number, fault) for number, fault in zip(others, faults, strict=True) if fault]

    def _open_group(self) -> None:
        timeout = timedelta(seconds=self._options.timeout / 2)
        self._group.enter_context(process_group(self._device, self._options.backend, timeout=timeout))

    def _measure(self) -> None:
        """Pairs with rank 0 and of neighbours, one after the other; then all ranks together."""
        import torch

        is_quick, size = self._options.quick, world_size()
        repeats, large, huge = (10, 2**20, 2**22) if is_quick else (100, 2**24, 2**26)  # times, bytes
        device = (
            self._device if "nccl" in self._backend else torch.device("cpu")
        )  # gloo sends from there only

        def exchange(peer: int) -> list[float]:
            return [
                _round_trip_seconds(peer, 4, repeats, device),
                _round_trip_seconds(peer, large, 3, device),
            ]

        def all_reduce() -> list[float]:
            return [_all_reduce_seconds(4, repeats, self._device), _all_reduce_seconds(huge, 3, self._device)]

        log.info(f"\n{self._backend}, {device.type} tensors: 4 bytes there and back, and {large >> 20} MiB")
        for a, b in [(0, other) for other in range(1, size)] + [(a, a + 1) for a in range(1, size - 1)]:
            name = f"exchange messages (rank {a} with rank {b})"
            times = self._stages.run(name, functools.partial(exchange, a + b - rank()), ranks=(a, b))
            latency, seconds = times[a]
            pair = f"{a} <-> {b}"
            log.info(f"{pair:<14} {latency * 1e6:8.0f} us {2 * large / seconds / 1e9:8.2f} GB/s")
        times = self._stages.run("all-reduce", all_reduce)
        latency, seconds = map(max, zip(*times.values(), strict=True))
        bandwidth = 2 * (size - 1) / size * huge / seconds
        log.info(
            f"{'all-reduce':<14} {latency * 1e6:8.0f} us {bandwidth / 1e9:8.2f} GB/s on the bus, "
            f"{huge >> 20} MiB in {seconds * 1e3:.1f} ms"
        )


def listen_like_gloo() -> list[socket.socket]:
    """Sockets where gloo will listen; to accept is the kernel's work.

    On the interfaces that GLOO_SOCKET_IFNAME names, else where the host's name leads, else on loopback. None
    for an interface whose IPv4 address cannot be told; ValueError for one that is not there.
    """
    chosen = os.environ.get("GLOO_SOCKET_IFNAME")
    hosts = [_address_of(name) for name in chosen.split(",")] if chosen else [socket.gethostname()]
    listeners = [_listen_on(host) or (None if chosen else _listen_on("127.0.0.1")) for host in hosts if host]
    return [listener for listener in listeners if listener]


def _address_of(interface: str) -> str | None:
    there = [name for _, name in socket.if_nameindex()]
    if interface not in there:
        raise ValueError(
            f"GLOO_SOCKET_IFNAME={interface}, but {socket.gethostname()} has no such network interface: "
            f"use one of {', '.join(there)}"
        )
    if sys.platform != "linux":
        return None
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            answer = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("256s", interface.encode()))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def _listen_on(host: str) -> socket.socket | None:
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return None
    for family, kind, protocol, _, address in found:
        listener = socket.socket(family, kind, protocol)
        try:
            listener.bind(address)
            listener.listen(world_size())
            return listener
        except OSError:
            listener.close()
    return None


def explain(faults: dict[tuple[int, int], str]) -> dict[int, str]:
    """Which ranks are out of reach, given who (first) could not reach whom (second), and why.

    The rank with most faults is named first, and explains all of its own; rather one that was called.
    """
    named = {}
    while faults:
        involved = Counter(number for pair in faults for number in pair)
        called = Counter(b for _, b in faults)
        culprit = max(involved, key=lambda number: (involved[number], called[number], number))
        callers = sorted(a for a, b in faults if b == culprit)
        targets = sorted(b for a, b in faults if a == culprit)
        parts = []
        if callers:
            parts.append(f"cannot be reached by {name_ranks(callers)} ({faults[callers[0], culprit]})")
        if targets:
            parts.append(f"cannot reach {name_ranks(targets)} ({faults[culprit, targets[0]]})")
        named[culprit] = " and ".join(parts)
        faults = {pair: text for pair, text in faults.items() if culprit not in pair}
    return named


def aligned(rows: list[tuple[str, ...]]) -> str:
    """A table without lines; the rows may differ in length."""
    columns = range(max(map(len, rows)))
    widths = [max(len(row[column]) for row in rows if column < len(row)) for column in columns]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=False)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)


def _show_ranks(rows: dict[int, dict[str, Any]]) -> None:
    facts = ("host", "pid", "device", "threads", "torch")
    table = [("rank", *facts, "address")]
    for number, row in rows.items():
        is_other = 0 in rows and row["torch"] != rows[0]["torch"]
        mark = ("<- not the torch of rank 0",) if is_other else ()
        table.append((str(number), *(str(row[fact]) for fact in facts), _addresses(row), *mark))
    log.info(f"\n{aligned(table)}")


def _addresses(row: dict[str, Any]) -> str:
    return ", ".join(host for host, _ in row["addresses"]) or "unknown"


def _round_trip_seconds(peer: int, num_bytes: int, repeats: int, device: torch.device) -> float:
    """Of a message to `peer` and back, which calls it too."""
    import torch
    import torch.distributed as dist

    message = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    first, second = (dist.send, dist.recv) if rank() < peer else (dist.recv, dist.send)

    def exchange() -> None:
        first(message, peer)
        second(message, peer)

    return _median_seconds(exchange, repeats, device)


def _all_reduce_seconds(num_bytes: int, repeats: int, device: torch.device) -> float:
    import torch
    import torch.distributed as dist

    summed = torch.zeros(num_bytes // 4, device=device)
    return _median_seconds(lambda: dist.all_reduce(summed), repeats, device)


def _median_seconds(action: Callable[[], Any], repeats: int, device: torch.device) -> float:
    """After a first time that is not counted."""
    import torch

    times = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])
