"""Sharded tensors: which part of a tensor each rank keeps."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from parallel.collectives import Ranks


class Span(NamedTuple):
    """Pieces of a tensor as it lies in memory: `count` of `length` elements each, `stride` apart."""

    start: int
    length: int
    stride: int = 0
    count: int = 1


Spans = tuple[Span, ...]


class Shard(NamedTuple):
    """The part of a tensor that this rank keeps.

    tensor: its elements, in the order of `spans`. spans: of the whole, disjoint and rising; () where this
    rank keeps nothing. shape: of the whole. is_own: whether the whole is [ranks, ...], with row r kept by
    rank r alone; another number of ranks takes the mean of the rows. is_copy: whether a rank before this one
    keeps the same, and writes it.
    """

    tensor: Tensor
    spans: Spans
    shape: tuple[int, ...]
    is_own: bool = False
    is_copy: bool = False


Tensors = dict[str, Tensor | Shard]  # by name, as a part of a run's state gives them


def as_shard(tensor: Tensor, spans: Spans, shape: tuple[int, ...], ranks: Ranks) -> Tensor | Shard:
    """Returns a shard; in a group of one, which keeps the whole, the tensor in the whole's shape."""
    return Shard(tensor, spans, shape) if ranks.size > 1 else tensor.view(shape)


def shard_of_rows(tensor: Tensor, rows: range, num_rows: int, ranks: Ranks) -> Tensor | Shard:
    """Returns the rows [n, ...] of a tensor [num_rows, ...] as a shard of it."""
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
    """Returns a tensor that every rank has of its own as this rank's row of one [ranks, ...]."""
    span = Span(ranks.index * tensor.numel(), tensor.numel())
    return Shard(tensor[None], (span,), (ranks.size, *tensor.shape), is_own=True)


def part_of_whole(whole: Tensor, shard: Shard) -> Tensor:
    """Returns the elements of a whole that are a shard's: [n]."""
    flat = whole.reshape(-1)
    pieces = [
        flat.as_strided((each.count, each.length), (each.stride, 1), each.start) for each in shard.spans
    ]
    return torch.cat([piece.flatten() for piece in pieces]) if pieces else flat[:0]


def tensor_of(kept: Tensor | Shard) -> Tensor:
    """Returns what this rank keeps of a tensor, all of it or its part."""
    return kept.tensor if isinstance(kept, Shard) else kept


def slots_of(ranks: Ranks, num_slots: int) -> range:
    """Returns the slots of a global batch that this rank works on; none are left for some of many ranks."""
    share = -(-num_slots // ranks.size)
    first, end = (min(number * share, num_slots) for number in (ranks.index, ranks.index + 1))
    return range(first, end)
