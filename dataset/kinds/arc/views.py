"""The ARC tasks that are evaluated, and the way back from an augmented view to them.

A grid is bytes (`tasks.grid_bytes`). Invariant: what is made here is sound (real grids, names of known tasks,
bijections), so nobody downstream checks again.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dataset.format import IDENTIFIERS, Metadata
from dataset.kinds.arc.symmetries import parse_variant_name
from dataset.kinds.arc.tasks import (
    COLOR_0,
    NUM_COLORS,
    SIZE,
    TEST_PUZZLES,
    VOCAB_SIZE,
    grid_bytes,
    parse_task,
)
from dataset.symmetries import DIHEDRAL_INVERSES, dihedral

EMPTY = bytes(2)  # the grid without a cell: an answer that does not begin with a colour


class EvaluatedTask(NamedTuple):
    """The tests of a task. Test inputs may be equal: then both are found at the place of the first.

    inputs, outputs  grids, one of each for every test
    places           of each distinct input: its first place in `inputs`
    """

    name: str
    inputs: list[bytes]
    outputs: list[bytes]
    places: dict[bytes, int]


def load_tasks(folder: Path) -> list[EvaluatedTask]:
    """Reads the tasks of `test_puzzles.json`, sorted by name; their content is as in `tasks.parse_task`.

    Raises ValueError, one line, where the file is missing or something in it is no task.
    """
    path = folder / TEST_PUZZLES
    content = _read_json(path)
    if not isinstance(content, dict) or not content:
        raise ValueError(f"{path} is no JSON object of tasks; build the dataset again")
    return [_task(path, name, content[name]) for name in sorted(content)]


def digest(tasks: Sequence[EvaluatedTask]) -> str:
    """Returns a sha256 that identifies the names and tests of the tasks."""
    content = [
        [task.name, [grid.hex() for grid in task.inputs], [grid.hex() for grid in task.outputs]]
        for task in tasks
    ]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def to_lists(grid: bytes) -> list[list[int]]:
    rows, columns = grid[:2]
    return [list(grid[2 + row * columns :][:columns]) for row in range(rows)]


def _task(path: Path, name: str, content: Any) -> EvaluatedTask:
    try:
        pairs = parse_task(content, task_id=name, subset="test", source=path).test
    except ValueError as error:
        raise ValueError(f"{error}; build the dataset again") from None
    inputs, outputs = ([grid_bytes(pair[side]) for pair in pairs] for side in (0, 1))
    return EvaluatedTask(name, inputs, outputs, {grid: inputs.index(grid) for grid in inputs})


# ------------------------------------------------------------------------------------------------------ views


class Views:
    """The way back from every puzzle identifier: the task that it shows, and how to undo its augmentation.

    tasks  int32 [num_puzzle_identifiers]: the task's place; -1 where no test set uses the identifier
    """

    def __init__(self, folder: Path, metadata: Metadata, *, tasks: Sequence[EvaluatedTask], used: np.ndarray):
        """used: the identifiers of all test sets. Reads `identifiers.json`, the name of each identifier.

        Raises ValueError, one line, where it is missing or malformed or names a task that is not there.
        """
        path, count = folder / IDENTIFIERS, metadata.num_puzzle_identifiers
        names = _read_json(path)
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError(f"{path} is no JSON list of names; build the dataset again")
        if len(names) != count:
            raise ValueError(
                f"{path} has {len(names)} names, but there are {count} identifiers; build the dataset again"
            )
        place_of = {task.name: place for place, task in enumerate(tasks)}
        self.tasks = np.full(count, -1, np.int32)
        self._dihedral = np.zeros(count, np.uint8)  # the inverse one
        self._colors = np.zeros((count, VOCAB_SIZE), np.uint8)  # of each token: the colour
        for identifier in used.tolist():
            try:
                task_id, (number, *colors) = parse_variant_name(names[identifier])
                place = place_of[task_id]
            except (ValueError, KeyError):
                raise ValueError(
                    f"{path}: {names[identifier]!r}, identifier {identifier}, is in the test split, but "
                    f"names no view of a task in {TEST_PUZZLES}; build the dataset again"
                ) from None
            self.tasks[identifier] = place
            self._dihedral[identifier] = DIHEDRAL_INVERSES[number]
            self._colors[identifier, np.array(colors) + COLOR_0] = np.arange(NUM_COLORS)

    def undo(self, grid: np.ndarray, identifier: int) -> bytes:
        """Undoes the augmentation; the result is bytes. `grid`: tokens of colours, [rows, columns]."""
        colors = self._colors[identifier][dihedral(grid, self._dihedral[identifier])]
        return grid_bytes(colors)


def corner_grids(tokens: np.ndarray) -> list[np.ndarray]:
    """Cuts out the largest rectangle at the top left with colours only, of each row of tokens [n, 900].

    Each is a view, [rows, columns]. Of equal areas the one with fewer rows counts; without a colour in the
    corner it is [0, 0].
    """
    grids = tokens.reshape(-1, SIZE, SIZE)
    is_color = (grids >= COLOR_0) & (grids < VOCAB_SIZE)
    widths = np.where(is_color.all(axis=2), SIZE, is_color.argmin(axis=2))
    widths = np.minimum.accumulate(widths, axis=1)  # of a rectangle of so many rows
    heights = (widths * np.arange(1, SIZE + 1)).argmax(axis=1) + 1
    widths = np.take_along_axis(widths, heights[:, None] - 1, axis=1)[:, 0]
    heights[widths == 0] = 0
    sizes = zip(heights.tolist(), widths.tolist(), strict=True)
    return [grid[:height, :width] for grid, (height, width) in zip(grids, sizes, strict=True)]


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(
            f"{path} is missing, and votes need it: build the dataset with a builder that writes it"
        ) from None
    except (ValueError, RecursionError, OSError) as error:
        problem = " ".join(str(error).split())
        raise ValueError(f"{path} is not valid JSON ({problem}); build the dataset again") from None
