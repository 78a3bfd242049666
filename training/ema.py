"""The exponential moving average (EMA) of everything that is trained: steadier weights, for evaluation.

After every step: average = rate * average + (1 - rate) * value. It begins with the initial weights, of which
rate^t are left after t steps; with bias correction (Adam's, arXiv 1412.6980, section 3) none. Of the puzzle
table a step changes a few rows, so only those are worked on: while
a row stands still for n steps, its average closes in on it by rate^n, at once, when it is next touched or
read. Invariant: reading changes nothing, so that a run has the same bits however often it was saved or
evaluated.
"""

import contextlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from models.network import Network
from parallel import log
from parallel.flat import FlatParameters

_TABLE = "puzzle_emb.weights"
_FEW = 5  # times as many steps: then less than 0.01 of the initial weights are left


class EMA:
    """The averages of a network's parameters and of its puzzle table, beginning as they are now.

    flat: the network's parameters. rate: below 1, close to it. corrects_bias: whether the initial weights are
    left out. Kept on the device of the weights, float32.
    """

    def __init__(self, network: Network, flat: FlatParameters, *, rate: float, corrects_bias: bool = False):
        self._flat, self._rate, self._corrects_bias = flat, rate, corrects_bias
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
        """Catches up on the rows that step `step` (from 1) is about to change: int64 [n], repeats allowed.

        A second call for the same step changes nothing.
        """
        self._rows[identifiers] = self._caught_up(identifiers, step=step - 1)
        self._steps[identifiers] = step - 1

    @torch.no_grad()
    def update(self, *, step: int, num_steps: int = 1) -> None:
        """Takes in the weights, in one pass over memory; called after every step, `step` counting from 1.

        num_steps: since the last call, where it was not after every step: the weights count for all of them.
        """
        share = 1 - self._rate**num_steps
        if self._corrects_bias:
            share /= 1 - self._rate**step
        self._flat_averages.lerp_(self._flat.weights, share)

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
        since = self._steps[rows].unsqueeze(1)
        now, remaining = self._table[rows], self._rate ** (step - since)
        if self._corrects_bias and step:
            decay = math.log(self._rate)
            remaining *= torch.expm1(since * decay) / math.expm1(step * decay)
        caught_up = now + (self._rows[rows] - now) * remaining
        return torch.where(since == step, self._rows[rows], caught_up)  # exact, however often it is asked


def warn_of_long_average(rate: float, *, num_steps: int, corrects_bias: bool) -> None:
    """Warns where the 1 / (1 - rate) steps of an average are not few against those of the run."""
    if num_steps * (1 - rate) >= _FEW:
        return
    held = "" if corrects_bias else f", and {rate**num_steps:.2f} of it are the initial weights"
    advice = "" if corrects_bias else " or ema_bias_correction=true"
    log.warning(
        f"ema={rate:g} averages over {1 / (1 - rate):.0f} steps, but the run has {num_steps}{held}: "
        f"evaluation may say less than the weights can do (raw=true tells); a lower ema{advice} mends it"
    )
