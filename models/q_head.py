"""The Q head's halting, exploration, and targets of q_continue.

Q-learning as in section 2 of the HRM paper (arXiv 2506.21734): a slot halts when q_halt exceeds q_continue.
With `no_ACT_continue`, the simplification of TRM, a slot halts when q_halt > 0 (the answer is more likely
right than wrong), and no extra network call is needed for a target of q_continue.

q_target says where the target of q_continue comes from. exact: from an extra call for all slots, as
published. deferred: for slots that continue, from the next step's call; this trains only the Q head, because
the graph of the earlier step is gone. For slots that halt, from an extra call; on CUDA the host waits for the
number of these slots.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from config.architecture import TokenConfig
from models.carry import Carry, Prediction, Reasoning, State, StepOutput
from models.compilation import eager_blocks
from models.flops import flops
from models.losses import ContinueTarget, TokenLosses
from models.random import Draws, draw_uniform


class QHead(TokenLosses):
    """The halting and the Q targets of a network with a method `q_values`. Inherit it before `Network`."""

    def __init__(self, arch: TokenConfig, *more: Any, **options: Any):
        super().__init__(arch, *more, **options)
        self.no_ACT_continue, self.q_target = arch.no_ACT_continue, arch.q_target

    def draw(self, *, seed: int, step: int, batch_size: int, reasoning: Reasoning) -> dict[str, np.ndarray]:
        """Draws `min_steps`, int32 [batch_size]: a slot may not halt before this number of thinking steps.

        With probability halt_exploration_prob, the number is uniform in 2 to max_steps, otherwise 0.
        """
        if not self.halt_exploration_prob or reasoning.max_steps == 1:
            return {}
        explores, amount = draw_uniform(seed=seed, step=step, count=2 * batch_size).reshape(2, batch_size)
        num_steps = 2 + np.floor(amount * (reasoning.max_steps - 1))
        min_steps = np.where(explores < self.halt_exploration_prob, num_steps, 0)
        return {"min_steps": min_steps.astype(np.int32)}

    def wants_to_halt(self, state: State, prediction: Prediction) -> Tensor:
        return prediction.q_halt > (0 if self.no_ACT_continue else prediction.q_continue)

    def halts(
        self, carry: Carry, prediction: Prediction, reasoning: Reasoning, draws: Draws | None
    ) -> Tensor:
        halted = super().halts(carry, prediction, reasoning, draws)
        if self.training and draws is not None and "min_steps" in draws.arrays:
            halted = halted & (carry.steps >= draws.arrays["min_steps"])
        return halted

    def continue_targets(
        self, before: Carry, output: StepOutput, reasoning: Reasoning, draws: Draws | None
    ) -> tuple[ContinueTarget, ...]:
        """Returns the training targets of q_continue in this step.

        exact: one for all slots. deferred: one for the last step's q_continue, one for slots that halt.
        """
        if reasoning.max_steps == 1 or self.no_ACT_continue:
            return ()
        carry, prediction = output
        if self.q_target == "exact":
            values = self._targets_by_a_call(carry, reasoning, draws)
            return (ContinueTarget(prediction.q_continue, values, torch.ones_like(carry.halted)),)
        went_on, stops = before.steps > 0, carry.halted.nonzero().flatten()
        best = torch.maximum(prediction.q_halt, prediction.q_continue).detach()
        earlier = self.q_values(before.state["z_H"])[:, 1]
        targets = [ContinueTarget(earlier, torch.sigmoid(best), went_on)]
        if len(stops):
            values, draws = torch.zeros_like(best), None if draws is None else draws[stops]
            with eager_blocks():
                values[stops] = self._targets_by_a_call(carry.select(stops), reasoning, draws)
            targets.append(ContinueTarget(prediction.q_continue, values, carry.halted))
        return tuple(targets)

    def step_flops(self, reasoning: Reasoning, *, seq_len: int, trains: bool = False) -> float:
        """Counts the operations of a step, with the extra calls for Q targets (deferred: estimated)."""
        once = super().step_flops(reasoning, seq_len=seq_len, trains=trains)
        if not trains or self.no_ACT_continue or reasoning.max_steps == 1:
            return once
        more = super().step_flops(reasoning, seq_len=seq_len)
        if self.q_target == "exact":
            return once + more
        of_earlier = [flops(self.q_head, (1, self.hidden_size), trains=each) for each in (True, False)]
        return once + more / reasoning.max_steps + of_earlier[0] - of_earlier[1]

    @torch.no_grad()
    def _targets_by_a_call(self, carry: Carry, reasoning: Reasoning, draws: Draws | None) -> Tensor:
        """Returns the target of q_continue: sigmoid of max(q_halt, q_continue) after one more call.

        After the last step, uses q_halt alone (arXiv 2407.04811). The call has the same noise as this step.
        """
        data = carry.data
        _, following = self(
            carry.state, data.inputs, data.puzzle_identifiers, reasoning=reasoning, draws=draws
        )
        best = torch.maximum(following.q_halt, following.q_continue)
        return torch.sigmoid(torch.where(carry.steps >= reasoning.max_steps, following.q_halt, best))
