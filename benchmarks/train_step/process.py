"""A contender of the training step's benchmark in a process of its own, as a run is.

So each contender has its own memory, threads and compiled code, and published does not have what ours sets
for its process. Processes share the machine by taking turns: a contender steps when its process is asked to.
"""

import contextlib
import dataclasses
import multiprocessing
import signal
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from benchmarks.harness import fail, now
from benchmarks.train_step.contenders import OURS, PARTS, build_contender, timed_calls
from benchmarks.train_step.flops import give_memory_back
from parallel.launch import keep_freed_memory
from parallel.process_group import set_cpu_threads
from training.clock import peak_memory_bytes

_PATIENCE_SECONDS = 10.0


@dataclasses.dataclass(frozen=True)
class Begin:
    """The first two steps of a contender, and the most memory that its process had until then."""

    first_seconds: float
    second_seconds: float
    peak_memory_bytes: int


class ContenderProcess:
    """The contender `name` of `contenders`, in a process that ends with the context, or with this process.

    An exception of the contender is raised here; if its process dies, the benchmark ends with one line.
    """

    def __init__(
        self,
        name: str,
        config: SimpleNamespace,
        metadata: SimpleNamespace,
        *,
        device: torch.device,
        threads: int,
    ):
        self.name = name
        context = multiprocessing.get_context("forkserver")  # which has imported torch, and computed nothing
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        try:
            self.begin: Begin = self._call("build", name, config, metadata, device, threads)
        except BaseException:
            self._close()
            raise

    def take_turn(self) -> float:
        """Returns the seconds of a step."""
        return self._call("take_turn")

    def time_parts(self, rounds: int) -> dict[str, float]:
        """Returns the median seconds of each part of a step, and of the rest of it."""
        return self._call("time_parts", rounds)

    def __enter__(self) -> "ContenderProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def _call(self, method: str, *arguments: Any) -> Any:
        try:
            self._connection.send((method, arguments))
            result, error = self._connection.recv()
        except (EOFError, ConnectionError):
            self._process.join()
            fail(f"the process of {self.name} ended with status {self._process.exitcode}")
        if error is not None:
            raise error
        return result

    def _close(self) -> None:
        self._connection.close()  # the process ends by itself, unless it is at work
        self._process.join(_PATIENCE_SECONDS)
        self._process.terminate()
        self._process.join()


# ------------------------------------------------------------------------------------- in the other process
def _serve(connection: Connection) -> None:
    """Calls the methods that the connection brings, until its other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # on Ctrl-C only the first process has something to say
    worker = _Worker()
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            method, arguments = connection.recv()
            try:
                answer = getattr(worker, method)(*arguments), None
            except Exception as error:
                answer = None, error
            connection.send(answer)


class _Worker:
    """The other end of a ContenderProcess. Each method leaves the GPU's memory to the other contenders."""

    def build(
        self,
        name: str,
        config: SimpleNamespace,
        metadata: SimpleNamespace,
        device: torch.device,
        threads: int,
    ) -> Begin:
        set_cpu_threads(threads)
        if name in OURS.values():
            keep_freed_memory(device)  # as pretrain.py does
        self._device, self._contender = device, build_contender(name, config, metadata, device)
        first_seconds, second_seconds = self._seconds_of_step(), self._seconds_of_step()
        begin = Begin(first_seconds, second_seconds, peak_memory_bytes(device))
        give_memory_back(device)
        return begin

    def take_turn(self) -> float:
        self._get_ready()
        seconds = self._seconds_of_step()
        give_memory_back(self._device)
        return seconds

    def time_parts(self, rounds: int) -> dict[str, float]:
        timings = []
        self._get_ready()
        for _ in range(rounds):
            with timed_calls(self._contender.calls(), self._device) as seconds:
                whole = self._seconds_of_step()
            timings.append({**seconds, "rest": whole - sum(seconds.values())})
        give_memory_back(self._device)
        return {part: float(np.median([each[part] for each in timings])) for part in (*PARTS, "rest")}

    def _get_ready(self) -> None:
        """Makes a step that does not count: caches, threads and memory are those of a run again."""
        self._contender.step()

    def _seconds_of_step(self) -> float:
        begin = now(self._device)
        self._contender.step()
        return now(self._device) - begin
