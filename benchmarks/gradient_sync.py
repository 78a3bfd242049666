"""Times what summing gradients over ranks adds to the backward pass, in four ways.

    python -m benchmarks.gradient_sync --processes 2
    torchrun --nproc-per-node 8 -m benchmarks.gradient_sync --device cuda

flat, ddp: as the config's `sync`. shared: in memory that the ranks of one machine share, as `sync=auto` does
on CPUs; its limit is what memory allows, a copy of all gradients on all ranks at once. per_parameter: the
textbook loop, one blocking all-reduce for each parameter after the backward pass, on the gradients that flat
lays out, so that the exchange alone differs.
sync: (backward pass with the exchange, until every gradient is there) - (the same backward pass in
`no_sync`), round by round. step: forward, backward, exchange, both optimizers. And the peak memory of a
process with and without activation checkpointing.
"""

import argparse
import functools
import gc
from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.harness import (
    Sample,
    add_processes,
    benchmark_parser,
    now,
    parse,
    positive,
    print_report,
    time_rounds,
)
from benchmarks.processes import run
from benchmarks.trainee import TINY, Trainee, build_config, random_batch
from parallel.collectives import all_reduce_sum_, barrier, gather_objects
from parallel.launch import keep_freed_memory
from parallel.process_group import is_main, num_nodes, rank, world_size
from training.clock import peak_memory_bytes

SYNCS = ("shared", "flat", "ddp", "per_parameter")
_CLOCK_SECONDS = 1e-6  # no difference of two times counts as less


def main(words: Sequence[str] | None = None) -> None:
    parser = benchmark_parser("gradient_sync", description="Gradient exchange in four ways.", rounds=12)
    add_processes(parser)
    parser.add_argument(
        "--puzzles", type=positive, default=2, metavar="N", help="of each process (default: %(default)s)"
    )
    parser.add_argument(
        "--memory-puzzles",
        type=positive,
        default=16,
        metavar="N",
        help="of each process, where memory is measured (default: %(default)s)",
    )
    run(measure, parse(parser, words, takes_torchrun=True))


def measure(arguments: argparse.Namespace, device: torch.device) -> None:
    """All ranks call it; rank 0 prints."""
    keep_freed_memory(device)  # as in a run
    # The lower peak first: that of a process on a CPU only ever rises.
    peaks = {kind: _peak_memory(kind, arguments, device) for kind in ("block", "none")}
    peaks_of_ranks = gather_objects(peaks)
    syncs = SYNCS if device.type == "cpu" and num_nodes() == 1 and world_size() > 1 else SYNCS[1:]
    contenders = [Contender(sync, arguments, device) for sync in syncs]
    turns = [turn for contender in contenders for turn in (contender.backward_alone, contender.step)]
    turns += [contenders[0].copy] if "shared" in syncs else []
    seconds = time_rounds(turns, rounds=arguments.rounds, warmup_rounds=2)
    if not is_main():
        return

    samples = {name: Sample.of(values) for name, values in seconds.items()}
    rows = []
    for sync in syncs:
        difference = seconds[f"{sync} backward and sync"] - seconds[f"{sync} backward alone"]
        samples[f"{sync} sync"] = Sample.of(difference)
        parts = [samples[f"{sync} {part}"] for part in ("backward alone", "sync", "step")]
        rows.append([sync, *(cell for sample in parts for cell in sample.cells())])

    def over(part: str, sync: str, other: str) -> float:
        ours, peer = (max(_CLOCK_SECONDS, samples[f"{each} {part}"].median) for each in (sync, other))
        return ours / peer

    pairs = [("flat", "ddp"), ("flat", "per_parameter")]
    if "shared" in syncs:
        pairs += [("shared", "ddp"), ("shared", "flat")]
    ratios = {
        f"{prefix}{sync}_over_{other}": over(part, sync, other)
        for prefix, part in (("", "sync"), ("step_", "step"))
        for sync, other in pairs
    }
    if "shared" in syncs:
        seconds_shared = max(_CLOCK_SECONDS, samples["shared sync"].median)
        ratios["shared_over_copy"] = seconds_shared / samples["copy"].median
    peak = {kind: max(each[kind] for each in peaks_of_ranks) / 2**20 for kind in ("none", "block")}
    print_report(
        "gradient_sync",
        header=["sync", "backward ms", "spread ms", "sync ms", "spread ms", "step ms", "spread ms"],
        rows=rows,
        notes=[
            *(f"{name} = {ratio:.2f}" for name, ratio in ratios.items()),
            f"peak memory with {arguments.memory_puzzles} puzzles a process: {peak['none']:.0f} MiB, "
            f"with activation checkpointing {peak['block']:.0f} MiB",
        ],
        result={**ratios, "peak_memory_mib": peak},
        samples=samples,
        arguments=arguments,
    )


