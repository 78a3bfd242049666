"""Votes for ARC answers: how often each grid was given to a test input, and how sure the model was of it.

The views of a test input vote, on several ranks, perhaps of several checkpoints. Of each distinct grid only
two sums are kept, and they travel in a file of plain arrays, in which nothing can be executed. Invariant: all
sums are integers and ties are broken by the grid itself, so that no division or order of the work changes
a ranking.

Grids are bytes (`tasks.grid_bytes`).
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dataset.kinds.arc.tasks import EMPTY, NUM_COLORS, SIZE

_HALTING_ONE = 1 << 32  # a probability of 1 in fixed point
_MAX_VOTES = 1 << 30  # for one grid in a file, so that its sums fit into int64
# In a file: the sums of one grid that one test input got.
_ENTRY = np.dtype(
    [
        ("set", np.int32),  # place in `set_names`
        ("task", np.int32),
        ("test_input", np.int32),
        ("rows", np.uint8),
        ("columns", np.uint8),
        ("votes", np.int64),
        ("halting", np.int64),
    ]
)


class Place(NamedTuple):
    """A test input that is voted on: its set, its task (a number) and its place in the task."""

    set_name: str
    task: int
    test_input: int


class Votes:
    """The votes of one rank or evaluation, of every place: the sums of each distinct grid."""

    def __init__(self) -> None:
        self._sums: dict[Place, dict[bytes, tuple[int, int]]] = {}  # of each grid: votes, halting

    def add(self, place: Place, grid: bytes, q_halt: float) -> None:
        """Counts one vote. q_halt: the logit of being right; what is no number counts as probability 0."""
        probability = 0.0 if math.isnan(q_halt) else (1 + math.tanh(q_halt / 2)) / 2  # the sigmoid
        _add(self._sums.setdefault(place, {}), grid, 1, round(probability * _HALTING_ONE))

    def merge(self, other: "Votes") -> None:
        for place, sums in other._sums.items():
            mine = self._sums.setdefault(place, {})
            for grid, (votes, halting) in sums.items():
                _add(mine, grid, votes, halting)

    def count(self) -> Counter[str]:
        """Counts the votes in each set that has any."""
        totals: Counter[str] = Counter()
        for place, sums in self._sums.items():
            totals[place.set_name] += sum(votes for votes, _ in sums.values())
        return totals

    def ranked(self, places: Iterable[Place]) -> list[bytes]:
        """Ranks the distinct grids that the places together got, the best first.

        They are ordered by votes, then by mean halting probability, then by their bytes. The empty grid,
        which is never an answer, comes last however many votes it has, so that it takes nobody's place.
        """
        together: dict[bytes, tuple[int, int]] = {}
        for place in places:
            for grid, (votes, halting) in self._sums.get(place, {}).items():
                _add(together, grid, votes, halting)

        def order(grid: bytes):
            votes, halting = together[grid]
            return grid == EMPTY, -votes, -halting, grid  # of equal votes the larger sum has the larger mean

        return sorted(together, key=order)

    def save(self, path: Path, *, digest: str) -> None:
        """Writes a .npz, sorted: equal votes give equal bytes. digest: of the tasks that are voted on."""
        set_names = sorted({place.set_name for place in self._sums})
        entries, cells = [], []
        for place, sums in sorted(self._sums.items()):
            for grid, (votes, halting) in sorted(sums.items()):
                where = set_names.index(place.set_name), place.task, place.test_input
                entries.append((*where, grid[0], grid[1], votes, halting))
                cells.append(grid[2:])
        with path.open("wb") as file:  # np.savez would add a suffix to a mere path
            np.savez_compressed(
                file,
                digest=np.array(digest),
                set_names=np.array(set_names, np.str_),
                entries=np.array(entries, _ENTRY),
                cells=np.frombuffer(b"".join(cells), np.uint8),
            )


def load_votes(
    path: Path, *, digest: str, num_test_inputs: Sequence[int], set_names: Collection[str]
) -> Votes:
    """Reads what `Votes.save` wrote, checked to the last cell.

    num_test_inputs: of each task. ValueError where the file is none of votes, or on other tasks or sets.
    """
    try:
        with path.open("rb") as file:  # np.load would leave a damaged file open
            arrays = np.load(file, allow_pickle=False)
            if not isinstance(arrays, np.lib.npyio.NpzFile):
                raise ValueError("it holds one array")
            fields = ("digest", "set_names", "entries", "cells")
            found_digest, names, entries, cells = (arrays[field] for field in fields)
    except FileNotFoundError:
        raise ValueError(f"{path} is missing: give a votes.npz that an evaluation wrote") from None
    except Exception as error:  # the parsers raise almost anything where a file is damaged
        raise _unusable(path, " ".join(str(error).split())) from None
    if names.dtype.kind != "U" or names.ndim != 1 or entries.dtype != _ENTRY or entries.ndim != 1:
        raise _unusable(path, "set_names or entries are of another type")
    if found_digest.shape != () or str(found_digest) != digest:
        raise ValueError(f"{path} has votes on other tasks: give votes of the same test_puzzles.json")
    for name in names.tolist():
        if name not in set_names:
            raise ValueError(f"{path} has votes on a set {name!r}: the sets are {', '.join(set_names)}")

    inputs = np.array(num_test_inputs)
    sizes = entries["rows"].astype(np.int64) * entries["columns"]
    is_grid = (sizes > 0) & (np.maximum(entries["rows"], entries["columns"]) <= SIZE)
    is_empty = (entries["rows"] == 0) & (entries["columns"] == 0)
    is_valid = (is_grid | is_empty) & _is_below(entries["set"], len(names))
    is_valid &= _is_below(entries["task"], len(inputs)) & _is_below(entries["votes"] - 1, _MAX_VOTES)
    num_inputs = inputs[np.where(is_valid, entries["task"], 0)]
    is_valid &= _is_below(entries["test_input"], num_inputs)
    is_valid &= _is_below(entries["halting"], entries["votes"] * _HALTING_ONE + 1)
    if not is_valid.all():
        raise _unusable(path, f"entry {int(is_valid.argmin())} is out of range")
    if cells.dtype != np.uint8 or cells.shape != (sizes.sum(),) or (cells >= NUM_COLORS).any():
        raise _unusable(path, "its cells are no grids of colours")

    result, content, start = Votes(), cells.tobytes(), 0
    for entry, size in zip(entries.tolist(), sizes.tolist(), strict=True):
        set_number, task, test_input, rows, columns, votes, halting = entry
        place = Place(str(names[set_number]), task, test_input)
        grid = bytes((rows, columns)) + content[start : start + size]
        _add(result._sums.setdefault(place, {}), grid, votes, halting)
        start += size
    return result


def _add(sums: dict[bytes, tuple[int, int]], grid: bytes, votes: int, halting: int) -> None:
    old_votes, old_halting = sums.get(grid, (0, 0))
    sums[grid] = old_votes + votes, old_halting + halting


def _is_below(values: np.ndarray, limit) -> np.ndarray:
    return (values >= 0) & (values < limit)


def _unusable(path: Path, problem: str) -> ValueError:
    return ValueError(f"{path} is no file of votes ({problem}): give a votes.npz that an evaluation wrote")
