"""The gradients of all ranks, summed, in one flat buffer.

Every `p.grad` is a view of the buffer, so that the exchange is one all-reduce without copies. The loss is
scaled by 1 / global batch before the backward pass: gradients are summed, never averaged.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from parallel.collectives import all_reduce_sum_


class GradientSync:
    """Owns the gradients of `parameters` (one dtype, one device; equal on all ranks)."""

    def __init__(self, parameters: Iterable[Tensor]):
        self._parameters = list(parameters)
        first = self._parameters[0]
        self._buffer = torch.zeros(
            sum(p.numel() for p in self._parameters), dtype=first.dtype, device=first.device
        )
        views = self._buffer.split([p.numel() for p in self._parameters])
        self._views = [view.view_as(p) for view, p in zip(views, self._parameters, strict=True)]
        for parameter, view in zip(self._parameters, self._views, strict=True):
            parameter.grad = view

    def zero(self) -> None:
        """Zeroes the buffer before a backward pass and keeps the views.

        `p.grad = None` would part them from it.
        """
        self._buffer.zero_()

    def all_reduce(self) -> None:
        """After the backward pass, on all ranks: sums the gradients over ranks, in place."""
        assert all(p.grad is view for p, view in zip(self._parameters, self._views, strict=True))
        all_reduce_sum_(self._buffer)
