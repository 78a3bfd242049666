"""Checks machines before a run: hardware, software, number formats, and links between all ranks.

    python -m launch.check
    torchrun --nproc-per-node N -m launch.check [--quick] [--timeout SECONDS]

Ranks report through the key-value store, not through the process group under test. If a rank hangs, a
watchdog names it and ends all ranks. `python -m torch.utils.collect_env` prints more about the software.
"""

from runtime.environment import num_cores

import argparse
import contextlib
import functools
import io
import itertools
import json
import os
import platform
import socket
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from distributed import backend, log, world
from distributed.errors import local_errors
from distributed.launch import wait_for_all_ranks
from distributed.processor import describe_processor
from distributed.watchdog import Watchdog
from distributed.world import is_main, rank, world_size
from launch import links
from launch.rates import RATES, Rates, measure_rates

_MOST_SECONDS = 10**6
_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCH", "NCCL_", "GLOO_", "OMP_", "CUDA_", "HIP_")


def main() -> None:
    with local_errors():
        world.read_launcher()
    parser = argparse.ArgumentParser(prog="python -m launch.check", description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda", "mps"])
    parser.add_argument("--backend", default="auto", choices=["auto", "nccl", "gloo"])
    timeout = "time limit of each check (default: 30)"
    parser.add_argument("--timeout", default=30.0, type=float, metavar="SECONDS", help=timeout)
    parser.add_argument("--quick", action="store_true", help="measure with fewer and smaller messages")
    out, err = (sys.stdout, sys.stderr) if is_main() else (io.StringIO(), io.StringIO())  # only rank 0 prints
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        options = parser.parse_args()
        if not 0 < options.timeout <= _MOST_SECONDS:
            parser.error(f"--timeout {options.timeout:g} must be greater than 0 and at most {_MOST_SECONDS}")
    log.info(describe_process())
    with local_errors():
        if world_size() > 1:
            check_ranks(options)
        else:
            rates = measure_rates(backend.choose_device(options.device))
            log.info(_table(*zip(RATES, rates.texts(), ("GFLOP/s",) * 2, strict=True)))
            log.info(rates.compare())


def describe_process() -> str:
    """Returns a text table of versions, hardware and environment variables for distributed runs.

    Also calls torch.set_num_threads, as a training run does.
    """
    return _table(
        ("python", f"{platform.python_version()} ({sys.executable})"),
        ("torch", f"{torch.__version__} (CUDA {torch.version.cuda}, ROCm {torch.version.hip})"),
        ("backends", ", ".join(filter(backend.has_backend, ("gloo", "nccl", "ucc")))),
        ("host", f"{socket.gethostname()} ({platform.platform()})"),
        ("memory", f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB"),
        ("threads", f"{backend.set_cpu_threads('auto')} on {num_cores()} cores for this process"),
        ("cpu", describe_processor()),
        *((f"cuda:{i}", torch.cuda.get_device_properties(i)) for i in range(torch.cuda.device_count())),
        *(pair for pair in sorted(os.environ.items()) if pair[0].startswith(_VARIABLES)),
    )


def check_ranks(options: argparse.Namespace) -> None:
    """Tests connections between all ranks, measures their speed, and prints the results.

    All ranks call it. If a rank fails or does not start, all ranks exit with status 1. If a rank hangs, they
    exit with status 124.

    options: Values of the command-line options --device, --backend, --timeout and --quick.
    """
    limit = options.timeout
    watchdog = Watchdog(init_timeout_seconds=3 * limit, step_timeout_seconds=limit)
    with watchdog, contextlib.ExitStack() as stack:
        wait_for_all_ranks(options.device, timeout_seconds=limit)
        watchdog.step_done(0)

        def set_up() -> list[Any]:
            device = backend.choose_device(options.device)
            backend.choose_backend(options.backend, device)
            address, port, *_ = stack.enter_context(links.listen_like_gloo()).getsockname()
            host, threads = socket.gethostname(), backend.set_cpu_threads("auto")
            return [host, os.getpid(), str(device), threads, links.interface_of(address), address, port]

        rows = _on_all_ranks("set up", set_up)
        device = backend.choose_device(options.device)
        rates = [Rates(*measured) for measured in _on_all_ranks("multiply", lambda: measure_rates(device))]
        names = ("rank", "host", "pid", "device", "threads", "interface", "address", "port")
        names += tuple(f"{name} GFLOP/s" for name in RATES)
        all_cells = ((*row, *speeds.texts()) for row, speeds in zip(rows, rates, strict=True))
        log.info("\n" + _table(names, *((number, *cells) for number, cells in enumerate(all_cells))))
        _compare_rates(rates)
        _check_names([row[0] for row in rows])
        _check_addresses(rows, timeout_seconds=limit / 2)
        watchdog.step_done(1)
        opened = backend.process_group(device, options.backend, timeout=timedelta(seconds=limit / 2))
        _on_all_ranks("open the group", lambda: stack.enter_context(opened))
        is_nccl = "nccl" in backend.choose_backend(options.backend, device)  # gloo sends only CPU tensors
        device = device if is_nccl else torch.device("cpu")
        _measure_links(device, rows, is_quick=options.quick, watchdog=watchdog)
        dist.barrier()  # rank 0 may serve the store, so it must not exit first


def _compare_rates(rates: Sequence[Rates]) -> None:
    ranks: dict[str, list[int]] = {}
    for number, speeds in enumerate(rates):
        ranks.setdefault(speeds.compare(), []).append(number)
    for text, numbers in ranks.items():
        log.info(text if len(ranks) == 1 else f"{log.name_ranks(numbers)}: {text}")


def _check_names(hosts: Sequence[str]) -> None:
    # torchrun would hang on such names without a message.
    unknown = _on_all_ranks("look up names", lambda: [host for host in set(hosts) if not _is_known(host)])
    for name in dict.fromkeys(hosts) if is_main() else ():
        callers = dict.fromkeys(host for host, names in zip(hosts, unknown, strict=True) if name in names)
        if callers:
            log.warning(
                f"host name {name} does not resolve on {', '.join(callers)}. Pass --local-addr to torchrun "
                f"on {name}, with an address or a name that all nodes can resolve."
            )


def _is_known(host: str) -> bool:
    try:
        return bool(socket.getaddrinfo(host, None))
    except OSError:
        return False


def _check_addresses(rows: Sequence[Sequence[Any]], *, timeout_seconds: float) -> None:
    connect = functools.partial(links.connect, timeout_seconds=timeout_seconds)
    addresses = [row[-2:] for row in rows]  # (IP address, port) of each rank
    # faults[a][b]: reason why rank a cannot reach rank b; empty if it can.
    faults = _on_all_ranks(
        "connect to all ranks", lambda: list(ThreadPoolExecutor(128).map(connect, addresses))
    )
    for number, (host, *_, interface, address, _) in enumerate(rows if is_main() else ()):
        if callers := [caller for caller, texts in enumerate(faults) if texts[number]]:
            hosts = ", ".join(dict.fromkeys(rows[caller][0] for caller in callers))
            log.warning(
                f"rank {number} ({host}, {interface} {address}) cannot be reached by "
                f"{log.name_ranks(callers)} on {hosts} ({faults[callers[0]][number]}). Set "
                "GLOO_SOCKET_IFNAME to the interface that leads to the other hosts. Allow TCP connections "
                "from them to any port in the firewall."
            )
    for first, second in itertools.combinations(range(len(rows)), 2):
        if faults[first][second] and faults[second][first]:
            _end_all(f"ranks {first} and {second} cannot connect to each other")


def _on_all_ranks(name: str, action: Callable[[], Any]) -> list[Any]:
    """Runs a function on all ranks, and returns the list of the results of all ranks.

    All ranks call it. If the function raises an exception on one rank, all ranks exit with status 1.

    name: What the function does, for error messages, such as "look up names". Each call of `_on_all_ranks`
    needs another name. action: Function that returns a JSON value.
    """
    try:
        outcome = (action(), None)
    except Exception as error:
        outcome = (None, f"{type(error).__name__}: {error}".removeprefix("ValueError: "))
    store, keys = world.rendezvous_store(), [f"{name}/{number}" for number in range(world_size())]
    store.set(keys[rank()], json.dumps(outcome))
    store.wait(keys)
    results, errors = zip(*map(json.loads, store.multi_get(keys)), strict=True)
    if failed := [number for number, error in enumerate(errors) if error is not None]:
        _end_all(f"{log.name_ranks(failed)} of {world_size()} could not {name}: {errors[failed[0]]}")
    return list(results)


def _end_all(reason: str) -> NoReturn:
    store = world.rendezvous_store()
    if is_main():
        log.error(reason)
        store.set("printed", "")
    with contextlib.suppress(RuntimeError):  # rank 0 may serve the store, and may have exited
        store.wait(["printed"])
    raise SystemExit(1)


def _table(*rows: Sequence[object]) -> str:
    texts = [list(map(str, row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in texts)


def _measure_links(
    device: torch.device, rows: Sequence[Sequence[Any]], *, is_quick: bool, watchdog: Watchdog
) -> None:
    size, repeats, large = world_size(), 10 if is_quick else 100, 2**20 if is_quick else 2**24  # large: bytes
    log.info(f"\n{device.type} tensors: round trip of 4 bytes, and rate of {large >> 20} MiB messages")
    hosts, durations = [row[0] for row in rows], {}
    for pair in links.pairs_to_measure(hosts):
        measure = functools.partial(links.measure_link, pair, device, repeats=repeats, num_bytes=large)
        first, second = pair
        seconds, rate = _on_all_ranks(f"exchange messages (rank {first} with rank {second})", measure)[first]
        log.info(_describe_link(f"{first} <-> {second}", seconds, rate))
        durations[pair] = seconds + large / rate
        watchdog.step_done(2)

    def all_reduces() -> list[float]:
        messages = ((torch.zeros(1, device=device), repeats), (torch.zeros(large // 4, device=device), 3))
        return [links.median_seconds([dist.all_reduce], *message) for message in messages]

    seconds, duration = map(max, zip(*_on_all_ranks("all-reduce", all_reduces), strict=True))
    log.info(
        f"{_describe_link('all-reduce', seconds, 2 * (size - 1) / size * large / duration)} (bus bandwidth)"
    )
    log.info(f"\nall {size} ranks can reach each other")
    if len(set(hosts)) > 1:
        # rows[number][4] is the network interface.
        ends = (f"{hosts[number]} ({rows[number][4]})" for number in max(durations, key=durations.get))
        log.info(f"\nthe slowest link is between {' and '.join(ends)}")


def _describe_link(name: str, seconds: float, bytes_per_second: float) -> str:
    return f"{name:<14} {seconds * 1e6:8.0f} us {bytes_per_second * 8e-6:8.0f} Mbit/s"


if __name__ == "__main__":
    main()
