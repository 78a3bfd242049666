"""The processes of benchmarks: ranks that measure together, and programs of the repository."""

import argparse
import contextlib
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess

import torch

from benchmarks.harness import REPOSITORY, fail, is_under_torchrun, open_device
from parallel.collectives import barrier
from parallel.process_group import close_group, open_group, set_cpu_threads

_POLL_SECONDS = 0.1


# ------------------------------------------------------------------------------------------------------ ranks
def run(benchmark: Callable[[argparse.Namespace, torch.device], None], arguments: argparse.Namespace) -> None:
    """Calls `benchmark` on every rank of a process group: of torchrun's processes, else of new ones."""
    if is_under_torchrun():
        _measure(benchmark, arguments)
        return
    processes = start(arguments.processes, lambda _rank: (_measure, (benchmark, arguments)))
    waiting = {process.sentinel: process for process in processes}
    while waiting:
        for sentinel in wait(list(waiting)):
            process = waiting.pop(sentinel)
            process.join()  # its sentinel is ready a moment before its exit code
            if process.exitcode:  # the others wait for it in vain; they end with this process
                sys.exit(1)


def _measure(benchmark: Callable, arguments: argparse.Namespace) -> None:
    arguments.threads = set_cpu_threads(arguments.threads)
    device = open_device(arguments.device)
    with group(device):
        benchmark(arguments, device)
        barrier()  # nobody leaves while others still talk


@contextlib.contextmanager
def group(device: torch.device) -> Iterator[None]:
    """Opens the process group of all ranks, in a world of one too: so one GPU measures NCCL."""
    open_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    try:
        yield
    finally:
        close_group()


def start(
    num_processes: int, task: Callable[[int], tuple[Callable[..., None], tuple]], *, is_apart: bool = False
) -> list[BaseProcess]:
    """Starts processes that call the function and arguments of `task(rank)`, in the environment of torchrun.

    is_apart: each process is a world of its own. Processes are forked, which is quick, and end with this
    process, which must not have computed anything before.
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
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # on Ctrl-C only the first process has something to say
    os.environ.update(environment)
    function(*arguments)


# --------------------------------------------------------------------------------------------------- programs
def program(*words: object, processes: int = 1) -> list[str]:
    """Returns the command of a program of the repository, under torchrun where it is several processes."""
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", processes] if processes > 1 else []
    return [sys.executable, *map(str, [*torchrun, *words])]


def run_program(
    *words: object, processes: int = 1, threads: int = 1, until: Callable[[], bool] = lambda: False
) -> None:
    """Runs a program of the repository; ends this one with its last line where it fails.

    until: asked ten times a second; once it holds, the program is asked to stop, and its status does not
    matter. Whatever ends this program ends that one too.
    """
    is_stopped = False
    with (
        tempfile.TemporaryFile("w+") as output,
        subprocess.Popen(
            program(*words, processes=processes),
            cwd=REPOSITORY,
            env=program_environment(threads),
            stdout=output,
            stderr=output,
        ) as process,
    ):
        try:
            while process.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_POLL_SECONDS)
                if not is_stopped and until():
                    is_stopped = True
                    process.terminate()
        except BaseException:
            process.terminate()  # torchrun ends its ranks
            raise
        if process.returncode and not is_stopped:
            output.seek(0)
            fail(f"{' '.join(map(str, words))}: {output.read().strip().splitlines()[-1:]}")


def program_environment(threads: int) -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": str(threads), "WANDB_MODE": "disabled"}
