"""Exponential moving average (EMA) of the puzzle embeddings, the rows of `optimizers.puzzle_table`.

In every training step: average = rate * average + (1 - rate) * row. But a training step changes only the few
rows that it uses. So the average of a row is not computed in every step, but only when the row is about to
change, or when the average is read.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from distributed.shards import Shard, Tensors, rows_of_rank, shard_of_rows
from optimizers.average import Average

if TYPE_CHECKING:
    from optimizers.puzzle_table import Replicated, RowsByOwner


class RowAverage(Average):
    """The moving average (EMA) of the puzzle embeddings. Each rank averages some of the embeddings.

    Without bias correction, each step multiplies the difference between the average and an unchanged
    embedding by `rate`. n steps multiply the difference by rate^n, which is computed in one operation.

    rate: Factor of the old average in each step, close to 1.
    corrects_bias: If True, the bias is corrected as in Adam: the initial embeddings have no influence on the
        average. The factor of the old average is then 0 in step 1, and rises toward `rate` in later steps.
    """

    def __init__(self, table: Replicated | RowsByOwner, *, rate: float, corrects_bias: bool):
        self._table, self._weights, self._ranks = table, table.owned_weights(), table.ranks
        self._rate, self._corrects_bias = rate, corrects_bias
        self._owned = rows_of_rank(table.num_rows, self._ranks.index, self._ranks.size)
        # Writes for rows of other ranks go to the extra row: a selection would make the host wait for a GPU.
        num_kept = len(self._owned) + 1
        # The average of row i after step _steps[i].
        self._rows = self._weights.new_zeros(num_kept, self._weights.shape[1])
        self._steps = torch.zeros(num_kept, dtype=torch.int32, device=self._weights.device)
        self.reset_to_weights()

    def reset_to_weights(self) -> None:
        self._rows[:-1].copy_(self._weights)
        self._steps.zero_()

    @torch.no_grad()
    def before_change(self, identifiers: Tensor, *, step: int) -> None:
        # A second call for the same step changes nothing. Rows that other ranks average are ignored.
        if not self._owned:
            return
        is_owned, rows = identifiers % self._ranks.size == self._ranks.index, identifiers // self._ranks.size
        caught_up = self._caught_up(torch.where(is_owned, rows, 0), step=step - 1)
        rows = torch.where(is_owned, rows, len(self._owned))
        self._rows[rows] = caught_up
        self._steps[rows] = step - 1

    @contextlib.contextmanager
    def averaged(self, *, step: int) -> Iterator[None]:
        embedding = self._table.embedding
        raw, averages = embedding.weights.data, self._caught_up(slice(len(self._owned)), step=step)
        try:
            embedding.weights.data = self._table.all_gather_owned(averages)
            yield
        finally:
            embedding.weights.data = raw

    def values(self, *, step: int) -> Tensors:
        return {self._table.name: self._shard(self._caught_up(slice(len(self._owned)), step=step))}

    def tensors(self) -> Tensors:
        tensors = {"table.rows": self._rows[:-1], "table.steps": self._steps[:-1]}
        return {name: self._shard(tensor) for name, tensor in tensors.items()}

    def _shard(self, tensor: Tensor) -> Tensor | Shard:
        return shard_of_rows(tensor, self._owned, self._table.num_rows, self._ranks)

    # The averages of some rows after training step `step`, [n, ndim]. The rows must not have changed since
    # their averages were stored. Nothing is stored here: the state of a run must not depend on when it was
    # saved or evaluated. rows: Row numbers among those that this rank averages.
    @torch.no_grad()
    def _caught_up(self, rows: Tensor | slice, *, step: int) -> Tensor:
        since = self._steps[rows].unsqueeze(1)
        now, remaining = self._weights[rows], self._rate ** (step - since)
        if self._corrects_bias and step:
            decay = math.log(self._rate)
            remaining *= torch.expm1(since * decay) / math.expm1(step * decay)
        caught_up = now + (self._rows[rows] - now) * remaining
        return torch.where(since == step, self._rows[rows], caught_up)  # the exact value for 0 steps
