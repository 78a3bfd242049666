"""Evaluates ARC answers by vote: every test example is one view of a test input, and all its views vote.

A view is a task under one augmentation, which the name of its puzzle identifier tells (`variants`). Undone
in the input, the augmentation says which of the task's test inputs this is; undone in the answer, which grid
gets the vote. Two attempts are allowed: pass@2 is the score of ARC.

`identifiers.json` and `test_puzzles.json` in the dataset folder are those of the public TRM tools too.
Invariant: neither the number of ranks nor the batch size changes a metric or a byte of what is written; with
one set, pass@2 is the score of the submission that is written.
"""

import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dataset.format import IDENTIFIERS, Metadata, open_split
from dataset.kinds.arc.tasks import (
    COLOR_0,
    EMPTY,
    NUM_COLORS,
    TEST_PUZZLES,
    VOCAB_SIZE,
    grid_bytes,
    parse_task,
)
from dataset.kinds.arc.variants import parse_variant_name
from dataset.kinds.arc.votes import Place, Votes, load_votes
from dataset.kinds.kind import Answers
from dataset.symmetries import DIHEDRAL_INVERSES, dihedral

PASSES = (1, 2, 5, 10, 100, 1000)  # the K of pass@K
SUBMISSION_FILE = "submission.json"
VOTES_FILE = "votes.npz"

_NUM_ATTEMPTS = 2
_NO_ANSWER = [[0]]  # a submission has a grid everywhere


