"""Exponential moving average (EMA) of the dense weights. By default, evaluations use the averages.

In every training step: average = rate * average + (1 - rate) * weight. The average starts as the initial
weights. After t steps, their coefficient is rate^t. With bias correction (as in Adam, arXiv 1412.6980,
section 3), it is 0. Puzzle embeddings have another class (`optimizers.puzzle_table_average.RowAverage`).

Every rank keeps the averages of a part of the flat buffers. After a step, the rank has the current float32
weights of this part. An update of averages therefore sends nothing, and almost nothing is computed twice.
Only `averaged` sends messages.
"""

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from config.schema import PretrainConfig
from distributed import log
from distributed.flat import FlatParameters
from distributed.shards import Tensors
from distributed.world import is_main

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

    With several ranks, each rank holds only the averages of a part of the weights. The averages are on the
    device of the weights.

    flats: Objects that each store the values of many weights in one tensor. rate: Factor of the old average
    in each step, close to 1. corrects_bias: If True, the initial weights have no influence on the average.
    """

    def __init__(self, *flats: FlatParameters, rate: float, corrects_bias: bool = False):
        self._flats, self._rate, self._corrects_bias = flats, rate, corrects_bias
        self._shards = [flat.average_shards() for flat in flats]
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
            values |= flat.shards(shard_buffers, shard)
        return values

    def tensors(self) -> Tensors:
        return {f"average.{name}": average for name, average in self.values().items()}


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
