"""Starts processes that each run a task under a watchdog with short limits."""

import contextlib
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from torch.distributed import TCPStore

from distributed import log
from distributed import watchdog as watchdog_module
from distributed.watchdog import EXIT_HANG, Watchdog
from distributed.world import rank, rendezvous_store
from tests.ranks import _in_environment, _server
from tests.waiting import read, wait_for

TICK = 0.15  # seconds
TIMEOUT = 10 * TICK  # of a step
SLACK = 20.0  # for a busy machine
UNTIL_REPORTED = TIMEOUT + 15 * TICK  # after the timeout of a hang, if it were one


class WatchedRanks:
    """Processes that each call `task(watchdog)` in the watchdog's block; some do not end by themselves."""

    def __init__(
        self, task: Callable[[Watchdog], None], size: int, *, port: int, is_served: bool, folder: Path
    ):
        self.folder, self._processes = folder, []
        for number in range(size):
            environment = {"RANK": str(number), "WORLD_SIZE": str(size)}
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            environment["TORCHELASTIC_USE_AGENT_STORE"] = str(is_served)
            # Each agent counts for itself, and a node that came back begins at 0.
            environment["TORCHELASTIC_RESTART_COUNT"] = "0" if is_served else str(number)
            arguments = (environment, _watched, (task, folder))
            self._processes.append(_server.Process(target=_in_environment, args=arguments))
            self._processes[-1].start()

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()

    def send(self, number: signal.Signals) -> None:
        for process in self._processes:
            os.kill(process.pid, number)

    def status(self, number: int) -> int:
        process = self._processes[number]
        process.join(TIMEOUT + SLACK)
        assert not process.is_alive(), f"rank {number} has not ended: {self.stderr(number)}"
        return process.exitcode

    def is_alive(self, number: int) -> bool:
        return self._processes[number].is_alive()

    def wait_until_all_say(self, text: str) -> None:
        numbers = range(len(self._processes))
        wait_for(lambda: all(text in self.stderr(number) for number in numbers), text)

    def stderr(self, number: int) -> str:
        return read(self.folder / f"{number}.stderr")

    def report(self, number: int) -> str:
        """The one line of a rank that ended by the watchdog; its stacks follow."""
        assert self.status(number) == EXIT_HANG, self.stderr(number)
        found = re.findall(rf"(?m)^error \(rank {number}\): (.*)\nThread", self.stderr(number))
        assert len(found) == 1, self.stderr(number)
        assert re.search(r'File ".*test_watchdog.py", line \d+ in ', self.stderr(number))
        return found[0]


@contextlib.contextmanager
def starting_ranks(parent: Path) -> Iterator[Callable[..., WatchedRanks]]:
    """Context manager with a function that starts some ranks on a task, in a folder of their own in `parent`.

    The argument `port` of the function is the port of the store. If None, this process serves a store for
    these ranks. At the end of the block, all ranks that still run are killed.
    """
    started, stores = [], []

    def start_ranks(
        task: Callable[[Watchdog], None], size: int, *, port: int | None = None, is_served: bool = True
    ) -> WatchedRanks:
        if port is None:
            stores.append(TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
            port = stores[-1].port
        folder = parent / str(len(started))
        folder.mkdir()
        started.append(WatchedRanks(task, size, port=port, is_served=is_served, folder=folder))
        return started[-1]

    yield start_ranks
    for ranks in started:
        ranks.kill()


def _watched(task: Callable[[Watchdog], None], folder: Path) -> None:
    with open(folder / f"{rank()}.stderr", "w") as file:
        os.dup2(file.fileno(), 2)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    watchdog_module._TICK_SECONDS = TICK
    rendezvous_store()  # the programs have it by then, to agree on the config
    with Watchdog(init_timeout_seconds=30, step_timeout_seconds=TIMEOUT) as watchdog:
        log.open_rank_file(folder)
        task(watchdog)
