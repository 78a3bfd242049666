"""Everything that a training step changes: what a checkpoint must hold to go on as if nothing happened."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from config.schema import PretrainConfig
from dataset.format import Metadata
from evaluation.compilation import compiles_on_all_ranks
from models import HaltingModel, build_model, recompute_blocks
from models.blocks import Elsewhere, taking
from models.carry import Carry, sum_names
from models.compilation import COMPILER_OPTIONS, compile_blocks
from models.network import Network, PuzzleEmbedding
from optimizers.puzzle_table import PuzzleTable, build_table, num_local_rows
from optimizers.weights import Weights, build_weights
from parallel import log
from parallel.collectives import Key, Ranks, RankSums, all_ranks, broadcast_difference
from parallel.errors import abort_all, collective_errors
from parallel.flat import FlatParameters
from parallel.mesh import Mesh
from parallel.pipeline import Ring, pipe_levels
from parallel.process_group import is_main, world_size
from parallel.shards import Shard, Tensors, shard_of_rows, slots_of, tensor_of
from parallel.strategy import SCALARS, EveryStep, LocalSteps, Strategy
from parallel.sync import build_gradient_sync
from parallel.tensor import Cut, cut_tensors
from training.average import Average, NoAverage, warn_of_long_average
from training.layout import layout_of


@dataclasses.dataclass
class TrainState:
    """The state of a run on this rank: parts that each know how they move and what their tensors are.

    slots: this rank's, of num_slots in the global batch. carry: the memory of these slots. metrics: sums
    since the last logged row. step: updates done so far.
    """

    model: HaltingModel
    weights: Weights
    table: PuzzleTable
    average: NoAverage | Average
    strategy: Strategy
    carry: Carry
    slots: range
    num_slots: int
    mesh: Mesh
    metrics: RankSums
    step: int = 0

    @property
    def ranks(self) -> Ranks:
        """Returns the group that shares the batch."""
        return self.mesh.data

    def parts(self) -> dict[str, Tensors]:
        """Returns all tensors of the state, by the file of a checkpoint that keeps them."""
        share = {"rows": self.slots, "num_rows": self.num_slots, "ranks": self.ranks}
        carry = {name: shard_of_rows(each, **share) for name, each in self.carry.tensors().items()}
        rows = self._mark_copies(self.table.rows())
        return {
            "weights": self.model.network.state_dict() | self.weights.tensors() | rows,
            "optimizer": self.strategy.moments(),
            "outer_optimizer": self.strategy.tensors(),
            "ema_state": self._mark_copies(self.average.tensors() | self.table.average_tensors()),
            "carry": self._mark_copies(carry),
        }

    def _mark_copies(self, tensors: Tensors) -> Tensors:
        """Marks as copies, on all tensor ranks but the first, the shards that all of them have alike."""
        if self.mesh.tensor.index == 0:
            return tensors
        spread = {name for flat in self.weights.flats if flat.is_part for name in flat.parameters}
        copies = {
            name: each._replace(is_copy=True)
            for name, each in tensors.items()
            if isinstance(each, Shard) and name.removeprefix("average.") not in spread
        }
        return tensors | copies

    def exports(self) -> dict[str, Tensors]:
        """Returns, by file, what a checkpoint has for evaluations alone: averages, named as weights."""
        averages = self._mark_copies(self.average.values() | self.table.averages(step=self.step))
        return {"ema_weights": self.parts()["weights"] | averages} if averages else {}

    def held(self) -> dict[Key, Tensor]:
        """Returns all that this rank holds: what two ranks have under one key must be equal.

        With `local_steps` after a synchronisation. Weights are there twice: as they are updated, and as the
        forward pass reads them. The part of a key is () where it is the whole.
        """
        cuts = {name: cut for flat in self.weights.flats for name, cut in flat.cuts.items()}
        read = self.model.network.state_dict() | self.table.rows()
        held = {}
        for file, tensors in (self.parts() | {"the forward pass": read}).items():
            for name, each in tensors.items():
                part = each.spans if isinstance(each, Shard) else cuts.get(name, ())
                held[f"{name} of {file}", part] = tensor_of(each)
        return held

    def check_replicas(self) -> None:
        """Ends all ranks, with one line, unless all that hold the same hold it equally. All ranks call it."""
        if difference := broadcast_difference(self.held()):
            name, numbers, first = difference
            abort_all(
                f"the ranks have drifted apart at step {self.step}: {name} of ranks {numbers} is not that of "
                f"rank {first}: start again from the newest checkpoint"
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
            self.weights.fill_(spread, all_ranks())
        tensors = dict(self.model.network.named_buffers()) | self.parts()["weights"]  # not all are saved
        all_ranks().broadcast_([each for each in tensors.values() if isinstance(each, Tensor)])
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
    mesh = Mesh(layout_of(config, world_size()))
    if not mesh.is_plain:
        log.locate_ranks(mesh.describe)
    ranks, num_rows = mesh.data, metadata.num_puzzle_identifiers
    # The order matters: first cut, then move parameters into flat memory, where optimizers and averages find
    # them, and compile last.
    with collective_errors():
        if (num_own := num_local_rows(config, num_rows, ranks)) < num_rows:
            metadata = dataclasses.replace(metadata, num_puzzle_identifiers=num_own)
        model, cuts = _draw_own_parts(config, metadata, mesh)
        model = model.to(device)
        with torch.device("meta"):
            whole = build_model(config.arch, metadata).network
        shapes = {name: tuple(each.shape) for name, each in whole.named_parameters()}
        if config.train_only == "puzzle_embeddings":
            model.requires_grad_(False)
        if config.activation_checkpointing == "block":
            recompute_blocks(model)
    network, num_slots = model.network, config.global_batch_size
    # Lest ranks drew other numbers.
    buffers = {n: each for n, each in network.named_buffers() if n != PuzzleEmbedding.weights_name}
    blocks, named = network.block_weights(), dict(network.named_parameters())
    all_ranks().broadcast_([*(each for n, each in named.items() if n not in blocks), *buffers.values()])
    for name in sorted(blocks):  # one by one: a message is a copy
        mesh.replicas.broadcast_([named[name]])
    if mesh.pipeline.size > 1:
        pipe_levels(network.levels().values(), Ring(mesh.pipeline, mesh.homes))
    flats = _build_flats(config, network, mesh, device, cuts)
    with collective_errors():
        options = {"shapes": shapes, "holders": mesh.parts, "tensor": mesh.tensor}
        options["compiler_options"] = COMPILER_OPTIONS if compiles else None
        weights = build_weights(config, *flats, **options)
        slot_counts = [len(slots_of(Ranks(index, ranks.size), num_slots)) for index in range(ranks.size)]
        table = build_table(config, network.puzzle_emb, num_rows, ranks, slot_counts=slot_counts)
        average = NoAverage()
        if config.ema is not None:
            average = Average(*flats, rate=config.ema, corrects_bias=config.ema_bias_correction)
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
            carry=model.blank_carry(len(slots), seq_len=metadata.seq_len, device=device),
            slots=slots,
            num_slots=num_slots,
            mesh=mesh,
            metrics=RankSums(sums, device, ranks),
        )


def _draw_own_parts(
    config: PretrainConfig, metadata: Metadata, mesh: Mesh
) -> tuple[HaltingModel, dict[str, Cut]]:
    """Draws the model from the seed, and keeps what this rank has of it; returns the cuts by name too.

    Every rank draws every block, and drops it before the next one: numbers do not depend on the mesh.
    """
    cuts: dict[nn.Module, dict[str, Cut]] = {}

    def take(block: nn.Module, number: int, num_blocks: int) -> nn.Module:
        assert num_blocks % mesh.pipeline.size == 0, "the schema refuses other numbers"
        if number * mesh.pipeline.size // num_blocks != mesh.pipeline.index:
            return Elsewhere(block)
        cuts[block] = cut_tensors(block, mesh.tensor) if mesh.tensor.size > 1 else {}
        return block

    torch.manual_seed(config.seed)
    with taking(take):
        model = build_model(config.arch, metadata)
    named = model.network.named_modules()
    return model, {f"{name}.{w}": cut for name, each in named for w, cut in cuts.get(each, {}).items()}


def build_first_state(
    config: PretrainConfig, metadata: Metadata, *, device: torch.device, total_steps: int
) -> TrainState:
    """Builds the state of step 0 of a run of `total_steps`, on each rank its part. All ranks call it."""
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
    elif config.data_parallel_shard_degree in ("auto", 1) and config.local_steps == 1:
        wishes.append("data_parallel_shard_degree=-1")
    if world_size() > 1 and config.arch.has_puzzle_embeddings and config.puzzle_emb_sharding != "rows":
        wishes.append("puzzle_emb_sharding=rows")
    at_once = f"a process computes {num_slots // parts} of its {num_slots} slots at once"
    return f"{at_once}; the same run needs less with {', or '.join(wishes) or 'a smaller global_batch_size'}"


def _build_flats(
    config: PretrainConfig, network: Network, mesh: Mesh, device: torch.device, cuts: dict[str, Cut]
) -> tuple[FlatParameters, ...]:
    """Moves the weights into flat memory: all together, or where blocks are spread these by themselves."""
    blocks, named = network.block_weights(), dict(network.named_parameters())
    of_blocks = {
        "sharers": mesh.sharers,
        "unsplit": [n for n in blocks if named[n].ndim == 2] if config.optimizer == "muon" else (),
        "spread": blocks,
        # DistributedDataParallel knows no dtype of a gradient.
        "compute_dtype": None if config.sync == "ddp" else network.dtype,
        "undecayed": network.undecayed,
    }
    if not mesh.is_plain:
        rest = [each for each in named.items() if each[0] not in blocks]
        here = [each for each in named.items() if each[0] in blocks]
        return (
            FlatParameters(rest, SCALARS, ranks=mesh.data, undecayed=network.undecayed),
            FlatParameters(here, ranks=mesh.replicas, is_part=True, cuts=cuts, **of_blocks),
        )
    # Sums in shared memory are of every step, of all weights, in float32.
    sends_less = config.sync_dtype != "float32" or config.local_steps > 1 or config.train_only != "all"
    in_shared_memory = config.sync == "auto" and device.type == "cpu" and not sends_less
    in_shared_memory &= mesh.sharers.size in (1, mesh.data.size)
    if config.data_parallel_shard_degree == "auto":
        of_blocks["sharers"] = None
    options = {"in_shared_memory": in_shared_memory, **of_blocks}
    return (FlatParameters(named.items(), SCALARS, ranks=mesh.data, **options),)


def _build_strategy(
    config: PretrainConfig,
    model: HaltingModel,
    weights: Weights,
    table: PuzzleTable,
    *,
    total_steps: int | None,
) -> Strategy:
    options = {"bucket_size_mb": config.bucket_size_mb, "sync_dtype": config.sync_dtype}
    syncs = [build_gradient_sync(model, flat, sync=config.sync, **options) for flat in weights.flats]
    size, num_ranks = config.global_batch_size, weights.flats[0].ranks.size
    if config.local_steps == 1:
        return EveryStep(syncs, weights, table, batch_size=size)
    assert size % num_ranks == 0, "the mean of all weights counts every rank alike"
    interval = {"local_steps": config.local_steps, "total_steps": total_steps}
    outer = {"lr": config.outer_lr, "momentum": config.outer_momentum}
    return LocalSteps(syncs, weights, table, batch_size=size // num_ranks, **interval, **outer)
