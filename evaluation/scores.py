"""The scores of a grid of steps and samples: how often each way to select is right, and what it costs.

Only integers are added, so that neither the number of ranks nor the batch size changes a figure.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from config.schema import Select
from dataset.format import IGNORE_LABEL_ID
from evaluation.evaluators import Rules
from evaluation.selection import ANSWER_AT, ORACLE, AnswerAt, SampleAnswers, select


@dataclasses.dataclass(frozen=True)
class Grid:
    """The settings that an evaluation is asked for: every number of steps with every number of samples.

    steps, samples: ascending. selects: ways to select; the first makes the metrics of the largest setting.
    """

    steps: tuple[int, ...]
    samples: tuple[int, ...] = (1,)
    selects: tuple[Select, ...] = ("q_head",)

    @property
    def settings(self) -> list[tuple[int, int]]:
        """Returns every (steps, samples)."""
        return list(itertools.product(self.steps, self.samples))


@dataclasses.dataclass(frozen=True)
class Score:
    """The sums of one way to select in one setting, over the puzzles with a label.

    exact, valid: right by the label, and by the rules (None where there are none). calls: of the network.
    undecided: puzzles without an answer (None where every attempt has one).
    """

    exact: int
    valid: int | None
    calls: int
    undecided: int | None = None


ScoresBySetting = dict[tuple[int, int], dict[str, Score]]  # then by way to select, and `ORACLE`


class Scores:
    """The sums of every setting of a grid, on one rank.

    rules: says which answers are valid; the way to select `rules` needs it. is_search: of the network.
    """

    def __init__(self, grid: Grid, *, rules: Rules | None, is_search: bool = False):
        assert rules is not None or "rules" not in grid.selects
        self.grid, self._rules, self._is_search = grid, rules, is_search
        self.by_setting: ScoresBySetting = {setting: {} for setting in grid.settings}

    def add(self, depth: int, puzzles: dict[str, np.ndarray]) -> np.ndarray:
        """Adds whole puzzles as they were at this depth, [puzzles, samples, ...] each.

        Returns which sample the first way to select chooses of all of them, int64 [puzzles]; -1: none.
        """
        inputs, labels = puzzles["inputs"][:, 0], puzzles["labels"][:, 0]
        counted = (labels != IGNORE_LABEL_ID).any(axis=1)
        answers = {at: _answers_at(at, puzzles) for at in {*map(ANSWER_AT.get, self.grid.selects), "end"}}
        end = answers["end"]
        is_exact = _are_exact(end.preds, labels[:, None])
        is_valid = self._are_valid(inputs.repeat(end.preds.shape[1], axis=0), end.preds)
        for num_samples in self.grid.samples:
            score = self.by_setting[depth, num_samples]
            first = slice(num_samples)
            calls = puzzles["calls"][:, first].sum(axis=1)
            valid_first = None if is_valid is None else is_valid[:, first]
            if not self._is_search:  # attempts that cannot win do not go on to their end
                any_valid = None if valid_first is None else valid_first.any(1)
                self._add(score, ORACLE, counted, is_exact[:, first].any(1), any_valid, calls)
            for by in self.grid.selects:
                prefix = answers[ANSWER_AT[by]].prefix(num_samples)
                chosen = select(
                    by,
                    prefix,
                    has_halted=puzzles["has_halted"][:, first],
                    residuals=puzzles["residual"][:, first],
                    are_valid=valid_first,
                    is_search=self._is_search,
                )
                is_open, answer = chosen < 0, prefix.of(np.maximum(chosen, 0))
                # Side by side, the others stop when the first one halts.
                needed = (
                    num_samples * np.where(is_open, depth, answer.steps) if by == "first_to_halt" else calls
                )
                exact, valid = _are_exact(answer.preds, labels), self._are_valid(inputs, answer.preds)
                valid = None if valid is None else valid & ~is_open
                undecided = is_open if self._is_search else None
                self._add(score, by, counted, exact & ~is_open, valid, needed, undecided)
                if by == self.grid.selects[0]:
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
        undecided: np.ndarray | None = None,
    ) -> None:
        columns = (exact, valid, calls, undecided)
        new = Score(*(None if each is None else int(each[counted].sum()) for each in columns))
        score[name] = _sum_of([score[name], new]) if name in score else new


def sum_scores(parts: Sequence[ScoresBySetting]) -> ScoresBySetting:
    """Adds up the scores of all ranks; a rank without puzzles has none."""
    total: ScoresBySetting = {setting: {} for setting in parts[0]}
    for setting, scores in total.items():
        for name in dict.fromkeys(name for part in parts for name in part[setting]):
            scores[name] = _sum_of([part[setting][name] for part in parts if name in part[setting]])
    return total


def _sum_of(scores: Sequence[Score]) -> Score:
    columns = zip(*map(dataclasses.astuple, scores), strict=True)
    return Score(*(None if column[0] is None else sum(column) for column in columns))


def _answers_at(at: AnswerAt, puzzles: dict[str, np.ndarray]) -> SampleAnswers:
    return SampleAnswers(*(puzzles[f"{at}.{field.name}"] for field in dataclasses.fields(SampleAnswers)))


def _are_exact(preds: np.ndarray, labels: np.ndarray) -> np.ndarray:
    return ((preds == labels) | (labels == IGNORE_LABEL_ID)).all(axis=-1)
