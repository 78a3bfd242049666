"""Everything that a training step changes: what a checkpoint must hold to go on as if nothing happened."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

from config.schema import PretrainConfig
from dataset.format import Metadata
from dataset.loader import Batch
from evaluation.compilation import compiles_on_all_ranks
from models import HaltingModel, build_model, recompute_blocks
from models.carry import Carry, sum_names
from models.compilation import COMPILER_OPTIONS, compile_blocks
from models.network import PuzzleEmbedding
from optimizers.puzzle_table import PuzzleTable, build_table, num_local_rows
from optimizers.weights import Weights, build_weights
from parallel.collectives import ALONE, Ranks, RankSums, all_gather_difference, all_ranks
from parallel.errors import abort_all, collective_errors
from parallel.flat import FlatParameters
from parallel.process_group import is_main, world_size
from parallel.shards import Tensors, shard_of_rows, slots_of
from parallel.strategy import SCALARS, EveryStep, LocalSteps, Strategy
from parallel.sync import build_gradient_sync
from training.average import Average, NoAverage, warn_of_long_average


@dataclasses.dataclass
class TrainState:
    """The state of a run on this rank: parts that each know how they move and what their tensors are.

    ranks: the group that shares the batch. slots: this rank's, of num_slots in the global batch. carry: the
    memory of these slots. metrics: sums since the last logged row. step: updates done so far.
    """

    model: HaltingModel
    weights: Weights
    table: PuzzleTable
    average: NoAverage | Average
    strategy: Strategy
    carry: Carry
    slots: range
    num_slots: int
    ranks: Ranks
    metrics: RankSums
    step: int = 0

    def parts(self) -> dict[str, Tensors]:
        """Returns all tensors of the state, by the file of a checkpoint that keeps them."""
        share = {"rows": self.slots, "num_rows": self.num_slots, "ranks": self.ranks}
        return {
            "weights": self.model.network.state_dict() | self.weights.tensors() | self.table.rows(),
            "optimizer": self.strategy.moments(),
            "outer_optimizer": self.strategy.tensors(),
            "ema_state": self.average.tensors() | self.table.average_tensors(),
            "carry": {name: shard_of_rows(each, **share) for name, each in self.carry.tensors().items()},
        }

    def exports(self) -> dict[str, Tensors]:
        """Returns, by file, what a checkpoint has for evaluations alone: averages, named as weights."""
        averages = self.average.values() | self.table.averages(step=self.step)
        return {"ema_weights": self.parts()["weights"] | averages} if averages else {}

    def replicated_tensors(self) -> dict[str, Tensor]:
        """Returns what must be equal on all ranks, with `local_steps` after a synchronisation."""
        read = self.model.network.state_dict() | self.table.rows()
        return {
            f"{name} of {part}": each
            for part, tensors in (self.parts() | {"weights": read}).items()
            for name, each in tensors.items()
            if isinstance(each, Tensor)
        }

    def check_replicas(self) -> None:
        """Ends all ranks, with one line, unless all hold equal replicas. All ranks call it."""
        if difference := all_gather_difference(self.replicated_tensors()):
            name, ranks = difference
            abort_all(
                f"the ranks have drifted apart at step {self.step}: {name} of ranks {ranks} "
                "is not rank 0's: start again from the newest checkpoint"
            )

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Replaces the weights by their averages, if there are any. All ranks enter it together."""
        with self.average.averaged(), self.table.averaged(step=self.step):
            yield

    def fetch_rows(self, identifiers: Tensor) -> None:
        """Fetches puzzle rows, int [n], for an evaluation from other ranks. All ranks call it."""
        self.table.fetch(identifiers)

    def broadcast_model_(self, spread: dict[str, Tensor] | None = None) -> None:
        """Overwrites the model with rank 0's, at step 0, and restarts averages and strategy from there.

        All ranks call it. spread: rank 0's full copies of sharded weights, {} elsewhere; None: leave sharded
        weights alone.
        """
        assert self.step == 0
        if spread is not None:
            self.table.fill_(spread)
            self.weights.fill_(spread, self.ranks)
        tensors = dict(self.model.network.named_buffers()) | self.parts()["weights"]  # not all are saved
        self.ranks.broadcast_([each for each in tensors.values() if isinstance(each, Tensor)])
        self.weights.gather_()
        for part in (self.average, self.table, self.strategy):
            part.restart()


