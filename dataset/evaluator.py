"""Evaluation by the rules of a puzzle, where comparing with the recorded label says too little.

An evaluator is shown a model's answers as they come and keeps little of them. It knows nothing of ranks: each
rank has an evaluator of its own, and rank 0's makes the metrics from the parts of all, which
`evaluation.evaluators` gathers. Invariant: only integers are added, so that neither the number of ranks nor
the batch size changes a metric.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from dataset.format import IGNORE_LABEL_ID


class Answers(NamedTuple):
    """A model's answers to one batch of examples: real rows only, no padding; there may be none.

    rows                int64 [n]: the example's place in its set
    inputs              int32 [n, seq_len]
    labels              int32 [n, seq_len]: IGNORE_LABEL_ID where a cell counts nowhere
    puzzle_identifiers  int32 [n]
    preds               uint8 or int32 [n, seq_len]: the token that the model finds likeliest
    q_halt              float32 [n]: logits of being right
    """

    rows: np.ndarray
    inputs: np.ndarray
    labels: np.ndarray
    puzzle_identifiers: np.ndarray
    preds: np.ndarray
    q_halt: np.ndarray


class Evaluator(Protocol):
    """The interface of what evaluates one dataset folder."""

    samples_vote: bool
    """Whether all answers to an example are wanted, where there are several; else only the selected one."""

    def add(self, set_name: str, answers: Answers) -> None:
        """Takes the answers to one batch of a set."""

    def are_valid(self, inputs: np.ndarray, preds: np.ndarray) -> np.ndarray | None:
        """Tells by the rules of the puzzles alone, without a label, which answers solve them: bool [n].

        None where the rules cannot tell. inputs, preds: tokens [n, seq_len].
        """

    def partial(self) -> Any:
        """Returns everything that was added here, in a form that can be pickled."""

    def metrics(self, partials: Sequence[Any]) -> dict[str, dict[str, float]]:
        """{set: {"<kind>/<metric>": value}} of everything in `partials`.

        Shares are fractions; `<kind>/count` is what they are shares of. A set without data is left out.
        """

    def write(self, folder: Path) -> None:
        """Leaves the evaluator's files in the folder, if it has any; after `metrics`."""


class RowEvaluator:
    """An evaluator that checks every row by itself: whether its counted cells are as labelled (exact), and
    what the rules of its kind say. A row without a counted cell counts nowhere.
    """

    samples_vote = False

    def __init__(self, kind: str, check: Callable[[np.ndarray, np.ndarray], dict[str, np.ndarray]]):
        """check: inputs, preds -> {share: bool [n]}; the share `valid` is of right answers by the rules."""
        self._kind, self._check = kind, check
        self._passed: dict[str, Counter[str]] = {}  # of each set: the rows that pass each check, and all

    def add(self, set_name: str, answers: Answers) -> None:
        counts = answers.labels != IGNORE_LABEL_ID
        has_label = counts.any(axis=1)
        is_exact = ((answers.preds == answers.labels) | ~counts).all(axis=1)
        checks = {"exact": is_exact, **self._check(answers.inputs, answers.preds)}
        passed = self._passed.setdefault(set_name, Counter())
        passed.update({check: int((is_passed & has_label).sum()) for check, is_passed in checks.items()})
        passed["count"] += int(has_label.sum())

    def are_valid(self, inputs: np.ndarray, preds: np.ndarray) -> np.ndarray | None:
        return self._check(inputs, preds).get("valid")

    def partial(self) -> dict[str, Counter[str]]:
        return self._passed

    def metrics(self, partials: Sequence[dict[str, Counter[str]]]) -> dict[str, dict[str, float]]:
        total: dict[str, Counter[str]] = {}
        for part in partials:
            for set_name, passed in part.items():
                total.setdefault(set_name, Counter()).update(passed)
        metrics: dict[str, dict[str, float]] = {}
        for set_name, passed in total.items():
            if count := passed.pop("count"):
                metrics[set_name] = {
                    f"{self._kind}/{check}_accuracy": n / count for check, n in passed.items()
                }
                metrics[set_name][f"{self._kind}/count"] = count
        return metrics

    def write(self, folder: Path) -> None:
        """Writes nothing: the metrics say it all."""
