"""The exponential moving average (EMA) of everything that is trained: steadier weights, for evaluation.

After every step: average = rate * average + (1 - rate) * value. It begins with the initial weights, of which
rate^t are left after t steps; with bias correction (Adam's, arXiv 1412.6980, section 3) none. Of the puzzle
table a step changes a few rows, so only those are worked on: while
a row stands still for n steps, its average closes in on it by rate^n, at once, when it is next touched or
read. Invariant: reading changes nothing, so that a run has the same bits however often it was saved or
evaluated.

Every rank has all weights after a step, and keeps its share of the averages: a range of the flat buffer, and
the rows of the table that it owns. So nothing is exchanged but where the averages are used, and nothing is
computed twice.
"""

import contextlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from models.network import Network
from parallel import log
from parallel.flat import FlatParameters
from parallel.process_group import rank, world_size
from parallel.shards import Slice, all_gather_owned_rows, owned_rows, spread

_TABLE = "puzzle_emb.weights"
_FEW = 5  # times as many steps: then less than 0.01 of the initial weights are left


class EMA:
    """The averages of a network's parameters and of its puzzle table, beginning as they are now.

    flat: the network's parameters. rate: below 1, close to it. corrects_bias: whether the initial weights are
    left out. num_rows: of the puzzle table, where the network has but those that this rank owns; None: all
    are there. Kept on the device of the weights, float32.
    """

    def __init__(
        self,
        network: Network,
        flat: FlatParameters,
        *,
        rate: float,
        corrects_bias: bool = False,
        num_rows: int | None = None,
    ):
        self._flat, self._rate, self._corrects_bias = flat, rate, corrects_bias
        self._padded = flat.weights.new_zeros(flat.share_size)
        self._averages = self._padded[: flat.share.stop - flat.share.start]
        self._table = None if network.puzzle_emb is None else network.puzzle_emb.weights
        if self._table is not None:
            self._has_all_rows = num_rows is None
            self._shape = (num_rows or len(self._table), self._table.shape[1])  # of the whole table
            self._owned = owned_rows(self._shape[0])
            here = self._owned if self._has_all_rows else range(len(self._table))
            self._weights = self._table[here.start :: here.step]  # a view
            # One more is for rows of other ranks: to leave these out, the host would have to wait for a GPU.
            num_kept = len(self._owned) + 1
            self._rows = self._table.new_zeros(num_kept, self._shape[1])  # row i after step _steps[i]
            self._steps = torch.zeros(num_kept, dtype=torch.int32, device=self._table.device)
        self.restart()

    def restart(self) -> None:
        """Begins anew with the weights as they are now, at step 0."""
        self._averages.copy_(self._flat.weights[self._flat.share])
        if self._table is not None:
            self._rows[:-1].copy_(self._weights)
            self._steps.zero_()

    @torch.no_grad()
    def before_rows_change(self, identifiers: Tensor, *, step: int) -> None:
        """Catches up on the rows that step `step` (from 1) is about to change: int64 [n], repeats allowed.

        A second call for the same step changes nothing.
        """
        if not self._owned:
            return
        is_owned, places = identifiers % world_size() == rank(), identifiers // world_size()
        caught_up = self._caught_up(torch.where(is_owned, places, 0), step=step - 1)
        places = torch.where(is_owned, places, len(self._owned))
        self._rows[places] = caught_up
        self._steps[places] = step - 1

    @torch.no_grad()
    def update(self, *, step: int, num_steps: int = 1) -> None:
        """Takes in the weights, in one pass over memory; called after every step, `step` counting from 1.

        num_steps: since the last call, where it was not after every step: the weights count for all of them.
        """
        share = 1 - self._rate**num_steps
        if self._corrects_bias:
            share /= 1 - self._rate**step
        self._averages.lerp_(self._flat.weights[self._flat.share], share)

    @torch.no_grad()
    def values(self, *, step: int) -> dict[str, Tensor | Slice]:
        """Returns what this rank keeps of the averages after step `step`, by the weights' names.

        The table's is computed anew.
        """
        values = self._flat.slices(self._averages, begin=self._flat.share.start)
        if self._table is not None:
            rows = self._caught_up(slice(len(self._owned)), step=step)
            values[_TABLE] = spread(rows, self._owned, self._shape)
        return values

    @torch.no_grad()
    def all_gather_values(self, *, step: int) -> dict[str, Tensor]:
        """Returns the averages of what the network has, after step `step`, by name; all ranks call it."""
        values = self._flat.views(self._flat.all_gather_shares(self._padded))
        if self._table is not None:
            rows = self._caught_up(slice(len(self._owned)), step=step)
            values[_TABLE] = all_gather_owned_rows(rows, self._shape[0]) if self._has_all_rows else rows
        return values

    @contextlib.contextmanager
    def swapped_in(self, *, step: int) -> Iterator[None]:
        """Puts the averages in the place of the network's weights; all ranks enter it together.

        Copies the table, and what other ranks keep.
        """
        averages = self.all_gather_values(step=step)
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

    def state(self) -> dict[str, Tensor | Slice]:
        """Returns all that this rank keeps, to be saved, or to be overwritten with what was saved."""
        averages = self._flat.slices(self._averages, begin=self._flat.share.start)
        state = {f"average.{name}": average for name, average in averages.items()}
        if self._table is not None:
            for name, tensor in (("rows", self._rows[:-1]), ("steps", self._steps[:-1])):
                shape = (self._shape[0], *tensor.shape[1:])
                state[f"table.{name}"] = spread(tensor, self._owned, shape)
        return state

    def _caught_up(self, rows: Tensor | slice, *, step: int) -> Tensor:
        """Returns owned rows of the table's average after `step`; they stood still since their own step."""
        since = self._steps[rows].unsqueeze(1)
        now, remaining = self._weights[rows], self._rate ** (step - since)
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
