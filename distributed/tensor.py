"""Tensor parallelism (Megatron-LM, arXiv 1909.08053): each rank holds some heads and features of every block.

A `Plan` describes how ranks divide a layer. The layer's input is the same on all ranks. The forward pass sums
the layer's output over ranks, and the backward pass sums the gradient of the input. Weights stay plain
tensors, and fused matrices stay fused. Every rank holds the full weights outside of blocks.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from distributed.collectives import Ranks
from distributed.shards import Span, Spans


class _Copy(torch.autograd.Function):
    """Returns x. The backward pass sums the gradient of x over `ranks`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks.all_reduce_sum_(gradient.clone(memory_format=torch.contiguous_format)), None


class _Sum(torch.autograd.Function):
    """Sums its input over ranks in the forward pass. The backward pass is the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        return ranks.all_reduce_sum_(x.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Cut(NamedTuple):
    """Describes which part of a weight a rank holds in tensor parallelism.

    If the full weight is viewed as [outer, middle, rest], the rank holds [:, begin:end] of this view.
    Example: a weight [8, 6] has 6 input features. With outer=8, middle=6, begin=0 and end=3, the part is
    weight[:, 0:3].

    Attributes:
        shape: Shape of the full weight.
    """

    outer: int
    middle: int
    begin: int
    end: int
    shape: tuple[int, ...]

    def take(self, full: Tensor) -> Tensor:
        """Returns a copy of this rank's part of a tensor.

        Example: if this rank holds the first 3 of the 6 rows of a weight [6, 4], the result is a copy of
        full[0:3]. The `Cut` then has outer=1, middle=6, begin=0 and end=3.

        full: The full weight, or a tensor of its shape, such as its gradient.
        """
        shape, axis = list(self.shape), int(self.outer == self.shape[0])
        shape[axis] = shape[axis] * (self.end - self.begin) // self.middle
        return full.reshape(self.outer, self.middle, -1)[:, self.begin : self.end].reshape(shape).clone()

    def of(self, index: int, size: int) -> "Cut":
        """Returns the `Cut` that describes which part of the same weight rank `index` holds.

        The weight is viewed as [outer, middle, rest], and each rank holds an equal slice of the axis
        `middle`: begin is index * middle / size.

        index: Index of the rank in the group of ranks that divide the weight, from 0. size: Size of this
        group.
        """
        begin, end = (number * self.middle // size for number in (index, index + 1))
        return self._replace(begin=begin, end=end)

    def join(self, parts: list[Tensor]) -> Tensor:
        return torch.cat([part.reshape(self.outer, -1) for part in parts], dim=1).view(self.shape)

    def spans(self, part: slice) -> Spans:
        """Converts positions within this rank's part to positions within the full weight.

        Both tensors are flattened. Returns a tuple of `Span`, each of which describes equal pieces at equal
        distances. Example: rank 1 of 2 holds the last 3 rows of a weight [6, 4]. For slice(0, 12), the result
        is (Span(start=12, length=12),).

        part: Range of positions in the flattened part.
        """
        rest = math.prod(self.shape) // (self.outer * self.middle)
        length, stride, start = (self.end - self.begin) * rest, self.middle * rest, self.begin * rest
        spans, first = [], part.start
        while first < part.stop:
            number, offset = divmod(first, length)
            count = 0 if offset else (part.stop - first) // length
            size = min(length - offset, part.stop - first)
            spans.append(Span(start + number * stride + offset, size, stride, max(count, 1)))
            first += size * max(count, 1)
        return tuple(span if span.count > 1 else span._replace(stride=0) for span in spans)


class Plan(NamedTuple):
    """Describes how tensor parallelism divides the weights of one layer among ranks.

    The output of the layer is the sum of the outputs of all ranks.

    Attributes:
        weights: {name of a weight: (outer, middle)}. The weight is viewed as [outer, middle, rest], and ranks
            divide the middle axis. Example: (3, 8) for a fused weight of queries, keys and values with 8
            heads.
        reads_share: Whether the layer gets only this rank's part of the input features, instead of all of
            them.
    """

    weights: dict[str, tuple[int, int]]
    reads_share: bool = False


def cut_tensors(
    network: nn.Module, ranks: Ranks, plan_of: Callable[[nn.Module], Plan | None]
) -> dict[str, Cut]:
    """Applies tensor parallelism: replaces weights by the parts that this rank holds, in place.

    Returns {name of a replaced weight: its `Cut`}. Also adds hooks to each layer with a plan. In the forward
    pass, the hooks sum the output of the layer over ranks. In the backward pass, they sum the gradient of the
    input. A plan views a weight as [outer, middle, rest]. Raises ValueError if the number of ranks does not
    divide `middle`.

    ranks: Ranks that divide the weights. plan_of: Function that returns the `Plan` of a layer, or None if
        every rank keeps the full layer.
    """
    cuts: dict[str, Cut] = {}
    for name, module in network.named_modules():
        if (plan := plan_of(module)) is None:
            continue
        for weight, (outer, middle) in plan.weights.items():
            if middle % ranks.size:
                raise ValueError(
                    f"tensor_parallel_degree={ranks.size} does not divide the {middle} parts of "
                    f"{name}.{weight}. Set a divisor of {middle}."
                )
            full = module.get_parameter(weight)
            cut = Cut(outer, middle, 0, middle, tuple(full.shape)).of(ranks.index, ranks.size)
            cuts[f"{name}.{weight}"] = cut
            owner = module.get_submodule(weight.rpartition(".")[0])
            part = nn.Parameter(cut.take(full.detach()), requires_grad=full.requires_grad)
            setattr(owner, weight.rpartition(".")[2], part)
        _surround(module, ranks, reads_share=plan.reads_share)
    return cuts


def _surround(module: nn.Module, ranks: Ranks, *, reads_share: bool) -> None:
    def before(_: nn.Module, arguments: tuple) -> tuple:
        x, *rest = arguments
        x = _Copy.apply(x, ranks)
        if reads_share:
            x = x.chunk(ranks.size, dim=-1)[ranks.index]
        return (x, *rest)

    module.register_forward_pre_hook(before)
    module.register_forward_hook(lambda _, __, out: _Sum.apply(out, ranks))