def build_train_state(
    config: PretrainConfig,
    metadata: Metadata,
    *,
    device: torch.device,
    total_steps: int | None = None,
    compiles: bool = False,
) -> TrainState:
    """Builds the state of step 0: the model that rank 0 draws from the seed, and this rank's slots, halted.

    All ranks call it. total_steps: of the run, for local steps. compiles: blocks and dense optimizer.
    """
    ranks = all_ranks()
    # The order matters: first freeze, then move parameters into flat memory, where optimizers and average
    # find them, and compile last.
    with collective_errors():
        torch.manual_seed(config.seed)
        num_rows = metadata.num_puzzle_identifiers
        if (num_own := num_local_rows(config, num_rows, ranks)) < num_rows:
            metadata = dataclasses.replace(metadata, num_puzzle_identifiers=num_own)
        model = build_model(config.arch, metadata).to(device)
        if config.train_only == "puzzle_embeddings":
            model.requires_grad_(False)
        if config.activation_checkpointing == "block":
            recompute_blocks(model)
    network, num_slots = model.network, config.global_batch_size
    # Now, while all ranks have all of it, lest they drew other numbers.
    buffers = {n: each for n, each in network.named_buffers() if n != PuzzleEmbedding.weights_name}
    ranks.broadcast_([*network.parameters(), *buffers.values()])
    in_shared_memory = _sums_in_memory(config, device)
    blocks = network.block_weights()
    matrices = [name for name in blocks if network.get_parameter(name).ndim == 2]
    is_plain = config.sync == "ddp"  # which knows no dtype of a gradient
    flat = FlatParameters(
        network.named_parameters(),
        SCALARS,
        ranks=ranks,
        sharers={"auto": None, "none": ALONE, "ranks": ranks}[config.optimizer_sharding],
        in_shared_memory=in_shared_memory,
        undecayed=network.undecayed,
        unsplit=matrices if config.optimizer == "muon" else (),
        spread=blocks,
        compute_dtype=None if is_plain else network.dtype,
    )
    with collective_errors():
        compiler_options = COMPILER_OPTIONS if compiles else None
        weights = build_weights(config, flat, compiler_options=compiler_options)
        slot_counts = [len(slots_of(Ranks(index, ranks.size), num_slots)) for index in range(ranks.size)]
        table = build_table(config, network.puzzle_emb, num_rows, ranks, slot_counts=slot_counts)
        average = NoAverage()
        if config.ema is not None:
            average = Average(flat, rate=config.ema, corrects_bias=config.ema_bias_correction)
        if compiles:
            compile_blocks(model)
        if table.is_spread and network.advances:
            raise ValueError(
                "puzzle_emb_sharding=rows is not for this model: it reads the rows of the step before"
            )
        slots = slots_of(ranks, num_slots)
        sums = (*sum_names(network.metrics), "grad_norm", *sum_names(network.training_metrics))
        return TrainState(
            model=model,
            weights=weights,
            table=table,
            average=average,
            strategy=_build_strategy(config, model, weights, table, total_steps=total_steps),
            carry=_halted_carry(model, metadata, len(slots), device),
            slots=slots,
            num_slots=num_slots,
            ranks=ranks,
            metrics=RankSums(sums, device, ranks),
        )


def build_replicated_state(
    config: PretrainConfig, metadata: Metadata, *, device: torch.device, total_steps: int
) -> TrainState:
    """Builds the state of step 0 of a run of `total_steps`, equal on all ranks, which all call it."""
    compiles = compiles_on_all_ranks(config.compile, device, num_steps=total_steps)
    if config.ema is not None and is_main():
        last_step = min(config.max_steps or total_steps, total_steps)
        warn_of_long_average(config.ema, num_steps=last_step, corrects_bias=config.ema_bias_correction)
    return build_train_state(config, metadata, device=device, total_steps=total_steps, compiles=compiles)


def memory_advice(config: PretrainConfig) -> str:
    """Says how the same run needs less memory, for when there is no memory left."""
    num_slots, parts = config.global_batch_size // world_size(), config.gradient_accumulation_steps
    more_parts = [number for number in range(parts + 1, num_slots + 1) if num_slots % number == 0]
    wishes = [f"gradient_accumulation_steps={number}" for number in more_parts[:1]]
    if config.activation_checkpointing == "none":
        wishes.append("activation_checkpointing=block")
    if world_size() == 1:
        wishes.append("more processes")
    elif config.optimizer_sharding != "ranks" and config.local_steps == 1:
        wishes.append("optimizer_sharding=ranks")
    if world_size() > 1 and config.arch.has_puzzle_embeddings and config.puzzle_emb_sharding != "rows":
        wishes.append("puzzle_emb_sharding=rows")
    at_once = f"a process computes {num_slots // parts} of its {num_slots} slots at once"
    return f"{at_once}; the same run needs less with {', or '.join(wishes) or 'a smaller global_batch_size'}"


def _sums_in_memory(config: PretrainConfig, device: torch.device) -> bool:
    """Returns whether gradients may be summed in shared memory: in every step, of all weights, on CPUs."""
    sends_less = config.sync_dtype != "float32" or config.local_steps > 1 or config.train_only != "all"
    return config.sync == "auto" and device.type == "cpu" and not sends_less


def _build_strategy(
    config: PretrainConfig,
    model: HaltingModel,
    weights: Weights,
    table: PuzzleTable,
    *,
    total_steps: int | None,
) -> Strategy:
    (flat,) = weights.flats
    options = {"bucket_size_mb": config.bucket_size_mb, "sync_dtype": config.sync_dtype}
    sync = build_gradient_sync(model, flat, sync=config.sync, **options)
    size = config.global_batch_size
    if config.local_steps == 1:
        return EveryStep(sync, weights, table, batch_size=size)
    assert size % flat.ranks.size == 0, "the mean of all weights counts every rank alike"
    interval = {"local_steps": config.local_steps, "total_steps": total_steps}
    outer = {"lr": config.outer_lr, "momentum": config.outer_momentum}
    return LocalSteps(sync, weights, table, batch_size=size // flat.ranks.size, **interval, **outer)


def _halted_carry(model: HaltingModel, metadata: Metadata, num_slots: int, device: torch.device) -> Carry:
    """Makes the carry before the first step, which replaces it; only shapes and dtypes matter."""
    tokens = torch.zeros(num_slots, metadata.seq_len, dtype=torch.int32, device=device)
    numbers = torch.zeros(num_slots, dtype=torch.int64, device=device)
    blank = Batch(inputs=tokens, labels=tokens.clone(), puzzle_identifiers=numbers.int(), rows=numbers)
    tensors = model.initial_carry(blank, boards=model.network.boards_per_slot).tensors()
    # A checkpoint is read into them, so that no two slots may share their memory.
    return Carry.from_tensors({name: each.clone() for name, each in tensors.items()})
