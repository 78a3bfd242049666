"""Shards: descriptions of the part of a tensor that this rank holds."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from distributed.collectives import Ranks


class Span(NamedTuple):
    """Regularly spaced pieces of a flattened tensor: `count` pieces of `length` elements, `stride` apart."""

    start: int
    length: int
    stride: int = 0
    count: int = 1


Spans = tuple[Span, ...]


class Shard(NamedTuple):
    """The part of a tensor that this rank holds.

    tensor: Elements of the part, in the order of `spans`. spans: Positions of these elements in the flattened
    full tensor, disjoint and rising. () if this rank holds nothing. shape: Shape of the full tensor.
    is_by_rank: If True, the full tensor is [ranks, ...], and row r is on rank r only. When another number of
    ranks loads it, each rank gets the mean of the rows. is_copy: Whether an earlier rank holds the same part,
    and saves it.
    """

    tensor: Tensor
    spans: Spans
    shape: tuple[int, ...]
    is_by_rank: bool = False
    is_copy: bool = False


Tensors = dict[str, Tensor | Shard]  # tensors of a run's state by name; a Tensor is the full tensor


def as_shard(tensor: Tensor, spans: Spans, shape: tuple[int, ...], ranks: Ranks) -> Tensor | Shard:
    """Returns `tensor` as a shard. With a single rank, returns it as a full tensor of this shape."""
    return Shard(tensor, spans, shape) if ranks.size > 1 else tensor.view(shape)


def shard_of_rows(tensor: Tensor, rows: range, num_rows: int, ranks: Ranks) -> Tensor | Shard:
    """Returns rows [n, ...] as a shard of a tensor [num_rows, ...]. rows: Row numbers of these rows."""
    shape = (num_rows, *tensor.shape[1:])
    length = math.prod(shape[1:])
    if not rows or not length:
        spans = ()
    elif rows.step == 1:
        spans = (Span(rows.start * length, len(rows) * length),)
    else:
        spans = (Span(rows.start * length, length, rows.step * length, len(rows)),)
    return as_shard(tensor, spans, shape, ranks)


def shard_of_own(tensor: Tensor, ranks: Ranks) -> Shard:
    """Returns this rank's tensor as a shard: row `ranks.index` of a tensor [ranks, ...]."""
    span = Span(ranks.index * tensor.numel(), tensor.numel())
    return Shard(tensor[None], (span,), (ranks.size, *tensor.shape), is_by_rank=True)


def part_of_whole(whole: Tensor, shard: Shard) -> Tensor:
    """Returns the elements of the full tensor `whole` that the shard describes, flattened: [n]."""
    flat = whole.reshape(-1)
    pieces = [
        flat.as_strided((each.count, each.length), (each.stride, 1), flat.storage_offset() + each.start)
        for each in shard.spans
    ]
    return torch.cat([piece.flatten() for piece in pieces]) if pieces else flat[:0]


def tensor_of(kept: Tensor | Shard) -> Tensor:
    """Returns the memory on this rank, to copy to or from: the tensor, or the elements of the shard."""
    return kept.tensor if isinstance(kept, Shard) else kept


def slots_of(ranks: Ranks, num_slots: int) -> range:
    """Returns this rank's slots in a global batch. The last ranks may have fewer slots, or none."""
    share = -(-num_slots // ranks.size)
    first, end = (min(number * share, num_slots) for number in (ranks.index, ranks.index + 1))
    return range(first, end)