class ArcEvaluator:
    """An evaluator that keeps, of each distinct grid that a test input got, only the sums of `Votes`.

    Several samples of an answer vote as several views do.
    """

    samples_vote = True

    def __init__(self, folder: Path, metadata: Metadata, *, further_votes: Sequence[Path] = ()):
        """further_votes: files that `write` left in earlier evaluations; those votes count as well.

        ValueError where the views of the dataset cannot be undone, or further votes are not on its tasks.
        """
        self._tasks = load_tasks(folder)
        sets = open_split(folder, "test").sets
        identifiers = {name: np.unique(puzzle_set.puzzle_identifiers) for name, puzzle_set in sets.items()}
        used = np.unique(np.concatenate(list(identifiers.values())))
        self._views = Views(folder, metadata, tasks=self._tasks, used=used)
        tasks_of_set = {name: set(self._views.tasks[each].tolist()) for name, each in identifiers.items()}
        in_no_set = set(range(len(self._tasks))).difference(*tasks_of_set.values())
        self._tasks_of_set = {name: sorted(each | in_no_set) for name, each in tasks_of_set.items()}
        self._votes = Votes()
        self._num_unknown = 0  # rows that show no test input of their task
        self._further = self._load_further(further_votes)
        self._gathered, self._total = Votes(), Votes()  # from `metrics` on: all votes, with the further ones

    def _load_further(self, paths: Sequence[Path]) -> Votes:
        if len({path.resolve() for path in paths}) < len(paths):
            raise ValueError(f"further votes name a file twice: {', '.join(map(str, paths))}")
        num_test_inputs = [len(task.inputs) for task in self._tasks]
        known = {"num_test_inputs": num_test_inputs, "set_names": self._tasks_of_set}
        together = Votes()
        for path in paths:
            together.merge(load_votes(path, digest=digest(self._tasks), **known))
        return together

    def add(self, set_name: str, answers: Answers) -> None:
        """Counts the votes of the rows."""
        rows = zip(
            answers.puzzle_identifiers.tolist(),
            corner_grids(answers.inputs),
            corner_grids(answers.preds),
            answers.q_halt.tolist(),
            strict=True,
        )
        for identifier, shown, answer, q_halt in rows:
            task = int(self._views.tasks[identifier])
            assert task >= 0, "a row of another dataset"
            test_input = self._tasks[task].places.get(self._views.undo(shown, identifier))
            if test_input is None:
                self._num_unknown += 1
                continue
            place = Place(set_name, task, test_input)
            self._votes.add(place, self._views.undo(answer, identifier), q_halt=q_halt)

    def are_valid(self, inputs: np.ndarray, preds: np.ndarray) -> None:
        """Tells nothing: the rule of a task is what is to be found out."""

    def partial(self) -> tuple[Votes, int]:
        return self._votes, self._num_unknown

    def metrics(self, partials: Sequence[tuple[Votes, int]]) -> dict[str, dict[str, float]]:
        """{set: {"arc/pass@1": ..., "arc/count": tasks, "arc/test_inputs": ..., "arc/votes": ...}}.

        pass@K is a task's share of test inputs whose right output is among the first K grids, averaged over
        the tasks of the set, and over those that no set has rows of. Without a vote a test input is wrong.
        ValueError where rows show no test input of test_puzzles.json.
        """
        if num_unknown := sum(number for _, number in partials):
            shown = f"{num_unknown} test examples show no test input of their task in {TEST_PUZZLES}"
            raise ValueError(f"{shown}: build the dataset again")
        self._gathered, self._total = Votes(), Votes()
        for votes, _ in partials:
            self._gathered.merge(votes)
        for votes in (self._gathered, self._further):
            self._total.merge(votes)
        return {name: self._scores(name, count) for name, count in self._total.count().items()}

    def _scores(self, set_name: str, num_votes: int) -> dict[str, float]:
        numbers = self._tasks_of_set[set_name]
        scores: dict[int, list[float]] = {k: [] for k in PASSES}  # of each task
        for number in numbers:
            task = self._tasks[number]
            firsts = []  # how many grids come before the right one
            for grid, output in zip(task.inputs, task.outputs, strict=True):
                ranked = self._total.ranked([Place(set_name, number, task.places[grid])])
                firsts.append(ranked.index(output) if output in ranked else math.inf)
            for k, of_tasks in scores.items():
                of_tasks.append(sum(first < k for first in firsts) / len(firsts))
        return {
            **{f"arc/pass@{k}": math.fsum(of_tasks) / len(numbers) for k, of_tasks in scores.items()},
            "arc/count": len(numbers),
            "arc/test_inputs": sum(len(self._tasks[number].inputs) for number in numbers),
            "arc/votes": num_votes,
        }

    def write(self, folder: Path) -> None:
        """Writes `submission.json` in Kaggle's form, and `votes.npz`, which later evaluations may add.

        The submission is {task: [{"attempt_1": grid, "attempt_2": grid} of each test input]}, the votes of
        all sets taken together: the only grid twice, and [[0]] where there is none, or only the empty one.
        The votes are those of this evaluation alone.
        """
        submission = {
            task.name: [self._attempts(number, task.places[grid]) for grid in task.inputs]
            for number, task in enumerate(self._tasks)
        }
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = {name: folder / f"{name}.tmp" for name in (SUBMISSION_FILE, VOTES_FILE)}
        unfinished[SUBMISSION_FILE].write_text(json.dumps(submission) + "\n", encoding="utf-8")
        self._gathered.save(unfinished[VOTES_FILE], digest=digest(self._tasks))
        for name, path in unfinished.items():
            path.replace(folder / name)

    def _attempts(self, task: int, test_input: int) -> dict[str, list[list[int]]]:
        ranked = self._total.ranked(Place(name, task, test_input) for name in self._tasks_of_set)
        grids = [to_lists(grid) for grid in ranked[:_NUM_ATTEMPTS] if grid != EMPTY] or [_NO_ANSWER]
        return {
            f"attempt_{number + 1}": grids[min(number, len(grids) - 1)] for number in range(_NUM_ATTEMPTS)
        }


