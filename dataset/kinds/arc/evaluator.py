"""Evaluates ARC answers by vote: every test example is one view of a test input, and all its views vote.

A view is a test input under one transform, which is written in the name of its puzzle identifier
(`dataset.kinds.arc.variants`). The inverse transform turns the example's input into the task's test input,
and the model's answer into the grid that gets the vote. ARC's score is pass@2: one of two attempts must be
right. Grids are bytes (`tasks.grid_bytes`).

The public TRM tools write `identifiers.json` and `test_puzzles.json` in the same form. Invariant: neither the
number of ranks nor the batch size changes a metric or a byte of what is written, since all sums are integers
and the grid itself breaks ties; with one set, pass@2 is the score of the submission.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dataset.augmentations import DIHEDRAL_INVERSES, dihedral
from dataset.description import read_every_name
from dataset.format import IDENTIFIERS, Metadata, open_split
from dataset.kinds.arc import tasks as arc
from dataset.kinds.arc.tasks import COLOR_0, TEST_PUZZLES, VOCAB_SIZE, grid_bytes
from dataset.kinds.arc.variants import IDENTITY, parse_variant_name
from dataset.kinds.kind import SUBMISSION_FILE, Answers
from dataset.sets import PuzzleSet
from runtime.reading import read_json
from runtime.writing import write_json

PASSES = (1, 2, 5, 10, 100, 1000)  # the K of pass@K

_NUM_ATTEMPTS = 2
_NO_ANSWER = [[0]]  # a submission needs a grid for every attempt
_HALTING_ONE = 1 << 32  # a probability of 1 in fixed point


class TestInput(NamedTuple):
    """A test input that is voted on: its set, the number of its task, and its index in the task."""

    __test__ = False  # for pytest

    set_name: str
    task: int
    index: int


class Votes:
    """The votes of one rank, or of all: how often each test input got a grid, and how sure the model was.

    votes, halting: for each test input {grid: number of votes}, and {grid: sum of the probabilities of being
    right, in fixed point}.
    """

    def __init__(self) -> None:
        self.votes: defaultdict[TestInput, Counter[bytes]] = defaultdict(Counter)
        self.halting: defaultdict[TestInput, Counter[bytes]] = defaultdict(Counter)

    def vote(self, test_input: TestInput, grid: bytes, q_halt: float) -> None:
        """Adds one vote. q_halt: the logit of being right; NaN counts as probability 0."""
        probability = 0.0 if math.isnan(q_halt) else (1 + math.tanh(q_halt / 2)) / 2  # the sigmoid
        self.votes[test_input][grid] += 1
        self.halting[test_input][grid] += round(probability * _HALTING_ONE)

    def merge(self, other: "Votes") -> None:
        for test_input in other.votes:
            self.votes[test_input].update(other.votes[test_input])
            self.halting[test_input].update(other.halting[test_input])

    def count(self) -> Counter[str]:
        """Returns the number of votes in each set."""
        totals: Counter[str] = Counter()
        for test_input, votes in self.votes.items():
            totals[test_input.set_name] += votes.total()
        return totals

    def ranked(self, test_inputs: Iterable[TestInput]) -> list[bytes]:
        """Returns the different grids that these test inputs got, the best first.

        The order is by votes, then by mean probability of being right, then by bytes. The empty grid is last.
        """
        votes, halting = Counter(), Counter()
        for test_input in test_inputs:
            votes.update(self.votes.get(test_input))
            halting.update(self.halting.get(test_input))  # of equal votes the larger sum has the larger mean
        return sorted(votes, key=lambda grid: (grid == arc.EMPTY, -votes[grid], -halting[grid], grid))


class ArcEvaluator:
    """An evaluator that lets answers vote; of each grid that a test input got, it keeps the sums of `Votes`.

    Several samples of a puzzle vote like several views.
    """

    samples_vote = True

    def __init__(self, folder: Path, metadata: Metadata):
        """Reads the tasks. ValueError where an identifier's name in a test set is no variant of a task."""
        sets = open_split(folder, "test").sets
        identifiers = {name: np.unique(puzzle_set.puzzle_identifiers) for name, puzzle_set in sets.items()}
        used = np.unique(np.concatenate(list(identifiers.values())))
        names = read_every_name(folder, metadata)
        has_own = (folder / TEST_PUZZLES).exists()
        self._tasks = load_tasks(folder) if has_own else _tasks_in(sets.values(), names)
        self._views = Views(folder, names, tasks=self._tasks, used=used)
        tasks_of_set = {name: set(self._views.tasks[each].tolist()) for name, each in identifiers.items()}
        in_no_set = set(range(len(self._tasks))).difference(*tasks_of_set.values())
        self._tasks_of_set = {name: sorted(each | in_no_set) for name, each in tasks_of_set.items()}
        self._num_unknown = 0  # rows that show no test input of their task
        self._votes, self._total = Votes(), Votes()  # of this rank; of all ranks, set in `metrics`

    def add(self, set_name: str, answers: Answers) -> None:
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
            index = self._tasks[task].index_of.get(self._views.undo(shown, identifier))
            if index is None:
                self._num_unknown += 1
                continue
            test_input = TestInput(set_name, task, index)
            self._votes.vote(test_input, self._views.undo(answer, identifier), q_halt)

    def are_valid(self, inputs: np.ndarray, preds: np.ndarray) -> None:
        """Returns None, as there are no rules to check: only a task's demonstrations show its rule."""

    def partial(self) -> tuple[Votes, int]:
        return self._votes, self._num_unknown

    def metrics(self, partials: Sequence[tuple[Votes, int]]) -> dict[str, dict[str, float]]:
        """Returns {set: {"arc/pass@1": ..., "arc/count": tasks, "arc/test_inputs": ..., "arc/votes": ...}}.

        pass@K of a task is the share of its test inputs with the right output among the K best grids. The
        metric is the mean over the set's tasks; tasks that no set has count in each set. Inputs without votes
        are wrong; those without a known output are left out. ValueError for an example with an unknown input.
        """
        if num_unknown := sum(number for _, number in partials):
            shown = f"{num_unknown} test examples show no test input of their task in {TEST_PUZZLES}"
            raise ValueError(f"{shown}: build the dataset again")
        self._total = Votes()
        for votes, _ in partials:
            self._total.merge(votes)
        return {name: self._scores(name, count) for name, count in self._total.count().items()}

    def _scores(self, set_name: str, num_votes: int) -> dict[str, float]:
        numbers = self._tasks_of_set[set_name]
        num_inputs, scores = 0, {k: [] for k in PASSES}  # by K, of each task
        for number in numbers:
            task = self._tasks[number]
            ranks = []  # how many grids come before the right one
            for grid, output in zip(task.inputs, task.outputs, strict=True):
                if output == arc.EMPTY:  # nobody knows it
                    continue
                ranked = self._total.ranked([TestInput(set_name, number, task.index_of[grid])])
                ranks.append(ranked.index(output) if output in ranked else math.inf)
            num_inputs += len(ranks)
            for k, of_tasks in scores.items() if ranks else ():
                of_tasks.append(sum(rank < k for rank in ranks) / len(ranks))
        means = {f"arc/pass@{k}": math.fsum(each) / len(each) for k, each in scores.items() if each}
        return {**means, "arc/count": len(scores[1]), "arc/test_inputs": num_inputs, "arc/votes": num_votes}

    def write(self, folder: Path) -> None:
        """Writes `submission.json`, the two best grids of each test input over all sets, in Kaggle's form.

        It is {task: [{"attempt_1": grid, "attempt_2": grid} of each test input]}. A single grid fills both
        attempts; without one they are [[0]].
        """
        submission = {
            task.name: [self._attempts(number, task.index_of[grid]) for grid in task.inputs]
            for number, task in enumerate(self._tasks)
        }
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / SUBMISSION_FILE, submission, indent=None)

    def _attempts(self, task: int, test_input: int) -> dict[str, list[list[int]]]:
        ranked = self._total.ranked(TestInput(name, task, test_input) for name in self._tasks_of_set)
        grids = [to_lists(grid) for grid in ranked[:_NUM_ATTEMPTS] if grid != arc.EMPTY] or [_NO_ANSWER]
        return {
            f"attempt_{number + 1}": grids[min(number, len(grids) - 1)] for number in range(_NUM_ATTEMPTS)
        }


