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

from parallel.flat import FlatParameters
from parallel.shards import Shard, Tensors


class UpdateSharding:
    """The sharing of the update of flat parameters among their ranks.

    is_sharded: whether each rank updates a share of its own; never in a world of one.
    own_range: of the buffers, what this rank updates.
    parts: by name, what this rank updates of each parameter, with the gradient as `grad`: the parameter, or a
    shard [n] of it, maybe empty; a shard of an `unsplit` parameter has all of its rows, or none.

    unsplit: names of parameters that one rank updates as a whole. Shares are then as even as that allows,
    else multiples of 1024 elements, except the last.
    """

    def __init__(self, flat: FlatParameters, *, is_sharded: bool = False, unsplit: Collection[str] = ()):
        self.flat, self.is_sharded = flat, is_sharded and flat.ranks.size > 1
        self._has_equal_shares = not unsplit
        self._ranges = _even_ranges(flat, unsplit) if unsplit else flat.shares()
        self.own_range = self._ranges[flat.ranks.index] if self.is_sharded else slice(0, flat.size)
        self.parts: Tensors = self._split(unsplit) if self.is_sharded else dict(flat.parameters)

    def views(self, buffer: Tensor, *, begin: int) -> dict[str, Tensor]:
        """Returns what of each parameter is in a buffer of a range of `own_range` that begins at `begin`.

        Parameters outside of it are left out. Without shares a parameter is there as a whole.
        """
        if not self.is_sharded:
            return self.flat.views(buffer, begin=begin)
        shards = self.flat.shards(buffer, begin=begin)
        return {name: shard.tensor for name, shard in shards.items() if shard.runs}

    def all_gather_weights_(self) -> None:
        """Overwrites what other ranks update with their weights. All ranks call it, after every update."""
        if not self.is_sharded:
            return
        flat = self.flat
        if flat.weights_of_ranks is not None:
            flat.weights_of_ranks.all_gather_(self.own_range)
            return
        if self._has_equal_shares:
            own = flat.padded[flat.ranks.index * flat.share_size :][: flat.share_size]
            flat.ranks.all_gather_flat_(flat.padded, own)
            return
        weights = [flat.weights[each] for each in self._ranges]
        works = [
            dist.broadcast(each, group_src=source, async_op=True, group=flat.ranks.group)
            for source, each in enumerate(weights)
            if len(each)
        ]
        for work in works:
            work.wait()

    def _split(self, unsplit: Collection[str]) -> dict[str, Shard]:
        flat, begin = self.flat, self.own_range.start
        parts = flat.shards(flat.weights[self.own_range], begin=begin)
        gradients = self.views(flat.gradients[self.own_range], begin=begin)
        for name, shard in parts.items():
            tensor = shard.tensor
            if name in unsplit:
                tensor = tensor.view(shard.shape[0] if shard.runs else 0, *shard.shape[1:])
            if len(flat.gradients):
                tensor.grad = gradients[name].view_as(tensor) if shard.runs else tensor.clone()
            parts[name] = shard._replace(tensor=tensor)
        return parts


def _even_ranges(flat: FlatParameters, unsplit: Collection[str]) -> list[slice]:
    """Cuts the buffers into a range for each rank, only where one of `unsplit` begins or ends.

    Parameters between two of `unsplit` are not cut either, and are rounded as without ranges.
    """
    ranges = flat.ranges(unsplit, joins=False)
    edges = sorted({0, flat.size, *(edge for each in ranges for edge in (each.start, each.stop))})

    def nearest(goal: float) -> int:
        return min(edges, key=lambda edge: abs(edge - goal))

    ends = [nearest(flat.size * number / flat.ranks.size) for number in range(flat.ranks.size + 1)]
    return [slice(*pair) for pair in itertools.pairwise(ends)]
