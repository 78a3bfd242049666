"""Runs functions and programs on several ranks. Starting the ranks takes tenths of a second.

Ranks are forked from a server process that has imported torch but started no thread. A fork of the test
process itself could hang in autograd or OpenMP. As under torchrun, ranks connect to a store that outlives
them, and have the same environment variables.
"""

import contextlib
import dataclasses
import importlib
import itertools
import multiprocessing
import os
import pickle
import runpy
import subprocess
import sys
import tempfile
import textwrap
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore

from tests.float64 import float64

# Read by OpenMP when a process loads it: threads that wait leave the cores to the tests beside them.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

REPOSITORY = Path(__file__).resolve().parent.parent
NUM_THREADS = int(os.environ.get("TEST_THREADS", "1"))  # of torch, in every process
_TIMEOUT_SECONDS = 280  # less than pytest allows a test, and enough on a busy machine

_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload(["tests.preload"])


@dataclasses.dataclass(frozen=True)
class Finished:
    """Result of a program: the exit status of each rank, and the joined output of all ranks."""

    statuses: list[int]
    stdout: str
    stderr: str

    @property
    def error_lines(self) -> list[str]:
        return [line for line in self.stderr.splitlines() if line.strip()]


def run_ranks(function: Callable[..., Any], world_size: int, *arguments: Any) -> list[Any]:
    """Calls `function(*arguments)` on every rank of a gloo group. Returns the results, by rank.

    The function must be importable (no lambda). If a rank fails, raises AssertionError with its traceback.
    """
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / str(rank) for rank in range(world_size)]
        statuses = _run(world_size, lambda rank: (_call, (function, arguments, paths[rank])))
        failures, results = [], []
        for rank, path in enumerate(paths):
            is_result, value = (
                pickle.loads(path.read_bytes()) if path.exists() else (False, f"status {statuses[rank]}")
            )
            results.append(value)
            if not is_result:
                failures.append(f"rank {rank}: {value}")
    assert not failures, "\n".join(failures)
    return results


def call_each(function: Callable[..., Any], cases: Iterable[tuple]) -> list[Any]:
    """Returns [function(*arguments) for each tuple of arguments in `cases`].

    With `run_ranks`, the same processes compute all cases.
    """
    return [function(*each) for each in cases]


def run_program(
    name: str,
    *arguments: str,
    folder: Path,
    world_size: int | None = 1,
    is_float64: bool = False,
    spoil: Callable[[], Any] | None = None,
    **environment: str,
) -> Finished:
    """Runs a program in `folder` on every rank, as torchrun would.

    name: Path of the program without .py, absolute or in the repository. world_size: Number of ranks. If
    None, runs one process without the environment variables of torchrun. is_float64: Whether to compute in
    float64 in place of float32 and bfloat16. spoil: Function that the last rank calls before the program.
    """
    output = folder / f".output_{Path(name).stem}"
    output.mkdir(exist_ok=True)
    given = (name, arguments, folder, environment, is_float64, spoil)
    statuses = _run(world_size, lambda rank: (_program, (output / str(rank), *given)))
    texts = {
        stream: "".join((output / f"{rank}.{stream}").read_text() for rank in range(world_size or 1))
        for stream in ("stdout", "stderr")
    }
    return Finished(statuses, **texts)


def complete_program(
    name: str, *arguments: str, folder: Path, world_size: int | None = 1, **options: Any
) -> Finished:
    """Runs a program as `run_program` does. Raises AssertionError if a rank does not exit with 0."""
    finished = run_program(name, *arguments, folder=folder, world_size=world_size, **options)
    assert finished.statuses == [0] * (world_size or 1), finished.stderr
    return finished


def run_code(code: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess:
    """Runs Python code in a new interpreter that can import the modules of the repository.

    Environment variables that set numbers of threads are removed.
    """
    given = {key: each for key, each in os.environ.items() if not key.startswith(("OMP_", "GOMP_", "KMP_"))}
    given |= {"PYTHONPATH": str(REPOSITORY)} | environment
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    return subprocess.run(command, env=given, capture_output=True, text=True)


def send_signal(number: int, module: str, name: str, call: int) -> None:
    """Makes this process send itself a signal later, in a call of a function.

    module, name: Module and name of the function. call: Number of the call, from 1.
    """
    place, calls = importlib.import_module(module), itertools.count(1)
    function = getattr(place, name)

    def interrupted(*arguments: Any, **options: Any) -> Any:
        if next(calls) == call:
            os.kill(os.getpid(), number)
        return function(*arguments, **options)

    setattr(place, name, interrupted)


def start_program(
    name: str, *arguments: str, folder: Path, spoil: Callable[[], Any] | None = None
) -> multiprocessing.Process:
    """Starts a program in `folder` as one process. Its output goes to <name>.stdout and .stderr there.

    spoil: Function that the process calls before the program.
    """
    given = (folder / name, name, arguments, folder, {"WANDB_MODE": "disabled"}, False, spoil)
    process = _server.Process(target=_in_environment, args=({}, _program, given))
    process.start()
    return process


def _run(world_size: int | None, task: Callable[[int], tuple[Callable, tuple]]) -> list[int]:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = []
    for rank in range(world_size or 1):
        of_torchrun = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        environment = {"WANDB_MODE": "disabled", **(of_torchrun if world_size else {})}
        target, arguments = task(rank)
        processes.append(_server.Process(target=_in_environment, args=(environment, target, arguments)))
    for process in processes:
        process.start()
    end = time.monotonic() + _TIMEOUT_SECONDS
    try:
        for process in processes:
            process.join(max(0.0, end - time.monotonic()))
        stuck = [rank for rank, process in enumerate(processes) if process.is_alive()]
    finally:
        for process in processes:
            process.kill()
            process.join()
    assert not stuck, f"ranks {stuck} did not end within {_TIMEOUT_SECONDS} seconds"
    return [process.exitcode for process in processes]


def _in_environment(environment: dict[str, str], target: Callable, arguments: tuple) -> None:
    os.environ.update(environment)
    warnings.simplefilter("error", FutureWarning)  # what torch is about to drop
    torch.set_num_threads(NUM_THREADS)
    target(*arguments)


def _call(function: Callable, arguments: tuple, path: Path) -> None:
    from distributed.backend import process_group
    from distributed.collectives import barrier

    try:
        with process_group(torch.device("cpu")):
            barrier()  # a rank that leaves before another has found all breaks the group of the other
            result = (True, function(*arguments))
    except BaseException:
        result = (False, traceback.format_exc())
    path.write_bytes(pickle.dumps(result))


def _program(
    output: Path,
    name: str,
    arguments: tuple,
    folder: Path,
    environment: dict[str, str],
    is_float64: bool,
    spoil: Callable[[], Any] | None,
) -> None:
    os.environ.update(environment)
    os.chdir(folder)
    for stream, descriptor in (("stdout", 1), ("stderr", 2)):
        with open(f"{output}.{stream}", "w") as file:
            os.dup2(file.fileno(), descriptor)
    sys.stdout, sys.stderr = (os.fdopen(os.dup(descriptor), "w", buffering=1) for descriptor in (1, 2))
    sys.argv = [f"{name}.py", *arguments]
    if spoil and int(os.environ.get("RANK", 0)) == int(os.environ.get("WORLD_SIZE", 1)) - 1:
        spoil()
    with float64() if is_float64 else contextlib.nullcontext():
        runpy.run_path(str(REPOSITORY / f"{name}.py"), run_name="__main__")
