"""Records what a model thinks after each step: its answer, how sure it is of each cell, its Q value."""

from typing import NamedTuple

import numpy as np
import torch

from dataset.loader import Batch
from evaluation.halting import Draw, answer_batches
from evaluation.test_time import predicted_tokens
from models import HaltingModel
from models.halting import StepOutput
from models.network import Prediction


class Thoughts(NamedTuple):
    """What a model thinks of puzzles, or of runs of them, after each step.

    preds          uint8 or int32 [runs, steps, seq_len]: the likeliest token of each cell
    confidence     float32 [runs, steps, seq_len]: the probability of that token
    q_halt         float32 [runs, steps]: the logit of stopping here
    wants_to_halt  bool [runs, steps]: whether the Q head would stop here
    """

    preds: np.ndarray
    confidence: np.ndarray
    q_halt: np.ndarray
    wants_to_halt: np.ndarray

    @property
    def halting_steps(self) -> np.ndarray:
        """The number of the step after which each run would stop, from 1; the last, where none is: [runs]."""
        first = self.wants_to_halt.argmax(axis=1)
        return np.where(self.wants_to_halt.any(axis=1), first, self.wants_to_halt.shape[1] - 1) + 1


@torch.inference_mode()
def record_thoughts(model: HaltingModel, batch: Batch, *, draw: Draw = lambda _: None) -> Thoughts:
    """Runs every slot of a batch through all steps of a model in evaluation mode; one process is enough.

    draw: the random numbers of a noisy model (`evaluation.test_time.build_draw`).
    """
    assert not model.training
    steps: list[Thoughts] = []

    def add(output: StepOutput, _: torch.Tensor) -> None:
        steps.append(read_thoughts(model, output.prediction))

    for _ in answer_batches(model, iter([batch]), halting="max", draw=draw, watch=add):
        pass
    return Thoughts(*(np.stack(column, axis=1) for column in zip(*steps, strict=True)))


def read_thoughts(model: HaltingModel, prediction: Prediction) -> Thoughts:
    """Returns the thoughts of one step: the arrays of `Thoughts` without their axis of steps."""
    tensors = (
        predicted_tokens(prediction.logits),
        prediction.logits.float().softmax(-1).amax(-1),
        prediction.q_halt.float(),
        model.wants_to_halt(prediction),
    )
    return Thoughts(*(tensor.cpu().numpy() for tensor in tensors))
