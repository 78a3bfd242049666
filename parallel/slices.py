"""Tensors that are spread over the ranks, each of which keeps a part: which part, and of what."""

from typing import NamedTuple

from torch import Tensor

from parallel.process_group import rank, world_size


class Slice(NamedTuple):
    """The part of a tensor that this rank keeps.

    tensor: [n, ...]. place: the n numbers of what it holds, of rows of the whole; or where `tensor` is [n] of
    the whole's elements, counted as they lie in memory. shape: of the whole.
    """

    tensor: Tensor
    place: range
    shape: tuple[int, ...]


def owned_rows(num_rows: int) -> range:
    """Returns the rows that this rank owns, of the puzzle table and of all that has a row for each puzzle.

    The owner is the identifier modulo the number of ranks: row i of the whole is row i // world_size of its
    owner's.
    """
    return range(rank(), num_rows, world_size())


def spread(tensor: Tensor, place: range, shape: tuple[int, ...]) -> Tensor | Slice:
    """Returns a slice, or in a world of one, where it is the whole, the tensor in the shape of that."""
    return Slice(tensor, place, shape) if world_size() > 1 else tensor.view(shape)


def tensor_of(kept: Tensor | Slice) -> Tensor:
    """Returns what this rank keeps of a tensor, all of it or its slice."""
    return kept.tensor if isinstance(kept, Slice) else kept
