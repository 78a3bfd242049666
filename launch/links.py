"""Network links between ranks: listens as gloo does, connects, and measures messages."""

import contextlib
import fcntl
import functools
import itertools
import os
import socket
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from distributed.world import rank, world_size

_MAX_HOSTS = 8  # with more hosts, not all pairs are measured
_SIOCGIFADDR = 0x8915  # from Linux's sockios.h


def listen_like_gloo() -> socket.socket:
    """Opens a TCP server at the address that torch's backend gloo would use.

    Returns the server's socket. If the environment variable GLOO_SOCKET_IFNAME names a network interface, the
    server has the address of this interface. Without the variable, it has the address of the host name. If no
    server can be opened at this address, it has 127.0.0.1. The port is any free one. Raises ValueError if the
    interface does not exist or has no IPv4 address.
    """
    interface, host = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0], socket.gethostname()
    if interface:
        try:
            host = _address_of(interface)
        except OSError as error:
            known = [name for _, name in socket.if_nameindex()]
            raise ValueError(
                f"GLOO_SOCKET_IFNAME={interface}: {error.strerror}. Choose one of {known}."
            ) from None
    with contextlib.suppress(OSError):
        family, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=world_size())
    return socket.create_server(("127.0.0.1", 0), backlog=world_size())


def interface_of(address: str) -> str:
    """Returns the name of the network interface with an IPv4 address, such as "eth0".

    Returns "lo" for 127.*, and "?" if no interface has the address.
    """
    if address.startswith("127."):
        return "lo"
    for _, name in socket.if_nameindex():
        with contextlib.suppress(OSError):
            if _address_of(name) == address:
                return name
    return "?"


def _address_of(interface: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        request = struct.pack("256s", interface.encode())
        return socket.inet_ntoa(fcntl.ioctl(asking, _SIOCGIFADDR, request)[20:24])


def connect(address: Sequence[Any], timeout_seconds: float) -> str:
    """Connects to the TCP server at (host, port). Returns "", or the reason why that fails."""
    try:
        socket.create_connection(tuple(address), timeout=timeout_seconds).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def pairs_to_measure(hosts: Sequence[str]) -> list[tuple[int, int]]:
    """Returns pairs of ranks to measure, such as [(0, 4), (0, 8), (4, 8)].

    `measure_link` measures each pair. With several machines, only the first rank of each machine is used. The
    example above has three machines with four ranks each. With one machine, all ranks are used. With more
    than 8 used ranks, the pairs are (first used rank, any other) and (used rank, next used rank).

    hosts: Host name of each rank.
    """
    first = list({host: number for number, host in reversed(list(enumerate(hosts)))}.values())[::-1]
    chosen = sorted(first) if len(first) > 1 else list(range(len(hosts)))
    if len(chosen) <= _MAX_HOSTS:
        return list(itertools.combinations(chosen, 2))
    return [(chosen[0], other) for other in chosen[1:]] + list(itertools.pairwise(chosen[1:]))


def measure_link(
    pair: tuple[int, int], device: torch.device, *, repeats: int, num_bytes: int
) -> tuple[float, float] | None:
    """Measures how fast two ranks exchange messages.

    Both ranks of the pair call it. Returns (seconds of a round trip of 4 bytes, bytes per second of large
    messages). If other ranks call it, it returns None at once.

    repeats: Number of measured round trips of 4 bytes. For large messages, of `num_bytes`, it is 3.
    """
    if rank() not in pair:
        return None
    peer = sum(pair) - rank()
    calls = [functools.partial(dist.send, dst=peer), functools.partial(dist.recv, src=peer)]
    calls = calls if rank() == pair[0] else calls[::-1]
    round_trip = median_seconds(calls, torch.zeros(1, device=device), repeats)
    large_round_trip = median_seconds(calls, torch.zeros(num_bytes // 4, device=device), 3)
    return round_trip, 2 * num_bytes / max(large_round_trip - round_trip, large_round_trip / 2)


def median_seconds(calls: Sequence[Callable[..., Any]], message: torch.Tensor, repeats: int) -> float:
    """Returns the median time of calling all functions of `calls` in turn, in seconds.

    calls: Functions of `message`, such as torch.distributed.all_reduce. repeats: Number of measurements, in
    addition to a first one that is not counted.
    """
    times = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        for call in calls:
            call(message)
        message[:1].sum().item()  # waits for the GPU
        times.append(time.perf_counter() - started)
    return sorted(times[1:])[repeats // 2]
