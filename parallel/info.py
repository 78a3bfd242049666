"""What this machine and its torch offer a run, which ranks do not reach each other, and what a step costs.

    python -m parallel.info
    torchrun --nproc-per-node N -m parallel.info [--quick] [--timeout SECONDS] [experiment=NAME key=value ...]

With keys of a config, as pretrain.py takes them: what its steps send, what that takes on the slowest line,
and which keys make it less. Ranks report through the store of torchrun, beside the network that may be at
fault; the watchdog names a rank that hangs, and ends all. `python -m torch.utils.collect_env` tells more of
the software.
"""

from __future__ import annotations

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

from parallel import lines, log
from parallel import process_group as group
from parallel.launch import wait_for_all_ranks
from parallel.lines import Line
from parallel.process_group import is_main, num_nodes, rank, world_size
from parallel.watchdog import Watchdog

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCH", "NCCL_", "GLOO_", "OMP_", "CUDA_", "HIP_")
# Keys that make a step send less, or more rarely.
_ALTERNATIVES = (
    (),
    ("gradient_dtype=bfloat16",),
    ("local_steps=8",),
    ("local_steps=32",),
    ("local_steps=32", "outer_dtype=bfloat16", "puzzle_emb_sync=local"),
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m parallel.info", description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda", "mps"])
    parser.add_argument("--backend", default="auto", choices=["auto", "nccl", "gloo", "mpi"])
    parser.add_argument("--timeout", default=30.0, type=float, metavar="SECONDS", help="of each step (30)")
    keys = "of a run, as experiment=sudoku_extreme: what its steps cost here"
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=keys)
    parser.add_argument("--quick", action="store_true", help="fewer and smaller messages")
    out, err = (sys.stdout, sys.stderr) if is_main() else (io.StringIO(), io.StringIO())  # rank 0's will do
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        options = parser.parse_intermixed_args()
        if options.timeout <= 0:
            parser.error(f"--timeout {options.timeout:g} is not above 0")
    log.info(describe_process())
    if world_size() > 1:
        check_ranks(options)
    elif options.overrides:
        log.error(f"{options.overrides[0]}: one process sends nothing: start this with torchrun")
        raise SystemExit(1)


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
            address, port, *_ = stack.enter_context(lines.listen_like_gloo()).getsockname()
            host, threads = socket.gethostname(), group.set_cpu_threads("auto")
            where = [lines.interface_of(address), address, port]
            return [host, os.getpid(), str(device), threads, *where]

        rows = _on_all_ranks("set up", set_up)
        names = ("rank", "host", "pid", "device", "threads", "interface", "address", "port")
        log.info("\n" + _table(names, *((number, *row) for number, row in enumerate(rows))))
        connect = functools.partial(lines.try_address, timeout_seconds=limit / 2)
        addresses = [row[-2:] for row in rows]
        faults = _on_all_ranks(
            "try the others", lambda: list(ThreadPoolExecutor(128).map(connect, addresses))
        )
        if is_main():
            _warn_of_unreachable(rows, faults)
        pairs = itertools.combinations(range(len(rows)), 2)
        if apart := [(a, b) for a, b in pairs if faults[a][b] and faults[b][a]]:
            _end_all(f"neither of ranks {apart[0][0]} and {apart[0][1]} reaches the other")
        watchdog.step_done(1)
        device = group.choose_device(options.device)
        opened = group.process_group(device, options.backend, timeout=timedelta(seconds=limit / 2))
        _on_all_ranks("open the group", lambda: stack.enter_context(opened))
        is_nccl = "nccl" in group.choose_backend(options.backend, device)  # gloo sends from the CPU alone
        device = device if is_nccl else torch.device("cpu")
        hosts = [row[0] for row in rows]
        slowest = _measure(device, hosts, is_quick=options.quick, watchdog=watchdog)
        if len(set(hosts)) > 1:
            ends = " and ".join(f"{hosts[number]} ({rows[number][4]})" for number in slowest.ranks)
            log.info(f"\nthe slowest line is between {ends}")
        if options.overrides:
            _describe_step(options.overrides, slowest, device, limit=limit)
        dist.barrier()  # rank 0, which may serve the store, leaves when nobody needs it any more


def _warn_of_unreachable(rows: Sequence[Sequence[Any]], faults: Sequence[Sequence[str]]) -> None:
    """Prints a line for each rank that others cannot reach. faults: of each rank, by whom it calls."""
    for number, (host, *_, interface, address, _) in enumerate(rows):
        if callers := [caller for caller, texts in enumerate(faults) if texts[number]]:
            hosts = ", ".join(dict.fromkeys(rows[caller][0] for caller in callers))
            where = f"rank {number} ({host}, {interface} {address})"
            log.warning(
                f"{where} cannot be reached by {log.name_ranks(callers)} on {hosts} "
                f"({faults[callers[0]][number]}): set GLOO_SOCKET_IFNAME to the interface that leads to the "
                "others, and let their TCP through its firewall, to any port"
            )


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
        _end_all(f"{log.name_ranks(failed)} of {world_size()} did not {name}: {errors[failed[0]]}")
    return list(results)


