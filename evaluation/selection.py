"""Selects one of several samples of a puzzle, and counts right answers and thinking steps.

A sample is one of several answers of a model to a puzzle, with its own random noise. No selection rule uses
labels. Each rule compares one number of each sample, for example its number of thinking steps. Among equally
good samples, the one with the largest q_halt is selected, then the one with the lowest index. In a
search (LDT), q_halt has no effect. All sums are integers, so they do not depend on the number of ranks or on
the batch size.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Literal, NamedTuple

import numpy as np
from torch import Tensor

from config.programs import Select
from dataset.kinds.kind import Rules
from dataset.metadata import IGNORE_LABEL_ID
from models.carry import StepOutput

ORACLE = "any"  # not a rule, but the upper bound of all rules: right if any sample is right
# Which answer of a sample a selection rule uses: the last one (after all steps, or where the sample halted),
# the answer where the Q head halts first, or the answer with the largest q_halt.
AnswerAt = Literal["end", "halt", "peak"]
ANSWER_AT: dict[str, AnswerAt] = {
    "q_head": "end",
    "q_head_any_step": "peak",
    "first_to_halt": "halt",
    "vote": "end",
    "residual": "end",
    "rules": "end",
}
ScoreKey = tuple[int, int, str, str]  # steps, samples, selection rule or `ORACLE`, what is counted


@dataclasses.dataclass(frozen=True)
class Settings:
    """The numbers of thinking steps and of samples to evaluate, in all combinations.

    Attributes:
        steps: Numbers of thinking steps, ascending.
        samples: Numbers of samples of each puzzle, ascending.
        selects: Rules that select one sample, such as "vote". The first rule selects the answers from which
            all other metrics are computed.
        retry_samples: Only for a search model (LDT). If none of the first samples of a puzzle finds an
            answer, the model runs more samples of it, up to this total number. If None, it runs no more.
    """

    steps: tuple[int, ...]
    samples: tuple[int, ...] = (1,)
    selects: tuple[Select, ...] = ("q_head",)
    retry_samples: int | None = None


class Samples(NamedTuple):
    """The answers of all samples of some puzzles. Arrays are [puzzles, samples].

    preds       [puzzles, samples, seq_len]: tokens of the answer. uint8 if there are at most 256 different
                tokens, otherwise int32
    q_halt      float32: the model's logit of "the answer is right"
    steps       int32: number of thinking steps up to the answer
    has_halted  bool: whether the model wanted to halt after at least one thinking step
    residuals   float32: mean change of the logits in the last 3 thinking steps
    are_valid   bool: whether the answer after the last thinking step obeys the puzzle's rules. None if there
                are no rules
    """

    preds: np.ndarray
    q_halt: np.ndarray
    steps: np.ndarray
    has_halted: np.ndarray
    residuals: np.ndarray
    are_valid: np.ndarray | None

    def take(self, *index: slice | np.ndarray) -> Samples:
        return Samples(*(None if column is None else column[index] for column in self))


def select(by: Select, samples: Samples, *, is_search: bool = False) -> np.ndarray:
    """Selects a sample of each puzzle. Returns their indices, int64 [puzzles].

    The rules prefer these samples:

    - "first_to_halt": the smallest number of thinking steps, among samples that wanted to halt
    - "vote": the most frequent answer to the puzzle
    - "residual": the smallest change of the logits in the last thinking steps
    - "rules": an answer that obeys the rules of the puzzle
    - "q_head" and "q_head_any_step": the largest q_halt

    Among equally good samples, the one with the largest q_halt is selected, then the first.

    by: The rule.
    samples: Answers of all samples, each from the thinking step that `ANSWER_AT` names for the rule.
    is_search: Whether the model is a search (LDT). If it is, q_halt has no effect. If no sample of a puzzle
    halted, the puzzle has no answer, and its index is -1.
    """
    values = {
        "first_to_halt": lambda: np.where(samples.has_halted, samples.steps, np.inf),
        "vote": lambda: -votes(samples.preds),
        "residual": lambda: np.nan_to_num(samples.residuals, nan=np.inf),
        "rules": lambda: ~samples.are_valid,
    }
    value = values[by]().astype(np.float64) if by in values else np.zeros(samples.q_halt.shape)
    is_best = value == value.min(axis=1, keepdims=True)
    if is_search:
        return np.where(samples.has_halted.any(axis=1), is_best.argmax(axis=1), -1)
    certainty = np.nan_to_num(samples.q_halt.astype(np.float64), nan=-np.inf, posinf=np.inf, neginf=-np.inf)
    is_best &= certainty == np.where(is_best, certainty, -np.inf).max(axis=1, keepdims=True)
    return is_best.argmax(axis=1)


def votes(preds: np.ndarray) -> np.ndarray:
    """Returns how many samples of the same puzzle have the same answer: int64 [puzzles, samples].

    Each sample also counts itself. preds: Tokens of the answers, [puzzles, samples, seq_len].
    """
    num_puzzles, num_samples, _ = preds.shape
    flat = np.ascontiguousarray(preds.reshape(num_puzzles * num_samples, -1))
    _, kinds = np.unique(flat.view(np.dtype((np.void, flat.itemsize * flat.shape[1]))), return_inverse=True)
    kinds = kinds.reshape(num_puzzles, num_samples)
    return (kinds[:, :, None] == kinds[:, None, :]).sum(axis=2)


def answer_at(at: AnswerAt, output: StepOutput) -> StepOutput:
    """Returns the output with the answer of an earlier thinking step.

    at: "halt": the first step after which the model wants to halt, or the last step if there is none. "peak":
    the step with the largest q_halt. "end": the last step. The output is then returned unchanged.
    output: Last output of a model in a `HistoryNetwork` (evaluation/test_time.py), which stores the earlier
    answers.
    """
    if at == "end":
        return output
    state, prediction = output.carry.state, output.prediction
    answer = {name: state[f"{at}.{name}"] for name in ("logits", "q_halt", "q_continue")}
    steps = state[f"{at}.steps"]
    return StepOutput(output.carry._replace(steps=steps), prediction._replace(**answer))


def predicted_tokens(logits: Tensor) -> Tensor:
    """Returns the token with the largest logit in every cell: [batch, seq_len].

    uint8 if there are at most 256 different tokens, otherwise int32.

    logits: [batch, seq_len, tokens].
    """
    return logits.argmax(-1).byte() if logits.shape[-1] <= 256 else logits.argmax(-1).int()


class Scores:
    """Counts right answers on this rank, for several numbers of steps and samples.

    Puzzles without a label do not count.

    rules: Function (inputs, answers) -> whether each answer obeys the rules of the puzzle. None if answers
    are not checked by rules.
    is_search: Whether the model is a search (LDT).

    Attributes:
        sums: {(number of steps, number of samples, selection rule, what is counted): sum over puzzles}. A
            selection rule, such as "vote", picks one sample of each puzzle. In place of a rule, "any" means
            that a puzzle counts if any of its samples is right (not for a search). These are counted: "exact"
            (the answer equals the label), "valid" (the answer obeys the rules, only with `rules`), "calls"
            (thinking steps of all samples together), and "undecided" (no answer, only for a search).
    """

    def __init__(self, settings: Settings, *, rules: Rules | None, is_search: bool = False):
        assert rules is not None or "rules" not in settings.selects
        self.settings, self._rules, self._is_search = settings, rules, is_search
        self.sums: Counter[ScoreKey] = Counter()

    def add(self, steps: int, attempts: StepOutput, *, runs_all: bool = False) -> np.ndarray:
        """Counts the answers to some puzzles after at most `steps` thinking steps.

        Returns the index of the sample that the first selection rule selects among all samples of each
        puzzle, int64 [puzzles]. -1 means that a search model has no answer.

        attempts: Output for all samples of the puzzles, [puzzles * samples, ...], ordered by puzzle.
        runs_all: Whether all samples of a search have run to their end. Then "calls" contains all of their
        steps. If False, or if the model is no search, "calls" of the rule first_to_halt contains only the
        steps up to the first sample that halted.
        """
        num_samples = self.settings.samples[-1]

        def columns(tensor: Tensor) -> np.ndarray:
            return tensor.cpu().numpy().reshape(-1, num_samples, *tensor.shape[1:])

        state, data = attempts.carry.state, attempts.carry.data
        inputs, labels = columns(data.inputs), columns(data.labels)[:, 0]
        counted = (labels != IGNORE_LABEL_ID).any(axis=1)
        calls = columns(attempts.carry.steps)
        end_preds = columns(predicted_tokens(attempts.prediction.logits))
        is_valid = self._are_valid(inputs, end_preds)
        is_exact = _are_exact(end_preds, labels[:, None])
        samples_at = {}
        for at in {*map(ANSWER_AT.get, self.settings.selects)}:
            answer = answer_at(at, attempts)
            samples_at[at] = Samples(
                preds=columns(predicted_tokens(answer.prediction.logits)),
                q_halt=columns(answer.prediction.q_halt),
                steps=columns(answer.carry.steps),
                has_halted=columns(state["history.has_halted"]),
                residuals=columns(state["history.changes"].nanmean(dim=1)),
                are_valid=is_valid,
            )
        for count in self.settings.samples:
            all_calls = calls[:, :count].sum(axis=1)
            for by in self.settings.selects:
                samples = samples_at[ANSWER_AT[by]].take(slice(None), slice(count))
                chosen = select(by, samples, is_search=self._is_search)
                is_open = chosen < 0
                answer = samples.take(np.arange(len(chosen)), np.maximum(chosen, 0))
                valid = self._are_valid(inputs[:, 0], answer.preds)
                num_calls = all_calls
                if by == "first_to_halt" and not (self._is_search and runs_all):
                    # Samples run side by side, and all stop when the first one halts.
                    num_calls = count * np.where(is_open, steps, answer.steps)
                figures = {
                    "exact": _are_exact(answer.preds, labels) & ~is_open,
                    "valid": None if valid is None else valid & ~is_open,
                    "calls": num_calls,
                    "undecided": is_open if self._is_search else None,
                }
                self._add((steps, count, by), counted, figures)
                if by == self.settings.selects[0]:
                    of_first = chosen
            if not self._is_search:  # in a search, samples that lost stop without an answer
                any_valid = None if is_valid is None else is_valid[:, :count].any(axis=1)
                figures = {"exact": is_exact[:, :count].any(axis=1), "valid": any_valid, "calls": all_calls}
                self._add((steps, count, ORACLE), counted, figures)
        return of_first

    def for_retry(self) -> Scores:
        more = self.settings.retry_samples - self.settings.samples[-1]
        settings = dataclasses.replace(self.settings, samples=(more,), retry_samples=None)
        return Scores(settings, rules=self._rules, is_search=self._is_search)

    def add_retry(self, retry: Scores) -> None:
        for steps, _, by, figure in list(self.sums):
            key, more = (steps, self.settings.samples[-1], by, figure), retry.settings.samples[-1]
            # "undecided" then counts the puzzles without an answer in both runs.
            before = 0 if figure == "undecided" else self.sums[key]
            self.sums[key] = before + retry.sums[steps, more, by, figure]

    def _are_valid(self, inputs: np.ndarray, preds: np.ndarray) -> np.ndarray | None:
        if self._rules is None:
            return None
        flat = (tokens.reshape(-1, tokens.shape[-1]) for tokens in (inputs, preds))
        return self._rules(*flat).reshape(preds.shape[:-1])

    def _add(
        self, key: tuple[int, int, str], counted: np.ndarray, figures: dict[str, np.ndarray | None]
    ) -> None:
        for name, values in figures.items():
            if values is not None:
                self.sums[(*key, name)] += int(values[counted].sum())


def _are_exact(preds: np.ndarray, labels: np.ndarray) -> np.ndarray:
    return ((preds == labels) | (labels == IGNORE_LABEL_ID)).all(axis=-1)
