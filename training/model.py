"""The model of a run on one rank: initialized from the seed, with the blocks and weights of this rank."""

import dataclasses
from typing import Any

import torch

from config.schema import PretrainConfig
from dataset.format import Metadata
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
    """The part of a run's model that this rank holds.

    cuts: {name of a weight that this rank has a part of: which part}. shapes: of all weights of the whole
    model, by name. compiler_options: of torch.compile, for blocks and optimizer; None: nothing is compiled.
    """

    model: HaltingModel
    cuts: dict[str, Cut]
    shapes: dict[str, tuple[int, ...]]
    compiler_options: dict[str, Any] | None

    def compile_(self) -> None:
        """Compiles the blocks, if the run compiles; to be called when the weights are in flat buffers."""
        if self.compiler_options is not None:
            compile_blocks(self.model)


def build_local_model(
    config: PretrainConfig, metadata: Metadata, mesh: Mesh, *, device: torch.device, total_steps: int
) -> LocalModel:
    """Builds this rank's part of the model on the device; all ranks call it.

    metadata: num_puzzle_identifiers is the number of puzzle embeddings on this rank. total_steps: number of
    steps of the run, from which compile=auto decides.
    """
    compiles = compiles_on_all_ranks(config.compile, device, num_steps=total_steps)
    with collective_errors():
        torch.manual_seed(config.seed)
        model = build_model(config.arch, metadata)
        shapes = {name: tuple(each.shape) for name, each in model.network.named_parameters()}
        cuts = cut(model.network, mesh)
        model = model.to(device)
        if config.train_only == "puzzle_embeddings":
            model.requires_grad_(False)
        if config.activation_checkpointing == "block":
            recompute_blocks(model)
    network = model.network
    # Broadcast the initial weights, because ranks on other hardware may have drawn other numbers.
    buffers = {n: each for n, each in network.named_buffers() if n != PuzzleEmbedding.weights_name}
    blocks, named = block_weights(network), dict(network.named_parameters())
    all_ranks().broadcast_([*(each for n, each in named.items() if n not in blocks), *buffers.values()])
    for name in sorted(blocks):  # one by one: the message needs a copy of all its tensors
        mesh.replicas.broadcast_([named[name]])
    if mesh.pipeline.size > 1:
        pipe_levels(levels_of(network).values(), Ring(mesh.pipeline, mesh.homes))
    return LocalModel(model, cuts, shapes, COMPILER_OPTIONS if compiles else None)


def count_steps(config: PretrainConfig, metadata: Metadata) -> StepCounter:
    """Returns the counter of operations of the whole model of a run."""
    with torch.device("meta"):
        model = build_model(config.arch, metadata)
    model.requires_grad_(config.train_only == "all")
    return StepCounter(model, seq_len=metadata.seq_len)
