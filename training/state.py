"""The state of a run: everything that a training step changes, and that a checkpoint must contain."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpointing.tensors import load_into_
from config.schema import PretrainConfig
from dataset.metadata import Metadata
from distributed import log
from distributed.collectives import Key, Ranks, RankSums, all_ranks, broadcast_difference
from distributed.errors import abort_all, collective_errors
from distributed.mesh import Mesh
from distributed.shards import Shard, Tensors, shard_of_rows, slots_of, tensor_of
from distributed.world import num_nodes
from evaluation.compilation import compiles_on_all_ranks
from models import HaltingModel
from models.blocks import block_weights
from models.carry import Carry
from models.compilation import COMPILER_OPTIONS, compile_blocks
from models.objective import sum_names
from optimizers.average import Average, build_average
from optimizers.puzzle_table import PuzzleTable, build_table, num_local_rows
from optimizers.weights import Weights, build_flats, build_weights
from training.layout import build_mesh
from training.model import build_local_model, shared_weights
from training.strategy import EveryStep, LocalSteps, Strategy


@dataclasses.dataclass
class TrainState:
    """The state of a run on this rank.

    A slot is one position of the global batch, and works on one puzzle for several training steps.

    Attributes:
        model: This rank's part of the model.
        weights: The dense weights, which are all weights except puzzle embeddings, and their optimizers.
        table: Puzzle embeddings and their optimizer.
        average: Moving average (EMA) of the dense weights.
        strategy: When and how ranks synchronize gradients or weights.
        carry: Puzzle and latent state of each slot of this rank.
        slots: Numbers of this rank's slots in the global batch.
        num_slots: Number of slots of the global batch.
        mesh: Process groups of this rank.
        metrics: Sums of metrics over this rank's slots, and over the steps since metrics were last logged.
        step: Number of training steps done.
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
        return self.mesh.data

    def sections(self) -> dict[str, Tensors]:
        """Returns the tensors that a checkpoint needs to continue this run.

        The result is {section: {name: value}}, for example with the section "optimizer". A value is a
        `Tensor` if each rank holds the full tensor, which rank 0 then saves. Otherwise it is a `Shard`: the
        elements on this rank, and their positions in the full tensor. Values are not copied, because loading
        writes into them.
        """
        carry = {
            name: shard_of_rows(tensor, self.slots, self.num_slots, self.ranks)
            for name, tensor in self.carry.tensors().items()
        }
        return {
            # {name in the model: value} of buffers such as "H_init", dense weights and puzzle embeddings. The
            # state dict also contains weights, perhaps as bfloat16 copies: the later values replace them.
            # Dense weights are in the dtype in which the optimizer updates them. They are full, except those
            # of the blocks with a pipeline, with tensor parallelism, or if the blocks compute in bfloat16 and
            # a shard group divides their updates (`data_parallel_shard_degree`).
            "weights": self.model.network.state_dict()
            | self._with_shared(self.weights.tensors())
            | self._mark_copies(self.table.tensors()),
            # {"<moment>.<weight>": value}, full unless a shard group divides the updates of the weight. With
            # adam_atan2, the moments are "first_moment" and "second_moment", and its number of steps is
            # `self.step`.
            "optimizer": self.weights.moments(),
            # {weight: momentum of the merges} with `local_steps` and `outer_momentum`, otherwise {}.
            "outer_optimizer": self.strategy.tensors(),
            # {"average.<weight>": EMA}, and for puzzle embeddings the averages "table.rows" and their steps
            # "table.steps". {} without EMA. Several ranks always divide the averages: each has one range of
            # a flat tensor of all weights, and the rows r, r + ranks, ... of the table. Exception: averages
            # of float32 weights beside bfloat16 ones are full.
            "ema_state": self._mark_copies(self.average.tensors() | self.table.average.tensors()),
            # "steps", "halted", the fields of `Batch` as "data.<field>" (without "answers"), and states of
            # the model such as "z_H", each with a row for each slot of the global batch.
            "carry": self._mark_copies(carry),
        }

    def exports(self) -> dict[str, Tensors]:
        """Returns weights for evaluation, to be saved in a checkpoint: {"ema_weights": {name: average}}.

        A weight without an average is included unchanged. For puzzle embeddings, the average after this step
        is computed. The averages are divided among ranks like those of the section "ema_state". Returns {}
        without EMA. A run that resumes does not read these weights.
        """
        step = self.step
        averages = self._mark_copies(self.average.values(step=step) | self.table.average.values(step=step))
        averages = self._with_shared(averages)
        return {"ema_weights": self.sections()["weights"] | averages} if averages else {}

    def _with_shared(self, tensors: Tensors) -> Tensors:
        # The state dict of a network has every name of a weight, but `tensors` only the first one.
        shared = shared_weights(self.model.network)
        return tensors | {name: tensors[first] for name, first in shared.items() if first in tensors}

    def _mark_copies(self, tensors: Tensors) -> Tensors:
        # Tensor-parallel ranks work on the same puzzles, so they hold equal carries, puzzle embeddings, and
        # averages of weights outside of blocks. Only index 0 of the group saves these. Weights of blocks are
        # divided among the ranks, so each rank saves its part. (`FlatParameters.shards` and
        # `Weights.moments` mark other copies.)
        if self.mesh.tensor.index == 0:
            return tensors
        of_blocks = {name for flat in self.weights.flats if flat.is_part for name in flat.parameters}
        copies = {
            name: value._replace(is_copy=True)
            for name, value in tensors.items()
            if isinstance(value, Shard) and name.removeprefix("average.") not in of_blocks
        }
        return tensors | copies

    def load_(self, folder: Path, content: dict[str, Any]) -> None:
        """Loads the tensors, the step and the metric sums of a checkpoint into this state. All ranks call it.

        Any number of ranks may have saved the checkpoint. If the checkpoint has no averages (EMA), they start
        as its weights. If it has no outer momentum (local steps), the outer momentum starts as 0. If another
        tensor is missing, or if a tensor does not match this run, ends all ranks with a message.

        folder: Folder of the checkpoint. content: Content of its state.json.
        """
        with collective_errors():
            self.step = content["step"]
            # Each rank gets its own sums. If another number of ranks saved them, the first rank gets all.
            self.metrics.load_(content["metrics"])
            missing, sections = set(), self.sections()
            # Latent states of the carry, and buffers such as `H_init`, are stored in the number format of the
            # forward pass. A run at resume=PATH may have another one. Then convert them.
            casts = {*sections["carry"], *dict(self.model.network.named_buffers())}
            for name, tensors in sections.items():
                # A run at resume=PATH may lack averages or outer momentum. The outer momentum then starts as
                # 0, and the averages start as the weights.
                options = {"is_optional": name in ("outer_optimizer", "ema_state"), "casts": casts}
                if not load_into_(tensors, folder, name, absent_weights=self.weights.absent, **options):
                    missing.add(name)
            if "ema_state" in missing:
                self.average.reset_to_weights()
                self.table.average.reset_to_weights()
            # With local steps, the loaded weights count as the result of a merge.
            self.strategy.reset_to_weights(step=self.step)
        if "ema_state" in missing:
            log.info(f"{folder} contains no averages (EMA). The averages start as its weights.")
        # The loaded weights are those that the optimizer updates. Copy them to those of the forward pass.
        self.weights.gather_()

    def held(self) -> dict[Key, Tensor]:
        """Returns {key: tensor} of all tensors on this rank, to compare them with other ranks.

        If two ranks have the same key, their tensors must be equal. With `local_steps` > 1, they are equal
        only after a step in which the ranks merge their weights. A key is (name, positions of the elements in
        the full tensor), or (name, ()) for a full tensor.
        """
        cuts = {name: cut for flat in self.weights.flats for name, cut in flat.cuts.items()}
        read = self.model.network.state_dict() | self.table.tensors()
        held = {}
        for section, tensors in (self.sections() | {"the forward pass": read}).items():
            for name, value in tensors.items():
                part = value.spans if isinstance(value, Shard) else cuts.get(name, ())
                held[f"{name} of {section}", part] = tensor_of(value)
        return held

    def check_replicas(self) -> None:
        """Ends all ranks with a message if copies of a tensor differ between ranks. All ranks call it."""
        if difference := broadcast_difference(self.held()):
            name, numbers, first = difference
            abort_all(
                f"replicas differ at step {self.step}: {name} on ranks {numbers} is not equal to rank "
                f"{first}. Restart from the newest checkpoint."
            )

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Context manager that replaces the weights and puzzle embeddings by their moving averages (EMA).

        On exit, restores the weights. Without EMA, nothing changes. All ranks enter it.
        """
        with self.average.averaged(step=self.step), self.table.average.averaged(step=self.step):
            yield

    def broadcast_model_(self, full_weights: dict[str, Tensor] | None = None) -> None:
        """Overwrites the weights of all ranks with the weights of rank 0. All ranks call it, at step 0.

        The moving averages (EMA) also start from these weights.

        full_weights: New values of the weights that ranks divide: {name: full weight} on rank 0, and {} on
        the other ranks. If None on all ranks, these weights do not change.
        """
        assert self.step == 0
        if full_weights is not None:
            self.table.fill_(full_weights)
            self.weights.fill_(full_weights, all_ranks())
        # `sections` lacks buffers that are not in the state dict.
        tensors = dict(self.model.network.named_buffers()) | self.sections()["weights"]
        all_ranks().broadcast_([tensor for tensor in tensors.values() if isinstance(tensor, Tensor)])
        self.weights.gather_()
        self.average.reset_to_weights()
        self.table.average.reset_to_weights()
        self.strategy.reset_to_weights(step=0)


def build_first_state(
    config: PretrainConfig, metadata: Metadata, *, device: torch.device, total_steps: int | None = None
) -> TrainState:
    """Builds this rank's part of a run's state before the first training step. All ranks call it.

    Args:
        config: Config of the run. Its seed determines the weights.
        metadata: Sizes of the dataset, such as the vocabulary.
        device: Device of this rank.
        total_steps: Number of steps of the run. If None, it is unknown, and compile=auto compiles nothing.
    """
    mesh = build_mesh(config)
    ranks, num_rows = mesh.data, metadata.num_puzzle_identifiers
    local_metadata = dataclasses.replace(
        metadata, num_puzzle_identifiers=num_local_rows(config, num_rows, ranks)
    )
    # The order matters: build this rank's part of the model, move the parameters into flat buffers, build the
    # optimizers and averages on the buffers, and compile after that.
    compiles = compiles_on_all_ranks(config.compile, device, num_steps=total_steps or 0)
    model, shapes, cuts = build_local_model(config, local_metadata, mesh, device=device)
    network = model.network
    flats = build_flats(config, network, mesh, blocks=block_weights(network), cuts=cuts)
    with collective_errors():
        options = {"shapes": shapes, "compiler_options": COMPILER_OPTIONS if compiles else None}
        options["trains_alone"] = config.local_steps > 1
        weights = build_weights(config, *flats, holders=mesh.holders, tensor=mesh.tensor, **options)
        table = build_table(config, network.puzzle_emb, num_rows, ranks)
        average = build_average(config, flats, total_steps=total_steps)
        if compiles:
            compile_blocks(model)
        strategy_class = EveryStep if config.local_steps == 1 else LocalSteps
        slots = slots_of(ranks, config.global_batch_size)
        objective = network.objective
        sums = (*sum_names(objective.metrics), "grad_norm", *sum_names(objective.training_metrics), "loss")
        return TrainState(
            model=model,
            weights=weights,
            table=table,
            average=average,
            strategy=strategy_class(
                config, model, weights, table, tensor=mesh.tensor, total_steps=total_steps
            ),
            carry=model.blank_carry(len(slots), seq_len=metadata.seq_len, device=device),
            slots=slots,
            num_slots=config.global_batch_size,
            mesh=mesh,
            metrics=RankSums(sums, device, ranks),
        )


def memory_advice(config: PretrainConfig, device: torch.device) -> str:
    """Returns a text with the config keys to set if a run is out of memory."""
    num_ranks, parts = all_ranks().size, config.gradient_accumulation_steps
    num_shares = num_ranks // config.tensor_parallel_degree  # tensor-parallel ranks have the same slots
    num_replicas = num_shares // config.pipeline_parallel_degree  # of each block
    num_slots = -(-config.global_batch_size // num_shares)
    more_parts = [count for count in range(parts + 1, num_slots + 1) if num_slots % count == 0]
    hints = [f"gradient_accumulation_steps={count}" for count in more_parts[:1]]
    if config.activation_checkpointing == "none":
        hints.append("activation_checkpointing=block")
    if num_ranks == 1:
        hints.append("more processes")
    elif config.local_steps == 1:
        is_in_memory = device.type == "cpu" and num_nodes() == 1 and config.sync == "auto"
        is_in_memory &= config.sync_dtype == "float32"  # then `auto` is -1 already
        unsharded = (1,) if is_in_memory else ("auto", 1)
        can_shard = num_replicas > 1 and config.train_only == "all"
        if can_shard and config.data_parallel_shard_degree in unsharded:
            hints.append("data_parallel_shard_degree=-1")
        can_shard = num_shares > 1 and config.arch.has_puzzle_embeddings
        if can_shard and config.puzzle_emb_sharding != "rows":
            hints.append("puzzle_emb_sharding=rows")
    at_once = f"each process computes {num_slots // parts} of its {num_slots} slots at once"
    return f"{at_once}. To need less memory, use {', or '.join(hints) or 'a smaller global_batch_size'}."
