"""Estimates the memory, messages and operations of a run on any number of processes, without running it.

docs/parallel.md describes the output.
"""

from runtime.environment import num_cores

import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from config.schema import PretrainConfig
from dataset.description import with_candidates
from dataset.metadata import USUAL_SIZES, Metadata, usual_metadata
from dataset.mixture import open_datasets
from distributed.backend import device_type
from models.blocks import block_weights
from models.carry import Reasoning
from models.flops import StepCounter
from optimizers.weights import SCALARS, state_numbers_per_weight
from training.cut import plan_of
from training.data import build_plan, hold_out
from training.layout import check_layout, layout_of
from training.model import count_steps
from training.schedule import Schedule

_MB, _GB, _PETA = 10**6, 10**9, 10**15
# Bytes of saved bfloat16 activations per block, position and feature. _WHOLE: bytes on every tensor-parallel
# rank. _SHARED: {architecture: bytes that tensor-parallel ranks divide among themselves}. _INPUT: bytes of
# the input of the block; only the input is saved with activation_checkpointing=block.
_WHOLE, _SHARED, _INPUT = 12, {"urm": 53}, 2
_USUALLY_SHARED = 35
_BUCKET_MB = 25  # bucket_size_mb=auto on NCCL


class Sent(NamedTuple):
    messages: float
    bytes: float


