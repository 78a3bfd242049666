"""Everything that a training step changes: what a checkpoint must hold to go on as if nothing happened."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dataset.format import Batch, Metadata
from models import HaltingModel, build_model, recompute_blocks
from models.compilation import COMPILER_OPTIONS, compile_blocks, should_compile
from models.halting import Carry
from models.network import Network
from optimizers import SparseSignSGD, build_optimizers
from optimizers.outer import OuterOptimizer, build_outer_optimizer
from parallel.collectives import RankSums, broadcast_tensors_, true_on_all_ranks
from parallel.errors import collective_errors
from parallel.flat import FlatParameters, GradientSync, build_gradient_sync
from parallel.process_group import is_main, rank, world_size
from training.ema import EMA, warn_of_long_average
from training.metrics import SUMMED

if TYPE_CHECKING:
    from config.schema import PretrainConfig


# What the ranks tell each other with the gradients of a step, or with what they exchange after several: the
# sum of their losses, of their own gradient norms, how many puzzles their slots have, whether they were asked
# to stop.
_TOLD = ("loss", "grad_norm", "num_distinct", "stop")


@dataclasses.dataclass
class TrainState:
    """The state of a run on this rank.

    flat: the dense weights and their gradients. carry: of this rank's slots. slots: which of the global batch
    these are. metrics: sums since the last logged row. outer: with `local_steps`. step: updates done so far.
    """

    model: HaltingModel
    flat: FlatParameters
    gradients: GradientSync
    dense_optimizers: list[torch.optim.Optimizer]
    sparse_optimizer: SparseSignSGD | None
    outer: OuterOptimizer | None
    carry: Carry
    slots: slice
    metrics: RankSums
    ema: EMA | None
    step: int = 0

    @property
    def num_parameters(self) -> int:
        """Counts the dense weights; the size of the puzzle table is the dataset's."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def replicated_tensors(self) -> dict[str, Tensor]:
        """Returns what must be equal on all ranks, with `local_steps` after an exchange.

        Weights, buffers, puzzle table, averages, and the moments that are not each rank's own.
        """
        moments = self.moments()
        if self.outer is not None:
            moments = {f"outer momentum {name}": t for name, t in self.outer.state().items()}
        averages = {} if self.ema is None else {f"ema {name}": t for name, t in self.ema.state().items()}
        return {**self.model.network.state_dict(), **moments, **averages}

    def moments(self) -> dict[str, Tensor]:
        """Returns what the dense optimizers keep of every weight, as <moment>.<weight>."""
        names = {parameter: name for name, parameter in self.flat.parameters.items()}
        return {
            f"{moment}.{names[parameter]}": tensor
            for optimizer in self.dense_optimizers
            for parameter, moments in optimizer.state.items()
            for moment, tensor in moments.items()
        }


def build_train_state(
    config: PretrainConfig, metadata: Metadata, *, device: torch.device, compiles: bool = False
) -> TrainState:
    """Builds the state of step 0: the model drawn from the seed on every rank, and this rank's slots, halted.

    compiles: whether the blocks and the dense optimizer are compiled.
    """
    torch.manual_seed(config.seed)
    model = build_model(config.arch, metadata).to(device)
    if config.train_only == "puzzle_embeddings":
        model.requires_grad_(False)
    if config.activation_checkpointing == "block":
        recompute_blocks(model)
    network = model.network
    flat = FlatParameters(network.named_parameters(), _TOLD)
    dense, sparse = build_optimizers(
        config,
        flat,
        network.puzzle_emb,
        matrices=network.block_weights(),
        compiler_options=COMPILER_OPTIONS if compiles else None,
    )
    if compiles:
        compile_blocks(model)
    dtype = config.gradient_dtype if config.local_steps == 1 else config.outer_dtype
    wire = {"bucket_size_mb": config.bucket_size_mb, "gradient_dtype": dtype}
    gradients = build_gradient_sync(model, flat, sync=config.sync, **wire)
    local = config.global_batch_size // world_size()
    return TrainState(
        model=model,
        flat=flat,
        gradients=gradients,
        dense_optimizers=dense,
        sparse_optimizer=sparse,
        outer=build_outer_optimizer(config, gradients),
        carry=model.initial_carry(_blank_batch(local, metadata, device)),
        slots=slice(rank() * local, (rank() + 1) * local),
        metrics=RankSums(SUMMED, device),
        ema=_build_ema(config, network, flat),
    )


def _build_ema(config: PretrainConfig, network: Network, flat: FlatParameters) -> EMA | None:
    if config.ema is None:
        return None
    return EMA(network, flat, rate=config.ema, corrects_bias=config.ema_bias_correction)


def build_replicated_state(
    config: PretrainConfig, metadata: Metadata, *, device: torch.device, num_steps: int
) -> TrainState:
    """Builds the state of step 0 of a run of `num_steps`, equal on all ranks, which all call it.

    Compiled is on all ranks or on none: the weights would come to differ.
    """
    with collective_errors():
        compiles = should_compile(config.compile, device, num_steps=num_steps)
    compiles = true_on_all_ranks(compiles, device=device)
    if config.ema is not None and is_main():
        warn_of_long_average(config.ema, num_steps=num_steps, corrects_bias=config.ema_bias_correction)
    with collective_errors():
        state = build_train_state(config, metadata, device=device, compiles=compiles)
    broadcast_model_(state)
    return state


def broadcast_model_(state: TrainState) -> None:
    """Overwrites parameters and buffers with rank 0's, at step 0, where averages begin. All ranks call it."""
    assert state.step == 0
    broadcast_tensors_([*state.model.parameters(), *state.model.buffers()])
    for kept in (state.ema, state.outer):
        if kept is not None:
            kept.restart()


def _blank_batch(batch_size: int, metadata: Metadata, device: torch.device) -> Batch:
    """Makes what halted slots hold before their first step replaces it; only shapes and dtypes matter."""
    tokens = torch.zeros(batch_size, metadata.seq_len, dtype=torch.int32, device=device)
    numbers = torch.zeros(batch_size, dtype=torch.int64, device=device)
    return Batch(inputs=tokens, labels=tokens.clone(), puzzle_identifiers=numbers.int(), rows=numbers)
