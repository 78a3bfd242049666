"""Puzzles with many right answers: their rules, and metrics of how many right answers a model finds.

A model answers each puzzle several times. Coverage is the number of different right answers among the samples
divided by the number of all right answers. The evaluator counts all right answers by the rules. It reads no
label. GRAM (arXiv 2605.19376) and Looped Flows measure N-Queens completion and graph coloring in this way.
"""

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np

from dataset.kinds.evaluator import Answers
from dataset.kinds.kind import Puzzle, read_symbols

_CHUNK_CELLS = 1 << 22  # puzzles * candidates that are compared at once
_NOTHING = np.zeros(0, np.int64)


@dataclasses.dataclass(frozen=True)
class AnswerRules:
    """The rules of a kind of puzzle with several right answers, as functions.

    `inputs` and `answers` are tokens, [n, seq_len].

    Attributes:
        are_valid: (inputs, answers) -> whether each answer is right, bool [n].
        to_standard: (inputs, answers) -> answers in a standard form. Two answers count as the same if their
            standard forms are equal. Example: colors are renamed in order of first use.
        count_answers: (inputs) -> number of right answers of each input in standard form, int64 [n].
        count_conflicts: (inputs, answers) -> number of rules that each answer breaks, int64 [n]. -1 if
            the answer leaves even one cell without a value. None if the kind of puzzle does not count broken
            rules.
        count_rules: (inputs) -> number of rules that an answer to each input can break, int64 [n]. An
            evaluation counts this number as the broken rules of a puzzle if every answer of the model to it
            leaves a cell without a value. None if `count_conflicts` is None.
    """

    are_valid: Callable[[np.ndarray, np.ndarray], np.ndarray]
    to_standard: Callable[[np.ndarray, np.ndarray], np.ndarray]
    count_answers: Callable[[np.ndarray], np.ndarray]
    count_conflicts: Callable[[np.ndarray, np.ndarray], np.ndarray] | None = None
    count_rules: Callable[[np.ndarray], np.ndarray] | None = None


