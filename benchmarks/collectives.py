"""Times the collectives over sizes, and what share of a training step its own exchanges are.

    python -m benchmarks.collectives
    torchrun --nproc-per-node 8 -m benchmarks.collectives --device cuda

Bus bandwidth is that of nccl-tests (its doc/PERFORMANCE.md): bytes over time, times the share of them that
must leave a process, so that it compares with the hardware whatever the number of processes.
"""

import argparse
import dataclasses
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from benchmarks.harness import (
    Sample,
    add_processes,
    benchmark_parser,
    parse,
    print_report,
    time_rounds,
    timed,
)
from benchmarks.processes import run
from benchmarks.trainee import TINY, Trainee, build_config, random_batch
from parallel.process_group import is_main, rank

_KIB, _MIB = 2**10, 2**20
_SIZES = (4 * _KIB, 64 * _KIB, _MIB, 16 * _MIB, 64 * _MIB)
_QUICK_SIZES = (4 * _KIB, 64 * _KIB)
_SAMPLE_BYTES = 4 * _MIB  # a small message is repeated until so much has travelled ...
_MOST_REPEATS = 20  # ... or so often
_PUZZLES, _QUICK_PUZZLES = 8, 2  # of each process in the training step
_STEP = "training step"

# New names since torch 2.12; the old ones warn there.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_BUS_FACTORS = {
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: (n - 1) / n,
    "all-to-all": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
}


@dataclasses.dataclass(frozen=True)
class Contender:
    """A call that all ranks make together. size: bytes, for the table; repeats: calls in one timing."""

    name: str
    call: Callable[[], object]
    size: int | None = None
    repeats: int = 1

    @property
    def key(self) -> str:
        return f"{self.name} {self.size_text}".rstrip()

    @property
    def size_text(self) -> str:
        if self.size is None:
            return ""
        return f"{self.size / _MIB:.0f} MiB" if self.size >= _MIB else f"{self.size / _KIB:.0f} KiB"

    def call_repeatedly(self) -> None:
        for _ in range(self.repeats):
            self.call()


def main(words: Sequence[str] | None = None) -> None:
    parser = benchmark_parser(
        "collectives", description="Collectives over sizes, and their share of a training step.", rounds=7
    )
    add_processes(parser)
    run(measure, parse(parser, words, takes_torchrun=True))


def measure(arguments: argparse.Namespace, device: torch.device) -> None:
    """All ranks call it; rank 0 prints."""
    sizes = _QUICK_SIZES if arguments.quick else _SIZES
    collectives = [
        collective for size in sizes for collective in build_collectives(size, arguments.processes, device)
    ]
    step = build_step(arguments, device)
    seconds = time_rounds(
        [timed(each.key, each.call_repeatedly, device) for each in [*collectives, *step]],
        rounds=arguments.rounds,
        warmup_rounds=2,
    )
    if not is_main():
        return

    samples = {each.key: Sample.of(seconds[each.key] / each.repeats) for each in [*collectives, *step]}
    shares = {each.name: samples[each.key].median / samples[_STEP].median for each in step}
    rows = []
    for each in [*collectives, *step]:
        sample, bus_cell = samples[each.key], ""
        if each.name in _BUS_FACTORS and arguments.processes > 1:
            bus = each.size * _BUS_FACTORS[each.name](arguments.processes) / sample.median
            bus_cell = f"{bus / 1e9:.3f}"
        share_cell = f"{100 * shares[each.name]:.2f} %" if each.name in shares else ""
        rows.append([each.name, each.size_text, *sample.cells(unit=1e-6), bus_cell, share_cell])
    print_report(
        "collectives",
        header=["collective", "size", "median us", "spread us", "bus GB/s", "of a step"],
        rows=rows,
        notes=["of a step: the bare exchange; in a step, part of it hides behind the backward pass."],
        result={"share_of_step": {name: share for name, share in shares.items() if name != _STEP}},
        samples=samples,
        arguments=arguments,
    )


def build_collectives(size: int, num_ranks: int, device: torch.device) -> list[Contender]:
    """Returns the collectives on `size` bytes of float32.

    As in nccl-tests, `size` is that of the whole: what an all-gather ends with, a reduce-scatter begins with.
    """
    part = torch.zeros(-(-size // (4 * num_ranks)), device=device)
    whole, other = (torch.zeros(len(part) * num_ranks, device=device) for _ in range(2))
    calls = {
        "all-reduce": lambda: dist.all_reduce(whole),
        "all-gather": lambda: _all_gather(whole, part),
        "reduce-scatter": lambda: _reduce_scatter(part, whole),
        "all-to-all": lambda: dist.all_to_all_single(other, whole),
        "broadcast": lambda: dist.broadcast(whole, src=0),
    }
    repeats = max(1, min(_MOST_REPEATS, _SAMPLE_BYTES // size))
    return [Contender(name, call, size, repeats) for name, call in calls.items()]


def build_step(arguments: argparse.Namespace, device: torch.device) -> list[Contender]:
    """Returns a training step, and apart from it the exchanges that it makes."""
    puzzles = _QUICK_PUZZLES if arguments.quick else _PUZZLES
    sizes = TINY if arguments.quick else None
    sent = {"sync": "flat", "optimizer_sharding": "none"}  # on one machine too
    config = build_config(global_batch_size=puzzles * arguments.processes, sizes=sizes, **sent)
    trainee, batch = Trainee(config, device), random_batch(puzzles, seed=rank(), device=device)
    state = trainee.state
    gradients = torch.zeros(state.num_parameters, device=device)

    def exchange_puzzle_rows() -> None:
        state.model.network.puzzle_emb(batch.puzzle_identifiers).sum().backward()
        state.sparse_optimizer.all_gather_gradients()

    return [
        Contender(_STEP, lambda: trainee.step(batch)),
        Contender("its gradients", lambda: dist.all_reduce(gradients), gradients.nbytes),
        Contender("its puzzle rows", exchange_puzzle_rows),
    ]


if __name__ == "__main__":
    main()
