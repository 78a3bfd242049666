"""Evaluates ARC answers by vote: all views of a test input vote for an answer to the test input.

A view is a test input under one transform. Each example of the test split is a view. The name of its puzzle
identifier contains the transform, such as "0a938d79|||t3|||0214356789". The name of the original is only the
id of the task. The inverse transform converts the input of the example to the test input, and the answer of
the model to the grid that gets the vote. ARC's score is pass@2: one of two grids must be right. Grids are
bytes: number of rows, number of columns, colors.

The public TRM tools write `identifiers.json` and `test_puzzles.json` in the same form. Invariant: metrics and
files do not depend on the number of ranks or the batch size, because all sums are integers and ties are
broken by the bytes of the grids. If the test split has one set, pass@2 is the score of the submission.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dataset.augmentations import DIHEDRAL_INVERSES, dihedral
from dataset.description import read_every_name
from dataset.files import IDENTIFIERS, open_split
from dataset.kinds.arc import tasks as arc
from dataset.kinds.arc.tasks import COLOR_0, TEST_PUZZLES, VOCAB_SIZE, grid_bytes
from dataset.kinds.arc.variants import IDENTITY, parse_variant_name
from dataset.kinds.evaluator import SUBMISSION_FILE, Answers
from dataset.metadata import Metadata
from dataset.sets import PuzzleSet
from runtime.reading import PointerFileError, read_json
from runtime.writing import write_json

PASSES = (1, 2, 5, 10, 100, 1000)  # K of pass@K

_NUM_ATTEMPTS = 2
_NO_ANSWER = [[0]]  # a submission needs a grid for every attempt
_HALTING_ONE = 1 << 32  # a probability of 1 in fixed point


# A test input: name of the test set, index of the task, index of the input among the test inputs of the task.
_TestInput = tuple[str, int, int]


class Votes:
    """Counts the votes for the answers to test inputs of ARC tasks.

    Attributes:
        votes: {test input: {grid as bytes: number of votes}}.
        halting: {test input: {grid as bytes: sum of the predicted probabilities that the grid is right}}. The
            sums are integers, in units of 2^-32, so the order of the votes does not matter.
    """

    def __init__(self) -> None:
        self.votes: defaultdict[_TestInput, Counter[bytes]] = defaultdict(Counter)
        self.halting: defaultdict[_TestInput, Counter[bytes]] = defaultdict(Counter)

    def vote(self, test_input: _TestInput, grid: bytes, q_halt: float) -> None:
        """Adds one vote for an answer to a test input.

        grid: The answer as bytes, with the transform of its view undone. q_halt: Logit of the predicted
        probability that the answer is right. NaN counts as probability 0.
        """
        probability = 0.0 if math.isnan(q_halt) else (1 + math.tanh(q_halt / 2)) / 2  # the sigmoid
        self.votes[test_input][grid] += 1
        self.halting[test_input][grid] += round(probability * _HALTING_ONE)

    def merge(self, other: "Votes") -> None:
        for test_input in other.votes:
            self.votes[test_input].update(other.votes[test_input])
            self.halting[test_input].update(other.halting[test_input])

    def count(self) -> Counter[str]:
        """Returns {name of a test set: number of votes for answers to its test inputs}."""
        totals: Counter[str] = Counter()
        for (set_name, *_), votes in self.votes.items():
            totals[set_name] += votes.total()
        return totals

    def ranked(self, test_inputs: Iterable[_TestInput]) -> list[bytes]:
        """Returns the different answers that have votes, as bytes, sorted from best to worst.

        Answers with more votes come first. Ties are broken by the larger mean probability, then by the
        smaller bytes. The empty grid (`EMPTY`) is always last. It gets the vote if the first token of an
        answer is not a color, or if a search model (LDT) has not found an answer.

        test_inputs: Test inputs whose votes are added, such as the same input in several test sets.
        """
        votes, halting = Counter(), Counter()
        for test_input in test_inputs:
            votes.update(self.votes.get(test_input))
            halting.update(self.halting.get(test_input))  # equal votes: larger sum, larger mean
        return sorted(votes, key=lambda grid: (grid == arc.EMPTY, -votes[grid], -halting[grid], grid))


class ArcEvaluator:
    """Computes the metrics of ARC, such as pass@2.

    If the model answers each view several times, all of these answers vote. A test input of a task is solved
    if one of the two grids with the most votes is right. pass@2 is the fraction of solved test inputs of a
    task, averaged over the tasks.
    """

    samples_vote, only_answered = True, False

    def __init__(self, folder: Path, metadata: Metadata):
        """Reads the test tasks of a dataset folder, and the names of its puzzle identifiers.

        Raises ValueError if the name of a test puzzle is missing or belongs to none of these tasks.
        """
        sets = open_split(folder, "test").sets
        names = read_every_name(folder, metadata)
        has_own = (folder / TEST_PUZZLES).exists()
        self._tasks = load_tasks(folder) if has_own else _tasks_in(sets.values(), names)
        index_of = {task.name: index for index, task in enumerate(self._tasks)}
        # For each identifier in the test sets: the index of its task, and the inverse of its transform, which
        # is a dihedral number and the color of each token.
        self._task_of = np.full(len(names), -1, np.int32)
        self._dihedral = np.zeros(len(names), np.uint8)
        self._colors = np.zeros((len(names), VOCAB_SIZE), np.uint8)
        tasks_of_set = {}
        for set_name, puzzle_set in sets.items():
            used = np.unique(puzzle_set.puzzle_identifiers)
            for identifier in used[self._task_of[used] < 0].tolist():
                try:
                    task_id, (dihedral_index, *colors) = parse_variant_name(names[identifier])
                    self._task_of[identifier] = index_of[task_id]
                except (ValueError, KeyError):
                    where = f"{folder / IDENTIFIERS}: {names[identifier]!r}, identifier {identifier}"
                    problem = f"is in the test split, but is not a variant of a task in {TEST_PUZZLES}"
                    raise ValueError(f"{where}, {problem}. Build the dataset again.") from None
                self._dihedral[identifier] = DIHEDRAL_INVERSES[dihedral_index]
                self._colors[identifier, np.array(colors) + COLOR_0] = np.arange(arc.NUM_COLORS)
            tasks_of_set[set_name] = set(self._task_of[used].tolist())
        # A task that is in no set counts in every set. It has no votes, so it is not solved.
        in_no_set = set(range(len(self._tasks))).difference(*tasks_of_set.values())
        self._tasks_of_set = {
            set_name: sorted(set_tasks | in_no_set) for set_name, set_tasks in tasks_of_set.items()
        }
        self._num_unknown = 0  # rows without a test input of their task
        self._votes, self._total = Votes(), Votes()  # of this rank; of all ranks (set in `metrics`)

    def add(self, set_name: str, answers: Answers) -> None:
        is_decided = np.ones(len(answers.preds), bool) if answers.is_decided is None else answers.is_decided
        rows = zip(
            answers.puzzle_identifiers.tolist(),
            corner_grids(answers.inputs),
            corner_grids(answers.preds),
            answers.q_halt.tolist(),
            is_decided.tolist(),
            strict=True,
        )
        for identifier, shown, answer, q_halt, has_answer in rows:
            task = int(self._task_of[identifier])
            assert task >= 0, "a row of another dataset"
            inputs, grid = self._tasks[task].inputs, self._undo(shown, identifier)
            if grid not in inputs:
                self._num_unknown += 1
                continue
            test_input = (set_name, task, inputs.index(grid))
            vote = self._undo(answer, identifier) if has_answer else arc.EMPTY
            self._votes.vote(test_input, vote, q_halt)

    def _undo(self, grid: np.ndarray, identifier: int) -> bytes:
        # The grid of a view, tokens [rows, columns], before it was transformed, as bytes.
        return grid_bytes(self._colors[identifier][dihedral(grid, self._dihedral[identifier])])

    def are_valid(self, inputs: np.ndarray, preds: np.ndarray) -> None:
        """Returns None, because the rules of ARC tasks are not known."""

    def partial(self) -> tuple[Votes, int]:
        return self._votes, self._num_unknown

    def metrics(self, partials: Sequence[tuple[Votes, int]]) -> dict[str, dict[str, float]]:
        """Computes the metrics from the votes of all ranks. Called on rank 0.

        Returns {set: {metric: value}}, for example {"all": {"arc/pass@2": 0.41, "arc/count": 400, ...}}.
        docs/metrics.md describes the metrics. Raises ValueError if the input of an example is not a test
        input of its task.

        partials: (votes, number of examples with an input that is no test input of their task) of each rank,
        from `partial`.
        """
        if num_unknown := sum(count for _, count in partials):
            shown = f"{num_unknown} test examples match no test input of their task in {TEST_PUZZLES}"
            raise ValueError(f"{shown}. Build the dataset again.")
        self._total = Votes()
        for votes, _ in partials:
            self._total.merge(votes)
        return {set_name: self._scores(set_name, count) for set_name, count in self._total.count().items()}

    def _scores(self, set_name: str, num_votes: int) -> dict[str, float]:
        task_indices = self._tasks_of_set[set_name]
        num_solved, scores = dict.fromkeys(PASSES, 0), {k: [] for k in PASSES}  # {K: pass@K of each task}
        num_inputs = 0
        for task_index in task_indices:
            task = self._tasks[task_index]
            ranks = []  # number of grids before the right one
            for grid, output in zip(task.inputs, task.outputs, strict=True):
                if output == arc.EMPTY:  # unknown
                    continue
                ranked = self._total.ranked([(set_name, task_index, task.inputs.index(grid))])
                if self.only_answered and not ranked:
                    continue
                ranks.append(ranked.index(output) if output in ranked else math.inf)
            num_inputs += len(ranks)
            for k, of_tasks in scores.items() if ranks else ():
                solved = sum(rank < k for rank in ranks)
                num_solved[k] += solved
                of_tasks.append(solved / len(ranks))
        metrics: dict[str, float] = {}
        if num_inputs:
            metrics |= {
                f"arc/pass@{k}": math.fsum(of_tasks) / len(of_tasks) for k, of_tasks in scores.items()
            }
            metrics |= {f"arc/outputs/pass@{k}": solved / num_inputs for k, solved in num_solved.items()}
        counts = {"arc/count": len(scores[1]), "arc/outputs/count": num_inputs, "arc/test_inputs": num_inputs}
        return {**metrics, **counts, "arc/votes": num_votes}

    def write(self, folder: Path) -> None:
        """Writes submission.json for Kaggle, with two grids for each test input.

        The content is {task: [{"attempt_1": grid, "attempt_2": grid} for each test input]}. The attempts are
        the two grids with the most votes. If there is only one grid, both attempts are this grid. If there is
        none, both attempts are [[0]].
        """
        submission = {
            task.name: [self._attempts(index, task.inputs.index(grid)) for grid in task.inputs]
            for index, task in enumerate(self._tasks)
        }
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / SUBMISSION_FILE, submission, indent=None)

    def _attempts(self, task: int, test_input: int) -> dict[str, list[list[int]]]:
        ranked = self._total.ranked((set_name, task, test_input) for set_name in self._tasks_of_set)
        grids = [to_lists(grid) for grid in ranked[:_NUM_ATTEMPTS] if grid != arc.EMPTY] or [_NO_ANSWER]
        return {
            f"attempt_{attempt + 1}": grids[min(attempt, len(grids) - 1)] for attempt in range(_NUM_ATTEMPTS)
        }


class EvaluatedTask(NamedTuple):
    """The test pairs of a task. If several pairs have the same input, votes for it go to the first of them.

    Attributes:
        name: Id of the task.
        inputs, outputs: Grids of the test pairs, as bytes. An unknown output is a grid without cells
            (`tasks.EMPTY`).
    """

    name: str
    inputs: list[bytes]
    outputs: list[bytes]


def load_tasks(folder: Path) -> list[EvaluatedTask]:
    path = folder / TEST_PUZZLES
    try:
        content = read_json(path)
        if not isinstance(content, dict) or not content:
            raise ValueError(f"{path} is not a JSON object of tasks")
        arguments = {"subset": "test", "source": path, "needs_outputs": False}
        tests = {
            task_id: arc.parse_task(content[task_id], task_id=task_id, **arguments).test
            for task_id in sorted(content)
        }
    except PointerFileError:
        raise
    except ValueError as error:
        raise ValueError(f"{error}. Build the dataset again.") from None
    return [_evaluated_task(task_id, pairs) for task_id, pairs in tests.items()]


def _evaluated_task(name: str, pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> EvaluatedTask:
    return EvaluatedTask(name, *([grid_bytes(pair[side]) for pair in pairs] for side in (0, 1)))


def _tasks_in(sets: Iterable[PuzzleSet], names: Sequence[str]) -> list[EvaluatedTask]:
    """Collects the test pairs of tasks from the originals in test sets. Returns tasks, sorted by name.

    Needed for datasets without test_puzzles.json, such as those of HRM's tools.
    """
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


def corner_grids(tokens: np.ndarray) -> list[np.ndarray]:
    """Returns the grid at the top left of each token array.

    The grid is the largest rectangle of color tokens that starts there. Of rectangles with equal area, the
    one with the fewest rows counts. If the first token is not a color, the grid has shape [0, 0]. The results
    are numpy views of the tokens, [rows, columns].

    tokens: [n, seq_len]. seq_len must be a square number.
    """
    size = math.isqrt(tokens.shape[1])
    grids = tokens.reshape(-1, size, size)
    is_color = (grids >= COLOR_0) & (grids < VOCAB_SIZE)
    widths = np.where(is_color.all(axis=2), size, is_color.argmin(axis=2))
    widths = np.minimum.accumulate(widths, axis=1)  # [:, r]: width of a rectangle with r + 1 rows
    heights = (widths * np.arange(1, size + 1)).argmax(axis=1) + 1
    widths = np.take_along_axis(widths, heights[:, None] - 1, axis=1)[:, 0]
    heights[widths == 0] = 0
    sizes = zip(heights.tolist(), widths.tolist(), strict=True)
    return [grid[:height, :width] for grid, (height, width) in zip(grids, sizes, strict=True)]
