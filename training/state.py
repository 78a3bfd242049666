"""Everything that a training step changes, and a checkpoint must therefore hold."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpointing.tensors import load_into_
from config.schema import PretrainConfig
from dataset.format import Metadata
from distributed.collectives import Key, Ranks, RankSums, all_ranks, broadcast_difference, gather_objects
from distributed.errors import abort_all, collective_errors
from distributed.mesh import Mesh
from distributed.process_group import num_nodes
from distributed.shards import Shard, Tensors, shard_of_rows, slots_of, tensor_of
from models import HaltingModel
from models.blocks import block_weights
from models.carry import Carry
from models.objective import sum_names
from optimizers.average import Average, build_average
from optimizers.puzzle_table import PuzzleTable, build_table, num_local_rows
from optimizers.weights import Weights, build_flats, build_weights
from training.layout import build_mesh
from training.model import build_local_model
from training.strategy import Strategy, build_strategy


@dataclasses.dataclass
class TrainState:
    """The state of a run on this rank.

    table: the puzzle embeddings. average: of the dense weights (EMA). strategy: how ranks act as one. slots:
    range of this rank's slots among the `num_slots` of the global batch. carry: what these slots keep between
    steps. metrics: sums since the last logged row. step: number of updates done.
    """

    model: HaltingModel
    weights: Weights
    table: PuzzleTable
    average: Average
    strategy: Strategy
    carry: Carry
    slots: range
    num_slots: int
    mesh: Mesh
    metrics: RankSums
    step: int = 0

    @property
    def ranks(self) -> Ranks:
        """Returns the group of ranks that divide the global batch among them."""
        return self.mesh.data

    def numbers(self) -> dict[str, Any]:
        """Returns the state that is no tensor: step, and metric sums of each rank, for state.json.

        All ranks call it; the result is for rank 0.
        """
        own = {**self.metrics.own(), "steps_summed": self.metrics.steps}
        return {"step": self.step, "metrics": gather_objects(own, self.ranks)}

    def sections(self) -> dict[str, Tensors]:
        """Returns all tensors of this rank's state, as {section of a checkpoint: {name: tensor or shard}}."""
        share = {"rows": self.slots, "num_rows": self.num_slots, "ranks": self.ranks}
        carry = {name: shard_of_rows(each, **share) for name, each in self.carry.tensors().items()}
        rows = self._mark_copies(self.table.rows())
        return {
            "weights": self.model.network.state_dict() | self.weights.tensors() | rows,
            "optimizer": self.strategy.moments(),
            "outer_optimizer": self.strategy.tensors(),
            "ema_state": self._mark_copies(self.average.tensors() | self.table.average.tensors()),
            "carry": self._mark_copies(carry),
        }

    def _mark_copies(self, tensors: Tensors) -> Tensors:
        """Marks as copies the shards that an earlier tensor-parallel rank holds as well, and saves."""
        if self.mesh.tensor.index == 0:
            return tensors
        cut = {name for flat in self.weights.flats if flat.is_part for name in flat.parameters}
        copies = {
            name: each._replace(is_copy=True)
            for name, each in tensors.items()
            if isinstance(each, Shard) and name.removeprefix("average.") not in cut
        }
        return tensors | copies

    def exports(self) -> dict[str, Tensors]:
        """Returns the averages, named as weights, which a checkpoint has for evaluations; {} without EMA."""
        step = self.step
        averages = self._mark_copies(self.average.values(step=step) | self.table.average.values(step=step))
        return {"ema_weights": self.sections()["weights"] | averages} if averages else {}

    def load_(self, folder: Path, numbers: dict[str, Any]) -> set[str]:
        """Loads a verified checkpoint of any number of ranks; returns the sections that it lacks.

        `weights.gather_` must follow; this function sends no message. numbers: as `numbers` has returned
        them. Raises ValueError where names, shapes or dtypes differ.
        """
        self.step, saved = numbers["step"], numbers["metrics"]
        # With as many ranks as before, each takes its own sums, so that later sums over ranks are equal to
        # the last bit to those of an uninterrupted run. Otherwise member 0 takes the sums of all.
        takes_own = len(saved) == self.ranks.size
        own = [sums for n, sums in enumerate(saved) if self.ranks.index == (n if takes_own else 0)]
        sums = {name: math.fsum(each.get(name, 0.0) for each in own) for name in saved[0]}
        self.metrics.fill_(sums, steps=saved[0]["steps_summed"])
        missing, sections = set(), self.sections()
        # resume=PATH may be a run in another number format: states and their initial values are in it.
        casts = {*sections["carry"], *dict(self.model.network.named_buffers())}
        for name, tensors in sections.items():
            # resume=PATH may be a run without averages, or without outer momentum, which then begins with 0.
            options = {"is_optional": name in ("outer_optimizer", "ema_state"), "casts": casts}
            if not load_into_(tensors, folder, name, remote_names=self.weights.remote_names, **options):
                missing.add(name)
        if "ema_state" in missing:
            self.average.reset_to_weights()
            self.table.average.reset_to_weights()
        self.strategy.reset_to_weights()
        return missing

    def held(self) -> dict[Key, Tensor]:
        """Returns {key: tensor} of all tensors on this rank, to compare ranks: equal keys, equal tensors.

        With `local_steps` this holds only after a synchronisation. Weights appear twice: as the optimizer
        updates them, and as the forward pass reads them. A key is (name, part of the tensor); (): the whole.
        """
        cuts = {name: cut for flat in self.weights.flats for name, cut in flat.cuts.items()}
        read = self.model.network.state_dict() | self.table.rows()
        held = {}
        for section, tensors in (self.sections() | {"the forward pass": read}).items():
            for name, each in tensors.items():
                part = each.spans if isinstance(each, Shard) else cuts.get(name, ())
                held[f"{name} of {section}", part] = tensor_of(each)
        return held

    def check_replicas(self) -> None:
        """Ends all ranks with a message if copies of one tensor differ between ranks. All ranks call it."""
        if difference := broadcast_difference(self.held()):
            name, numbers, first = difference
            abort_all(
                f"the ranks have drifted apart at step {self.step}: {name} of ranks {numbers} is not that of "
                f"rank {first}: start again from the newest checkpoint"
            )

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Replaces weights and puzzle embeddings by the averages, if the run has EMA. All ranks enter it."""
        with self.average.averaged(step=self.step), self.table.average.averaged(step=self.step):
            yield

    def broadcast_model_(self, whole: dict[str, Tensor] | None = None) -> None:
        """Overwrites the weights of all ranks with rank 0's, at step 0, and resets averages and strategy.

        All ranks call it. whole: on rank 0 the whole weight for each sharded one, by name, {} elsewhere;
        None: sharded weights stay as they are.
        """
        assert self.step == 0
        if whole is not None:
            self.table.fill_(whole)
            self.weights.fill_(whole, all_ranks())
        tensors = dict(self.model.network.named_buffers()) | self.sections()["weights"]  # not all are saved
        all_ranks().broadcast_([each for each in tensors.values() if isinstance(each, Tensor)])
        self.weights.gather_()
        for part in (self.average, self.table.average, self.strategy):
            part.reset_to_weights()


def build_first_state(
    config: PretrainConfig, metadata: Metadata, *, device: torch.device, total_steps: int | None = None
) -> TrainState:
    """Builds the state of step 0 from the seed, on each rank the part that it holds. All ranks call it.

    total_steps: number of steps of the run; None: unknown, so that compile=auto compiles nothing.
    """
    mesh = build_mesh(config)
    ranks, num_rows = mesh.data, metadata.num_puzzle_identifiers
    own = dataclasses.replace(metadata, num_puzzle_identifiers=num_local_rows(config, num_rows, ranks))
    # The order matters: cut the model to this rank's part, move the parameters into flat buffers, build
    # optimizers and averages on these, and compile last.
    model = build_local_model(config, own, mesh, device=device, total_steps=total_steps or 0)
    network = model.model.network
    flats = build_flats(config, network, mesh, blocks=block_weights(network), cuts=model.cuts)
    with collective_errors():
        options = {"shapes": model.shapes, "compiler_options": model.compiler_options}
        weights = build_weights(config, *flats, holders=mesh.holders, tensor=mesh.tensor, **options)
        table = build_table(config, network.puzzle_emb, num_rows, ranks)
        average = build_average(config, flats, total_steps=total_steps)
        model.compile_()
        slots = slots_of(ranks, config.global_batch_size)
        sums = (
            *sum_names(network.objective.metrics),
            "grad_norm",
            *sum_names(network.objective.training_metrics),
        )
        return TrainState(
            model=model.model,
            weights=weights,
            table=table,
            average=average,
            strategy=build_strategy(config, model.model, weights, table, total_steps=total_steps),
            carry=model.model.blank_carry(len(slots), seq_len=metadata.seq_len, device=device),
            slots=slots,
            num_slots=config.global_batch_size,
            mesh=mesh,
            metrics=RankSums(sums, device, ranks),
        )


def memory_advice(config: PretrainConfig, device: torch.device) -> str:
    """Returns advice for a run that is out of memory on `device`: which keys make the same run need less."""
    num_ranks, parts = all_ranks().size, config.gradient_accumulation_steps
    num_slots = -(-config.global_batch_size // (num_ranks // config.tensor_parallel_degree))
    more_parts = [number for number in range(parts + 1, num_slots + 1) if num_slots % number == 0]
    wishes = [f"gradient_accumulation_steps={number}" for number in more_parts[:1]]
    if config.activation_checkpointing == "none":
        wishes.append("activation_checkpointing=block")
    if num_ranks == 1:
        wishes.append("more processes")
    elif config.local_steps == 1:
        is_in_memory = device.type == "cpu" and num_nodes() == 1 and config.sync == "auto"
        is_in_memory &= config.sync_dtype == "float32"  # then `auto` is -1 already
        unsharded = (1,) if is_in_memory else ("auto", 1)
        if config.data_parallel_shard_degree in unsharded and config.train_only == "all":
            wishes.append("data_parallel_shard_degree=-1")
        if config.arch.has_puzzle_embeddings and config.puzzle_emb_sharding != "rows":
            wishes.append("puzzle_emb_sharding=rows")
    at_once = f"a process computes {num_slots // parts} of its {num_slots} slots at once"
    return f"{at_once}; the same run needs less with {', or '.join(wishes) or 'a smaller global_batch_size'}"
