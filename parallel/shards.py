"""Tensors that are spread over the ranks, each of which keeps a part: which part, of what, and all joined."""

from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from parallel.collectives import has_group
from parallel.process_group import rank, world_size


class Slice(NamedTuple):
    """The part of a tensor that this rank keeps.

    tensor: [n, ...]. place: the n numbers of what it holds, of rows of the whole; or where `tensor` is [n] of
    the whole's elements, counted as they lie in memory. shape: of the whole.
    """

    tensor: Tensor
    place: range
    shape: tuple[int, ...]


def owned_rows(num_rows: int, *, owner: int | None = None) -> range:
    """Returns the rows that a rank owns, of the puzzle table and of all that has a row for each puzzle.

    The owner is the identifier modulo the number of ranks: row i of the whole is row i // world_size of its
    owner's. owner: None is this rank.
    """
    return range(rank() if owner is None else owner, num_rows, world_size())


def spread(tensor: Tensor, place: range, shape: tuple[int, ...]) -> Tensor | Slice:
    """Returns a slice, or in a world of one, where it is the whole, the tensor in the shape of that."""
    return Slice(tensor, place, shape) if world_size() > 1 else tensor.view(shape)


def tensor_of(kept: Tensor | Slice) -> Tensor:
    """Returns what this rank keeps of a tensor, all of it or its slice."""
    return kept.tensor if isinstance(kept, Slice) else kept


def all_gather_owned_rows(rows: Tensor, num_rows: int) -> Tensor:
    """Joins what each rank has of the rows that it owns: [num_rows, ...]. All ranks call it.

    One rank's after the other, so that it takes little more memory than the result.
    """
    if not has_group():
        return rows
    whole = rows.new_empty(num_rows, *rows.shape[1:])
    for owner in range(world_size()):
        place = owned_rows(num_rows, owner=owner)
        theirs = rows.contiguous() if owner == rank() else rows.new_empty(len(place), *rows.shape[1:])
        if place:
            dist.broadcast(theirs, src=owner)
            whole[place.start :: place.step] = theirs
    return whole
