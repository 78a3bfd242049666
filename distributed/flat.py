"""Flat tensors of the dense parameters, so that one message or kernel processes many parameters at once.

A flat tensor, also called flat buffer, contains the values of many parameters, one after the other. Weights
and gradients have separate flat tensors. A parameter has the same range of positions in both.

Parameters are in reverse order of registration, because a backward pass completes gradients in about this
order. Parameters without weight decay come last. The first of them starts at a multiple of 1024 elements.
Every parameter starts at a multiple of 16 and of the number of ranks. The gaps between parameters stay zero.

With ZeRO-1 (arXiv 1910.02054), a group of ranks (shard group) divides the optimizer's work. Each rank
updates its shard of the flat tensor. An all-gather then sends the new weights to the other ranks.

In mixed precision (arXiv 1710.03740), the forward pass reads some parameters in `compute_dtype`. Only these
cast parameters are sharded, and a rank has float32 master weights only for its shard. All other parameters
stay float32, and every rank updates all of them. Without mixed precision, all parameters are sharded.
"""

import contextlib
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from distributed.collectives import ALONE, Ranks
from distributed.scalars import Scalars
from distributed.shards import Shard, ShardBuffers, Span, Tensors, tensor_of
from distributed.shared_memory import SharedTensors, open_shared_tensors
from distributed.tensor import Cut

_ALIGNMENT = 16  # elements: every parameter starts at a multiple, for vectorized kernels
# Alignment of shards, in elements. Kernels round differently after the last full vector of a range. With
# another alignment, results would depend on the number of ranks.
_SHARD_ALIGNMENT = 1024
_FIRST_BUCKET_BYTES = 2**20  # a small bucket, so that the first message is sent early


