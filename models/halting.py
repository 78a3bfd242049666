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

    def initial_carry(self, batch: Batch) -> Carry:
        """Returns the carry of halted slots: `refill` puts `batch` into every one of them."""
        steps = torch.zeros(len(batch.rows), dtype=torch.int32, device=batch.inputs.device)
        state = self.network.start(batch, self.reasoning, None, steps == 0)
        return Carry(state, steps, steps == 0, batch)

    def blank_carry(self, num_slots: int, *, seq_len: int, device: torch.device) -> Carry:
        """Returns the carry before the first step, which replaces it: only shapes and dtypes matter."""
        tokens = torch.zeros(num_slots, seq_len, dtype=torch.int32, device=device)
        rows, boards = torch.zeros(num_slots, dtype=torch.int64, device=device), self.network.boards_per_slot
        tensors = self.initial_carry(Batch(tokens, tokens, rows.int(), rows)).tensors()
        if boards > 1:
            tensors = {k: t[:, None].expand(-1, boards, *t.shape[1:]) for k, t in tensors.items()}
        # A checkpoint is read into them, so that no two slots may share their memory.
        return Carry.from_tensors({name: each.contiguous().clone() for name, each in tensors.items()})

    @torch.no_grad()
    def refill(self, carry: Carry, batch: Batch, reasoning: Reasoning, draws: Draws | None = None) -> Carry:
        """Returns the boards that a step works on, one of each slot; halted slots get their row of `batch`.

        Slots are independent of each other: a slice of them gives a slice of the result.
        """
        boards = carry.boards(self._picked(draws))
        data = Batch(*(where(boards.halted, new, old) for new, old in zip(batch, boards.data, strict=True)))
        fresh = self.network.start(data, reasoning, draws, boards.halted)
        state = {name: where(boards.halted, fresh[name], old) for name, old in boards.state.items()}
        steps = torch.where(boards.halted, 0, boards.steps)
        return Carry(state, steps, torch.zeros_like(boards.halted), data)

    @torch.no_grad()
    def advance(self, carry: Carry, reasoning: Reasoning, draws: Draws) -> tuple[Carry, Sums]:
        """Lets the network `advance` the boards of the last training step; returns sums of that too.

        In eval mode, with the weights after that step's update. reasoning, draws: of that step.
        """
        picked, was_training = self._picked(draws), self.training
        boards, sums = self.eval().network.advance(carry.boards(picked), reasoning, draws)
        self.train(was_training)
        return carry.with_boards_(picked, boards), sums

    def forward(self, carry: Carry, reasoning: Reasoning, draws: Draws | None = None) -> StepOutput:
        """Runs one step. carry: from `refill` in training, from the last call in evaluation."""
        data = carry.data
        state, prediction = self.network(
            carry.state, data.inputs, data.puzzle_identifiers, reasoning=reasoning, draws=draws
        )
        after = Carry(state, carry.steps + 1, carry.halted, data)
        with torch.no_grad():
            halted = self.network.halts(after, prediction, reasoning, draws)
        return StepOutput(after._replace(halted=halted), prediction)

    def put_back(self, carry: Carry, boards: Carry, draws: Draws) -> Carry:
        """Returns the carry with the boards of a training step as the step left them."""
        return carry.with_boards_(self._picked(draws), boards)

    def _picked(self, draws: Draws | None) -> Tensor | None:
        """Draws which board of each slot a step works on: int64 [batch]; None where a slot has but one."""
        boards = self.network.boards_per_slot if self.training else 1
        return None if boards == 1 else draws.integers((), below=boards, use="picked board")