# ------------------------------------------------------------------------------------------------------ views


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
    """Reads the tasks of `test_puzzles.json`, sorted by name. ValueError where something in it is no task."""
    path, tasks = folder / TEST_PUZZLES, []
    content = _read_json(path)
    if not isinstance(content, dict) or not content:
        raise ValueError(f"{path} is no JSON object of tasks; build the dataset again")
    for name in sorted(content):
        try:
            pairs = parse_task(content[name], task_id=name, subset="test", source=path).test
        except ValueError as error:
            raise ValueError(f"{error}; build the dataset again") from None
        inputs, outputs = ([grid_bytes(pair[side]) for pair in pairs] for side in (0, 1))
        tasks.append(EvaluatedTask(name, inputs, outputs, {grid: inputs.index(grid) for grid in inputs}))
    return tasks


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


class Views:
    """The way back from every puzzle identifier: the task that it shows, and how to undo its augmentation.

    tasks  int32 [num_puzzle_identifiers]: the task's place; -1 where no test set uses the identifier
    """

    def __init__(self, folder: Path, metadata: Metadata, *, tasks: Sequence[EvaluatedTask], used: np.ndarray):
        """Reads the name of each identifier; used: of the test sets. ValueError where one is no view."""
        path, count = folder / IDENTIFIERS, metadata.num_puzzle_identifiers
        names = _read_json(path)
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError(f"{path} is no JSON list of names; build the dataset again")
        if len(names) != count:
            there = f"{path} has {len(names)} names, but there are {count} identifiers"
            raise ValueError(f"{there}; build the dataset again")
        place_of = {task.name: place for place, task in enumerate(tasks)}
        self.tasks = np.full(count, -1, np.int32)
        self._dihedral = np.zeros(count, np.uint8)  # the inverse one
        self._colors = np.zeros((count, VOCAB_SIZE), np.uint8)  # of each token: the colour
        for identifier in used.tolist():
            try:
                task_id, (number, *colors) = parse_variant_name(names[identifier])
                place = place_of[task_id]
            except (ValueError, KeyError):
                where = f"{path}: {names[identifier]!r}, identifier {identifier}, is in the test split"
                problem = f"names no view of a task in {TEST_PUZZLES}; build the dataset again"
                raise ValueError(f"{where}, but {problem}") from None
            self.tasks[identifier] = place
            self._dihedral[identifier] = DIHEDRAL_INVERSES[number]
            self._colors[identifier, np.array(colors) + COLOR_0] = np.arange(NUM_COLORS)

    def undo(self, grid: np.ndarray, identifier: int) -> bytes:
        """Undoes the augmentation; the result is bytes. `grid`: tokens of colours, [rows, columns]."""
        return grid_bytes(self._colors[identifier][dihedral(grid, self._dihedral[identifier])])


def corner_grids(tokens: np.ndarray) -> list[np.ndarray]:
    """Cuts out the largest rectangle at the top left with colours only, of each row of tokens [n, seq_len].

    Each is a view, [rows, columns]. Of equal areas the one with fewer rows counts; without a colour in the
    corner it is [0, 0].
    """
    size = math.isqrt(tokens.shape[1])
    grids = tokens.reshape(-1, size, size)
    is_color = (grids >= COLOR_0) & (grids < VOCAB_SIZE)
    widths = np.where(is_color.all(axis=2), size, is_color.argmin(axis=2))
    widths = np.minimum.accumulate(widths, axis=1)  # of a rectangle of so many rows
    heights = (widths * np.arange(1, size + 1)).argmax(axis=1) + 1
    widths = np.take_along_axis(widths, heights[:, None] - 1, axis=1)[:, 0]
    heights[widths == 0] = 0
    sizes = zip(heights.tolist(), widths.tolist(), strict=True)
    return [grid[:height, :width] for grid, (height, width) in zip(grids, sizes, strict=True)]


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        remedy = "build the dataset with a builder that writes it"
        raise ValueError(f"{path} is missing, and votes need it: {remedy}") from None
    except (ValueError, RecursionError, OSError) as error:
        problem = " ".join(str(error).split())
        raise ValueError(f"{path} is not valid JSON ({problem}); build the dataset again") from None
