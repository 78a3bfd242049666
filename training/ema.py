"""The exponential moving average (EMA) of everything that is trained: steadier weights, for evaluation.

After every step: average = rate * average + (1 - rate) * value. Of the puzzle table a step changes a few
rows, so only those are worked on: while a row stands still for n steps, its average closes in on it by
rate^n, at once, when it is next touched or read. Invariant: reading changes nothing, so that a run has the
same bits however often it was saved or evaluated.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from models.network import Network
from parallel.flat import FlatParameters

_TABLE = "puzzle_emb.weights"


class EMA:
    """The averages of a network's parameters and of its puzzle table, beginning as they are now.

    flat: the network's parameters. rate: below 1, close to it. Kept on the device of the weights, float32.
    """

    def __init__(self, network: Network, flat: FlatParameters, *, rate: float):
        self._flat, self._rate = flat, rate
        self._flat_averages = torch.zeros_like(flat.weights)
        self._averages = flat.views(self._flat_averages)
        self._table = None if network.puzzle_emb is None else network.puzzle_emb.weights
        if self._table is not None:
            self._rows = torch.empty_like(self._table)  # the average of row r after step self._steps[r]
            self._steps = torch.empty(len(self._table), dtype=torch.int32, device=self._table.device)
        self.restart()

    def restart(self) -> None:
        """Begins anew with the weights as they are now, at step 0."""
        self._flat_averages.copy_(self._flat.weights)
        if self._table is not None:
            self._rows.copy_(self._table)
            self._steps.zero_()

    @torch.no_grad()
    def before_rows_change(self, identifiers: Tensor, *, step: int) -> None:
        """Catches up on the rows that step `step` (from 1) is about to change: int64 [n], repeats allowed."""
        self._rows[identifiers] = self._caught_up(identifiers, step=step - 1)
        self._steps[identifiers] = step - 1

    @torch.no_grad()
    def update(self) -> None:
        """Takes in the weights, in one pass over memory; called after every step."""
        self._flat_averages.lerp_(self._flat.weights, 1 - self._rate)

    @torch.no_grad()
    def values(self, *, step: int) -> dict[str, Tensor]:
        """Returns the averages after step `step` by the weights' names; the table's is computed anew."""
        values = dict(self._averages)
        if self._table is not None:
            values[_TABLE] = self._caught_up(slice(None), step=step)
        return values

    @contextlib.contextmanager
    def swapped_in(self, *, step: int) -> Iterator[None]:
        """Puts the averages in the place of the network's weights; copies nothing but the table."""
        averages = self.values(step=step)
        tensors: dict[str, Tensor] = dict(self._flat.parameters)
        if self._table is not None:
            tensors[_TABLE] = self._table
        raw = {name: tensor.data for name, tensor in tensors.items()}
        try:
            for name, tensor in tensors.items():
                tensor.data = averages[name]
            yield
        finally:
            for name, tensor in tensors.items():
                tensor.data = raw[name]

    def state(self) -> dict[str, Tensor]:
        """Returns every tensor that is kept, to be saved, or to be overwritten with what was saved."""
        state = {f"average.{name}": average for name, average in self._averages.items()}
        if self._table is not None:
            state |= {"table.rows": self._rows, "table.steps": self._steps}
        return state

    def _caught_up(self, rows: Tensor | slice, *, step: int) -> Tensor:
        """Returns rows of the table's average after `step`; the weights stood still since their own step."""
        gaps = (step - self._steps[rows]).unsqueeze(1)
        now = self._table[rows]
        return now + (self._rows[rows] - now) * self._rate**gaps
