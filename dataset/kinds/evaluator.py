"""The interface of evaluators, and `RowEvaluator`, which checks each answer on its own.

An evaluator computes the metrics of one kind of puzzle. ARC has another evaluator,
`dataset.kinds.arc.evaluator`, because the answers to all variants of a test input vote. Queens and coloring
have another one, `dataset.many_answers`, which counts the different right answers to each puzzle.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from dataset.metadata import IGNORE_LABEL_ID
from runtime.writing import write_json

SUBMISSION_FILE, TASKS_FILE = "submission.json", "tasks.json"


class Answers(NamedTuple):
    """The answers of a model to one batch of examples, without padding.

    Attributes:
        inputs: Tokens, int32 [n, seq_len]. n may be 0.
        labels: Right answers, int32 [n, seq_len]. IGNORE_LABEL_ID (-100) for cells that are not scored.
        puzzle_identifiers: Index of each example's puzzle embedding, int32 [n].
        preds: Most probable token of each cell, [n, seq_len]. uint8 if there are at most 256 different
            tokens, otherwise int32.
        q_halt: Logit of the predicted probability that the answer is right, float32 [n].
        is_decided: Whether a search model (LDT) found an answer, bool [n]. None for other models.
        num_samples: Number of answers to each example. With 3, rows 0 to 2 of all arrays belong to the first
            example, so its input and label occur three times.
    """

    inputs: np.ndarray
    labels: np.ndarray
    puzzle_identifiers: np.ndarray
    preds: np.ndarray
    q_halt: np.ndarray
    is_decided: np.ndarray | None = None
    num_samples: int = 1


class Evaluator(Protocol):
    """Computes the metrics of one kind of puzzle on a dataset folder."""

    samples_vote: bool
    """Whether `add` gets all samples of an example. If False, `add` gets only the selected sample.

    If True, all samples of a search model (LDT) run to their end.
    """

    only_answered: bool
    """Whether the metrics include only examples that `add` got.

    If False, an example of the test set that no rank passed to `add` may count as wrong.
    """

    def add(self, set_name: str, answers: Answers) -> None:
        """Adds the model's answers to one batch of examples of the test set `set_name`."""

    def are_valid(self, inputs: np.ndarray, preds: np.ndarray) -> np.ndarray | None:
        """Returns whether answers obey the rules of the puzzle: bool [n]. Labels are not used.

        Returns None if the kind of puzzle has no rules. inputs, preds: Inputs and answers, tokens [n,
        seq_len].
        """

    def partial(self) -> Any:
        """Returns what `add` has counted on this rank. The caller pickles it and sends it to rank 0."""

    def metrics(self, partials: Sequence[Any]) -> dict[str, dict[str, float]]:
        """Computes the metrics from the counts of all ranks. Called on rank 0.

        Returns {set: {metric: value}}, for example {"all": {"sudoku/exact_accuracy": 0.91, "sudoku/count":
        1000}}. A test set is left out if no rank has counted an answer for it, for example because its
        puzzles have no labels.

        partials: The counts of each rank, from `partial`.
        """

    def write(self, folder: Path) -> None:
        """Writes the evaluator's files, if any, into a folder. Called on rank 0 after `metrics`."""


class RowEvaluator:
    """Computes the fraction of answers that pass each check, such as `exact`. Checks each answer on its own.

    An answer passes the check `exact` if all scored cells are right. The function `check` adds other checks,
    such as `valid`. If a search model (LDT) found no answer, the example passes no check. An example without
    a scored cell does not count.
    """

    samples_vote, only_answered = False, True

    def __init__(
        self,
        kind: str,
        check: Callable[[np.ndarray, np.ndarray], dict[str, np.ndarray]],
        *,
        tasks: Sequence[str] = (),
    ):
        """Creates an evaluator that has no answers yet.

        Args:
            kind: Name of the kind of puzzle. The metrics are `<kind>/<check>_accuracy` and `<kind>/count`.
            check: Function (inputs, preds) -> {check: whether each answer passes, bool [n]}. Both arguments
                are tokens, [n, seq_len]. The check `valid` means that an answer obeys the rules.
            tasks: Name of the task of each puzzle identifier. If there are several names, `write` writes the
                accuracy of each task.
        """
        self._kind, self._check, self._tasks = kind, check, tasks
        # {set: {check: number of examples of each task that pass}}, of this rank and of all ranks. All
        # examples pass the check "count".
        self._passed: dict[str, dict[str, np.ndarray]] = {}
        self._total: dict[str, dict[str, np.ndarray]] = {}

    def add(self, set_name: str, answers: Answers) -> None:
        counts = answers.labels != IGNORE_LABEL_ID
        is_exact = ((answers.preds == answers.labels) | ~counts).all(axis=1)
        checks = {"exact": is_exact, **self._check(answers.inputs, answers.preds)}
        if answers.is_decided is not None:
            checks = {check: is_passed & answers.is_decided for check, is_passed in checks.items()}
        checks["count"] = np.True_  # every example with a label
        tasks = answers.puzzle_identifiers if self._tasks else np.zeros_like(answers.puzzle_identifiers)
        has_label, num_tasks = counts.any(axis=1), max(len(self._tasks), 1)
        passed = self._passed.setdefault(set_name, {})
        for check, is_passed in checks.items():
            passed[check] = passed.get(check, 0) + np.bincount(
                tasks[has_label & is_passed], minlength=num_tasks
            )

    def are_valid(self, inputs: np.ndarray, preds: np.ndarray) -> np.ndarray | None:
        return self._check(inputs, preds).get("valid")

    def partial(self) -> dict[str, dict[str, np.ndarray]]:
        return self._passed

    def metrics(self, partials: Sequence[dict[str, dict[str, np.ndarray]]]) -> dict[str, dict[str, float]]:
        self._total = {}
        for part in partials:
            for set_name, passed in part.items():
                total = self._total.setdefault(set_name, {})
                for check, numbers in passed.items():
                    total[check] = total.get(check, 0) + numbers
        self._total = {name: passed for name, passed in self._total.items() if passed["count"].any()}
        return {
            set_name: {f"{self._kind}/{metric}": value for metric, value in _scores(passed).items()}
            for set_name, passed in self._total.items()
        }

    def write(self, folder: Path) -> None:
        """Writes the accuracy of each task to tasks.json, if there are several tasks.

        The content is {set: {task: {"exact_accuracy": 0.5, "count": 20}}}.
        """
        if len(self._tasks) < 2:
            return
        tasks = {
            set_name: {self._tasks[task]: _scores(passed, task) for task in passed["count"].nonzero()[0]}
            for set_name, passed in self._total.items()
        }
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / TASKS_FILE, tasks)


def _scores(passed: dict[str, np.ndarray], tasks: int | slice = slice(None)) -> dict[str, float]:
    # Such as {"exact_accuracy": 0.5, "count": 20}: of all tasks, or of the task with this index.
    numbers = {check: int(of_tasks[tasks].sum()) for check, of_tasks in passed.items()}
    count = numbers.pop("count")
    return {f"{check}_accuracy": number / count for check, number in numbers.items()} | {"count": count}
