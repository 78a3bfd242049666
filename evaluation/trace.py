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
from models.lattice import NO_GUESS
from models.objective import PROBABILITIES, loss_type_of

MOST_TOKENS = 31  # bits of a mask. A browser's integers have 32 bits


class Trace(NamedTuple):
    """The answers of a model to a batch of puzzles, after each thinking step.

    preds          [batch, steps, seq_len]: Most likely token of each cell. uint8 if there are at most 256
                   different tokens, otherwise int32.
    confidence     float32 [batch, steps, seq_len]: Probability of this token, by stablemax if the loss of the
                   model has stablemax (arch.loss.loss_type), else by softmax.
    q_halt         float32 [batch, steps]: Logit of the predicted probability that the answer is right.
    wants_to_halt  bool [batch, steps]: Whether the model would stop after this step.
    candidates     int64 [batch, steps, seq_len]: Bit t is set if token t is still possible in the cell. Only
                   for a search model (LDT) with at most MOST_TOKENS tokens. Otherwise [batch, steps, 0].
    guesses        int16 [batch, steps]: Index of the cell that the search guessed in this step. NO_GUESS
                   (-1) if it guessed none. RESET (-2) if it started again from the puzzle. Without
                   `candidates`, all entries are NO_GUESS.
    """

    preds: np.ndarray
    confidence: np.ndarray
    q_halt: np.ndarray
    wants_to_halt: np.ndarray
    candidates: np.ndarray
    guesses: np.ndarray

    @property
    def halting_steps(self) -> np.ndarray:
        """The step (from 1) after which the model would stop, for each puzzle: int64 [batch].

        If the model would never stop, this is the last step.
        """
        first = self.wants_to_halt.argmax(axis=1)
        return np.where(self.wants_to_halt.any(axis=1), first, self.wants_to_halt.shape[1] - 1) + 1


@torch.inference_mode()
def record_trace(model: HaltingModel, batch: Batch, *, seed: int = 0, max_steps: int | None = None) -> Trace:
    """Runs a model on a batch of puzzles, and returns its answer after each thinking step. No puzzle halts.

    model: Model in evaluation mode.
    seed: Seed of the random noise.
    max_steps: Number of thinking steps. The model makes no more steps than an evaluation allows
    (arch.eval_halt_max_steps, or arch.halt_max_steps if that is not set). If None, it makes that many.
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
    """Returns the answers after one thinking step, from the output of the model.

    The arrays have no axis "steps". Example: preds is [batch, seq_len].
    """
    logits, state = output.prediction.logits, output.carry.state
    candidates = torch.zeros(len(logits), 0, dtype=torch.int64)
    guesses = torch.full((len(logits),), NO_GUESS, dtype=torch.int16)
    if model.network.is_search and logits.shape[-1] <= MOST_TOKENS:
        is_candidate, guesses = model.network.view(state)
        bits = 2 ** torch.arange(logits.shape[-1], device=logits.device)
        candidates = (is_candidate * bits).sum(-1)
    probabilities = PROBABILITIES[loss_type_of(model.network.arch)](logits.float())
    tensors = (
        predicted_tokens(logits),
        probabilities.amax(-1),
        output.prediction.q_halt.float(),
        model.network.wants_to_halt(state, output.prediction),
        candidates,
        guesses,
    )
    return Trace(*(tensor.cpu().numpy() for tensor in tensors))
