"""ARC tasks: what a task is, the checks that make sure of it, and which tasks may be used together.

A task is a few demonstration pairs and test pairs of grids; a grid is 1 to 30 rows of as many cells, of the
colours 0 to 9. Invariant: a `Task` is whole (every pair has both grids), and of the tasks that
`drop_repeats` returns no two have the same id. Anything else raises ValueError, one line with the file, the
task and the reason.
"""

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

SIZE = 30  # rows and columns into which a grid is laid
NUM_COLORS = 10
PAD, END, COLOR_0 = 0, 1, 2  # tokens; END fills the row below a grid and the column right of it
VOCAB_SIZE = COLOR_0 + NUM_COLORS

TEST_PUZZLES = "test_puzzles.json"  # in the dataset folder: the evaluated tasks, with what is right
VARIANT_SEPARATOR = "|||"  # between the parts of a variant's name: task, dihedral transform, colours
BLANK = "<blank>"  # the name of identifier 0


def grid_bytes(grid: np.ndarray) -> bytes:
    """Writes a grid as bytes: its number of rows, its number of columns, then its colours row by row."""
    return bytes(grid.shape) + grid.tobytes()


class Pair(NamedTuple):
    """Two grids, uint8 [rows, columns], each of its own size."""

    input: np.ndarray
    output: np.ndarray

    @property
    def key(self) -> bytes:
        """Bytes that are equal for equal pairs, and only for those."""
        return b"".join(map(grid_bytes, self))


@dataclasses.dataclass(frozen=True)
class Task:
    """source: the file, or what stands for it, for people to read."""

    id: str
    subset: str
    source: Path | str
    train: tuple[Pair, ...]
    test: tuple[Pair, ...]

    @property
    def pairs(self) -> tuple[Pair, ...]:
        return self.train + self.test

    @functools.cached_property
    def content(self) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
        """A value that is equal for tasks with the same pairs, in whatever order: ARC-2 lists some pairs of
        ARC-1 in another.
        """
        return tuple(sorted(pair.key for pair in self.train)), tuple(sorted(pair.key for pair in self.test))


# ----------------------------------------------------------------------------------------------------- checks


def parse_task(content: Any, *, task_id: str, subset: str, source: Path | str) -> Task:
    """Checks a task, {"train": [{"input": grid, "output": grid}, ...], "test": [...]}; grids are lists."""
    try:
        if not task_id.isprintable() or not task_id or VARIANT_SEPARATOR in task_id or task_id == BLANK:
            raise ValueError("cannot be a task's name")
        pairs = {}
        for part, words in (("train", "demonstration pair"), ("test", "test pair")):
            if not isinstance(content, dict) or not isinstance(content.get(part), list):
                raise ValueError('not a task, which is {"train": [...], "test": [...]}')
            if not content[part]:
                raise ValueError(f"it has no {words}")
            pairs[part] = tuple(
                _parse_pair(pair, name=f"{words} {number}") for number, pair in enumerate(content[part], 1)
            )
    except ValueError as error:
        raise ValueError(f"{source}: task {ascii(task_id)[1:-1]}: {error}") from None
    return Task(task_id, subset, source, **pairs)


def _parse_pair(pair: Any, *, name: str) -> Pair:
    if not isinstance(pair, dict):
        raise ValueError(f'{name} is not {{"input": grid, "output": grid}}')
    if missing := [side for side in Pair._fields if pair.get(side) is None]:
        raise ValueError(f"{name} has no {missing[0]}")
    return Pair(*(_parse_grid(pair[side], name=f"the {side} of {name}") for side in Pair._fields))


def _parse_grid(rows: Any, *, name: str) -> np.ndarray:
    if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
        raise ValueError(f"{name} is not a list of rows")
    lengths = [len(row) for row in rows]
    if not rows or not lengths[0]:
        raise ValueError(f"{name} is empty")
    for number, length in enumerate(lengths, 1):
        if length != lengths[0]:
            raise ValueError(f"{name} is ragged: row {number} has {length} cells, row 1 has {lengths[0]}")
    if max(len(rows), lengths[0]) > SIZE:
        raise ValueError(f"{name} has {len(rows)}x{lengths[0]} cells, more than {SIZE}x{SIZE}")
    for row in rows:
        for cell in row:
            if type(cell) is not int or not 0 <= cell < NUM_COLORS:  # True is an int too
                raise ValueError(f"{name} has the cell {repr(cell)[:20]}, not a colour from 0 to 9")
    return np.array(rows, np.uint8)


# --------------------------------------------------------------------------------------------- tasks together


def drop_repeats(tasks: Sequence[Task], *, evaluated: Sequence[str]) -> list[Task]:
    """Keeps each task once, sorted by subset and id.

    Of the tasks with one id it is the first that is in an evaluated subset, else the first. So a task that is
    evaluated is not also trained on under the same id.

    ValueError where two tasks with the same id differ.
    """
    kept: dict[str, Task] = {}
    for task in sorted(tasks, key=lambda task: task.subset not in evaluated):  # stable
        first = kept.setdefault(task.id, task)
        if task.content != first.content:
            raise ValueError(
                f"{task.source}: task {task.id}: its content is not that of the task of the same name in "
                f"{first.source}: leave out one of them"
            )
    return sorted(kept.values(), key=lambda task: (task.subset, task.id))


def find_leaks(tasks: Sequence[Task], *, evaluated: Sequence[str]) -> list[str]:
    """Says of each evaluated test pair that is also trained on, in a line, which it is, and as what it is."""
    trained = {}
    for task in tasks:
        for number, pair in enumerate(training_pairs(task, evaluated=evaluated), 1):
            name = f"demonstration pair {number}"
            if number > len(task.train):
                name = f"test pair {number - len(task.train)}"
            trained.setdefault(pair.key, f"{name} of task {task.id} in {task.subset}")
    return [
        f"test pair {number} of task {task.id} in {task.subset} is {trained[pair.key]}"
        for task in tasks
        if task.subset in evaluated
        for number, pair in enumerate(task.test, 1)
        if pair.key in trained
    ]


def training_pairs(task: Task, *, evaluated: Sequence[str]) -> tuple[Pair, ...]:
    """Lists the pairs that are trained on: demonstration pairs, and test pairs unless those are evaluated."""
    return task.train if task.subset in evaluated else task.pairs
