"""The memory of a training, sampled from outside."""

import os
import time
from collections import defaultdict
from pathlib import Path

import numpy as np

from tests.stress.runs import parents, rank_of


class Memory:
    """The resident memory of torchruns and of all below them, by kind of process."""

    def __init__(self, settling_seconds: float):
        self._settling_seconds = settling_seconds
        self._lives: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)

    def sample(self, torchrun: int, *, run: str = "") -> None:
        """Reads the memory of a torchrun and its processes. run: added to the names of their kinds."""
        above, now = parents(), time.monotonic()
        for pid in above:
            kind = kind_of(pid, torchrun, above)
            if kind is None:
                continue
            try:
                pages = int(Path("/proc", str(pid), "statm").read_text().split()[1])
                started = Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[19]
            except (OSError, IndexError):  # it has ended
                continue
            self._lives[kind + run, f"{pid} {started}"].append(
                (now, pages * os.sysconf("SC_PAGE_SIZE") / 2**20)
            )

    def _settled(self) -> dict[str, list[np.ndarray]]:
        """Returns by kind the samples [n, 2] of each life, seconds and MiB, once it had settled."""
        found = defaultdict(list)
        for (kind, _), life in self._lives.items():
            samples = np.array(life)
            samples = samples[samples[:, 0] >= samples[0, 0] + self._settling_seconds]
            if len(samples) > 2:
                found[kind].append(samples)
        return dict(sorted(found.items()))

    def slopes(self) -> dict[str, float]:
        """Fits by kind one slope, MiB an hour, to all lives, each with a level of its own."""
        slopes = {}
        for kind, lives in self._settled().items():
            centred = np.concatenate([life - life.mean(axis=0) for life in lives])
            slopes[kind] = float(3600 * (centred[:, 0] @ centred[:, 1]) / (centred[:, 0] @ centred[:, 0]))
        return slopes

    def rows(self) -> list[list[str]]:
        slopes = self.slopes()
        return [
            [
                kind,
                str(sum(map(len, lives))),
                str(len(lives)),
                f"{np.median(np.concatenate(lives)[:, 1]):.0f}",
                f"{slopes[kind]:+.2f}",
            ]
            for kind, lives in self._settled().items()
        ]


def kind_of(pid: int, torchrun: int, above: dict[int, int]) -> str | None:
    """Names what a process is to a run: torchrun, `rank 0`, `below rank 0`; None where it is not of it."""
    if pid == torchrun:
        return "torchrun"
    depth, current = 0, pid
    while current in above and current != torchrun:
        depth, current = depth + 1, above[current]
    if current != torchrun or (rank := rank_of(pid)) is None:
        return None
    return f"rank {rank}" if depth == 1 else f"below rank {rank}"
