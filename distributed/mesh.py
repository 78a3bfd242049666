"""The device mesh: axes pipeline x replicate x shard x tensor, and the process groups along them.

Along the pipeline and tensor axes, ranks divide the weights of the blocks. All other weights are on every
rank. Along the shard axis, ranks divide the work of the optimizer. The tensor axis is the innermost: ranks
that differ only along it have consecutive numbers, so they are usually on one node. The next axes outward are
shard, replicate and pipeline.
"""

import math
from collections.abc import Collection

import torch.distributed as dist

from distributed.collectives import ALONE, Ranks, all_ranks
from distributed.world import rank, world_size

AXES = {
    "pipeline": "stage",
    "replicate": "replica",
    "shard": "shard",
    "tensor": "tensor",
}  # {axis: name of a rank's position along it}


def position_of(number: int, sizes: dict[str, int]) -> dict[str, int]:
    """Returns the indices of a rank along all axes of a mesh: {axis: index from 0}.

    number: The rank. sizes: {axis: number of ranks along it}, from the outermost axis to the innermost.
    """
    found = {}
    for axis in reversed(sizes):
        number, found[axis] = divmod(number, sizes[axis])
    return found


def describe_position(number: int, sizes: dict[str, int]) -> str:
    """Returns the position of a rank in a mesh, such as "stage 1, shard 0".

    Axes of size 1 are left out.

    number: The rank. sizes: {axis: number of ranks along it}, from the outermost axis to the innermost.
    """
    position = position_of(number, sizes)
    return ", ".join(f"{name} {position[axis]}" for axis, name in AXES.items() if sizes[axis] > 1)


class Mesh:
    """Layout of all ranks along four axes, with process groups, similar to torch's `DeviceMesh`.

    The axes are pipeline, replicate, shard and tensor. All ranks create a mesh together. Each attribute
    except `sizes` is a group of ranks that contains this rank.

    Attributes:
        sizes: {axis: number of ranks along it}.
        data: Ranks that divide the slots of the global batch among themselves.
        replicas: Ranks that hold the same part of the blocks, and sum the gradients of this part.
        shard_group: Ranks of `replicas` that divide the optimizer's work (ZeRO-1).
        pipeline: Ranks that run the stages of one pipeline.
        owners: The same ranks as `pipeline`, with a second process group (see `distributed.pipeline.Ring`).
        tensor: Ranks that process the same slots and divide the weights of each block (tensor parallelism).
        holders: Ranks that together hold every weight of the blocks once.
    """

    def __init__(self, sizes: dict[str, int]):
        assert math.prod(sizes.values()) == world_size()
        self.sizes = sizes
        self.data = self._along(("pipeline", "replicate", "shard"))
        self.replicas = self._along(("replicate", "shard"))
        self.shard_group = self._along(("shard",))
        self.pipeline, self.owners = self._along(("pipeline",)), self._along(("pipeline",))
        self.tensor = self._along(("tensor",))
        self.holders = self._along(("pipeline", "tensor"))

    @property
    def is_plain(self) -> bool:
        # Every rank holds all weights.
        return self.sizes["pipeline"] == self.sizes["tensor"] == 1

    def __str__(self) -> str:
        return " x ".join(f"{axis} {size}" for axis, size in self.sizes.items() if size > 1)

    def _along(self, axes: Collection[str]) -> Ranks:
        # The ranks whose positions differ from this rank's only along `axes`.
        lines: dict[tuple[int, ...], list[int]] = {}
        for number in range(world_size()):
            position = position_of(number, self.sizes)
            lines.setdefault(tuple(position[axis] for axis in AXES if axis not in axes), []).append(number)
        ranks = ALONE
        for members in lines.values():  # all ranks must create all groups, in the same order
            if len(members) == world_size() and axes != ("pipeline",):
                return all_ranks()
            group = dist.new_group(members) if len(members) > 1 else None
            if rank() in members:
                ranks = Ranks(members.index(rank()), len(members), group)
        return ranks
