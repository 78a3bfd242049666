"""Exponential moving averages (EMA) of the weights. By default, evaluations use the averages.

In every training step: average = rate * average + (1 - rate) * weight. The average starts as the initial
weights. After t steps, their coefficient is rate^t. With bias correction (as in Adam, arXiv 1412.6980,
section 3), it is 0.

`DenseAverage` averages all weights except puzzle embeddings. Every rank keeps the averages of a part of them.
After a step, the rank has the current float32 weights of this part. An update of averages therefore sends
nothing, and almost nothing is computed twice. Only `averaged` sends messages.

`RowAverage` averages the puzzle embeddings, the rows of `optimizers.puzzle_table`. A training step changes
only the few rows that it uses. So the average of a row is not computed in every step, but only when the row
is about to change, or when the average is read.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from config.schema import PretrainConfig
from distributed import log
from distributed.flat import FlatParameters, cut_evenly
from distributed.shards import Shard, Tensors, rows_of_rank, shard_of_rows
from distributed.world import is_main

if TYPE_CHECKING:
    from optimizers.puzzle_table import Replicated, RowsByOwner

_FEW = 5  # after 5 / (1 - rate) steps, less than 0.01 of the average are the initial weights


class Average:
    """A moving average (EMA) of weights. The methods of this base class do nothing, for runs without EMA."""

    def reset_to_weights(self) -> None:
        """Sets the averages to the current weights, as at the start of a run."""

    def update(self, steps: range) -> None:
        """Adds the current weights to the averages, once for each training step in `steps`.

        steps: Numbers of consecutive training steps, from 1. With local_steps=1, only the current step. If
        local_steps > 1, ranks train separately, and merge their weights every few steps. After a merge,
        `steps` contains all steps since the previous merge. After other steps, it is empty.
        """

    def before_change(self, identifiers: Tensor, *, step: int) -> None:
        """Brings the moving averages of some puzzle embeddings up to date before the embeddings change.

        The averages then include the current embeddings for all training steps before `step`.

        identifiers: Puzzle identifiers of the embeddings, int64 [n]. step: Training step, from 1, that will
        change the embeddings. With local_steps > 1, the first step since the last merge of the ranks.
        """

    @contextlib.contextmanager
    def averaged(self, *, step: int) -> Iterator[None]:
        """Context manager that replaces the weights of the model by their averages after step `step`.

        On exit, the weights are restored. All ranks enter it together.
        """
        yield

    def values(self, *, step: int) -> Tensors:
        """Returns the averages on this rank after step `step`: {name of the weight: tensor or shard}."""
        return {}

    def tensors(self) -> Tensors:
        """Returns the tensors of this object for a checkpoint, as {name: tensor or shard}.

        When a checkpoint is loaded, these tensors are overwritten in place.
        """
        return {}


class DenseAverage(Average):
    """The moving average (EMA) of all weights except puzzle embeddings, in float32.

    With several ranks, each rank holds the averages of a part of the weights: a range of positions in each
    flat tensor. The ranges have about equal length. Exception: in mixed precision, only the weights that the
    forward pass reads in bfloat16 are divided. Every rank holds the averages of all weights that stay
    float32. The averages are on the device of the weights.

    flats: Objects that each store the values of many weights in one tensor. rate: Factor of the old average
    in each step, close to 1. corrects_bias: If True, the initial weights have no influence on the average.
    """

    def __init__(self, *flats: FlatParameters, rate: float, corrects_bias: bool = False):
        self._flats, self._rate, self._corrects_bias = flats, rate, corrects_bias
        # For each flat tensor, a list with the range that rank 0, 1, ... averages. In mixed precision, a rank
        # averages only weights that it also updates. So the ranks that update the same range divide it.
        self._shards = []
        for flat in flats:
            shards = flat.update_shards if flat.is_mixed else [slice(0, flat.size)]
            num_copies = flat.ranks.size // len(shards)
            self._shards.append(
                [cut_evenly(shard, num_copies)[copy] for copy in range(num_copies) for shard in shards]
            )
        self._local_shards, self._averages = [], []
        for flat, shards in zip(flats, self._shards, strict=True):
            self._local_shards.append(shards[flat.ranks.index])
            self._averages.append(flat.zeros(flat.around(self._local_shards[-1])))
        self.reset_to_weights()

    def reset_to_weights(self) -> None:
        for averages, weights in self._pairs():
            averages.copy_(weights)

    @torch.no_grad()
    def update(self, steps: range) -> None:
        if not steps:
            return
        share = 1 - self._rate ** len(steps)
        if self._corrects_bias:
            share /= 1 - self._rate ** steps[-1]
        for averages, weights in self._pairs():
            averages.lerp_(weights, share)  # in one pass over memory

    # (averages, weights) of each range of the weights that this rank averages.
    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        for flat, shard_buffers in zip(self._flats, self._averages, strict=True):
            for part, averages in zip(shard_buffers.ranges, shard_buffers.buffers, strict=True):
                yield averages, flat.master_weights.at(part)

    @contextlib.contextmanager
    def averaged(self, *, step: int) -> Iterator[None]:
        parameters, averages = {}, {}
        for flat, shard_buffers, shards in zip(self._flats, self._averages, self._shards, strict=True):
            parameters |= flat.parameters
            averages |= flat.all_gather_views(shard_buffers, shards)
        raw = {name: parameter.data for name, parameter in parameters.items()}
        try:
            for name, parameter in parameters.items():
                parameter.data = averages[name]
            yield
        finally:
            for name, parameter in parameters.items():
                parameter.data = raw[name]

    def values(self, *, step: int = 0) -> Tensors:
        values: Tensors = {}
        for flat, shard_buffers, shard in zip(self._flats, self._averages, self._local_shards, strict=True):
            values |= flat.shards(shard_buffers, shard, divided_among=flat.ranks)
        return values

    def tensors(self) -> Tensors:
        return {f"average.{name}": average for name, average in self.values().items()}


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


def build_average(
    config: PretrainConfig, flats: Sequence[FlatParameters], *, total_steps: int | None
) -> Average:
    """Creates the moving average (EMA) of all weights except puzzle embeddings.

    If config.ema is None, the methods of the result do nothing. Warns if the average will still contain much
    of the initial weights when this launch ends. With ema_bias_correction=true, this cannot happen.

    flats: Objects that each store the values of many weights in one tensor, from `build_flats`. total_steps:
    Number of training steps of the run. If None, there is no warning.
    """
    if config.ema is None:
        return Average()
    if total_steps is not None and not config.ema_bias_correction:
        last_step = min(config.max_steps or total_steps, total_steps)
        warn_of_long_average(config.ema, num_steps=last_step)
    return DenseAverage(*flats, rate=config.ema, corrects_bias=config.ema_bias_correction)


def warn_of_long_average(rate: float, *, num_steps: int) -> None:
    """Warns on rank 0 if an average (EMA) still contains much of the initial weights after `num_steps` steps.

    This is so if num_steps < 5 / (1 - rate). Only for averages without bias correction. Example: A rate of
    0.999 averages over about 1000 steps. So there is a warning for fewer than 5000 steps.
    """
    if num_steps * (1 - rate) >= _FEW or not is_main():
        return
    log.warning(
        f"ema={rate:g} averages over about {1 / (1 - rate):.0f} steps, but this launch ends at step "
        f"{num_steps}. The initial weights still make up {rate**num_steps:.0%} of the average. Evaluation "
        "may understate the model. Lower ema, set ema_bias_correction=true, or compare with raw=true."
    )
