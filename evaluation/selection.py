"""Which of several attempts of a puzzle answers it: the ways to select, on arrays.

None of them sees a label. Each prefers the attempts with the smallest value of something; of equal ones
the attempt with the largest q_halt of its answer, then the first.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import numpy as np

from config.schema import Select

ORACLE = "any"  # no way to select, but the upper bound of all: any of the attempts is right
# Where in an attempt is the answer that a way to select chooses from: at its end (all steps, or where it
# halted), where the Q head halts first, or at the step with the largest q_halt.
AnswerAt = Literal["end", "halt", "peak"]
ANSWER_AT: dict[str, AnswerAt] = {
    "q_head": "end",
    "q_head_any_step": "peak",
    "first_to_halt": "halt",
    "vote": "end",
    "residual": "end",
    "rules": "end",
}


@dataclasses.dataclass(frozen=True)
class SampleAnswers:
    """The answers of the attempts of some puzzles, each at one step.

    preds    uint8 or int32 [puzzles, samples, seq_len]
    q_halt   float32 [puzzles, samples]
    steps    int32 [puzzles, samples]: network calls up to this answer
    """

    preds: np.ndarray
    q_halt: np.ndarray
    steps: np.ndarray

    def prefix(self, num_samples: int) -> SampleAnswers:
        """Returns the answers of the first samples alone."""
        return SampleAnswers(*(getattr(self, f.name)[:, :num_samples] for f in dataclasses.fields(self)))

    def of(self, chosen: np.ndarray) -> SampleAnswers:
        """Returns the answers of one sample of each puzzle, int64 [puzzles], without the second axis."""
        rows = np.arange(len(chosen))
        return SampleAnswers(*(getattr(self, f.name)[rows, chosen] for f in dataclasses.fields(self)))


def select(
    by: Select,
    answers: SampleAnswers,
    *,
    has_halted: np.ndarray,
    residuals: np.ndarray,
    are_valid: np.ndarray | None,
    is_search: bool = False,
) -> np.ndarray:
    """Chooses a sample of each puzzle: int64 [puzzles].

    answers: at the step of `ANSWER_AT`. has_halted, residuals, are_valid: [puzzles, samples]. Where no
    sample halted or is valid, the choice is by `q_head`. is_search: the network answers only where it halts;
    then the first of equal samples is chosen, and -1 where none has halted.
    """
    values = {
        "first_to_halt": lambda: np.where(has_halted, answers.steps, np.inf),
        "vote": lambda: -votes(answers.preds),
        "residual": lambda: np.nan_to_num(residuals, nan=np.inf),
        "rules": lambda: ~are_valid,
    }
    value = values[by]().astype(np.float64) if by in values else np.zeros(answers.q_halt.shape)
    is_best = value == value.min(axis=1, keepdims=True)
    if is_search:
        return np.where(has_halted.any(axis=1), is_best.argmax(axis=1), -1)
    certainty = np.nan_to_num(answers.q_halt.astype(np.float64), nan=-np.inf, posinf=np.inf, neginf=-np.inf)
    is_best &= certainty == np.where(is_best, certainty, -np.inf).max(axis=1, keepdims=True)
    return is_best.argmax(axis=1)


def votes(preds: np.ndarray) -> np.ndarray:
    """Counts, for each sample, the samples of its puzzle with the same answer: int64 [puzzles, samples]."""
    num_puzzles, num_samples, _ = preds.shape
    flat = np.ascontiguousarray(preds.reshape(num_puzzles * num_samples, -1))
    _, kinds = np.unique(flat.view(np.dtype((np.void, flat.itemsize * flat.shape[1]))), return_inverse=True)
    kinds = kinds.reshape(num_puzzles, num_samples)
    return (kinds[:, :, None] == kinds[:, None, :]).sum(axis=2)
