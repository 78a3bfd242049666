"""Judges of answers by the rules of their puzzles, where comparing with the recorded label says too little.

A judge is shown the model's answers as they come, each rank its own rows, keeps little of them, and sums up
over all ranks at the end. Invariant: only integers are added, so that neither the number of ranks nor the
batch size changes a metric.
"""

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from dataset.format import IGNORE_LABEL_ID, Metadata
from evaluation.arc import ArcJudge
from evaluation.maze import maze_rules
from evaluation.sudoku import sudoku_rules
from parallel.collectives import gather_objects


class Answers(NamedTuple):
    """What a rank hands over of one batch: real rows only, no padding; there may be none.

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


class Judge(Protocol):
    def add(self, set_name: str, answers: Answers) -> None:
        """Takes this rank's rows of one batch. No communication."""

    def gather_metrics(self) -> dict[str, dict[str, float]]:
        """{set: {"<judge>/<metric>": value}} on rank 0, {} elsewhere. All ranks call it.

        Shares are fractions; `<judge>/count` is what they are shares of. A set without data is left out.
        """

    def write(self, folder: Path) -> None:
        """Leaves files in the folder, if the judge has any. Rank 0 calls it, after gather_metrics."""


# The checks of one kind of puzzle: (folder, metadata) -> (inputs, preds) -> {share: bool [n]}.
Rules = Callable[[Path, Metadata], Callable[[np.ndarray, np.ndarray], dict[str, np.ndarray]]]


class RowJudge:
    """Judges every row by itself: whether its counted cells are as labelled (exact), and what its rules say.

    A row without a counted cell counts nowhere.
    """

    def __init__(self, name: str, rules: Rules, *, folder: Path, metadata: Metadata):
        self._name, self._judge = name, rules(folder, metadata)
        self._passed: dict[str, Counter[str]] = {}  # of each set: the rows that pass each check, and all

    def add(self, set_name: str, answers: Answers) -> None:
        counts = answers.labels != IGNORE_LABEL_ID
        has_label = counts.any(axis=1)
        is_exact = ((answers.preds == answers.labels) | ~counts).all(axis=1)
        checks = {"exact": is_exact, **self._judge(answers.inputs, answers.preds)}
        passed = self._passed.setdefault(set_name, Counter())
        passed.update({check: int((is_passed & has_label).sum()) for check, is_passed in checks.items()})
        passed["count"] += int(has_label.sum())

    def gather_metrics(self) -> dict[str, dict[str, float]]:
        total: dict[str, Counter[str]] = {}
        for part in gather_objects(self._passed) or ():
            for set_name, passed in part.items():
                total.setdefault(set_name, Counter()).update(passed)
        return {name: self._metrics(passed) for name, passed in total.items() if passed["count"]}

    def _metrics(self, passed: Counter[str]) -> dict[str, float]:
        count = passed["count"]
        shares = {check: number / count for check, number in passed.items() if check != "count"}
        named = {f"{self._name}/{check}_accuracy": share for check, share in shares.items()}
        return {**named, f"{self._name}/count": count}

    def write(self, folder: Path) -> None:
        """The metrics say it all."""


JUDGES: dict[str, Callable[..., Judge]] = {
    "arc": ArcJudge,
    "maze": functools.partial(RowJudge, "maze", maze_rules),
    "sudoku": functools.partial(RowJudge, "sudoku", sudoku_rules),
}


def build_judge(name: str, *, folder: Path, metadata: Metadata, further_votes: Sequence[Path] = ()) -> Judge:
    """The judge `name` of `JUDGES` for the test split of the dataset in `folder`.

    further_votes: files that `write` of the arc judge left in earlier evaluations, which vote too. Raises
    ValueError, perhaps on one rank only (rank 0 alone reads the votes), where the data is not of that kind.
    """
    if name not in JUDGES:
        raise ValueError(f"unknown judge {name!r}; known are: {', '.join(JUDGES)}")
    if name == "arc":
        return ArcJudge(folder=folder, metadata=metadata, further_votes=further_votes)
    if further_votes:
        raise ValueError(f"further votes are for the judge arc, not for {name}: drop them")
    return JUDGES[name](folder=folder, metadata=metadata)
