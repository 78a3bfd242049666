"""The Q head's halting, exploration, and targets of q_continue.

Q-learning as in section 2 of the HRM paper (arXiv 2506.21734): a slot halts when q_halt exceeds q_continue.
With `no_ACT_continue`, the simplification of TRM, a slot halts when q_halt > 0 (the answer is more likely
right than wrong), and no extra network call is needed for a target of q_continue.

q_target says where the target of q_continue comes from. exact: from an extra call for all slots, as
published. deferred: for slots that continue, from the next step's call; this trains only the Q head, because
the graph of the earlier step is gone. For slots that halt, from an extra call; on CUDA the host waits for the
number of these slots.
"""

import numpy as np
import torch
from torch import Tensor, nn

from models.carry import Carry, Prediction, Reasoning, State, StepOutput
from models.compilation import eager_blocks
from models.layers import Linear
from models.losses import ContinueTarget, TokenObjective
from models.random import Draws, draw_uniform

Q_HEAD_BIAS = -5.0  # initially, slots hardly halt


class QHead(Linear):
    """The output head for q_halt and q_continue, initially without a view.

    Reads the first position; with `reads_mean`, where that one sees few or no cells, the mean of all.
    """

    def __init__(self, width: int, *, reads_mean: bool):
        super().__init__(width, 2, bias=True)
        nn.init.zeros_(self.weight)
        nn.init.constant_(self.bias, Q_HEAD_BIAS)
        self.reads_mean = reads_mean

    def forward(self, z_H: Tensor) -> Tensor:
        """Returns q_halt and q_continue for a state: float32 [batch, 2]."""
        return super().forward(z_H.mean(dim=1) if self.reads_mean else z_H[:, 0]).float()


class QLearning(TokenObjective):
    """The halting and the Q targets of a network with a `q_head`. arch: has the keys of `RecursiveConfig`."""

    def draw(self, *, seed: int, step: int, batch_size: int, reasoning: Reasoning) -> dict[str, np.ndarray]:
        """Draws `min_steps`, int32 [batch_size]: a slot may not halt before this number of thinking steps.

        With probability halt_exploration_prob, the number is uniform in 2 to max_steps, otherwise 0.
        """
        if not self.arch.halt_exploration_prob or reasoning.max_steps == 1:
            return {}
        explores, amount = draw_uniform(seed=seed, step=step, count=2 * batch_size).reshape(2, batch_size)
        num_steps = 2 + np.floor(amount * (reasoning.max_steps - 1))
        min_steps = np.where(explores < self.arch.halt_exploration_prob, num_steps, 0)
        return {"min_steps": min_steps.astype(np.int32)}

    def wants_to_halt(self, state: State, prediction: Prediction) -> Tensor:
        return prediction.q_halt > (0 if self.arch.no_ACT_continue else prediction.q_continue)

    def halts(
        self, carry: Carry, prediction: Prediction, reasoning: Reasoning, draws: Draws | None
    ) -> Tensor:
        halted = super().halts(carry, prediction, reasoning, draws)
        if self.network.training and draws is not None and "min_steps" in draws.arrays:
            halted = halted & (carry.steps >= draws.arrays["min_steps"])
        return halted

    def continue_targets(
        self, before: Carry, output: StepOutput, reasoning: Reasoning, draws: Draws | None
    ) -> tuple[ContinueTarget, ...]:
        """Returns the training targets of q_continue in this step.

        exact: one for all slots. deferred: one for the last step's q_continue, one for slots that halt.
        """
        if reasoning.max_steps == 1 or self.arch.no_ACT_continue:
            return ()
        carry, prediction = output
        if self.arch.q_target == "exact":
            values = self._targets_by_a_call(carry, reasoning, draws)
            return (ContinueTarget(prediction.q_continue, values, torch.ones_like(carry.halted)),)
        went_on, stops = before.steps > 0, carry.halted.nonzero().flatten()
        best = torch.maximum(prediction.q_halt, prediction.q_continue).detach()
        earlier = self.network.q_head(before.state["z_H"])[:, 1]
        targets = [ContinueTarget(earlier, torch.sigmoid(best), went_on)]
        if len(stops):
            values, draws = torch.zeros_like(best), None if draws is None else draws[stops]
            with eager_blocks():
                values[stops] = self._targets_by_a_call(carry.select(stops), reasoning, draws)
            targets.append(ContinueTarget(prediction.q_continue, values, carry.halted))
        return tuple(targets)

    def more_calls(self, reasoning: Reasoning) -> float:
        if self.arch.no_ACT_continue or reasoning.max_steps == 1:
            return 0
        return 1 if self.arch.q_target == "exact" else 1 / reasoning.max_steps

    @torch.no_grad()
    def _targets_by_a_call(self, carry: Carry, reasoning: Reasoning, draws: Draws | None) -> Tensor:
        """Returns the target of q_continue: sigmoid of max(q_halt, q_continue) after one more call.

        After the last step, uses q_halt alone (arXiv 2407.04811). The call has the same noise as this step.
        """
        data = carry.data
        _, following = self.network(
            carry.state, data.inputs, data.puzzle_identifiers, reasoning=reasoning, draws=draws
        )
        best = torch.maximum(following.q_halt, following.q_continue)
        return torch.sigmoid(torch.where(carry.steps >= reasoning.max_steps, following.q_halt, best))