class Needs:
    """Estimates the memory and the messages of a run. All numbers are means over the processes of the run.

    counter: Counts the operations of the model. sizes: Number of processes along each axis of the mesh, such
    as {"pipeline": 1, "replicate": 4, "shard": 2, "tensor": 1}. `reasoning` of the methods: Settings of the
    model's thinking, such as the number of cycles.
    """

    def __init__(self, config: PretrainConfig, counter: StepCounter, sizes: Mapping[str, int]):
        self._config, self._counter = config, counter
        self._network = network = counter.model.network
        self._stages, self._replicas, self._shares, self._tensor = sizes.values()
        self._data = self._stages * self._replicas * self._shares
        self._is_plain = self._stages == self._tensor == 1
        self._is_mixed = network.dtype != torch.float32 and config.sync != "ddp"
        names, parts = block_weights(network), self._stages * self._tensor
        weights = dict(network.named_parameters())
        self._blocks = sum(weights[name].numel() for name in names) / parts
        matrices = [weights[name].numel() for name in names if weights[name].ndim == 2]
        self._matrices, self._num_matrices = sum(matrices) / parts, len(matrices) / self._stages
        self._rest = sum(weight.numel() for name, weight in weights.items() if name not in names)
        self.slots = config.global_batch_size / self._data
        table = network.puzzle_emb
        self._row, self._rows = (0, 0) if table is None else (table.weights.shape[1], len(table.weights))

    def memory(self) -> dict[str, float]:
        """Estimates the bytes that a process keeps in memory between training steps, by purpose.

        Example: {"weights": 2.7e7, "gradients": 2.7e7, "carry": 1e6}.
        """
        config, blocks, rest = self._config, self._blocks, self._rest
        in_one_flat = self._is_plain and not self._is_mixed
        updated = blocks / self._shares + rest / (self._shares if in_one_flat else 1)
        averaged = blocks / (self._replicas * self._shares)
        averaged += rest / (1 if self._is_plain and self._is_mixed else self._data)
        moments = state_numbers_per_weight(config) * updated
        if config.optimizer == "muon":  # it stores one number for each element of a matrix, and not two
            moments -= self._matrices / self._shares
        rows = self._rows / (self._data if config.puzzle_emb_sharding == "rows" else 1)
        memory = {
            "weights": blocks * (self._network.dtype.itemsize if self._is_mixed else 4) + 4 * rest,
            "masters": 4 * blocks / self._shares * self._is_mixed,
            "gradients": 4 * (blocks + rest) * (config.train_only == "all"),
            "moments": 4 * moments,
            "averages": 4 * averaged * bool(config.ema),
            "local steps": 4 * (blocks + rest) * (config.local_steps > 1) * (1 + bool(config.outer_momentum)),
            "puzzle rows": 4 * self._row * rows,
            "averages of rows": 4 * (self._row + 1) * self._rows / self._data * bool(config.ema),
            "carry": self.slots * self._counter.carry_bytes(),
        }
        return {part: num_bytes for part, num_bytes in memory.items() if num_bytes}

    def activations(self, reasoning: Reasoning) -> float | None:
        """Estimates the bytes of activations that one process saves for the backward pass of a micro-batch.

        A micro-batch is the part of the batch that one forward and backward pass computes. If the network has
        no `Level`, the result is None, because only activations of levels can be estimated.
        """
        of_block = _WHOLE + _SHARED.get(self._config.arch.name, _USUALLY_SHARED) / self._tensor
        if self._config.activation_checkpointing == "block":
            of_block = _INPUT
        step = self._counter.count(reasoning, trains=True)
        if not step.calls:
            return None
        num_blocks = sum(graded * len(level.layers) for level, _, graded, _ in step.calls)
        at_once = self.slots / self._config.gradient_accumulation_steps
        # A pipeline stage saves activations of its blocks for the slots of all stages, so the sum is the
        # same.
        return at_once * num_blocks * of_block / 2 * self._state_bytes(reasoning)

    def slots_that_fit(self, num_bytes: float, reasoning: Reasoning) -> int:
        """Estimates how many slots fit into a process with `num_bytes` bytes of memory.

        Call it only if `activations(reasoning)` is not None.
        """
        of_slots = self.activations(reasoning) + self.memory()["carry"]
        fixed = sum(self.memory().values()) - self.memory()["carry"]
        return max(0, int((num_bytes - fixed) / of_slots * self.slots))

    def sent(self, reasoning: Reasoning) -> dict[str, Sent]:
        """Estimates what a process sends in a training step: {purpose: number of messages and bytes}.

        Example of a purpose: "sums of gradients". With local_steps > 1, the numbers are means over steps. The
        bytes of puzzle embeddings are an upper limit. Messages for metrics and gradient clipping are not
        counted.
        """
        config, blocks, rest = self._config, self._blocks, self._rest
        parts, state = config.gradient_accumulation_steps, self.slots * self._state_bytes(reasoning)
        more, calls, summed = self._network.objective.more_calls(reasoning), 0.0, 0.0
        for level, num_calls, graded, _ in self._counter.count(reasoning, trains=True).calls:
            calls += num_calls * (1 + more) + graded
            in_block = sum(plan_of(module) is not None for module in level.modules())
            again = graded * (config.activation_checkpointing == "block")
            summed += in_block * (num_calls * (1 + more) + again + graded)
        item = getattr(torch, config.sync_dtype).itemsize
        scalars = len(SCALARS) * self._data
        counts = [(blocks + rest + scalars, self._data)]
        if not self._is_plain:
            counts = [(rest + scalars, self._data), (blocks, self._replicas * self._shares)]
        sums = [(item * count, ranks) for count, ranks in counts if ranks > 1 and config.train_only == "all"]
        bucket = (_BUCKET_MB if config.bucket_size_mb == "auto" else config.bucket_size_mb) * 2**20
        gathered = (blocks + rest * self._is_plain) * (self._network.dtype.itemsize if self._is_mixed else 4)
        hops = self._stages + (self._stages > 2)
        has_muon = config.optimizer == "muon" and config.train_only == "all"
        row, others = self.slots * 4 * (self._row + 1) * bool(self._row), (self._data - 1) / self._data
        if config.puzzle_emb_sharding == "rows":  # row indices, rows, and sums in float64
            rows = Sent(3, others * self.slots * (12 * self._row + 8))
        else:
            rows = Sent(1, (self._data - 1) * row)
        sent = {
            "sums of gradients": Sent(
                sum(math.ceil(num_bytes / bucket) for num_bytes, _ in sums) / config.local_steps,
                sum(_ring(*pair) for pair in sums) / config.local_steps,
            ),
            "weights of shards": Sent(1, _ring(gathered / 2, self._shares)),
            # Muon gathers each matrix on one tensor-parallel rank, and scatters its update.
            "updates of matrices": Sent(
                2 * self._num_matrices / self._shares,
                _ring(4 * self._matrices / self._shares, self._tensor) * has_muon,
            ),
            "gradients of puzzle rows": rows._replace(messages=rows.messages / config.local_steps),
            "stages": Sent(calls * hops * parts, calls * hops * state * (self._stages > 1)),
            "sums of features": Sent(summed * parts, summed * _ring(state, self._tensor)),
        }
        return {purpose: traffic for purpose, traffic in sent.items() if traffic.bytes}

    def _state_bytes(self, reasoning: Reasoning) -> int:
        elements = max((size for *_, size in self._counter.count(reasoning, trains=True).calls), default=0)
        return elements * self._network.dtype.itemsize