class FlatParameters:
    """Moves the values of many parameters into flat tensors, and their gradients into another one.

    One message or kernel can then process many parameters at once. The docstring of this module describes
    the order of the parameters, ZeRO-1 and mixed precision.

    Attributes:
        parameters: {name: parameter}, in the order of the flat tensors.
        weights: Flat tensor [size]. The sharded parameters are views of it.
        update_shards: One range of positions in the flat tensors for each rank of `shard_group`. Rank i of
            the group updates the sharded parameters in range i. Ranges may be empty.
        shard: The range of this rank in `update_shards`.
        master_weights: In mixed precision, `ShardBuffers` of the float32 weights that this rank updates.
            Without mixed precision, `ShardBuffers` with all of `weights`.
        gradients: Flat tensor [size] of the gradients, initially 0. It is empty if the parameters need no
            gradient.
        gradient_views: {name of a parameter: view of its range of `gradients`}.
        message: Tensor that ranks sum. It contains `gradients` and then `scalars.values`, which are views of
            it.
        messages_of_ranks, weights_of_ranks: `message` and `weights` of all ranks, if they are in shared
            memory. Otherwise None.
        owned: {name of a parameter: what the optimizer of this rank updates}. This is the parameter, its
            float32 master weights, or a `Shard` of the parameter or of these weights.

    Args:
        named_parameters: Parameters of one dtype, on one device.
        scalar_names: Names of the numbers to sum over ranks too, such as "loss".
        ranks: Ranks that sum the gradients.
        shard_group: Ranks that divide the optimizer's work, a part of `ranks`. If None and the ranks use
            shared memory, all of `ranks`. If None without shared memory, every rank updates everything.
        in_shared_memory: Whether to use memory that all ranks of a machine share, if that is possible.
        undecayed: Names of parameters without weight decay. Names that are not in `named_parameters` are
            ignored.
        unsplit: Names of matrices that shards must not split, because of their optimizer.
        cast: In mixed precision, the names of the parameters that the forward pass reads in `compute_dtype`.
            Without mixed precision, empty.
        compute_dtype: Dtype of the parameters `cast` in the forward pass. Required if `cast` is not empty.
        is_part: Whether other ranks hold other parameters of the model (pipeline or tensor parallel).
        cuts: With tensor parallelism, {name of a parameter: `Cut`}. The parameter is only a part of the
            model's weight, and the `Cut` describes which part.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        scalar_names: Sequence[str] = (),
        *,
        ranks: Ranks,
        shard_group: Ranks | None = ALONE,
        in_shared_memory: bool = False,
        undecayed: Collection[str] = (),
        unsplit: Collection[str] = (),
        cast: Collection[str] = (),
        compute_dtype: torch.dtype | None = None,
        is_part: bool = False,
        cuts: Mapping[str, Cut] | None = None,
    ):
        self.ranks, self.undecayed, self.unsplit, self.is_part = ranks, undecayed, unsplit, is_part
        self.cuts = cuts or {}
        in_reverse = dict(reversed(list(named_parameters)))
        self.parameters = dict(sorted(in_reverse.items(), key=lambda item: item[0] in undecayed))
        first = next(iter(self.parameters.values()))
        for parameter in self.parameters.values():
            assert (parameter.dtype, parameter.device) == (first.dtype, first.device)
            assert parameter.requires_grad == first.requires_grad, "all are trained, or none is"
        self._alignment = math.lcm(_ALIGNMENT, ranks.size)
        self._ranges, self.size = {}, 0
        for name, parameter in self.parameters.items():
            if name in undecayed and not self._ranges.keys() & undecayed:
                edge = math.lcm(_SHARD_ALIGNMENT, ranks.size)
                self.size = -(-self.size // edge) * edge
            length = -(-parameter.numel() // self._alignment) * self._alignment
            self._ranges[name] = slice(self.size, self.size + length)
            self.size += length

        num_gradients = self.size if first.requires_grad else 0
        num_scalars = len(scalar_names) * ranks.size
        num_behind = -(-max(1, num_scalars) // self._alignment) * self._alignment

        def zeros(size: int, dtype: torch.dtype) -> tuple[SharedTensors | None, Tensor]:
            shared = open_shared_tensors(size, dtype, ranks) if in_shared_memory else None
            return shared, first.new_zeros(size, dtype=dtype) if shared is None else shared.local

        dtype = compute_dtype if cast else first.dtype
        assert dtype is not None, "parameters to cast need a compute_dtype"
        self.messages_of_ranks, self.message = zeros(num_gradients + num_behind, first.dtype)
        length = -(-self.size // (_SHARD_ALIGNMENT * ranks.size)) * _SHARD_ALIGNMENT * ranks.size
        self.weights_of_ranks, self._padded = zeros(length, dtype)
        self.weights = self._padded[: self.size]
        self.gradients, behind_gradients = self.message[:num_gradients], self.message[num_gradients:]
        values = behind_gradients[:num_scalars].view(len(scalar_names), ranks.size)
        self.scalars = Scalars(scalar_names, values, ranks)

        if shard_group is None:
            shard_group = ALONE if self.weights_of_ranks is None else ranks
        self.shard_group, self.is_mixed = shard_group, bool(cast)
        self.update_shards = self._cut()
        self.shard = self.update_shards[shard_group.index]
        self._cast = {*cast} & self._ranges.keys()
        self._sharded = self._cast if self.is_mixed else {*self._ranges}
        self._updated_ranges = self.around(self.shard)  # the ranges that this rank updates
        if self.is_mixed:
            self.master_weights = self.zeros(self._updated_ranges)
        else:
            self.master_weights = ShardBuffers([slice(0, self.size)], [self.weights])
        self.owned = self._take_over()
        self.gradient_views = self.views(self.gradients)

    def _take_over(self) -> Tensors:
        for name, parameter in self.parameters.items():
            value, start = parameter.detach(), self._ranges[name].start
            for part in self.updated_ranges_of([name]):
                values = value.flatten()[part.start - start : part.stop - start]
                self.master_weights.at(part)[: len(values)] = values
            memory = (
                self.weights[start:] if name in self._sharded else self.master_weights.at(self._ranges[name])
            )
            parameter.data = memory[: value.numel()].view(value.shape).copy_(value)
        owned = self.shards(self.master_weights, self.shard)
        for name, part in owned.items():
            parameter, tensor = self.parameters[name], tensor_of(part)
            if name in self._cast:
                parameter.grad_dtype = self.message.dtype
            elif isinstance(part, Tensor):
                owned[name] = parameter
                continue
            if isinstance(part, Shard):
                if name in self.unsplit:
                    tensor = tensor.view(parameter.shape[0] if part.spans else 0, *parameter.shape[1:])
                owned[name] = part._replace(tensor=tensor)
            if len(self.gradients):
                tensor.grad = self.gradients[self._part(name, self.shard)].view_as(tensor)
        return owned

    def attach_gradients(self) -> None:
        """Makes the `grad` of each float32 parameter a view of the flat gradients.

        Parameters in bfloat16 (mixed precision) have such a `grad`, a float32 view, only during a backward
        pass, inside `gradients_attached`. torch's compiler does not expect a `grad` of another dtype.
        """
        for name in self.gradient_views.keys() - self._cast:
            self.parameters[name].grad = self.gradient_views[name]

    @contextlib.contextmanager
    def gradients_attached(self) -> Iterator[None]:
        """Context manager for a backward pass with bfloat16 parameters (mixed precision).

        Inside, the `grad` of these parameters is a view of the flat gradients, so that the backward pass adds
        to the flat gradients. After the block, their `grad` is None. Other parameters do not change.
        """
        cast = {name: view for name, view in self.gradient_views.items() if name in self._cast}
        for name, view in cast.items():
            self.parameters[name].grad = view
        yield
        # torch's compiler does not expect a `grad` of another dtype than its parameter.
        assert all(self.parameters[name].grad is view for name, view in cast.items())
        for name in cast:
            self.parameters[name].grad = None

    def check_gradients(self) -> None:
        for name, view in self.gradient_views.items():
            assert self.parameters[name].grad is (None if name in self._cast else view)

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        """Splits a flat tensor into one view for each parameter: {name: view}.

        buffer: Tensor [size] with one value for each element of all parameters, such as `gradients`. If it
        is empty, the result is {}.
        """
        return {
            name: buffer[part.start :][: parameter.numel()].view(parameter.shape)
            for (name, parameter), part in zip(self.parameters.items(), self._ranges.values(), strict=True)
            if part.stop <= len(buffer)
        }

    def shards(
        self,
        shard_buffers: ShardBuffers,
        shard: slice,
        names: Collection[str] | None = None,
        *,
        divided_among: Ranks | None = None,
    ) -> Tensors:
        """Splits values of this rank by parameter: {name of a parameter: full tensor or `Shard`}.

        If ranks divide a parameter, its value is a `Shard` of the elements that lie in the range `shard`.
        This `Shard` may be empty. If every rank has all values of a parameter, its value is a full tensor.
        With pipeline or tensor parallelism (`is_part`), every sharded parameter has a `Shard`, also if one
        rank has all of its values. All tensors are views of `shard_buffers`.

        shard_buffers: Values to split, such as the state of an optimizer. It contains the values at the
        positions `shard`, and the values of all parameters that are not divided. `around(shard)` returns
        these ranges. shard: Range of positions in the flat tensor, such as the attribute `shard` of this
        rank. names: Names of the parameters to return. If None, all. divided_among: Ranks that each have a
        part of the values. If None, `shard_group`, as for the updates.
        """
        shards: Tensors = {}
        # All ranks must agree on which tensors are sharded. A rank cannot tell from its own shard: the
        # shard may happen to cover the full tensor.
        num_parts = (self.shard_group if divided_among is None else divided_among).size
        is_full = num_parts == 1 and not self.is_part
        for name in self.parameters if names is None else names:
            part, begin = self._part(name, shard), self._ranges[name].start
            shape, length = tuple(self.parameters[name].shape), part.stop - part.start
            if name not in self._sharded or is_full:
                shards[name] = shard_buffers.at(part).view(shape)
                continue
            spans = (Span(part.start - begin, length),) if length else ()
            if cut := self.cuts.get(name):
                spans, shape = cut.spans(slice(part.start - begin, part.stop - begin)), cut.shape
            # If `num_parts` ranks divide the values, later ranks hold copies of the same parts.
            is_copy = self.ranks.index >= num_parts
            tensor = shard_buffers.at(part) if length else self.message[:0]
            shards[name] = Shard(tensor, spans, shape, is_copy=is_copy)
        return shards

    def _part(self, name: str, shard: slice) -> slice:
        # Unused elements behind the parameter are not included.
        begin = self._ranges[name].start
        end = begin + self.parameters[name].numel()
        if name not in self._sharded:
            return slice(begin, end)
        return slice(*(min(max(edge, begin), end) for edge in (shard.start, shard.stop)))

    def around(self, shard: slice) -> list[slice]:
        """Returns the ranges of the flat tensor for which a rank with this shard keeps values.

        The ranges cover `shard` and all parameters that are not sharded. They are in ascending order and
        disjoint.
        """
        rest, unit = self.ranges(self.parameters.keys() - self._sharded), _SHARD_ALIGNMENT
        # Extend to multiples of 1024: the rounding of kernels depends on the position within a range.
        rest = [
            slice(part.start // unit * unit, min(-(-part.stop // unit) * unit, self.size)) for part in rest
        ]
        merged: list[slice] = []
        for part in sorted([shard, *rest], key=lambda part: part.start):
            if merged and part.start <= merged[-1].stop:
                merged[-1] = slice(merged[-1].start, max(part.stop, merged[-1].stop))
            elif part.start < part.stop:
                merged.append(part)
        return merged

    def zeros(self, ranges: Sequence[slice]) -> ShardBuffers:
        return ShardBuffers(ranges, [self.message.new_zeros(part.stop - part.start) for part in ranges])

    def updated_ranges_of(self, names: Collection[str]) -> list[slice]:
        """Returns the ranges of the flat tensor where this rank updates the parameters `names`."""
        pairs = itertools.product(self.ranges(names), self._updated_ranges)
        common = (slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in pairs)
        return [part for part in common if part.start < part.stop]

    def gather_(self) -> None:
        """Sends the weights in this rank's shard to the other ranks of `shard_group`, and receives theirs.

        All ranks call it after each update, before the next forward pass. In mixed precision, it first casts
        the updated float32 weights to the dtype of the forward pass. If every rank updates all weights,
        nothing is sent.
        """
        if self.is_mixed and self.shard.start < self.shard.stop:
            self.weights[self.shard] = self.master_weights.at(self.shard)
        if self.shard_group.size == 1:
            return
        if self.weights_of_ranks is not None:
            self.weights_of_ranks.all_gather_(self.shard)
        else:
            self.shard_group.all_gather_ranges_(self._padded, self.update_shards)

    def all_gather_views(self, shard_buffers: ShardBuffers, shards: Sequence[slice]) -> dict[str, Tensor]:
        """Gathers values of all parameters, such as averaged weights, from all ranks.

        Each rank has a part of the values. All ranks call it. Returns {name of a parameter: full tensor in
        the dtype of the parameter}.

        shard_buffers: Values of this rank. It contains the values at the positions `shards[rank]`, and the
        values of all parameters that are not divided among ranks. `around(shards[rank])` returns these
        ranges. shards: For each rank, the range of positions in the flat tensor that the rank sends.
        """
        full, shard = torch.zeros_like(self._padded), shards[self.ranks.index]
        if shard.start < shard.stop:
            full[shard] = shard_buffers.at(shard)
        self.ranks.all_gather_ranges_(full, shards)
        rest = self.shards(shard_buffers, shard, self.parameters.keys() - self._sharded)
        return self.views(full) | rest

    def _cut(self) -> list[slice]:
        # One range for each rank of `shard_group`. Their lengths are as equal as possible without splitting a
        # matrix in `unsplit`.
        if not self.unsplit or self.shard_group.size == 1:
            return cut_evenly(slice(0, self.size), self.shard_group.size)
        ranges = self.ranges(self.unsplit, joins=False)
        edges = sorted({0, self.size, *(edge for part in ranges for edge in (part.start, part.stop))})
        targets = (self.size * index / self.shard_group.size for index in range(self.shard_group.size + 1))
        ends = [min(edges, key=lambda edge: abs(edge - target)) for target in targets]
        return [slice(*pair) for pair in itertools.pairwise(ends)]

    def ranges(self, names: Collection[str], *, joins: bool = True) -> list[slice]:
        """Returns the ranges of positions in the flat tensor where the parameters `names` are.

        joins: Whether to merge adjacent ranges.
        """
        ranges: list[slice] = []
        for name, part in self._ranges.items():
            if name not in names:
                continue
            if joins and ranges and ranges[-1].stop == part.start:
                ranges[-1] = slice(ranges[-1].start, part.stop)
            else:
                ranges.append(part)
        return ranges

    def buckets(self, num_bytes: float) -> list[slice]:
        """Splits the tensor `message` (gradients, then scalars) into ranges that are sent one by one.

        The first range is small, so that sending starts early in the backward pass. The last range
        contains the scalars. No range ends within the gradient of a parameter.

        num_bytes: Approximate size of a range. If a parameter is larger, its range is larger, too.
        """
        element_bytes = self.message.element_size()
        buckets: list[slice] = []
        begin = 0
        for part in self._ranges.values() if len(self.gradients) else ():
            limit = num_bytes if buckets else min(num_bytes, _FIRST_BUCKET_BYTES)
            if (part.stop - begin) * element_bytes >= limit or part.stop == self.size:
                buckets.append(slice(begin, part.stop))
                begin = part.stop
        last_begin = buckets.pop().start if buckets else 0
        return [*buckets, slice(last_begin, len(self.message))]


def cut_evenly(full: slice, count: int) -> list[slice]:
    """Divides a range into `count` ranges of the same length, a multiple of 1024.

    Exception: the last ranges may be shorter or empty.
    """
    length = -(-(full.stop - full.start) // (_SHARD_ALIGNMENT * count)) * _SHARD_ALIGNMENT
    ends = [min(full.start + index * length, full.stop) for index in range(count + 1)]
    return [slice(*pair) for pair in itertools.pairwise(ends)]
