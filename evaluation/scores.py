"""The sums of a table of steps and samples: how often each way to select is right, and what it costs.

Only integers are added, so that neither the number of ranks nor the batch size changes a figure.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from dataset.format import IGNORE_LABEL_ID
from evaluation.evaluators import Rules
from evaluation.selection import ANY, MOMENT_OF, Moment, RunAnswers, select

if TYPE_CHECKING:
    from config.schema import Select


@dataclasses.dataclass(frozen=True)
class Grid:
    """The table that an evaluation is asked for.

    steps, samples: ascending. selects: of which the first makes the metrics of the largest corner.
    """

    steps: tuple[int, ...]
    samples: tuple[int, ...] = (1,)
    selects: tuple[Select, ...] = ("q_head",)

    @property
    def corners(self) -> list[tuple[int, int]]:
        """Returns every (steps, samples)."""
        return list(itertools.product(self.steps, self.samples))


@dataclasses.dataclass(frozen=True)
class Score:
    """The sums of one way to select in one corner, over the puzzles with a label.

    exact, valid: right by the label, and by the rules (None where there are none). calls: of the network.
    """

    exact: int
    valid: int | None
    calls: int


Scores = dict[tuple[int, int], dict[str, Score]]  # by corner; by way to select, and `ANY`


class Tally:
    """The sums of every corner of a grid, on one rank.

    rules: tells valid answers of this set; the way to select `rules` needs it.
    """

    def __init__(self, grid: Grid, *, rules: Rules | None):
        assert rules is not None or "rules" not in grid.selects
        self._grid, self._rules = grid, rules
        self.scores: Scores = {corner: {} for corner in grid.corners}
        self.count = 0

    def add(self, depth: int, puzzles: dict[str, np.ndarray]) -> np.ndarray:
        """Adds whole puzzles as they were at this depth, [puzzles, samples, ...] each.

        Returns which sample the first way to select chooses of all of them, int64 [puzzles].
        """
        inputs, labels = puzzles["inputs"][:, 0], puzzles["labels"][:, 0]
        counted = (labels != IGNORE_LABEL_ID).any(axis=1)
        if depth == self._grid.steps[-1]:
            self.count += int(counted.sum())
        moments = {MOMENT_OF[by] for by in self._grid.selects} | {"end"}
        answers = {each: _answers_at(each, puzzles) for each in moments}
        end = answers["end"]
        is_exact = _are_exact(end.preds, labels[:, None])
        is_valid = self._are_valid(inputs.repeat(end.preds.shape[1], axis=0), end.preds)
        for num_samples in self._grid.samples:
            score = self.scores[depth, num_samples]
            first = slice(num_samples)
            calls = puzzles["calls"][:, first].sum(axis=1)
            self._add(score, ANY, counted, is_exact[:, first].any(1), _any(is_valid, first), calls)
            for by in self._grid.selects:
                prefix = answers[MOMENT_OF[by]].prefix(num_samples)
                chosen = select(
                    by,
                    prefix,
                    has_halted=puzzles["has_halted"][:, first],
                    residuals=puzzles["residual"][:, first],
                    are_valid=None if is_valid is None else is_valid[:, first],
                )
                answer = prefix.of(chosen)
                # Side by side, the others stop when the first one halts.
                needed = num_samples * prefix.steps.min(axis=1) if by == "first_to_halt" else calls
                exact = _are_exact(answer.preds, labels)
                self._add(score, by, counted, exact, self._are_valid(inputs, answer.preds), needed)
                if by == self._grid.selects[0]:
                    of_first = chosen
        return of_first

    def _are_valid(self, inputs: np.ndarray, preds: np.ndarray) -> np.ndarray | None:
        """Asks the rules of answers [..., seq_len] to inputs [n, seq_len], as many in all: bool [...]."""
        if self._rules is None:
            return None
        return self._rules(inputs, preds.reshape(inputs.shape)).reshape(preds.shape[:-1])

    @staticmethod
    def _add(
        score: dict[str, Score],
        name: str,
        counted: np.ndarray,
        exact: np.ndarray,
        valid: np.ndarray | None,
        calls: np.ndarray,
    ) -> None:
        before = score.get(name, Score(0, None if valid is None else 0, 0))
        score[name] = Score(
            before.exact + int((exact & counted).sum()),
            None if valid is None else before.valid + int((valid & counted).sum()),
            before.calls + int(calls[counted].sum()),
        )


def sum_scores(parts: Sequence[Scores]) -> Scores:
    """Adds up the scores of all ranks, of which one without puzzles has none."""
    total: Scores = {corner: {} for corner in parts[0]}
    for corner, scores in total.items():
        for name in dict.fromkeys(name for part in parts for name in part[corner]):
            found = [part[corner][name] for part in parts if name in part[corner]]
            has_rules = found[0].valid is not None
            scores[name] = Score(
                sum(each.exact for each in found),
                sum(each.valid for each in found) if has_rules else None,
                sum(each.calls for each in found),
            )
    return total


def _answers_at(moment: Moment, puzzles: dict[str, np.ndarray]) -> RunAnswers:
    return RunAnswers(*(puzzles[f"{moment}.{field.name}"] for field in dataclasses.fields(RunAnswers)))


def _are_exact(preds: np.ndarray, labels: np.ndarray) -> np.ndarray:
    return ((preds == labels) | (labels == IGNORE_LABEL_ID)).all(axis=-1)


def _any(values: np.ndarray | None, first: slice) -> np.ndarray | None:
    return None if values is None else values[:, first].any(axis=1)
