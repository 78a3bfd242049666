"""The device mesh: axes pipeline x replicate x shard x tensor, and the process groups along them.

Ranks divide the weights of the blocks. All other weights are on every rank. Ranks that differ only along the
tensor axis (the innermost) are consecutive, so they are on one node. The next axes are shard, replicate and
pipeline.
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


def sizes_of(
    world_size: int, *, pipeline: int = 1, shard: int | str = "auto", tensor: int = 1
) -> dict[str, int]:
    """Computes the layout of all ranks in a mesh. Returns {axis: number of ranks along it}.

    The axes are pipeline, replicate, shard and tensor. The axis replicate gets all ranks that the other axes
    leave. Raises ValueError if the sizes do not divide `world_size`.

    shard: If -1, all ranks that the axes pipeline and tensor leave. If "auto", 1.
    """
    left, rest = divmod(world_size, pipeline * tensor)
    if rest:
        degrees = {"pipeline_parallel_degree": pipeline, "tensor_parallel_degree": tensor}
        product = " x ".join(f"{key}={size}" for key, size in degrees.items() if size > 1)
        raise ValueError(f"{product} does not divide the {world_size} processes. Change one of them.")
    shard = {"auto": 1, -1: left}.get(shard, shard)
    if left % shard:
        raise ValueError(
            f"data_parallel_shard_degree={shard} does not divide the {left} processes that pipeline and "
            "tensor parallelism leave. Choose a divisor."
        )
    return dict(zip(AXES, (pipeline, left // shard, shard, tensor), strict=True))


def position_of(number: int, sizes: dict[str, int]) -> dict[str, int]:
    """Returns the position of rank `number` along each axis of the mesh: {axis: index from 0}.

    sizes: {axis: number of ranks}.
    """
    found = {}
    for axis in reversed(sizes):
        number, found[axis] = divmod(number, sizes[axis])
    return found


def describe_position(number: int, sizes: dict[str, int]) -> str:
    """Returns the position of rank `number` in a mesh as a text, such as "stage 1, shard 0".

    Axes of size 1 are left out. sizes: {axis: number of ranks}.
    """
    position = position_of(number, sizes)
    return ", ".join(f"{name} {position[axis]}" for axis, name in AXES.items() if sizes[axis] > 1)


class Mesh:
    """The layout of all ranks along the axes pipeline, replicate, shard and tensor, with process groups.

    All ranks build a mesh together. A slot is one position of the global batch.

    Attributes:
        sizes: {axis: number of ranks along it}.
        data: Group of ranks that divide the slots of the global batch among themselves.
        replicas: Group of ranks that hold the same part of the blocks, and sum the gradients of this part.
        shard_group: Sharding group: the ranks of `replicas` that divide the optimizer's work (ZeRO-1).
        pipeline, owners: Ranks of one pipeline, as two groups (`distributed.pipeline.Ring` explains why).
        tensor: Group of ranks that have the same slots and divide the weights of blocks.
        holders: Group of ranks that together hold every weight of the blocks once.
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
        """Whether every rank holds all weights: the mesh has no pipeline or tensor parallelism."""
        return self.sizes["pipeline"] == self.sizes["tensor"] == 1

    def __str__(self) -> str:
        return " x ".join(f"{axis} {size}" for axis, size in self.sizes.items() if size > 1)

    def _along(self, axes: Collection[str]) -> Ranks:
        """Creates the group of ranks whose positions in the mesh differ from this rank's only along `axes`.

        All ranks call it.
        """
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
