"""What a Q head decides and is trained on: halting, exploration, the targets of q_continue.

Section 2 of the HRM paper (arXiv 2506.21734), with Q-learning: a slot halts where q_halt exceeds q_continue.
With `no_ACT_continue`, TRM's simplification, a slot halts where its answer is rather right than wrong, and no
second network call is needed for a target of q_continue.

q_target: where the target comes from. `exact`: one more call for all slots, as published. `deferred`: for
slots that go on the next step's call gives the target, which trains the Q head alone, because the graph of
the step is gone by then; slots that stop get one more call. On CUDA the host
waits for their number, once a step.
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
    """The halting and the targets of a network with `q_values`; a base in front of `Network`."""

    def __init__(self, arch: TokenConfig, *more: Any, **options: Any):
        super().__init__(arch, *more, **options)
        self.no_ACT_continue, self.q_target = arch.no_ACT_continue, arch.q_target

    def draw(self, *, seed: int, step: int, batch_size: int, reasoning: Reasoning) -> dict[str, np.ndarray]:
        """Draws the exploration, int32 `min_steps` [batch_size]: steps below which a slot may not halt early.

        With halt_exploration_prob the number is uniform in 2..max_steps, else 0.
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
        """Computes the targets of this step; deferred, of the step before and of slots that stop here."""
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
        """Counts as `Network`; a slot with q_target=deferred stops after max_steps, not before."""
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
        """Computes the value of going on: the better Q of one more call (arXiv 2407.04811).

        After the last step it is the halting one. The call has the noise of the step's own.
        """
        data = carry.data
        _, following = self(
            carry.state, data.inputs, data.puzzle_identifiers, reasoning=reasoning, draws=draws
        )
        best = torch.maximum(following.q_halt, following.q_continue)
        return torch.sigmoid(torch.where(carry.steps >= reasoning.max_steps, following.q_halt, best))
