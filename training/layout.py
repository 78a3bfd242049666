"""Arranges the ranks of a run along the axes of the mesh: pipeline, replicate, shard and tensor."""

import functools

from config.schema import PretrainConfig
from distributed import log
from distributed.mesh import Mesh, describe_position
from distributed.world import is_elastic, world_size


def layout_of(config: PretrainConfig, world_size: int) -> dict[str, int]:
    """Returns the number of ranks along each axis of the mesh.

    Example: {"pipeline": 1, "replicate": 4, "shard": 2, "tensor": 1} for `world_size` 8. The axis replicate
    gets the ranks that remain. Raises ValueError if the degrees in the config do not divide `world_size`.
    """
    pipeline, tensor = config.pipeline_parallel_degree, config.tensor_parallel_degree
    left, rest = divmod(world_size, pipeline * tensor)
    if rest:
        degrees = {"pipeline_parallel_degree": pipeline, "tensor_parallel_degree": tensor}
        product = " x ".join(f"{key}={size}" for key, size in degrees.items() if size > 1)
        raise ValueError(f"{product} does not divide the {world_size} processes. Change one of them.")
    shard = {"auto": 1, -1: left}.get(config.data_parallel_shard_degree, config.data_parallel_shard_degree)
    if left % shard:
        raise ValueError(
            f"data_parallel_shard_degree={shard} does not divide the {left} processes that pipeline and "
            "tensor parallelism leave. Choose a divisor."
        )
    return {"pipeline": pipeline, "replicate": left // shard, "shard": shard, "tensor": tensor}


def build_mesh(config: PretrainConfig) -> Mesh:
    """Builds the process groups of this rank. All ranks call it."""
    mesh = Mesh(layout_of(config, world_size()))
    if not mesh.is_plain:
        log.locate_ranks(functools.partial(describe_position, sizes=mesh.sizes))
    return mesh


def check_layout(config: PretrainConfig, world_size: int) -> None:
    """Raises ValueError if the slots cannot be divided evenly among processes, or into micro-batches.

    Also raises ValueError if the degrees of parallelism do not divide `world_size`, the number of processes.

    Exception: if torchrun may change the number of nodes (--nnodes MIN:MAX), local_steps is 1, and there is
    no pipeline, nothing is refused because it is uneven. An uneven division among processes causes a warning.
    Ranks in `profile_ranks` that do not exist also cause a warning.
    """
    sizes = layout_of(config, world_size)
    if config.profile and (absent := [number for number in config.profile_ranks if number >= world_size]):
        ranks = ", ".join(map(str, absent))
        log.warning(f"profile_ranks: the run has no rank {ranks}. The other ranks write their traces.")
    count = world_size // sizes["tensor"]
    slots, rest = divmod(config.global_batch_size, count)
    may_be_uneven = is_elastic() and config.local_steps == 1 and sizes["pipeline"] == 1
    if rest:
        uneven = f"global_batch_size {config.global_batch_size} is not divisible by the {count} processes"
        uneven += " that tensor parallelism leaves" if sizes["tensor"] > 1 else ""
        if not may_be_uneven:
            raise ValueError(f"{uneven}. Change one of them.")
        log.warning(
            f"{uneven}. Processes get {slots + 1} slots each until all are assigned; the last ones get fewer "
            "or none."
        )
    elif slots % config.gradient_accumulation_steps and not may_be_uneven:
        raise ValueError(
            f"the {slots} slots of each process are not divisible by "
            f"gradient_accumulation_steps {config.gradient_accumulation_steps}. Change one of them."
        )