def find_consistent(of_inputs: np.ndarray, of_candidates: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Finds, for each input, the candidates that contradict none of its properties.

    Example for N-Queens: the candidates are all solutions of an empty board, and property i of an input means
    that it has a queen in cell i. A solution without a queen in cell i contradicts this property.

    Returns two arrays: the indices of the candidates that were found, for one input after the other, int64
    [total], and their number for each input, int64 [n].

    of_inputs: Properties that each input has, bool [n, properties]. of_candidates: Properties that each
    candidate contradicts, bool [candidates, properties].
    """
    found, counts = [], []
    for is_right in _compare(of_inputs, of_candidates):
        found.append(is_right.nonzero()[1])
        counts.append(is_right.sum(axis=1))
    return np.concatenate([_NOTHING, *found]), np.concatenate([_NOTHING, *counts])


def count_consistent(of_inputs: np.ndarray, of_candidates: np.ndarray) -> np.ndarray:
    """Counts, for each input, the candidates that `find_consistent` finds: int64 [n]."""
    counts = (is_right.sum(axis=1) for is_right in _compare(of_inputs, of_candidates))
    return np.concatenate([_NOTHING, *counts])


def _compare(of_inputs: np.ndarray, of_candidates: np.ndarray) -> Iterator[np.ndarray]:
    # Yields whether candidates contradict no property of an input, bool [some inputs, candidates].
    columns = of_candidates.T.astype(np.float32)
    rows = max(_CHUNK_CELLS // len(of_candidates), 1)
    for start in range(0, len(of_inputs), rows):
        yield of_inputs[start : start + rows].astype(np.float32) @ columns == 0


@dataclasses.dataclass(frozen=True)
class ManyAnswersPuzzle(Puzzle):
    """A puzzle that a user wants to solve, and that may have several right answers."""

    answer_rules: AnswerRules | None = None
    has_many_answers: ClassVar[bool] = True

    @functools.cached_property
    def remark(self) -> str | None:
        (count,) = self.answer_rules.count_answers(self.tokens[None]).tolist()
        if not count:
            raise ValueError("the puzzle has no solution.")
        return None if count == 1 else f"this puzzle has {count} right answers"

    def distinct_answers(self, answers: np.ndarray) -> np.ndarray:
        inputs = np.broadcast_to(self.tokens, answers.shape)
        right = self.answer_rules.are_valid(inputs, answers)
        standard = self.answer_rules.to_standard(inputs[right], answers[right])
        firsts = {answer.tobytes(): row for row, answer in reversed([*enumerate(standard)])}
        return standard[sorted(firsts.values())]


def read_square(
    text: str, symbols: Sequence[str], *, sizes: range, answer_rules: AnswerRules
) -> list[Puzzle]:
    """Converts a text to a square puzzle. Returns a list that contains only this puzzle.

    Raises ValueError if a symbol is unknown, or if the text does not have an allowed size.

    symbols: The symbol of each token. sizes: Allowed numbers of rows.
    """
    (puzzle,) = read_symbols(text, symbols, vocab_size=len(symbols))
    size = math.isqrt(len(puzzle.tokens))
    if size**2 != len(puzzle.tokens) or size not in sizes:
        allowed = f"a square of {sizes[0]} to {sizes[-1]} rows"
        raise ValueError(f"{len(puzzle.tokens)} cells are not {allowed}.")
    tokens = puzzle.tokens.astype(np.uint8)
    return [ManyAnswersPuzzle(tokens, len(symbols), rules=answer_rules.are_valid, answer_rules=answer_rules)]


class Found(NamedTuple):
    """What a model's answers to one puzzle show.

    Attributes:
        num_right: Number of right answers that the puzzle has.
        num_samples: Number of answers of the model.
        num_found: Number of different right answers among the answers of the model.
        is_valid: Whether the first answer of the model is right.
        conflicts: Number of rules that the model's most frequent complete answer breaks. An answer is
            complete if every cell has a value and, with LDT, if its search found the answer. If no answer is
            complete, `conflicts` is the number of all rules. 0 if the kind of puzzle does not count broken
            rules.
    """

    num_right: int
    num_samples: int
    num_found: int
    is_valid: bool
    conflicts: int


class ManyAnswersEvaluator:
    """Measures how many of the right answers of each puzzle a model finds.

    The metrics do not depend on the number of ranks or on the batch size.

    Args:
        kind: Name of the kind of puzzle. Metrics are named `<kind>/<metric>`.
        rules: Rules that count all right answers of a puzzle.
    """

    samples_vote, only_answered = True, True

    def __init__(self, kind: str, rules: AnswerRules):
        self._kind, self._rules = kind, rules
        self._found: dict[str, Counter[Found]] = {}  # {set: {what the samples show: number of puzzles}}

    def add(self, set_name: str, answers: Answers) -> None:
        rules, num_samples = self._rules, answers.num_samples
        is_decided = np.ones(len(answers.preds), bool) if answers.is_decided is None else answers.is_decided
        is_valid = is_decided & rules.are_valid(answers.inputs, answers.preds)
        standard = rules.to_standard(answers.inputs, answers.preds)
        inputs = answers.inputs[::num_samples]
        num_right = rules.count_answers(inputs).tolist()
        conflicts, most = np.full(len(standard), -1), np.zeros(len(inputs), np.int64)
        if rules.count_conflicts is not None:
            conflicts = np.where(is_decided, rules.count_conflicts(answers.inputs, answers.preds), -1)
            most = rules.count_rules(inputs)
        counts = self._found.setdefault(set_name, Counter())
        for puzzle, num in enumerate(num_right):
            rows = range(puzzle * num_samples, (puzzle + 1) * num_samples)
            found = {standard[row].tobytes() for row in rows if is_valid[row]}
            complete = [(standard[row].tobytes(), conflicts[row]) for row in rows if conflicts[row] >= 0]
            broken = most[puzzle]
            if complete:  # of several most frequent answers, the one of the earliest sample counts
                (((_, broken), _),) = Counter(complete).most_common(1)
            counts[Found(num, num_samples, len(found), bool(is_valid[rows[0]]), int(broken))] += 1

    def are_valid(self, inputs: np.ndarray, preds: np.ndarray) -> np.ndarray:
        return self._rules.are_valid(inputs, preds)

    def partial(self) -> dict[str, Counter[Found]]:
        return self._found

    def metrics(self, partials: Sequence[dict[str, Counter[Found]]]) -> dict[str, dict[str, float]]:
        total: dict[str, Counter[Found]] = {}
        for part in partials:
            for set_name, counts in part.items():
                total.setdefault(set_name, Counter()).update(counts)
        return {
            set_name: {f"{self._kind}/{name}": value for name, value in self._scores(counts).items()}
            for set_name, counts in total.items()
            if counts
        }

    def _scores(self, counts: Counter[Found]) -> dict[str, float]:
        num_valid = sum(number for found, number in counts.items() if found.is_valid)
        scores: dict[str, float] = {"valid_accuracy": num_valid / counts.total()}
        rows = [(found, number) for found, number in sorted(counts.items()) if found.num_right]
        numbers_found = {
            "": lambda found: found.num_found,
            "_ceiling": lambda found: _expected_number(found.num_right, found.num_samples),
            "_floor": lambda _found: 1,
        }
        for ending, num_found in numbers_found.items():
            coverages = _coverages([(found.num_right, number, num_found(found)) for found, number in rows])
            scores |= {f"{name}{ending}": value for name, value in coverages.items()}
        if self._rules.count_conflicts is not None:
            scores["conflicts"] = sum(found.conflicts * number for found, number in counts.items())
        num_samples = max(found.num_samples for found in counts)
        return scores | {"samples": num_samples, "count": counts.total()}

    def write(self, folder: Path) -> None:
        """Writes no file."""


def _expected_number(num_right: int, num_samples: int) -> float:
    # Of the different right answers among `num_samples` independent uniform samples of right answers.
    return num_right * (1 - (1 - 1 / num_right) ** num_samples)


def _coverages(rows: Sequence[tuple[int, int, float]]) -> dict[str, float]:
    """Computes three averages of the fraction f / m of right answers that were found.

    - coverage_mean: average over the inputs, all with the same weight
    - coverage_inputs: average over the inputs with the weights m
    - coverage_pairs: average over the inputs with the weights m^2. It equals coverage_inputs for a test set
      that repeats each input m times.

    rows: [(number of right answers m, number of inputs with this m and f, number of answers found f), ...].
    """
    if not rows:
        return {}
    m, number, f = np.array(rows, np.float64).T
    return {
        "coverage_mean": math.fsum(number * f / m) / math.fsum(number),
        "coverage_inputs": math.fsum(number * f) / math.fsum(number * m),
        "coverage_pairs": math.fsum(number * m * f) / math.fsum(number * m**2),
    }
