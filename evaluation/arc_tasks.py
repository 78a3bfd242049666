"""The ARC tasks that are judged, and the way back from an augmented view to them.

A grid is bytes: its number of rows, its number of columns, then its colours 0 .. 9 row by row. Invariant:
what is made here is sound (real grids, names of known tasks, bijections), so nobody downstream checks again.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dataset.arc import VARIANT_SEPARATOR, parse_task
from dataset.format import Metadata
from dataset.symmetries import ARC_COLOR_0, ARC_SIZE, DIHEDRAL_INVERSES, dihedral

NUM_COLORS = 10
EMPTY = bytes(2)  # the grid without a cell: what an answer is that does not begin with a colour
IDENTIFIERS_FILE = "identifiers.json"
TEST_PUZZLES_FILE = "test_puzzles.json"

_SEPARATOR = re.escape(VARIANT_SEPARATOR)
_NAME = re.compile(
    rf"(?P<task>.+?)({_SEPARATOR}t(?P<dihedral>[0-7]){_SEPARATOR}(?P<colors>[0-9]{{10}}))?", re.DOTALL
)
_COLOR_NAMES = "0123456789"


class Task(NamedTuple):
    """A task's tests. Test inputs may be equal: then both are found at the place of the first.

    inputs, outputs  grids, one of each for every test
    places           of each distinct input: its first place in `inputs`
    """

    name: str
    inputs: list[bytes]
    outputs: list[bytes]
    places: dict[bytes, int]


def load_tasks(folder: Path) -> list[Task]:
    """The tasks of `test_puzzles.json`, by name: {name: content as in `dataset.arc.parse_task`}.

    Raises ValueError, one line, where the file is missing or something in it is no task.
    """
    path = folder / TEST_PUZZLES_FILE
    content = _read_json(path)
    if not isinstance(content, dict) or not content:
        raise ValueError(f"{path} is no JSON object of tasks; build the dataset again")
    return [_task(path, name, content[name]) for name in sorted(content)]


def digest(tasks: Sequence[Task]) -> str:
    """Identifies the names and tests of the tasks: a sha256."""
    content = [
        [task.name, [grid.hex() for grid in task.inputs], [grid.hex() for grid in task.outputs]]
        for task in tasks
    ]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def to_lists(grid: bytes) -> list[list[int]]:
    rows, columns = grid[:2]
    return [list(grid[2 + row * columns :][:columns]) for row in range(rows)]


def _task(path: Path, name: str, content: Any) -> Task:
    try:
        pairs = parse_task(content, task_id=name, subset="test", source=path).test
    except ValueError as error:
        raise ValueError(f"{error}; build the dataset again") from None
    inputs, outputs = ([_to_bytes(pair[side]) for pair in pairs] for side in (0, 1))
    return Task(name, inputs, outputs, {grid: inputs.index(grid) for grid in inputs})


def _to_bytes(grid: np.ndarray) -> bytes:
    return bytes(grid.shape) + grid.tobytes()


# ------------------------------------------------------------------------------------------------------ views


class Views:
    """Of each puzzle identifier: the task that it shows, and how to undo its augmentation.

    tasks  int32 [num_puzzle_identifiers]: the task's place; -1 where no test set uses the identifier
    """

    def __init__(self, folder: Path, metadata: Metadata, *, tasks: Sequence[Task], used: np.ndarray):
        """used: the identifiers of all test sets. Reads `identifiers.json`, the name of each identifier.

        Raises ValueError, one line, where it is missing or malformed or names a task that is not there.
        """
        path, number = folder / IDENTIFIERS_FILE, metadata.num_puzzle_identifiers
        names = _read_json(path)
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError(f"{path} is no JSON list of names; build the dataset again")
        if len(names) != number:
            raise ValueError(
                f"{path} has {len(names)} names, but there are {number} identifiers; build the dataset again"
            )
        place_of = {task.name: place for place, task in enumerate(tasks)}
        self.tasks = np.full(number, -1, np.int32)
        self._dihedral = np.zeros(number, np.uint8)  # the inverse one
        self._colors = np.zeros((number, ARC_COLOR_0 + NUM_COLORS), np.uint8)  # of each token: the colour
        for identifier in used.tolist():
            match = _NAME.fullmatch(names[identifier])
            colors = (match and match["colors"]) or _COLOR_NAMES
            if match is None or sorted(colors) != list(_COLOR_NAMES) or match["task"] not in place_of:
                raise ValueError(
                    f"{path}: {names[identifier]!r}, identifier {identifier}, is in the test split, but "
                    f"names no view of a task in {TEST_PUZZLES_FILE}; build the dataset again"
                )
            self.tasks[identifier] = place_of[match["task"]]
            self._dihedral[identifier] = DIHEDRAL_INVERSES[int(match["dihedral"] or 0)]
            became = np.array(list(colors), np.uint8) + ARC_COLOR_0
            self._colors[identifier, became] = np.arange(NUM_COLORS)

    def undo(self, grid: np.ndarray, identifier: int) -> bytes:
        """The grid before the augmentation; `grid`: tokens of colours, [rows, columns]."""
        colors = self._colors[identifier][dihedral(grid, self._dihedral[identifier])]
        return _to_bytes(colors)


def corner_grids(tokens: np.ndarray) -> list[np.ndarray]:
    """Of each row of tokens, [n, 900]: the largest rectangle at the top left with colours only.

    Each is a view, [rows, columns]. Of equal areas the one with fewer rows counts; without a colour in the
    corner it is [0, 0].
    """
    grids = tokens.reshape(-1, ARC_SIZE, ARC_SIZE)
    is_color = (grids >= ARC_COLOR_0) & (grids < ARC_COLOR_0 + NUM_COLORS)
    widths = np.where(is_color.all(axis=2), ARC_SIZE, is_color.argmin(axis=2))
    widths = np.minimum.accumulate(widths, axis=1)  # of a rectangle of so many rows
    heights = (widths * np.arange(1, ARC_SIZE + 1)).argmax(axis=1) + 1
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
