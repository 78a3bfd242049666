"""Who updates what of the dense weights: every rank everything, or each its share (ZeRO-1, arXiv 1910.02054).

With shares a rank keeps only the moments of what it updates, and learns of the rest by an all-gather of the
weights, or has it written into its own by the others, where ranks share memory. The sum of the gradients is
on all ranks nevertheless, and travels as without: a reduce-scatter would save no memory, as the backward pass
needs the whole buffer (and gloo's copies it: it is an all-reduce inside), and norm, clipping and update would
not have the bits that they have without shares.
"""

import itertools
from collections.abc import Collection

import torch.distributed as dist
from torch import Tensor

from parallel.collectives import all_gather_flat_
from parallel.flat import FlatParameters
from parallel.process_group import rank, world_size
from parallel.shards import Slice


class Division:
    """The division of the update of flat parameters among the ranks.

    is_sharded: whether each rank updates a share of its own; never in a world of one. never_cut: names of
    parameters that one rank updates as a whole. Shares are then as even as that allows, else multiples of
    1024 elements, but for the last.
    updated: this rank's range of the buffers.
    parts: what it updates of each parameter, by name, with the gradient as `grad`: the parameters, or slices
    of them, [n] each, maybe empty; of `never_cut` all rows or none.
    """

    def __init__(self, flat: FlatParameters, *, is_sharded: bool = False, never_cut: Collection[str] = ()):
        self.flat, self.is_sharded = flat, is_sharded and world_size() > 1
        self._has_equal_shares = not never_cut
        self._ranges = _even_ranges(flat, never_cut) if never_cut else flat.shares()
        self.updated = self._ranges[rank()] if self.is_sharded else slice(0, flat.size)
        self.parts: dict[str, Tensor | Slice] = dict(flat.parameters)
        if self.is_sharded:
            self.parts = self._cut(never_cut)

    def views(self, buffer: Tensor, *, begin: int) -> dict[str, Tensor]:
        """Returns what of each parameter is in a buffer of a range of `updated` that begins at `begin`.

        Names of which nothing is there are left out. Without shares a parameter is there as a whole.
        """
        if not self.is_sharded:
            return self.flat.views(buffer, begin=begin)
        slices = self.flat.slices(buffer, begin=begin)
        return {name: each.tensor for name, each in slices.items() if each.place}

    def all_gather_weights_(self) -> None:
        """Overwrites what other ranks update with their weights. All ranks call it, after every update."""
        if not self.is_sharded:
            return
        if self.flat.weights_of_ranks is not None:
            self.flat.weights_of_ranks.join_(self.updated)
            return
        if self._has_equal_shares:
            size = self.flat.share_size
            all_gather_flat_(self.flat.padded, self.flat.padded[rank() * size :][:size])
            return
        weights = [self.flat.weights[each] for each in self._ranges]
        works = [
            dist.broadcast(each, src=owner, async_op=True) for owner, each in enumerate(weights) if len(each)
        ]
        for work in works:
            work.wait()

    def _cut(self, never_cut: Collection[str]) -> dict[str, Slice]:
        flat, begin = self.flat, self.updated.start
        parts = flat.slices(flat.weights[self.updated], begin=begin)
        gradients = self.views(flat.gradients[self.updated], begin=begin)
        for name, (tensor, place, shape) in parts.items():
            if name in never_cut:
                place = range(shape[0] if place else 0)
                tensor = tensor.view(len(place), *shape[1:])
            if len(flat.gradients):
                tensor.grad = gradients[name].view_as(tensor) if place else tensor.clone()
            parts[name] = Slice(tensor, place, shape)
        return parts


def _even_ranges(flat: FlatParameters, never_cut: Collection[str]) -> list[slice]:
    """Cuts the buffers into a range for each rank, only where one of `never_cut` begins or ends.

    So what lies between these is not cut either, and is rounded as if there were no ranges.
    """
    places = flat.ranges(never_cut, joins=False)
    edges = sorted({0, flat.size, *(edge for place in places for edge in (place.start, place.stop))})

    def nearest(goal: float) -> int:
        return min(edges, key=lambda edge: abs(edge - goal))

    ends = [nearest(flat.size * number / world_size()) for number in range(world_size() + 1)]
    return [slice(*pair) for pair in itertools.pairwise(ends)]
