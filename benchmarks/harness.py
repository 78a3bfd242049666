"""Processes to measure in, and contenders that take turns in them.

A machine is noisy over minutes: so contenders are not timed one after the other, but in rounds (A B C, A B C,
...) in processes that live all the while, and a ratio compares what ran within seconds. A round counts the
slowest rank.
"""

import argparse
import contextlib
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist

from dataset.command_line import integer
from parallel import log
from parallel.collectives import barrier
from parallel.process_group import choose_device, is_main, open_group, set_cpu_threads, world_size

_USAGE_STATUS = 2  # argparse's
_QUICK_ROUNDS = 3


# ---------------------------------------------------------------------------------------------- command line
class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, on rank 0 for all."""

    def error(self, message: str) -> NoReturn:
        if is_main():
            log.error(f"{message} (--help lists the options)")
        sys.exit(_USAGE_STATUS)


def benchmark_parser(name: str, *, description: str, rounds: int) -> argparse.ArgumentParser:
    """A parser with what every benchmark has, but for the number of processes. `rounds` is the default."""
    parser = _Parser(prog=f"python -m benchmarks.{name}", description=description, allow_abbrev=False)
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="gloo or NCCL (default: %(default)s)"
    )
    parser.add_argument(
        "--rounds", type=integer(at_least=1), default=rounds, metavar="N", help="default: %(default)s"
    )
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes and few rounds: to see that it works, not how fast"
    )
    return parser


def add_processes(parser: argparse.ArgumentParser) -> None:
    """For a benchmark that measures one number of processes."""
    parser.add_argument(
        "--processes", type=integer(at_least=1), metavar="N", help="default: torchrun's, else 2"
    )
    parser.add_argument(
        "--threads",
        type=lambda text: text if text == "auto" else integer(at_least=1)(text),
        default="auto",
        metavar="N",
        help="of each process; auto: OMP_NUM_THREADS if set, else cores over processes (default: auto)",
    )


def parse(parser: argparse.ArgumentParser, words: Sequence[str] | None) -> argparse.Namespace:
    """The command line, with as many processes as torchrun started, or as asked for."""
    arguments = parser.parse_args(words)
    if arguments.quick:
        arguments.rounds = min(arguments.rounds, _QUICK_ROUNDS)
    if is_under_torchrun():
        if arguments.processes not in (None, world_size()):
            parser.error(f"--processes {arguments.processes}, but torchrun started {world_size()}: drop it")
        arguments.processes = world_size()
    arguments.processes = arguments.processes or 2
    return arguments


def is_under_torchrun() -> bool:
    return "RANK" in os.environ


# -------------------------------------------------------------------------------------------------- processes
def run(benchmark: Callable[[argparse.Namespace, torch.device], None], arguments: argparse.Namespace) -> None:
    """Calls `benchmark` on every rank of a process group: of torchrun's processes, else of new ones."""
    if is_under_torchrun():
        _measure(benchmark, arguments)
    else:
        processes = start(arguments.processes, lambda _rank: (_measure, (benchmark, arguments)))
        waiting = list(processes)
        while waiting:
            wait([process.sentinel for process in waiting])
            for process in waiting:
                if process.exitcode:  # the others wait for it in vain; they end with this process
                    sys.exit(1)
            waiting = [process for process in waiting if process.exitcode is None]


def _measure(benchmark: Callable, arguments: argparse.Namespace) -> None:
    arguments.threads = set_cpu_threads(arguments.threads)
    try:
        device = choose_device(arguments.device)
    except ValueError as error:
        if is_main():
            log.error(error)
        sys.exit(1)
    with group(device):
        benchmark(arguments, device)
        barrier()  # nobody leaves while others still talk


@contextlib.contextmanager
def group(device: torch.device) -> Iterator[None]:
    """The process group of all ranks, in a world of one too: so one GPU measures NCCL."""
    open_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def start(
    num_processes: int, task: Callable[[int], tuple[Callable[..., None], tuple]], *, is_apart: bool = False
) -> list[BaseProcess]:
    """Starts processes that call the function and arguments of `task(rank)`, in the environment of torchrun.

    Apart, each is a world of its own. They are forked, which is quick, and end with this process, which must
    not have computed anything before.
    """
    import torch._dynamo  # noqa: F401  (torch's optimizers import it: once here, instead of in each process)

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    processes = []
    for rank in range(num_processes):
        environment = {
            "RANK": "0" if is_apart else str(rank),
            "WORLD_SIZE": "1" if is_apart else str(num_processes),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(num_processes),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        processes.append(
            multiprocessing.get_context("fork").Process(
                target=_in_environment, args=(environment, *task(rank)), daemon=True
            )
        )
    for process in processes:
        process.start()
    return processes


def _in_environment(environment: dict[str, str], function: Callable[..., None], arguments: tuple) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C: only the first process has something to say
    os.environ.update(environment)
    function(*arguments)


# ----------------------------------------------------------------------------------------------------- rounds
def now(device: torch.device) -> float:
    """Seconds, read when the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def give_memory_back(device: torch.device) -> None:
    """What this process keeps of a GPU for its next tensors, for other processes there."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def timed(name: str, function: Callable[[], Any], device: torch.device) -> Callable[[], dict[str, float]]:
    """A contender that is timed as a whole."""

    def contender() -> dict[str, float]:
        begin = now(device)
        function()
        return {name: now(device) - begin}

    return contender


def time_rounds(
    contenders: Sequence[Callable[[], dict[str, float]]], *, rounds: int, warmup_rounds: int = 1
) -> dict[str, np.ndarray]:
    """Lets the contenders take turns and returns, by name, the seconds [rounds] of the slowest rank.

    All ranks call it. A contender returns what it timed, by names of its own; all ranks start it together.
    """
    timings = []
    for _ in range(warmup_rounds + rounds):
        timing = {}
        for contender in contenders:
            barrier()
            timing |= contender()
        timings.append(timing)
    names = list(timings[0])
    seconds = torch.tensor(
        [[timing[name] for name in names] for timing in timings[warmup_rounds:]], dtype=torch.float64
    )
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return dict(zip(names, seconds.T.numpy(), strict=True))
