"""Everything that a training step changes: what a checkpoint must hold to go on as if nothing happened."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dataset.format import Metadata
from dataset.loader import Batch
from models import HaltingModel, build_model, recompute_blocks
from models.carry import Carry, sum_names
from models.compilation import COMPILER_OPTIONS, compile_blocks, should_compile
from models.network import Network
from optimizers import SparseSignSGD, build_optimizers
from optimizers.outer import OuterOptimizer, build_outer_optimizer
from parallel.collectives import RankSums, broadcast_tensors_, true_on_all_ranks
from parallel.division import Division
from parallel.errors import collective_errors
from parallel.flat import FlatParameters
from parallel.process_group import is_main, rank, world_size
from parallel.row_owners import RowOwners
from parallel.shards import Slice, owned_rows, tensor_of
from parallel.sync import GradientSync, build_gradient_sync
from training.average import EMA, warn_of_long_average

if TYPE_CHECKING:
    from config.schema import PretrainConfig

_TABLE = "puzzle_emb.weights"


# What the ranks tell each other with the gradients of a step, or with what they exchange after several: the
# sum of their losses, of their own gradient norms, how many puzzles their slots have, whether they were asked
# to stop.
_TOLD = ("loss", "grad_norm", "num_distinct", "stop")


@dataclasses.dataclass
class TrainState:
    """The state of a run on this rank.

    flat: the dense weights and their gradients. division: which of them this rank updates. carry: of this
    rank's slots. slots: which of the global batch these are. metrics: sums since the last logged row. outer:
    with `local_steps`. owners: of the rows of the puzzle table, where a rank has but its own. step: updates
    done so far.
    """

    model: HaltingModel
    flat: FlatParameters
    division: Division
    gradients: GradientSync
    dense_optimizers: list[torch.optim.Optimizer]
    sparse_optimizer: SparseSignSGD | None
    outer: OuterOptimizer | None
    carry: Carry
    slots: slice
    metrics: RankSums
    ema: EMA | None
    owners: RowOwners | None = None
    step: int = 0

    @property
    def num_parameters(self) -> int:
        """Counts the dense weights; the size of the puzzle table is the dataset's."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def replicated_tensors(self) -> dict[str, Tensor]:
        """Returns what must be equal on all ranks, with `local_steps` after an exchange.

        Weights, buffers, puzzle table, and moments but those that are each rank's own. Not what is spread
        over ranks; in a world of one nothing is, and the averages are here too.
        """
        averages = {} if self.ema is None else {f"ema {name}": t for name, t in self.ema.state().items()}
        moments = self.moments()
        if self.outer is not None:
            moments = {f"outer momentum {name}": t for name, t in self.outer.state().items()}
        tensors = {**self.weights(), **moments, **averages}
        return {name: tensor for name, tensor in tensors.items() if isinstance(tensor, Tensor)}

    def weights(self) -> dict[str, Tensor | Slice]:
        """Returns weights, buffers and the puzzle table, of which a rank may have but the rows it owns."""
        weights = self.model.network.state_dict()
        if self.owners is not None:
            weights[_TABLE] = self.owners.slice_of(weights[_TABLE])
        return weights

    def moments(self) -> dict[str, Tensor | Slice]:
        """Returns what the dense optimizers of this rank keep of every weight, as <moment>.<weight>."""
        moments: dict[str, Tensor | Slice] = {}
        for optimizer in self.dense_optimizers:
            for name, part in self.division.parts.items():
                for moment, tensor in optimizer.state.get(tensor_of(part), {}).items():
                    is_slice = isinstance(part, Slice) and tensor.ndim  # a count is the same everywhere
                    moments[f"{moment}.{name}"] = part._replace(tensor=tensor) if is_slice else tensor
        return moments


def build_train_state(
    config: PretrainConfig, metadata: Metadata, *, device: torch.device, compiles: bool = False
) -> TrainState:
    """Builds the state of step 0: the model drawn from the seed on every rank, and this rank's slots, halted.

    All ranks call it. compiles: whether the blocks and the dense optimizer are compiled.
    """
    with collective_errors():
        torch.manual_seed(config.seed)
        model, owners = _build_model(config, metadata, device)
    flat = FlatParameters(
        model.network.named_parameters(), _TOLD, in_shared_memory=_sums_in_memory(config, device)
    )
    with collective_errors():
        return _build_rest(config, metadata, model, owners, flat, compiles=compiles)


