"""Finds processes of this machine in /proc, and measures their memory."""

import contextlib
import os
import signal
import time
from collections import defaultdict
from pathlib import Path

import numpy as np


def find_parents() -> dict[int, int]:
    """Returns {process id: process id of the parent} of all processes."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended in the meantime
            found[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    return found


def rank_of(pid: int) -> int | None:
    """Returns the RANK that torchrun gave to a process or its ancestor. Returns None if there is none."""
    entries = _read(pid, "environ").split(b"\0")
    return next((int(entry[5:]) for entry in entries if entry.startswith(b"RANK=")), None)


def kill_all_with(word: str) -> None:
    """Kills all processes with this argument on their command line, until none is left."""
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
    """Samples of the resident memory of torchruns and their descendants, by kind of process.

    settling_seconds: Time after the first sample of a process in which its samples do not count.
    """

    def __init__(self, settling_seconds: float):
        self._settling_seconds = settling_seconds
        self._lives: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)

    def sample(self, torchrun: int, *, run: str) -> None:
        """Samples the memory of a torchrun and its descendants.

        torchrun: Process id. run: Text to append to the names of the kinds, such as ", left alone".
        """
        parents, now = find_parents(), time.monotonic()
        for pid in parents:
            kind = kind_of(pid, torchrun, parents)
            with contextlib.suppress(OSError, IndexError):  # it has ended
                if kind is not None:
                    pages = int(Path("/proc", str(pid), "statm").read_text().split()[1])
                    self._lives[kind + run, pid].append((now, pages * os.sysconf("SC_PAGE_SIZE") / 2**20))

    def slopes(self) -> dict[str, float]:
        """Returns {kind of process: growth of memory in MiB per hour}.

        Fits lines to the samples of all processes of a kind. The lines have the same slope, but may have
        different offsets.
        """
        centred = defaultdict(list)
        for (kind, _), life in self._lives.items():
            samples = np.array(life)
            samples = samples[samples[:, 0] >= samples[0, 0] + self._settling_seconds]
            if len(samples) > 2:
                centred[kind].append(samples - samples.mean(axis=0))
        found = {kind: np.concatenate(lives).T for kind, lives in sorted(centred.items())}
        return {kind: float(3600 * (t @ mebibytes) / (t @ t)) for kind, (t, mebibytes) in found.items()}


def kind_of(pid: int, torchrun: int, parents: dict[int, int]) -> str | None:
    """Returns the kind of a process: "torchrun", "rank 0" or "below rank 0" (a descendant of rank 0).

    Returns None if the process does not belong to this torchrun. parents: Result of `find_parents`.
    """
    if pid == torchrun:
        return "torchrun"
    depth, current = 0, pid
    while current in parents and current != torchrun:
        depth, current = depth + 1, parents[current]
    if current != torchrun or (rank := rank_of(pid)) is None:
        return None
    return f"rank {rank}" if depth == 1 else f"below rank {rank}"