class EvaluatedTask(NamedTuple):
    """The test pairs of a task; several may have the same input.

    inputs, outputs  grids as bytes, one of each for every test pair; an unknown output is `tasks.EMPTY`
    index_of         {input: index of the first test pair with this input}
    """

    name: str
    inputs: list[bytes]
    outputs: list[bytes]
    index_of: dict[bytes, int]


def load_tasks(folder: Path) -> list[EvaluatedTask]:
    """Reads the tasks of `test_puzzles.json`, sorted by name. ValueError for malformed content."""
    path = folder / TEST_PUZZLES
    try:
        content = read_json(path)
        if not isinstance(content, dict) or not content:
            raise ValueError(f"{path} is no JSON object of tasks")
        own = {"subset": "test", "source": path, "needs_outputs": False}
        tests = {name: arc.parse_task(content[name], task_id=name, **own).test for name in sorted(content)}
    except ValueError as error:
        raise ValueError(f"{error}; build the dataset again") from None
    return [_evaluated_task(name, pairs) for name, pairs in tests.items()]


def _evaluated_task(name: str, pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> EvaluatedTask:
    inputs, outputs = ([grid_bytes(pair[side]) for pair in pairs] for side in (0, 1))
    return EvaluatedTask(name, inputs, outputs, {grid: inputs.index(grid) for grid in inputs})


def _tasks_in(sets: Iterable[PuzzleSet], names: Sequence[str]) -> list[EvaluatedTask]:
    """Returns the tasks whose originals are in test sets, by name; for HRM's tools, which write no tasks."""
    tests = {}
    for puzzle_set in sets:
        for puzzle, identifier in enumerate(puzzle_set.puzzle_identifiers.tolist()):
            name, first = names[identifier], puzzle_set.puzzle_indices[puzzle : puzzle + 2]
            if parse_variant_name(name) == (name, IDENTITY):
                rows = np.arange(*first)
                sides = puzzle_set.read(rows, np.full(len(rows), puzzle))
                grids = [[(grid - COLOR_0).astype(np.uint8) for grid in corner_grids(side)] for side in sides]
                tests[name] = list(zip(*grids, strict=True))
    return [_evaluated_task(name, tests[name]) for name in sorted(tests)]


def to_lists(grid: bytes) -> list[list[int]]:
    rows, columns = grid[:2]
    return [list(grid[2 + row * columns :][:columns]) for row in range(rows)]


class Views:
    """The task and the inverse transform of every puzzle identifier.

    tasks: int32 [num_puzzle_identifiers], the task's index; -1 where no test set uses the identifier.
    """

    def __init__(
        self, folder: Path, names: Sequence[str], *, tasks: Sequence[EvaluatedTask], used: np.ndarray
    ):
        """Parses the names of all identifiers. ValueError where one of `used` is no variant of a task."""
        count = len(names)
        index_of = {task.name: index for index, task in enumerate(tasks)}
        self.tasks = np.full(count, -1, np.int32)
        self._dihedral = np.zeros(count, np.uint8)  # the inverse one
        self._colors = np.zeros((count, VOCAB_SIZE), np.uint8)  # of each token: the colour
        for identifier in used.tolist():
            try:
                task_id, (number, *colors) = parse_variant_name(names[identifier])
                index = index_of[task_id]
            except (ValueError, KeyError):
                where = f"{folder / IDENTIFIERS}: {names[identifier]!r}, identifier {identifier}"
                problem = f"is in the test split, but names no view of a task in {TEST_PUZZLES}"
                raise ValueError(f"{where}, {problem}; build the dataset again") from None
            self.tasks[identifier] = index
            self._dihedral[identifier] = DIHEDRAL_INVERSES[number]
            self._colors[identifier, np.array(colors) + COLOR_0] = np.arange(arc.NUM_COLORS)

    def undo(self, grid: np.ndarray, identifier: int) -> bytes:
        """Applies the inverse transform of an identifier to a grid of colour tokens; returns `grid_bytes`."""
        return grid_bytes(self._colors[identifier][dihedral(grid, self._dihedral[identifier])])


def corner_grids(tokens: np.ndarray) -> list[np.ndarray]:
    """Cuts the largest rectangle of colours at the top left corner out of each field, tokens [n, seq_len].

    Returns numpy views [rows, columns]. Of equal areas, takes the one with fewer rows; [0, 0] without a
    colour.
    """
    size = math.isqrt(tokens.shape[1])
    grids = tokens.reshape(-1, size, size)
    is_color = (grids >= COLOR_0) & (grids < VOCAB_SIZE)
    widths = np.where(is_color.all(axis=2), size, is_color.argmin(axis=2))
    widths = np.minimum.accumulate(widths, axis=1)  # [:, r]: of a rectangle with r + 1 rows
    heights = (widths * np.arange(1, size + 1)).argmax(axis=1) + 1
    widths = np.take_along_axis(widths, heights[:, None] - 1, axis=1)[:, 0]
    heights[widths == 0] = 0
    sizes = zip(heights.tolist(), widths.tolist(), strict=True)
    return [grid[:height, :width] for grid, (height, width) in zip(grids, sizes, strict=True)]