def _sums_in_memory(config: PretrainConfig, device: torch.device) -> bool:
    """Whether gradients of all weights, float32 and on CPUs, are summed in every step, in no other way."""
    sends_less = config.sync_dtype != "float32" or config.local_steps > 1 or config.train_only != "all"
    return config.sync == "auto" and device.type == "cpu" and not sends_less


def _build_rest(
    config: PretrainConfig,
    metadata: Metadata,
    model: HaltingModel,
    owners: RowOwners | None,
    flat: FlatParameters,
    *,
    compiles: bool,
) -> TrainState:
    """Builds what needs no other rank."""
    network, device = model.network, flat.weights.device
    if owners is not None and network.advances:
        raise ValueError(
            "puzzle_emb_sharding=rows is not for this model: it reads the rows of the step before"
        )
    matrices = network.block_weights()
    never_cut = matrices if config.optimizer == "muon" else ()
    is_sharded = config.optimizer_sharding == "ranks"
    if config.optimizer_sharding == "auto":
        is_sharded = flat.weights_of_ranks is not None
    division = Division(flat, is_sharded=is_sharded, never_cut=never_cut)
    dense, sparse = build_optimizers(
        config,
        division,
        network.puzzle_emb,
        matrices=matrices,
        owners=owners,
        compiler_options=COMPILER_OPTIONS if compiles else None,
    )
    if compiles:
        compile_blocks(model)
    wire = {"bucket_size_mb": config.bucket_size_mb, "sync_dtype": config.sync_dtype}
    gradients = build_gradient_sync(model, flat, sync=config.sync, **wire)
    local = config.global_batch_size // world_size()
    return TrainState(
        model=model,
        flat=flat,
        division=division,
        gradients=gradients,
        dense_optimizers=dense,
        sparse_optimizer=sparse,
        outer=build_outer_optimizer(config, gradients),
        carry=model.initial_carry(_blank_batch(local, metadata, device), boards=network.boards_per_slot),
        slots=slice(rank() * local, (rank() + 1) * local),
        metrics=RankSums(
            (*sum_names(network.metrics), "grad_norm", *sum_names(network.training_metrics)), device
        ),
        ema=_build_ema(config, network, flat, num_rows=None if owners is None else owners.num_rows),
        owners=owners,
    )


def _build_model(
    config: PretrainConfig, metadata: Metadata, device: torch.device
) -> tuple[HaltingModel, RowOwners | None]:
    """Builds the model, and the owners of its puzzle rows where it has but those of this rank."""
    num_rows, is_spread = metadata.num_puzzle_identifiers, config.puzzle_emb_sharding == "rows"
    if is_spread and world_size() > 1:
        metadata = dataclasses.replace(metadata, num_puzzle_identifiers=len(owned_rows(num_rows)))
    model = build_model(config.arch, metadata).to(device)
    if config.train_only == "puzzle_embeddings":
        model.requires_grad_(False)
    if config.activation_checkpointing == "block":
        recompute_blocks(model)
    owners = RowOwners(model.network.puzzle_emb, num_rows) if is_spread and world_size() > 1 else None
    return model, owners


def _build_ema(
    config: PretrainConfig, network: Network, flat: FlatParameters, *, num_rows: int | None
) -> EMA | None:
    if config.ema is None:
        return None
    corrects_bias = config.ema_bias_correction
    return EMA(network, flat, rate=config.ema, corrects_bias=corrects_bias, num_rows=num_rows)


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
        last_step = min(config.max_steps or num_steps, num_steps)
        warn_of_long_average(config.ema, num_steps=last_step, corrects_bias=config.ema_bias_correction)
    state = build_train_state(config, metadata, device=device, compiles=compiles)
    broadcast_model_(state)
    return state


def broadcast_model_(state: TrainState) -> None:
    """Overwrites parameters and buffers with rank 0's, at step 0, where averages begin. All ranks call it.

    But for rows of the puzzle table that live on one rank alone.
    """
    assert state.step == 0
    buffers = dict(state.model.network.named_buffers())
    if state.owners is not None:
        del buffers[_TABLE]
    broadcast_tensors_([*state.model.parameters(), *buffers.values()])
    for kept in (state.ema, state.outer):
        if kept is not None:
            kept.restart()


def _blank_batch(batch_size: int, metadata: Metadata, device: torch.device) -> Batch:
    """Makes what halted slots hold before their first step replaces it; only shapes and dtypes matter."""
    tokens = torch.zeros(batch_size, metadata.seq_len, dtype=torch.int32, device=device)
    numbers = torch.zeros(batch_size, dtype=torch.int64, device=device)
    return Batch(inputs=tokens, labels=tokens.clone(), puzzle_identifiers=numbers.int(), rows=numbers)
