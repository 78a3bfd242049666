"""Slots that work on their puzzle over several steps, until they halt, as the network says.

Nothing here draws: what is random comes in as `Draws`, each slot's own, so that a run does not depend on the
number of processes.
"""

import torch
from torch import Tensor, nn

from dataset.loader import Batch
from models.carry import Carry, Reasoning, StepOutput, Sums, where
from models.network import Network
from models.random import Draws


class HaltingModel(nn.Module):
    """A network that is called once per step on every slot.

    reasoning, eval_reasoning: as the architecture has it, in training and in evaluation.
    """

    def __init__(self, network: Network, *, reasoning: Reasoning, eval_reasoning: Reasoning):
        super().__init__()
        self.network, self.reasoning, self.eval_reasoning = network, reasoning, eval_reasoning

    def initial_carry(self, batch: Batch, *, boards: int = 1) -> Carry:
        """Returns the carry of halted slots: `begin` puts `batch` into every one of them."""
        steps = torch.zeros(len(batch.rows), dtype=torch.int32, device=batch.inputs.device)
        state = self.network.start(batch, self.reasoning, None, steps == 0)
        carry = Carry(state, steps, steps == 0, batch)
        if boards == 1:
            return carry
        tensors = {k: t[:, None].repeat(1, boards, *[1] * (t.ndim - 1)) for k, t in carry.tensors().items()}
        return Carry.from_tensors(tensors)

    @torch.no_grad()
    def begin(
        self,
        carry: Carry,
        batch: Batch,
        reasoning: Reasoning,
        draws: Draws | None = None,
        last: tuple[Reasoning, Draws] | None = None,
    ) -> tuple[Carry, Sums]:
        """Returns the boards that this step is called with, one of each slot, and the sums of `advance`.

        Calls `advance` on the last step's boards, in eval mode, with the updated weights. Of the boards that
        are picked now, halted ones start on their row of `batch`. draws: of this step; last: of the step
        before, None in the first one. A carry of several boards a slot is changed in place. Slots are
        independent of each other: a slice of them gives a slice of the result.
        """
        sums: Sums = {}
        if last is not None and self.network.advances:
            was_training, picked = self.training, self._picked(last[1])
            moved, sums = self.eval().network.advance(carry.boards(picked), *last)
            self.train(was_training)
            carry = carry.with_boards_(picked, moved)
        here = carry.boards(self._picked(draws))
        data = Batch(*(where(here.halted, new, old) for new, old in zip(batch, here.data, strict=True)))
        fresh = self.network.start(data, reasoning, draws, here.halted)
        state = {name: where(here.halted, fresh[name], old) for name, old in here.state.items()}
        steps = torch.where(here.halted, 0, here.steps)
        return Carry(state, steps, torch.zeros_like(here.halted), data), sums

    def forward(self, carry: Carry, reasoning: Reasoning, draws: Draws | None = None) -> StepOutput:
        """Runs one step of what `begin` returned, or in evaluation the step before."""
        data = carry.data
        state, prediction = self.network(
            carry.state, data.inputs, data.puzzle_identifiers, reasoning=reasoning, draws=draws
        )
        after = Carry(state, carry.steps + 1, carry.halted, data)
        with torch.no_grad():
            halted = self.network.halts(after, prediction, reasoning, draws)
        return StepOutput(after._replace(halted=halted), prediction)

    def end(self, carry: Carry, after: Carry, draws: Draws) -> Carry:
        """Returns the carry with what a step of training made of its boards."""
        return carry.with_boards_(self._picked(draws), after)

    def _picked(self, draws: Draws | None) -> Tensor | None:
        """Draws which board of each slot a step works on: int64 [batch]; None where a slot has but one."""
        boards = self.network.boards_per_slot if self.training else 1
        return None if boards == 1 else draws.integers((), below=boards, use="picked board")
