"""Builds this rank's part of the model of a run, initialized from the seed."""

import dataclasses
from typing import Any

import torch

from config.schema import PretrainConfig
from dataset.metadata import Metadata
from distributed.collectives import all_ranks
from distributed.errors import collective_errors
from distributed.mesh import Mesh
from distributed.pipeline import Ring, pipe_levels
from distributed.tensor import Cut
from evaluation.compilation import compiles_on_all_ranks
from models import HaltingModel, build_model, recompute_blocks
from models.blocks import block_weights, levels_of
from models.compilation import COMPILER_OPTIONS, compile_blocks
from models.flops import StepCounter
from models.puzzle_embedding import PuzzleEmbedding
from training.cut import cut


@dataclasses.dataclass(frozen=True)
class LocalModel:
    """The part of the model that this rank holds, for pipeline and tensor parallelism.

    Attributes:
        model: The model with the blocks and weights of this rank.
        cuts: {name of a weight: which part of it this rank holds}, for weights that tensor-parallel ranks
            divide.
        shapes: {name: shape} of all weights, before ranks divide them.
        compiler_options: Options of torch.compile for blocks and optimizer. If None, nothing is compiled.
    """

    model: HaltingModel
    cuts: dict[str, Cut]
    shapes: dict[str, tuple[int, ...]]
    compiler_options: dict[str, Any] | None

    def compile_(self) -> None:
        """Compiles the blocks with torch.compile, unless `compiler_options` is None.

        Call it after the weights have been moved to their final memory.
        """
        if self.compiler_options is not None:
            compile_blocks(self.model)


def build_local_model(
    config: PretrainConfig, metadata: Metadata, mesh: Mesh, *, device: torch.device, total_steps: int
) -> LocalModel:
    """Builds the part of the model that this rank holds, on the device. All ranks call it.

    The initial weights do not depend on the number of ranks.

    metadata: Sizes of the dataset. `num_puzzle_identifiers` must be the number of puzzle embeddings that this
    rank holds. mesh: Process groups of this rank. total_steps: Number of training steps of the run. With
    compile=auto, only a long run is compiled.
    """
    compiles = compiles_on_all_ranks(config.compile, device, num_steps=total_steps)
    with collective_errors():
        torch.manual_seed(config.seed)
        model = build_model(config.arch, metadata)
        shapes = {name: tuple(parameter.shape) for name, parameter in model.network.named_parameters()}
        cuts = cut(model.network, mesh)
        model = model.to(device)
        if config.train_only == "puzzle_embeddings":
            model.requires_grad_(False)
        if config.activation_checkpointing == "block":
            recompute_blocks(model)
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
    if mesh.pipeline.size > 1:
        pipe_levels(levels_of(network).values(), Ring(mesh.pipeline, mesh.owners))
    return LocalModel(model, cuts, shapes, COMPILER_OPTIONS if compiles else None)


def count_steps(config: PretrainConfig, metadata: Metadata) -> StepCounter:
    """Returns an object that counts the floating-point operations of a training step.

    metadata: Sizes of the dataset, such as the vocabulary.
    """
    with torch.device("meta"):
        model = build_model(config.arch, metadata)
    model.requires_grad_(config.train_only == "all")
    return StepCounter(model, seq_len=metadata.seq_len)
