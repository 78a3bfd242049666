"""The exponential moving average (EMA) of the dense weights: steadier weights, for evaluation.

After every step: average = rate * average + (1 - rate) * value. It begins with the initial weights: their
share after t steps is rate^t, and 0 with bias correction (Adam's, arXiv 1412.6980, section 3). The average of
the puzzle table is its own (`optimizers.puzzle_table.RowAverage`).

Every rank keeps its share of the averages, a range of the flat buffers that it has the newest weights of. So
nothing is sent except where the averages are used, and hardly anything is computed twice.
"""

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from config.schema import PretrainConfig
from parallel import log
from parallel.flat import FlatParameters
from parallel.shards import Tensors

_FEW = 5  # times as many steps: then less than 0.01 of the initial weights are left


class NoAverage:
    """The absence of an average; and the interface of one."""

    def restart(self) -> None:
        """Begins anew with the weights as they are now, at step 0."""

    def update(self, steps: range) -> None:
        """Takes in the weights, which count for all of `steps`, from 1; there may be none."""

    def before_change(self, identifiers: Tensor, *, step: int) -> None:
        """Takes in rows of a puzzle table that step `step` (from 1) is about to change: int64 [n]."""

    @contextlib.contextmanager
    def averaged(self, *, step: int) -> Iterator[None]:
        """Replaces the weights by their averages after `step`; all ranks enter it together."""
        yield

    def values(self, *, step: int) -> Tensors:
        """Returns the averages after `step` that this rank keeps, by the weights' names."""
        return {}

    def tensors(self) -> Tensors:
        """Returns what this rank keeps, to be saved or overwritten."""
        return {}


class Average(NoAverage):
    """The averages of flat parameters, float32 on their device.

    rate: below 1, close to it. corrects_bias: whether the initial weights are left out.
    """

    def __init__(self, *flats: FlatParameters, rate: float, corrects_bias: bool = False):
        self._flats, self._rate, self._corrects_bias = flats, rate, corrects_bias
        self._shares = [flat.average_shares() for flat in flats]
        self._own = [shares[flat.ranks.index] for flat, shares in zip(flats, self._shares, strict=True)]
        self._averages = [flat.zeros(flat.around(own)) for flat, own in zip(flats, self._own, strict=True)]
        self.restart()

    def restart(self) -> None:
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

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields the averages of each range, and the weights there."""
        for flat, pieces in zip(self._flats, self._averages, strict=True):
            for each, averages in zip(pieces.ranges, pieces.buffers, strict=True):
                yield averages, flat.masters.at(each)

    @contextlib.contextmanager
    def averaged(self, *, step: int) -> Iterator[None]:
        parameters, averages = {}, {}
        for flat, pieces, shares in zip(self._flats, self._averages, self._shares, strict=True):
            parameters |= flat.parameters
            averages |= flat.all_gather_views(pieces, shares)
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
        for flat, pieces, own in zip(self._flats, self._averages, self._own, strict=True):
            values |= flat.shards(pieces, own)
        return values

    def tensors(self) -> Tensors:
        return {f"average.{name}": average for name, average in self.values().items()}


def build_average(
    config: PretrainConfig, flats: Sequence[FlatParameters], *, total_steps: int | None
) -> NoAverage | Average:
    """Builds the average of the config's `ema`. total_steps: of the run; None: not known."""
    if config.ema is None:
        return NoAverage()
    if total_steps is not None:
        last_step = min(config.max_steps or total_steps, total_steps)
        warn_of_long_average(config.ema, num_steps=last_step, corrects_bias=config.ema_bias_correction)
    return Average(*flats, rate=config.ema, corrects_bias=config.ema_bias_correction)


def warn_of_long_average(rate: float, *, num_steps: int, corrects_bias: bool) -> None:
    """Warns where an average spans 1 / (1 - rate) steps that are not few against num_steps of the run."""
    if num_steps * (1 - rate) >= _FEW:
        return
    held = "" if corrects_bias else f", and {rate**num_steps:.2f} of it are the initial weights"
    advice = "" if corrects_bias else " or ema_bias_correction=true"
    log.warning(
        f"ema={rate:g} averages over {1 / (1 - rate):.0f} steps, but the run has {num_steps}{held}: "
        f"evaluation may say less than the weights can do (raw=true tells); a lower ema{advice} mends it"
    )