def _end_all(reason: str) -> NoReturn:
    """Ends all ranks, for a reason that all know, with status 1 and one line."""
    store = group.rendezvous_store()
    if is_main():
        log.error(reason)
        store.set("printed", "")
    with contextlib.suppress(RuntimeError):  # rank 0, which may serve the store, prints before it goes
        store.wait(["printed"])
    raise SystemExit(1)


def _measure(device: torch.device, hosts: Sequence[str], *, is_quick: bool, watchdog: Watchdog) -> Line:
    """Prints how fast messages are between pairs of ranks, then among all; returns the slowest line."""
    size, repeats, large = world_size(), 10 if is_quick else 100, 2**20 if is_quick else 2**24  # large: bytes
    log.info(f"\n{device.type} tensors: 4 bytes there and back, and {large >> 20} MiB")
    measured = []
    for pair in lines.pairs_to_measure(hosts):
        measure = functools.partial(lines.measure_line, pair, device, repeats=repeats, num_bytes=large)
        name = f"exchange messages (rank {pair[0]} with rank {pair[1]})"
        measured.append(Line(*_on_all_ranks(name, measure)[pair[0]]))
        log.info(measured[-1].describe())
        watchdog.step_done(2)

    def all_reduces() -> list[float]:
        messages = [torch.zeros(num_bytes // 4, device=device) for num_bytes in (4, large)]
        return [lines.median_seconds([dist.all_reduce], message, 3) for message in messages]

    times = _on_all_ranks("all-reduce", all_reduces)
    latency, duration = map(max, zip(*times, strict=True))
    bandwidth = 2 * (size - 1) / size * large / duration
    log.info(f"{'all-reduce':<14} {latency * 1e6:8.0f} us {bandwidth * 8e-6:8.0f} Mbit/s on the bus")
    log.info(f"\nall {size} ranks reach each other")
    return max(measured, key=lambda line: line.all_reduce_seconds(large, ranks=2))


def _describe_step(overrides: Sequence[str], line: Line, device: torch.device, *, limit: float) -> None:
    """Prints what the steps of a run send, how long that takes on this line, and which keys make it less."""
    from config.compose import compose_overrides
    from config.schema import PretrainConfig
    from training.exchange import count_exchange

    def estimate() -> dict[str, list[float]]:
        found = {}
        for keys in _ALTERNATIVES if is_main() else ():
            try:
                config = compose_overrides(PretrainConfig, [*overrides, *keys])
            except ValueError:
                if keys:  # they do not go with those of the run
                    continue
                raise
            sent = count_exchange(config, world_size=world_size())
            dense = line.all_reduce_seconds(sent.dense_bytes, ranks=world_size()) if sent.dense_bytes else 0.0
            rows = line.all_gather_seconds(sent.row_bytes, ranks=world_size()) if sent.row_bytes else 0.0
            seconds = dense / sent.dense_interval + rows / sent.row_interval
            found[" ".join(keys) or "as it is"] = [sent.dense_bytes, sent.row_bytes, dense, seconds]
        return found

    estimates = _on_all_ranks("estimate a step", estimate)[0]
    dense_bytes, row_bytes, dense, _ = estimates["as it is"]
    is_one = num_nodes() == 1 and device.type == "cpu"
    log.info(
        f"\n{' '.join(overrides)}: an exchange has {dense_bytes / 2**20:.1f} MiB of gradients, and "
        f"{row_bytes / 2**20:.2f} MiB of each rank's puzzle embeddings; estimated for the slowest line"
        + (" (of one node's CPUs, which share memory and send none, as if of several):" if is_one else ":")
    )
    log.info(_table(*((keys, f"{each[-1]:.3g} s a step") for keys, each in estimates.items())))
    if not dense_bytes:
        return
    share = min(1.0, limit / 10 / dense)  # of the message, so that it is no hang
    num_bytes = int(share * dense_bytes) // 4 * 4
    message = torch.zeros(num_bytes // 4, device=device)
    all_reduce = functools.partial(lines.median_seconds, [dist.all_reduce], message, 1)
    measured = max(_on_all_ranks("all-reduce gradients", all_reduce))
    estimated = line.all_reduce_seconds(num_bytes, ranks=world_size())
    log.info(
        f"an all-reduce of {num_bytes / 2**20:.1f} MiB takes {measured:.3g} s here, "
        f"{estimated:.3g} s by the estimate"
    )


def _table(*rows: Sequence[object]) -> str:
    texts = [list(map(str, row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in texts)


if __name__ == "__main__":
    main()
