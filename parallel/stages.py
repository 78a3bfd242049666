"""What several ranks do one after the other, where any of it may fail or hang on some of them.

The action of a stage runs on a thread of its own, and what became of it travels through the store of the
launch, beside the network that may be at fault. So nobody waits for what hangs: a rank that does not come
through in time is named, and all the others end with status 1. Takes no torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

from parallel import log
from parallel.errors import EXIT_FAILURE
from parallel.process_group import connect_store, is_main, rank, world_size

_POLL_SECONDS = 0.01
_PATIENCE = 3  # timeouts until the store itself is given up: one for a stage, one to be told, one to spare
_MAX_NAMED = 8


class Stages:
    """Every rank of a world of several makes one.

    Ends the process, as every method does, where the store of the launch does not answer in time.
    """

    def __init__(self, *, timeout_seconds: float):
        self._timeout_seconds = timeout_seconds
        self._host = socket.gethostname()
        self._worker = ThreadPoolExecutor(1)
        with _store_answers(within_seconds=timeout_seconds):
            # A connection of its own: opening a group waits on the shared one, and others would wait with it.
            self._store = connect_store()
            self._store.set(f"host/{rank()}", self._host)

    def run(
        self,
        name: str,
        action: Callable[[], Any],
        *,
        ranks: Sequence[int] | None = None,
        show: Callable[[dict[int, Any]], None] = lambda results: None,
        suspects: Sequence[str] = (),
    ) -> dict[int, Any]:
        """Runs `action` on `ranks` (None: all) and returns, on every rank, what each returned, sent as JSON.

        All ranks call it. `name` completes "rank 2 did not ...". Unless all of `ranks` come through in time,
        every rank ends, and tells `suspects` if there are any, else what it knows; `show` sees what came.
        """
        numbers = range(world_size()) if ranks is None else ranks
        keys = {number: f"{name}/{number}" for number in numbers}
        with _store_answers(within_seconds=_PATIENCE * self._timeout_seconds):
            if rank() in keys:
                self._worker.submit(self._tell, keys[rank()], action)
            self._wait(list(keys.values()))
            came = [number for number in keys if self._store.check([keys[number]])]
            outcomes = {number: json.loads(self._store.get(keys[number])) for number in came}
            results = {number: outcomes[number]["result"] for number in came if "result" in outcomes[number]}
            show(results)
            if len(results) < len(keys):
                self._end(suspects or self._blame(name, keys, outcomes))
        return results

    def leave(self) -> None:
        """All ranks call it at the end: rank 0, which may hold the store, goes last."""
        with _store_answers(within_seconds=_PATIENCE * self._timeout_seconds):
            self._store.set(f"left/{rank()}", "")
            if is_main():
                self._wait([f"left/{number}" for number in range(world_size())])

    def _tell(self, key: str, action: Callable[[], Any]) -> None:
        try:
            outcome = {"result": action()}
        except Exception as error:  # shown by whoever speaks for all
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            outcome = {"error": f"{kind}{error}"}
        self._store.set(key, json.dumps(outcome))

    def _wait(self, keys: list[str]) -> None:
        """Until all keys are there or the timeout has passed.

        By asking again and again: the other thread could not use the store while this one waits in it.
        """
        until = time.monotonic() + self._timeout_seconds
        while not self._store.check(keys) and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)

    def _blame(self, name: str, numbers: Sequence[int], outcomes: dict[int, dict[str, Any]]) -> list[str]:
        """Lines about who failed (the first of them) and who is late."""
        failed = [number for number in outcomes if "error" in outcomes[number]]
        late = [number for number in numbers if number not in outcomes]
        lines = [f"rank {number}: {outcomes[number]['error']}" for number in failed[:1]]
        if late:
            lines.append(
                f"{name_ranks(late)} of {world_size()} did not {name} within {self._timeout_seconds:g} "
                "seconds: hung, gone, or out of reach"
            )
        return lines

    def _end(self, lines: Sequence[str]) -> NoReturn:
        """Tells the lines once on each host. Nobody leaves before: torchrun ends all when the first goes."""
        told = f"told/{self._host}"
        present = [number for number in range(world_size()) if self._store.check([f"host/{number}"])]
        here = [number for number in present if self._store.get(f"host/{number}").decode() == self._host]
        if rank() != here[0]:
            self._wait([told])
        if not self._store.check([told]):
            for line in lines:
                log.error(line)
            self._store.set(told, "")
        _exit()


def name_ranks(numbers: Sequence[int]) -> str:
    """For a sentence: rank 3, or ranks 3, 5."""
    shown = ", ".join(map(str, numbers[:_MAX_NAMED]))
    more = f", ... ({len(numbers)} in all)" if len(numbers) > _MAX_NAMED else ""
    return f"rank{'s' if len(numbers) > 1 else ''} {shown}{more}"


@contextlib.contextmanager
def _store_answers(*, within_seconds: float) -> Iterator[None]:
    """Ends the process where the store of the launch fails or is silent for longer.

    A call to it has no timeout that holds while the process that serves it is stopped.
    """
    from torch.distributed import DistError

    timer = threading.Timer(within_seconds, _end_without_store, ["no answer"])
    timer.daemon = True
    timer.start()
    try:
        yield
    except DistError as error:
        _end_without_store(error)
    finally:
        timer.cancel()


def _end_without_store(reason: object) -> NoReturn:
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    log.error(
        f"no store at MASTER_ADDR:MASTER_PORT, {address} ({reason}): does the node of rank 0 run, and is "
        "that its address?",
        failed_rank=rank(),
    )
    _exit()


def _exit() -> NoReturn:
    """At once: to leave in order is to wait for the thread that hangs."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(EXIT_FAILURE)
