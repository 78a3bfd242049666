"""Evaluates ARC answers by vote: every test example is one view of a test input, and all its views vote.

A view is a task under one augmentation, which the name of its puzzle identifier tells (`symmetries`). Undone
in the input, the augmentation says which of the task's test inputs this is; undone in the answer, which grid
gets the vote. Two attempts are allowed: pass@2 is the score of ARC.

`identifiers.json` and `test_puzzles.json` in the dataset folder are those of the public TRM tools too.
Invariant: neither the number of ranks nor the batch size changes a metric or a byte of what is written; with
one set, pass@2 is the score of the submission that is written.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dataset.evaluator import Answers
from dataset.format import Metadata, open_split
from dataset.kinds.arc.tasks import TEST_PUZZLES
from dataset.kinds.arc.views import EMPTY, Views, corner_grids, digest, load_tasks, to_lists
from dataset.kinds.arc.votes import Place, Votes, load_votes

PASSES = (1, 2, 5, 10, 100, 1000)  # the K of pass@K
SUBMISSION_FILE = "submission.json"
VOTES_FILE = "votes.npz"

_NUM_ATTEMPTS = 2
_NO_ANSWER = [[0]]  # a submission has a grid everywhere


class ArcEvaluator:
    """An evaluator that keeps, of each distinct grid that a test input got, only the sums of `Votes`."""

    def __init__(self, folder: Path, metadata: Metadata, *, further_votes: Sequence[Path] = ()):
        """further_votes: files that `write` left in earlier evaluations; those votes count as well.

        Raises ValueError, one line, where the views of the dataset in `folder` cannot be undone, or the
        further votes are not on its tasks.
        """
        self._tasks = load_tasks(folder)
        identifiers = {
            name: np.unique(puzzle_set.puzzle_identifiers)
            for name, puzzle_set in open_split(folder, "test").sets.items()
        }
        used = np.unique(np.concatenate(list(identifiers.values())))
        self._views = Views(folder, metadata, tasks=self._tasks, used=used)
        in_no_set = set(range(len(self._tasks))) - set(self._views.tasks[used].tolist())
        self._tasks_of_set = {
            name: sorted(in_no_set.union(self._views.tasks[used].tolist()))
            for name, used in identifiers.items()
        }
        self._votes = Votes()
        self._num_unknown = 0  # rows that show no test input of their task
        self._further = self._load_further(further_votes)
        self._gathered, self._total = Votes(), Votes()  # from `metrics` on: all votes, with the further ones

    def _load_further(self, paths: Sequence[Path]) -> Votes:
        if len({path.resolve() for path in paths}) < len(paths):
            raise ValueError(f"further votes name a file twice: {', '.join(map(str, paths))}")
        together = Votes()
        for path in paths:
            votes = load_votes(
                path,
                digest=digest(self._tasks),
                num_test_inputs=[len(task.inputs) for task in self._tasks],
                set_names=self._tasks_of_set,
            )
            together.merge(votes)
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

    def partial(self) -> tuple[Votes, int]:
        return self._votes, self._num_unknown

    def metrics(self, partials: Sequence[tuple[Votes, int]]) -> dict[str, dict[str, float]]:
        """{set: {"arc/pass@1": ..., "arc/count": tasks, "arc/test_inputs": ..., "arc/votes": ...}}.

        pass@K is a task's share of test inputs whose right output is among the first K grids, averaged over
        the tasks of the set, and over those that no set has rows of. Without a vote a test input is wrong.
        ValueError where rows show no test input of test_puzzles.json.
        """
        if num_unknown := sum(number for _, number in partials):
            raise ValueError(
                f"{num_unknown} test examples show no test input of their task in {TEST_PUZZLES}: "
                "build the dataset again"
            )
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
        all sets taken together. Where there is one grid only it is given twice, where
        there is none (or only the empty one) [[0]]. The votes are those of this evaluation alone.
        """
        submission = {
            task.name: [self._attempts(number, task.places[grid]) for grid in task.inputs]
            for number, task in enumerate(self._tasks)
        }
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = folder / f"{SUBMISSION_FILE}.tmp"
        unfinished.write_text(json.dumps(submission) + "\n", encoding="utf-8")
        unfinished.replace(folder / SUBMISSION_FILE)
        unfinished = folder / f"{VOTES_FILE}.tmp"
        self._gathered.save(unfinished, digest=digest(self._tasks))
        unfinished.replace(folder / VOTES_FILE)

    def _attempts(self, task: int, test_input: int) -> dict[str, list[list[int]]]:
        ranked = self._total.ranked(Place(name, task, test_input) for name in self._tasks_of_set)
        grids = [to_lists(grid) for grid in ranked[:_NUM_ATTEMPTS] if grid != EMPTY] or [_NO_ANSWER]
        return {
            f"attempt_{number + 1}": grids[min(number, len(grids) - 1)] for number in range(_NUM_ATTEMPTS)
        }
