"""Votes for ARC answers: how often each grid was given to a test input, and how sure the model was of it.

Each distinct grid has only two sums. Files of votes have plain arrays, so that loading executes no code.
Grids are bytes (`tasks.grid_bytes`).
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from config.reading import read_arrays
from config.writing import replace_file
from dataset.kinds.arc.tasks import EMPTY, NUM_COLORS, SIZE

VOTES_FILE = "votes.npz"

_HALTING_ONE = 1 << 32  # a probability of 1 in fixed point
_MAX_VOTES = 1 << 30  # for one grid in a file, so that its sums fit into int64
# An entry of a file of votes: the sums of one grid for one test input. set: index in `set_names`.
_INTEGERS = {"set": np.int32, "task": np.int32, "test_input": np.int32, "rows": np.uint8}
_INTEGERS |= {"columns": np.uint8, "votes": np.int64, "halting": np.int64}
_ENTRY = np.dtype(list(_INTEGERS.items()))


class TestInput(NamedTuple):
    """A test input that is voted on: its set, its task (a number) and its index in the task."""

    __test__ = False  # for pytest

    set_name: str
    task: int
    index: int


class Votes:
    """The votes of one rank or evaluation.

    sums: {test input: {grid: (number of votes, sum of the probabilities of being right, in fixed point)}}.
    """

    def __init__(self) -> None:
        self.sums: dict[TestInput, dict[bytes, tuple[int, int]]] = {}

    def vote(self, test_input: TestInput, grid: bytes, q_halt: float) -> None:
        """Adds one vote. q_halt: the logit of being right; NaN counts as probability 0."""
        probability = 0.0 if math.isnan(q_halt) else (1 + math.tanh(q_halt / 2)) / 2  # the sigmoid
        self.add(test_input, grid, 1, round(probability * _HALTING_ONE))

    def add(self, test_input: TestInput, grid: bytes, votes: int, halting: int) -> None:
        sums = self.sums.setdefault(test_input, {})
        old_votes, old_halting = sums.get(grid, (0, 0))
        sums[grid] = old_votes + votes, old_halting + halting

    def merge(self, other: "Votes") -> None:
        for test_input, sums in other.sums.items():
            for grid, counted in sums.items():
                self.add(test_input, grid, *counted)

    def count(self) -> Counter[str]:
        """Counts the votes in each set that has any."""
        totals: Counter[str] = Counter()
        for test_input, sums in self.sums.items():
            totals[test_input.set_name] += sum(votes for votes, _ in sums.values())
        return totals

    def ranked(self, test_inputs: Iterable[TestInput]) -> list[bytes]:
        """Ranks the distinct grids that some test inputs got together, the best first.

        The order is by votes, then by mean halting probability, then by bytes. The empty grid is always last.
        """
        votes, halting = Counter(), Counter()
        for test_input in test_inputs:
            for grid, counted in self.sums.get(test_input, {}).items():
                votes[grid] += counted[0]
                halting[grid] += counted[1]  # of equal votes the larger sum has the larger mean
        return sorted(votes, key=lambda grid: (grid == EMPTY, -votes[grid], -halting[grid], grid))

    def save(self, path: Path, *, digest: str) -> None:
        """Writes a .npz, sorted: equal votes give equal bytes. digest: of the tasks that are voted on."""
        set_names = sorted({test_input.set_name for test_input in self.sums})
        entries, cells = [], []
        for (set_name, *test_input), sums in sorted(self.sums.items()):
            for grid, counted in sorted(sums.items()):
                entries.append((set_names.index(set_name), *test_input, *grid[:2], *counted))
                cells.append(grid[2:])
        with replace_file(path, "wb") as file:
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

    def expect(condition: bool, problem: str) -> None:
        if not condition:
            raise ValueError(f"{path} is no file of votes ({problem}): give a {VOTES_FILE} of an evaluation")

    try:
        found_digest, *arrays = read_arrays(path, ("digest", "set_names", "entries", "cells"))
    except ValueError as error:
        expect(False, str(error))
    names, entries, cells = arrays
    is_typed = (names.dtype.kind, entries.dtype, cells.dtype) == ("U", _ENTRY, np.uint8)
    expect(is_typed and names.ndim == entries.ndim == cells.ndim == 1, "an array is of another type")
    if str(found_digest) != digest:
        raise ValueError(f"{path} has votes on other tasks: give votes of the same test_puzzles.json")
    for name in names.tolist():
        if name not in set_names:
            raise ValueError(f"{path} has votes on a set {name!r}: the sets are {', '.join(set_names)}")
    result, content, start = Votes(), cells.tobytes(), 0
    for number, (set_number, task, index, rows, columns, votes, halting) in enumerate(entries.tolist()):
        is_known = 0 <= set_number < len(names) and 0 <= task < len(num_test_inputs)
        is_known = is_known and 0 <= index < num_test_inputs[task]
        is_grid = max(rows, columns) <= SIZE and (rows > 0) == (columns > 0)
        are_sums = 0 < votes <= _MAX_VOTES and 0 <= halting <= votes * _HALTING_ONE
        expect(is_known and is_grid and are_sums, f"entry {number} is out of range")
        grid = bytes((rows, columns)) + content[start : start + rows * columns]
        result.add(TestInput(names[set_number].item(), task, index), grid, votes, halting)
        start += rows * columns
    expect((cells < NUM_COLORS).all() and start == len(content), "its cells are no grids of colours")
    return result
