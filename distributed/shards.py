"""Shards: descriptions of the part of a tensor that this rank holds."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from distributed.collectives import Ranks


class Span(NamedTuple):
    """Equal pieces of a flattened tensor at equal distances.

    Example: start=0, length=4, stride=10 and count=3 are the elements 0-3, 10-13 and 20-23.
    """

    start: int
    length: int
    stride: int = 0
    count: int = 1


Spans = tuple[Span, ...]


class Shard(NamedTuple):
    """Part of a tensor that this rank holds, with its position in the full tensor.

    Attributes:
        tensor: Elements of the part, in the order of `spans`.
        spans: Positions of these elements in the flattened full tensor (see `Span`), disjoint and in
            ascending order. If the part is empty, ().
        shape: Shape of the full tensor.
        is_by_rank: Whether the full tensor is [ranks, ...], and row r is on rank r only. Example: the
            optimizer state with local_steps > 1. If another number of ranks, or a run with local_steps=1,
            loads the tensor from a checkpoint, each rank gets the mean of the rows.
        is_copy: Whether a lower rank holds the same part. Only the lower rank saves it.
    """

    tensor: Tensor
    spans: Spans
    shape: tuple[int, ...]
    is_by_rank: bool = False
    is_copy: bool = False


class ShardBuffers:
    """Values for some ranges of positions in a flat tensor that contains all parameters.

    Example: the optimizer state of the weights that this rank updates.

    Args:
        ranges: Ranges of positions in the flat tensor, in ascending order and disjoint.
        buffers: One tensor for each range, [length of the range].
    """

    def __init__(self, ranges: Sequence[slice], buffers: Sequence[Tensor]):
        self.ranges, self.buffers = tuple(ranges), tuple(buffers)

    def at(self, part: slice) -> Tensor:
        """Returns a view of the values at the positions `part`, which must lie within one of `ranges`."""
        for buffer_range, buffer in zip(self.ranges, self.buffers, strict=True):
            if buffer_range.start <= part.start and part.stop <= buffer_range.stop:
                return buffer[part.start - buffer_range.start : part.stop - buffer_range.start]
        raise AssertionError(f"{part} is not inside one of the ranges {self.ranges}")


# Tensors of a run's state by name. A `Tensor` is the full tensor. Each part of the state has a method that
# returns its tensors, such as `Carry.tensors`, without copies: a checkpoint saves them, and a load overwrites
# them.
Tensors = dict[str, Tensor | Shard]


def shard_of_rows(tensor: Tensor, rows: range, num_rows: int, ranks: Ranks) -> Tensor | Shard:
    """Returns a `Shard` for this rank's rows of a table that is divided among ranks.

    If `ranks` has only one rank, returns `tensor` itself.

    tensor: The rows of this rank, [n, ...]. rows: Their row numbers in the full table, such as range(1,
    num_rows, 4). num_rows: Number of rows of the full table. ranks: Ranks that divide the table.
    """
    shape = (num_rows, *tensor.shape[1:])
    length = math.prod(shape[1:])
    if not rows or not length:
        spans = ()
    elif rows.step == 1:
        spans = (Span(rows.start * length, len(rows) * length),)
    else:
        spans = (Span(rows.start * length, length, rows.step * length, len(rows)),)
    return Shard(tensor, spans, shape) if ranks.size > 1 else tensor


def shard_of_own(tensor: Tensor, ranks: Ranks) -> Shard:
    """Returns a `Shard` for saving a tensor whose values differ between ranks.

    Row r of the full tensor, [ranks, ...], is the tensor of rank r. Example: if every rank trains its own
    copy of the weights for some steps (local_steps > 1), every rank has its own optimizer state.
    """
    span = Span(ranks.index * tensor.numel(), tensor.numel())
    return Shard(tensor[None], (span,), (ranks.size, *tensor.shape), is_by_rank=True)


def part_of_whole(full: Tensor, shard: Shard) -> Tensor:
    """Returns the elements of a full tensor at the positions of a shard, as a tensor [n].

    shard: Its `spans` are the positions to read. Its values are not used.
    """
    flat = full.reshape(-1)
    pieces = [
        flat.as_strided((span.count, span.length), (span.stride, 1), flat.storage_offset() + span.start)
        for span in shard.spans
    ]
    return torch.cat([piece.flatten() for piece in pieces]) if pieces else flat[:0]


def tensor_of(stored: Tensor | Shard) -> Tensor:
    return stored.tensor if isinstance(stored, Shard) else stored


def slots_of(ranks: Ranks, num_slots: int) -> range:
    """Divides the slots of the global batch among ranks. Returns the slot numbers of this rank.

    Example: 4 ranks get 3, 3, 3 and 1 of 10 slots. The last ranks may get none.

    ranks: Ranks that divide the slots. num_slots: Number of slots of the global batch.
    """
    share = -(-num_slots // ranks.size)
    first, end = (min(index * share, num_slots) for index in (ranks.index, ranks.index + 1))
    return range(first, end)


def rows_of_rank(num_rows: int, index: int, size: int) -> range:
    """Divides the rows of a table among ranks. Returns the row numbers of one rank.

    Example: Of 10 rows on 4 ranks, rank 1 holds the rows 1, 5 and 9 of the table. In the part that rank 1
    holds, they are the rows 0, 1 and 2.

    index: Index of the rank in the group of ranks that divide the table, from 0. size: Size of the group.
    """
    return range(index, num_rows, size)
