"""Traces: answers, probabilities, halting values and guesses of a model after each thinking step."""

import dataclasses
from typing import NamedTuple

import numpy as np
import torch

from dataset.loader import Batch
from evaluation.loop import answer_batches
from evaluation.selection import predicted_tokens
from evaluation.test_time import build_draw
from models import HaltingModel
from models.carry import StepOutput
from models.search import NO_GUESS, Search

MOST_TOKENS = 31  # bits of a mask. A browser's integers have 32 bits


class Trace(NamedTuple):
    """The answers of a model after each thinking step. A run is one puzzle in one slot.

    preds          uint8 or int32 [runs, steps, seq_len]: Most likely token of each cell.
    confidence     float32 [runs, steps, seq_len]: Probability of that token.
    q_halt         float32 [runs, steps]: Halting value, the logit of "the answer is right".
    wants_to_halt  bool [runs, steps]: Whether the model would halt after this step.
    candidates     int64 [runs, steps, seq_len]: Bit t is set if the cell may be token t. Only for a search
                   with at most MOST_TOKENS tokens. Otherwise [runs, steps, 0].
    guesses        int16 [runs, steps]: Cell that a search guessed, or NO_GUESS or RESET (`models.search`).
    """

    preds: np.ndarray
    confidence: np.ndarray
    q_halt: np.ndarray
    wants_to_halt: np.ndarray
    candidates: np.ndarray
    guesses: np.ndarray

    @property
    def halting_steps(self) -> np.ndarray:
        """Returns the step, from 1, after which each run would halt: int64 [runs].

        For a run that would never halt, this is the last step.
        """
        first = self.wants_to_halt.argmax(axis=1)
        return np.where(self.wants_to_halt.any(axis=1), first, self.wants_to_halt.shape[1] - 1) + 1


@torch.inference_mode()
def record_trace(model: HaltingModel, batch: Batch, *, seed: int = 0, max_steps: int | None = None) -> Trace:
    """Runs a batch through all thinking steps, in one process. The model must be in evaluation mode.

    seed: Seed of the random numbers, if the evaluation has any. max_steps: Maximum number of steps. If None,
    the number of steps of an evaluation.
    """
    assert not model.training
    reasoning = dataclasses.replace(model.eval_reasoning("max"), halting="max")  # for a search, too
    if max_steps is not None:
        reasoning = dataclasses.replace(reasoning, max_steps=min(max_steps, reasoning.max_steps))
    steps: list[Trace] = []

    def add(output: StepOutput, _: torch.Tensor) -> None:
        steps.append(trace_step(model, output))

    draw = build_draw(model.network, reasoning, seed=seed)
    for _ in answer_batches(model, iter([batch]), reasoning, draw=draw, on_step=add):
        pass
    return Trace(*(np.stack(column, axis=1) for column in zip(*steps, strict=True)))


def trace_step(model: HaltingModel, output: StepOutput) -> Trace:
    """Returns the trace of one step. Its arrays are those of `Trace`, without the axis of steps."""
    logits, state = output.prediction.logits, output.carry.state
    candidates = torch.zeros(len(logits), 0, dtype=torch.int64)
    guesses = torch.full((len(logits),), NO_GUESS, dtype=torch.int16)
    if isinstance(model.network, Search) and logits.shape[-1] <= MOST_TOKENS:
        board = model.network.view(state)
        bits = 2 ** torch.arange(logits.shape[-1], device=logits.device)
        candidates, guesses = (board.candidates * bits).sum(-1), board.guess
    tensors = (
        predicted_tokens(logits),
        logits.float().softmax(-1).amax(-1),
        output.prediction.q_halt.float(),
        model.network.wants_to_halt(state, output.prediction),
        candidates,
        guesses,
    )
    return Trace(*(tensor.cpu().numpy() for tensor in tensors))