class Contender:
    """One model with one way to sum its gradients; its turns return what they timed."""

    def __init__(self, sync: str, arguments: argparse.Namespace, device: torch.device):
        self._sync, self._device = sync, device
        config = build_config(
            global_batch_size=arguments.puzzles * arguments.processes,
            sizes=TINY if arguments.quick else None,
            sync={"shared": "auto", "ddp": "ddp"}.get(sync, "flat"),
            optimizer_sharding="none",  # the same update of all
        )
        self.trainee = Trainee(config, device)
        self._batch = random_batch(arguments.puzzles, seed=rank(), device=device)
        assert (self.trainee.state.flat.messages_of_ranks is not None) == (sync == "shared")

    def backward_alone(self) -> dict[str, float]:
        state = self.trainee.state
        with state.gradients.no_sync():
            loss = self._forward()
            now(self._device)
            barrier()
            begin = now(self._device)
            loss.backward()
            end = now(self._device)
        state.model.network.puzzle_emb.collect_gradients()  # and forget them
        return {f"{self._sync} backward alone": end - begin}

    @functools.cached_property
    def _copied(self) -> Tensor:
        return torch.empty_like(self.trainee.state.flat.gradients)

    def copy(self) -> dict[str, float]:
        """Copies the gradients, while all ranks do: as much memory is read and written as by `shared`."""
        gradients, copied = self.trainee.state.flat.gradients, self._copied
        barrier()
        begin = now(self._device)
        copied.copy_(gradients)
        return {"copy": now(self._device) - begin}

    def step(self) -> dict[str, float]:
        """Does what training/step.py does, with a clock in between."""
        state = self.trainee.state
        begin = now(self._device)
        loss = self._forward()
        now(self._device)
        barrier()  # what a rank waits for a slower forward pass is not the exchange's
        backward_begin = now(self._device)
        self.sum_gradients(loss)
        backward_end = now(self._device)
        state.sparse_optimizer.all_gather_gradients()
        torch.linalg.vector_norm(state.flat.gradients)
        for optimizer in state.dense_optimizers:
            optimizer.step()
        state.sparse_optimizer.step()
        end = now(self._device)
        return {
            f"{self._sync} backward and sync": backward_end - backward_begin,
            f"{self._sync} step": end - begin,
        }

    def sum_gradients(self, loss: Tensor) -> None:
        """Does the backward pass and the exchange, after which every gradient is the sum over ranks."""
        gradients = self.trainee.state.gradients
        if self._sync == "per_parameter":
            with gradients.no_sync():
                loss.backward()
            for parameter in self.trainee.state.flat.parameters.values():
                all_reduce_sum_(parameter.grad)
        else:
            loss.backward()
            gradients.finish()

    def _forward(self) -> Tensor:
        state, config = self.trainee.state, self.trainee.config
        state.gradients.zero()
        reasoning, counts = state.model.reasoning, {"slots": config.global_batch_size}
        before, _ = state.model.begin(state.carry, self._batch, reasoning)
        output = state.gradients.model(before, reasoning)
        loss, _ = state.model.network.losses(before, output, counts=counts, reasoning=reasoning)
        return loss / config.global_batch_size


def _peak_memory(activation_checkpointing: str, arguments: argparse.Namespace, device: torch.device) -> int:
    """Returns the bytes after a training step of a model that is then gone."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    config = build_config(
        global_batch_size=arguments.memory_puzzles * arguments.processes,
        sizes=TINY if arguments.quick else None,
        activation_checkpointing=activation_checkpointing,
    )
    trainee = Trainee(config, device)
    trainee.step(random_batch(arguments.memory_puzzles, seed=rank(), device=device))
    del trainee
    gc.collect()
    return peak_memory_bytes(device)


if __name__ == "__main__":
    main()