def _ring(num_bytes: float, ranks: int) -> float:
    """Returns how many bytes each of `ranks` processes sends in a ring all-reduce of `num_bytes` bytes."""
    return 2 * (ranks - 1) / ranks * num_bytes


def describe(config: PretrainConfig, world_size: int) -> str:
    """Returns a text with the estimated memory, messages and operations of a run on `world_size` processes.

    Raises ValueError if the run cannot be divided among so many processes.
    """
    check_layout(config, world_size)
    metadata, num_steps, missing = _read_data(config)
    seq_len, sizes, counter = metadata.seq_len, layout_of(config, world_size), count_steps(config, metadata)
    model, needs = counter.model, Needs(config, counter, sizes)
    mesh = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "one"
    num_weights = sum(parameter.numel() for parameter in model.network.parameters())
    sizes_of_model = f"{num_weights:,} weights, {seq_len} tokens a puzzle"
    if missing:
        sizes_of_model += f"\ndataset not found: {missing}. Estimates assume puzzles of {seq_len} tokens."
    memory = needs.memory()
    if (activations := needs.activations(model.reasoning)) is not None:
        memory["activations, about"] = activations
    memory["together"] = sum(memory.values())
    sent = needs.sent(model.reasoning)
    flops = config.global_batch_size * counter.flops(model.reasoning, trains=True)
    return "\n".join(
        [
            f"{world_size} processes ({mesh}), {needs.slots:g} slots each",
            sizes_of_model,
            f"\n{'GB a process':<24}",
            *(f"{part:<24}{num_bytes / _GB:10.3g}" for part, num_bytes in memory.items()),
            *_describe_fit(config, needs, model.reasoning, world_size),
            f"\n{'a process sends a step':<24}{'messages':>10}{'MB':>10}",
            *(
                f"{purpose:<24}{traffic.messages:10.3g}{traffic.bytes / _MB:10.3g}"
                for purpose, traffic in sent.items()
            ),
            f"\n{num_steps} steps, {flops / _PETA:.3g} PFLOP each"
            if num_steps
            else f"\n{flops / _PETA:.3g} PFLOP a step. The number of steps depends on the dataset. Build the "
            f"dataset to see it{'' if config.curriculum else ', or set train_steps'}.",
        ]
    )


def _describe_fit(
    config: PretrainConfig, needs: Needs, reasoning: Reasoning, world_size: int
) -> Iterator[str]:
    if needs.activations(reasoning) is None:
        yield f"activations are unknown and not included, because arch={config.arch.name} has no Level"
        return
    if device_type(config.device) == "cuda":
        if not torch.cuda.is_available():
            return
        num_bytes, where = float(torch.cuda.get_device_properties(0).total_memory), "a GPU like the first one"
    else:
        processes = min(world_size, num_cores())
        num_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / processes
        where = "this machine" if processes == 1 else f"this machine with {processes} processes"
    slots = needs.slots_that_fit(num_bytes, reasoning)
    yield f"estimate: about {slots:,} slots fit into a process, with {num_bytes / _GB:.3g} GB on {where}"


def _read_data(config: PretrainConfig) -> tuple[Metadata, int | None, str | None]:
    """Returns (sizes of the dataset, number of training steps, a missing dataset folder or None).

    If any dataset folder is missing, usual sizes are assumed, and the number of steps may be None (unknown).
    """
    if missing := next((path for path in config.data_paths if not Path(path).is_dir()), None):
        return usual_metadata(**USUAL_SIZES), None if config.curriculum else config.train_steps, missing
    data = open_datasets([Path(path) for path in config.data_paths], read_everything=False)
    data = with_candidates(data) if config.arch.finds_candidates else data
    plan = build_plan(config, data, hold_out(config, data)[0])
    return data.metadata, Schedule(config, plan).total_steps, None
