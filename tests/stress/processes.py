"""Processes of this machine, found in /proc, and their memory."""

import contextlib
import os
import signal
import time
from collections import defaultdict
from pathlib import Path

import numpy as np


def find_parents() -> dict[int, int]:
    """Returns the parent of every process."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended in the meantime
            found[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    return found


def rank_of(pid: int) -> int | None:
    """Returns the RANK that torchrun gave to a process or to an ancestor of it; None where there is none."""
    entries = _read(pid, "environ").split(b"\0")
    return next((int(entry[5:]) for entry in entries if entry.startswith(b"RANK=")), None)


def kill_all_with(word: str) -> None:
    """Kills all processes with this word on their command line, until there is none."""
    needle = f"\0{word}\0".encode()
    while found := [pid for pid in find_parents() if needle in _read(pid, "cmdline")]:
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def _read(pid: int, name: str) -> bytes:
    try:
        return Path("/proc", str(pid), name).read_bytes()
    except OSError:  # it has ended
        return b""


class Memory:
    """The resident memory of torchruns and of all below them, by kind of process."""

    def __init__(self, settling_seconds: float):
        self._settling_seconds = settling_seconds
        self._lives: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)

    def sample(self, torchrun: int, *, run: str) -> None:
        """Reads the memory of a torchrun and its processes. run: added to the names of their kinds."""
        parents, now = find_parents(), time.monotonic()
        for pid in parents:
            kind = kind_of(pid, torchrun, parents)
            with contextlib.suppress(OSError, IndexError):  # it has ended
                if kind is not None:
                    pages = int(Path("/proc", str(pid), "statm").read_text().split()[1])
                    self._lives[kind + run, pid].append((now, pages * os.sysconf("SC_PAGE_SIZE") / 2**20))

    def slopes(self) -> dict[str, float]:
        """Fits by kind one slope, MiB an hour, to all lives, each with a level of its own."""
        centred = defaultdict(list)
        for (kind, _), life in self._lives.items():
            samples = np.array(life)
            samples = samples[samples[:, 0] >= samples[0, 0] + self._settling_seconds]
            if len(samples) > 2:
                centred[kind].append(samples - samples.mean(axis=0))
        found = {kind: np.concatenate(lives).T for kind, lives in sorted(centred.items())}
        return {kind: float(3600 * (t @ mebibytes) / (t @ t)) for kind, (t, mebibytes) in found.items()}


def kind_of(pid: int, torchrun: int, parents: dict[int, int]) -> str | None:
    """Names what a process is to a run: torchrun, `rank 0`, `below rank 0`; None where it is not of it."""
    if pid == torchrun:
        return "torchrun"
    depth, current = 0, pid
    while current in parents and current != torchrun:
        depth, current = depth + 1, parents[current]
    if current != torchrun or (rank := rank_of(pid)) is None:
        return None
    return f"rank {rank}" if depth == 1 else f"below rank {rank}"
