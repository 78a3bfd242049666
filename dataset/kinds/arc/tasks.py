"""ARC tasks: their content, and checks which tasks may be used together.

A task consists of a few demonstration pairs and test pairs of grids. A grid has 1 to 30 rows of 1 to 30
cells, with colors 0 to 9. Invariant: only the output of a test pair may be unknown. It is then a grid without
cells. `drop_repeats` returns no two tasks with the same id. Invalid content raises a ValueError of one line
with the file, the task and the reason.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dataset.augmentations import FIRST_SYMBOL
from dataset.description import lay_out, size_of
from dataset.metadata import BLANK
from runtime.reading import parse_json

SIZE = 30  # rows and columns of the largest grid, and of the default field
NUM_COLORS = 10
COLOR_0 = FIRST_SYMBOL  # token of color 0
VOCAB_SIZE = COLOR_0 + NUM_COLORS

TEST_PUZZLES = "test_puzzles.json"  # in the dataset folder: the evaluated tasks, with their answers
VARIANT_SEPARATOR = "|||"  # between task, dihedral transform and colors in a variant's name
EMPTY = bytes(2)  # a grid without cells (`grid_bytes`): an answer that does not start with a color

_NOTHING = np.zeros((0, 0), np.uint8)  # stands for an unknown output
_TASK = '{"train": [...], "test": [...]}'


def grid_bytes(grid: np.ndarray) -> bytes:
    """Converts a grid to bytes: number of rows, number of columns, then the colors row by row."""
    return bytes(grid.shape) + grid.tobytes()


def grid_tokens(grid: np.ndarray, *, size: int) -> np.ndarray:
    """Converts a grid of colors to the tokens of a field with the grid at the top left: uint8 [size * size].

    Color c becomes token c + 2. The row below the grid and the column to its right become END (1), if the
    field has room for them. All other cells become PAD (0).
    """
    return lay_out(grid, num_rows=size, num_columns=size)


class Pair(NamedTuple):
    """An input grid and its output grid, uint8 [rows, columns] with colors 0 to 9."""

    input: np.ndarray
    output: np.ndarray

    @property
    def key(self) -> bytes:
        """Bytes to compare pairs. Two pairs have the same key if and only if they are equal."""
        return b"".join(map(grid_bytes, self))


class LargerError(ValueError):
    """Raised for a grid with more than 30 rows or columns."""


@dataclasses.dataclass(frozen=True)
class Task:
    """An ARC task: demonstration pairs that show a rule, and test pairs.

    Attributes:
        id: Name of the task, such as "0a938d79".
        subset: Part of ARC that contains the task, such as "evaluation".
        source: File or other source of the task, for messages.
        train: Demonstration pairs.
        test: Test pairs.
        is_evaluated: Whether the test pairs are evaluated. Otherwise they are trained on.
    """

    id: str
    subset: str
    source: Path | str
    train: tuple[Pair, ...]
    test: tuple[Pair, ...]
    is_evaluated: bool = False

    @property
    def pairs(self) -> tuple[Pair, ...]:
        return self.train + self.test

    @property
    def training_pairs(self) -> tuple[Pair, ...]:
        """The pairs to train on, each once: the demonstrations and, unless `is_evaluated`, the test pairs."""
        pairs = self.train if self.is_evaluated else self.pairs
        return tuple({pair.key: pair for pair in pairs}.values())

    @property
    def has_outputs(self) -> bool:
        return all(pair.output.size for pair in self.test)

    @property
    def without_outputs(self) -> "Task":
        return dataclasses.replace(self, test=tuple(Pair(pair.input, _NOTHING) for pair in self.test))

    @property
    def largest(self) -> int:
        """The largest number of rows or columns of all grids of the task."""
        return max(length for pair in self.pairs for grid in pair for length in grid.shape)

    @functools.cached_property
    def content(self) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
        # Sorted, because ARC-2 contains tasks of ARC-1 with the pairs in another order.
        return tuple(sorted(pair.key for pair in self.train)), tuple(sorted(pair.key for pair in self.test))

    @property
    def digest(self) -> int:
        """A hash of the demonstrations, an integer of 64 bits. It does not depend on their order."""
        digest = hashlib.blake2b(digest_size=8)
        for key in self.content[0]:
            digest.update(len(key).to_bytes(8, "big") + key)
        return int.from_bytes(digest.digest(), "little")


def parse_task(
    content: Any, *, task_id: str, subset: str, source: Path | str, needs_outputs: bool = True
) -> Task:
    """Converts the JSON value of an ARC task to a `Task`.

    Raises ValueError if the content is not valid. If a grid has more than 30 rows or columns, the error is a
    LargerError.

    content: {"train": [{"input": grid, "output": grid}, ...], "test": [...]}. A grid is a list of rows. A row
    is a list of colors from 0 to 9. needs_outputs: Whether test pairs must have outputs too.
    """
    try:
        if not task_id.isprintable() or not task_id or VARIANT_SEPARATOR in task_id or task_id == BLANK:
            raise ValueError("is not a valid name of a task")
        pairs = _parse_pairs(content, needs_outputs=needs_outputs)
    except ValueError as error:
        raise type(error)(f"{source}: task {ascii(task_id)[1:-1]}: {error}") from None
    return Task(task_id, subset, source, **pairs)


def parse_puzzle(text: str) -> tuple[Task, list[bool]]:
    """Parses the JSON text of an ARC task. Returns (task, whether each test pair has an output).

    Raises ValueError if the text is not valid. Test pairs may have no output.
    """
    try:
        content = parse_json(text, where="it")
    except ValueError as error:
        raise ValueError(f"{error}. An ARC task is a file with {_TASK}.") from None
    try:
        task = Task("asked", "", "", **_parse_pairs(content, needs_outputs=False))
    except ValueError as error:
        raise ValueError(f"it is not an ARC task: {error}") from None
    return task, [pair.output.size > 0 for pair in task.test]


def _parse_pairs(content: Any, *, needs_outputs: bool = True) -> dict[str, tuple[Pair, ...]]:
    pairs = {}
    for part, thing in (("train", "demonstration pair"), ("test", "test pair")):
        if not isinstance(content, dict) or not isinstance(content.get(part), list):
            raise ValueError(f"not a task of the form {_TASK}")
        if not content[part]:
            raise ValueError(f"it has no {thing}")
        sides = Pair._fields if needs_outputs or part == "train" else ("input",)
        numbered = enumerate(content[part], 1)
        pairs[part] = tuple(
            _parse_pair(pair, sides, name=f"{thing} {pair_number}") for pair_number, pair in numbered
        )
    return pairs


def _parse_pair(pair: Any, needed: Sequence[str], *, name: str) -> Pair:
    if not isinstance(pair, dict):
        raise ValueError(f'{name} is not {{"input": grid, "output": grid}}')
    if missing := [side for side in needed if pair.get(side) is None]:
        raise ValueError(f"{name} has no {missing[0]}")
    present = {side: grid for side, grid in pair.items() if side in Pair._fields and grid is not None}
    grids = {side: _parse_grid(grid, name=f"the {side} of {name}") for side, grid in present.items()}
    return Pair(**{"output": _NOTHING} | grids)


def _parse_grid(rows: Any, *, name: str) -> np.ndarray:
    if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
        raise ValueError(f"{name} is not a list of rows")
    size = size_of(rows, name)
    if max(size) > SIZE:
        raise LargerError(f"{name} has {size[0]}x{size[1]} cells, more than {SIZE}x{SIZE}")
    for row in rows:
        for cell in row:
            if type(cell) is not int or not 0 <= cell < NUM_COLORS:  # True is an int too
                raise ValueError(f"{name} has the cell {repr(cell)[:20]}, not a color from 0 to 9")
    return np.array(rows, np.uint8)


def drop_repeats(tasks: Sequence[Task], *, evaluated: Sequence[str]) -> list[Task]:
    """Returns one task for each task id, sorted by subset and id.

    If several tasks have the same id, a task of an evaluated subset is returned, if there is one. So its test
    pairs are not trained on. If the returned task has no test outputs, those of another task with this id are
    added. Raises ValueError if the pairs of tasks with the same id differ.

    evaluated: Names of the subsets that are evaluated, such as ["evaluation"].
    """
    distinct: dict[str, Task] = {}
    in_order = sorted(tasks, key=lambda task: (task.subset not in evaluated, not task.has_outputs))
    for task in in_order:  # the sort is stable: equal tasks keep their order
        first = distinct.setdefault(task.id, task)
        is_alike = task.has_outputs == first.has_outputs
        one, other = (
            version.content if is_alike else version.without_outputs.content for version in (task, first)
        )
        if one != other:
            other = f"its content differs from the task of the same name in {first.source}"
            raise ValueError(f"{task.source}: task {task.id}: {other}. Remove one of them.")
        if task.has_outputs > first.has_outputs:
            pairs = {grid_bytes(pair.input): pair for pair in task.test}
            test = tuple(pairs[grid_bytes(pair.input)] for pair in first.test)
            distinct[task.id] = dataclasses.replace(first, test=test)
    return sorted(distinct.values(), key=lambda task: (task.subset, task.id))


def drop_copies(tasks: Sequence[Task]) -> list[Task]:
    """Removes repeats among the tasks that are not evaluated. The first task with each content stays.

    Two tasks have the same content if they have the same demonstrations and the same test pairs, each in any
    order. All evaluated tasks stay, because a submission needs an answer to each of them. A task that is not
    evaluated stays even if an evaluated task has the same content.
    """
    different = {}
    for task in tasks:
        different.setdefault(task.id if task.is_evaluated else task.content, task)
    return [*different.values()]


def find_leaks(tasks: Sequence[Task]) -> list[str]:
    """Finds test pairs of evaluated tasks that are also training pairs. Returns a text for each.

    Example: "test pair 1 of task 0a938d79 in evaluation, a pair of task f76d97a5 in training too".
    """
    trained = {}
    for task in tasks:
        for pair in task.training_pairs:
            trained.setdefault(pair.key, f"task {task.id} in {task.subset}")
    return [
        f"test pair {pair_number} of task {task.id} in {task.subset}, a pair of {trained[pair.key]} too"
        for task in tasks
        if task.is_evaluated
        for pair_number, pair in enumerate(task.test, 1)
        if pair.key in trained
    ]
