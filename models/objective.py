"""The objective of a network: what training makes small, what it measures, and when slots halt."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np
from torch import Tensor

from models.carry import Carry, Divisors, Metrics, Prediction, Reasoning, State, StepOutput, Sums
from models.random import Draws

if TYPE_CHECKING:
    from models.network import Network


class Objective:
    """The base of objectives. A subclass must have `losses` and `sums`.

    metrics          computed from the sums that `losses` and `sums` return (see `models.carry.Metrics`)
    training_metrics computed from the sums that `losses` returns, in training only
    boards_per_slot  number of puzzles in a slot in training; each step works on one of them
    """

    metrics: ClassVar[Metrics] = {}
    training_metrics: ClassVar[Metrics] = {}
    boards_per_slot: int = 1

    def __init__(self, network: Network):
        self.network = network

    def draw(self, *, seed: int, step: int, batch_size: int, reasoning: Reasoning) -> dict[str, np.ndarray]:
        """Draws {name: [batch_size, ...]} on the host: a row for each slot of a step's global batch."""
        return {}

    def divisors(self, carry: Carry) -> Sums:
        """Returns divisors of losses besides `slots`, known before the forward pass, to sum over ranks."""
        return {}

    def losses(
        self,
        before: Carry,
        output: StepOutput,
        *,
        divisors: Divisors,
        reasoning: Reasoning,
        draws: Draws | None,
    ) -> tuple[Tensor, Sums]:
        """Returns the loss summed over slots, to be divided by divisors["slots"], and sums of metrics.

        before, output: input and output of the thinking step. divisors: over the global batch. A term
        that is a mean over another number must be multiplied by divisors["slots"] / divisors[name].
        """
        raise NotImplementedError

    def sums(self, output: StepOutput) -> Sums:
        """Returns the metric sums of an evaluation, over slots with final answers."""
        raise NotImplementedError

    def more_calls(self, reasoning: Reasoning) -> float:
        """Returns how many more forward passes of the network a training step needs, in the mean."""
        return 0

    def wants_to_halt(self, state: State, prediction: Prediction) -> Tensor:
        """Returns which slots would halt now if they were free to: bool [batch]."""
        return prediction.q_halt > 0

    def halts(
        self, carry: Carry, prediction: Prediction, reasoning: Reasoning, draws: Draws | None
    ) -> Tensor:
        """Returns which slots halt after a step: bool [batch]. carry, prediction: results of the step."""
        halted = carry.steps >= reasoning.max_steps
        if reasoning.halts_early and reasoning.max_steps > 1:
            halted = halted | self.wants_to_halt(carry.state, prediction)
        return halted
