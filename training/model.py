"""Builds this rank's part of the model of a run, initialized from the seed."""

import torch

from config.schema import PretrainConfig
from dataset.metadata import Metadata
from distributed.collectives import all_ranks
from distributed.errors import collective_errors
from distributed.mesh import Mesh
from distributed.pipeline import Ring, pipe_levels
from distributed.tensor import Cut, cut_tensors
from models import HaltingModel, Network, build_model
from models.blocks import block_weights, levels_of
from models.flops import StepCounter
from models.puzzle_embedding import PuzzleEmbedding
from training.cut import plan_of


def build_local_model(
    config: PretrainConfig, metadata: Metadata, mesh: Mesh, *, device: torch.device
) -> tuple[HaltingModel, dict[str, tuple[int, ...]], dict[str, Cut]]:
    """Builds the part of the model that this rank holds, on the device. All ranks call it.

    Returns (model with the blocks and weights of this rank, {name: shape} of all weights before ranks divide
    them, {name: part that this rank holds} of the weights that tensor-parallel ranks divide). The initial
    weights do not depend on the number of ranks. If the network of a plugin cannot be trained, or if ranks
    cannot divide it, all ranks exit with status 1.

    metadata: Sizes of the dataset. `num_puzzle_identifiers` must be the number of puzzle embeddings that this
    rank holds. mesh: Process groups of this rank.
    """
    with collective_errors():
        torch.manual_seed(config.seed)
        model = build_model(config.arch, metadata)
        shapes = {name: tuple(parameter.shape) for name, parameter in model.network.named_parameters()}
        levels, cuts = levels_of(model.network), {}
        _check_network(config, model.network, mesh)
        if mesh.pipeline.size > 1:
            pipe_levels(levels, Ring(mesh.pipeline, mesh.owners))
        if mesh.tensor.size > 1:
            in_blocks = {layer for level in levels.values() for layer in level.layers.modules()}
            cuts = cut_tensors(
                model.network, mesh.tensor, lambda layer: plan_of(layer) if layer in in_blocks else None
            )
            # Every rank would hold such a weight, but count and save it as a part that no other rank holds.
            if undivided := sorted(block_weights(model.network) - cuts.keys()):
                raise ValueError(
                    f"tensor_parallel_degree={mesh.tensor.size} cannot divide {undivided[0]}: "
                    "training/cut.py has no plan for its layer. Set tensor_parallel_degree=1."
                )
        model = model.to(device)
        if config.train_only == "puzzle_embeddings":
            model.requires_grad_(False)
        if config.activation_checkpointing == "block":
            for level in levels_of(model).values():
                level.recomputes_blocks = True
    network = model.network
    # Broadcast the initial weights, because random numbers may differ between kinds of hardware.
    buffers = {
        name: buffer for name, buffer in network.named_buffers() if name != PuzzleEmbedding.weights_name
    }
    blocks, named = block_weights(network), dict(network.named_parameters())
    all_ranks().broadcast_(
        [*(parameter for name, parameter in named.items() if name not in blocks), *buffers.values()]
    )
    for name in sorted(blocks):  # one at a time, because `broadcast_` copies all its tensors
        mesh.replicas.broadcast_([named[name]])
    return model, shapes, cuts


def _check_network(config: PretrainConfig, network: Network, mesh: Mesh) -> None:
    # Only networks of plugins can have these mistakes.
    levels, first = levels_of(network), next(network.parameters())
    for key in ("pipeline_parallel_degree", "tensor_parallel_degree", "activation_checkpointing"):
        if (value := getattr(config, key)) not in (1, "none") and not levels:
            raise ValueError(
                f"{key}={value} needs blocks, but arch={config.arch.name} has no Level. Remove {key}."
            )
    for name, parameter in network.named_parameters():
        if not parameter.requires_grad or parameter.dtype != first.dtype:
            raise ValueError(
                f"arch={config.arch.name}: the parameter {name} must be {first.dtype} and need a gradient. "
                "Register a constant as a buffer."
            )
    of_blocks = tuple(f"{name}.layers." for name in levels)
    for name, first_name in shared_weights(network).items():
        is_in_block = name.startswith(of_blocks) or first_name.startswith(of_blocks)
        if not mesh.is_plain and is_in_block:
            raise ValueError(
                f"pipeline and tensor parallelism need blocks with different weights, but {name} is "
                f"{first_name}. Remove pipeline_parallel_degree and tensor_parallel_degree."
            )
    buffers = (
        f"{of}.layers.{name}" for of, level in levels.items() for name, _ in level.layers.named_buffers()
    )
    if mesh.pipeline.size > 1 and (name := next(buffers, None)):
        # Rank 0 broadcasts and saves all buffers, but lacks those of other stages.
        raise ValueError(
            f"pipeline_parallel_degree={mesh.pipeline.size} needs blocks without buffers, but {name} is one. "
            "Remove pipeline_parallel_degree."
        )


def shared_weights(network: Network) -> dict[str, str]:
    """Returns {further name of a weight: its first name}, for a plugin whose layers share weights."""
    first_names = {parameter: name for name, parameter in network.named_parameters()}
    every_name = network.named_parameters(remove_duplicate=False)
    return {name: first_names[weight] for name, weight in every_name if first_names[weight] != name}


def count_steps(config: PretrainConfig, metadata: Metadata) -> StepCounter:
    """Returns an object that counts the floating-point operations of a thinking step on one puzzle.

    metadata: Sizes of the dataset, such as the vocabulary.
    """
    with torch.device("meta"):
        model = build_model(config.arch, metadata)
    model.requires_grad_(config.train_only == "all")
    return StepCounter(model, seq_len=metadata.seq_len)
