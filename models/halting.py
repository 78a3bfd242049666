"""The model: a network with the carry of slots, which work on a puzzle for several steps until they halt.

Random numbers come from `Draws`, which has separate ones for each slot, and not from torch: so results do not
depend on the number of processes.
"""

import torch
from torch import Tensor, nn

from dataset.loader import Batch
from models.carry import Carry, Reasoning, StepOutput, where
from models.network import Network
from models.random import Draws


class HaltingModel(nn.Module):
    """The model of a run: calls the network once per step on every slot, and refills halted slots.

    reasoning, eval_reasoning: the architecture's settings of thinking steps in training and in evaluation.
    """

    def __init__(self, network: Network, *, reasoning: Reasoning, eval_reasoning: Reasoning):
        super().__init__()
        self.network, self.reasoning, self.eval_reasoning = network, reasoning, eval_reasoning

    def initial_carry(self, batch: Batch) -> Carry:
        """Returns a carry with as many slots as `batch`, all halted, so that `refill` starts every slot."""
        steps = torch.zeros(len(batch.rows), dtype=torch.int32, device=batch.inputs.device)
        state = self.network.start(batch, self.reasoning, None, steps == 0)
        return Carry(state, steps, steps == 0, batch)

    def blank_carry(self, num_slots: int, *, seq_len: int, device: torch.device) -> Carry:
        """Returns the carry of a run's step 0, all slots halted; a checkpoint can be loaded into it."""
        tokens = torch.zeros(num_slots, seq_len, dtype=torch.int32, device=device)
        rows = torch.zeros(num_slots, dtype=torch.int64, device=device)
        boards = self.network.objective.boards_per_slot
        tensors = self.initial_carry(Batch(tokens, tokens, rows.int(), rows)).tensors()
        if boards > 1:
            tensors = {k: t[:, None].expand(-1, boards, *t.shape[1:]) for k, t in tensors.items()}
        # A checkpoint is loaded into these tensors: expanded ones, in which slots share memory, will not do.
        return Carry.from_tensors({name: each.contiguous().clone() for name, each in tensors.items()})

    @torch.no_grad()
    def refill(self, carry: Carry, batch: Batch, reasoning: Reasoning, draws: Draws | None = None) -> Carry:
        """Returns the boards that a step works on: halted slots start on their row of `batch`, others go on.

        Returns new tensors. If slots hold several boards in training, `draws` picks one board of each. Each
        row of the result depends only on the same row of the arguments.
        """
        boards = carry.boards(self._picked(draws))
        data = Batch(*(where(boards.halted, new, old) for new, old in zip(batch, boards.data, strict=True)))
        fresh = self.network.start(data, reasoning, draws, boards.halted)
        state = {name: where(boards.halted, fresh[name], old) for name, old in boards.state.items()}
        steps = torch.where(boards.halted, 0, boards.steps)
        return Carry(state, steps, torch.zeros_like(boards.halted), data)

    def forward(self, carry: Carry, reasoning: Reasoning, draws: Draws | None = None) -> StepOutput:
        """Runs one thinking step. carry: from `refill`; in evaluation also the result of the last call."""
        data = carry.data
        state, prediction = self.network(
            carry.state, data.inputs, data.puzzle_identifiers, reasoning=reasoning, draws=draws
        )
        after = Carry(state, carry.steps + 1, carry.halted, data)
        with torch.no_grad():
            halted = self.network.objective.halts(after, prediction, reasoning, draws)
        return StepOutput(after._replace(halted=halted), prediction)

    def put_back(self, carry: Carry, boards: Carry, draws: Draws) -> Carry:
        """Puts the boards of a training step back into their slots. draws: the same that `refill` had."""
        return carry.with_boards_(self._picked(draws), boards)

    def _picked(self, draws: Draws | None) -> Tensor | None:
        """Draws which board of each slot a step works on: int64 [batch]; None if slots have one board."""
        boards = self.network.objective.boards_per_slot if self.training else 1
        return None if boards == 1 else draws.integers((), below=boards, use="picked board")
