"""Measures what each rank keeps in memory, with and without what grows with the world being shared.

    python -m benchmarks.memory --processes 1 2 4

HRM with 27 M parameters, EMA and a puzzle table of --rows, after a training step: the bytes of what a rank
keeps, by what it is, and the resident memory of its process, each of the rank that has most. Every rank of a
run without anything shared keeps what one process does.
"""

import argparse
from collections.abc import Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import benchmark_parser, fail, parse, positive, print_report
from benchmarks.processes import group, start
from benchmarks.trainee import METADATA, TINY, Trainee, build_config, random_batch
from dataset.format import Metadata
from parallel.collectives import gather_objects
from parallel.process_group import choose_device, is_main, rank, world_size
from parallel.shards import tensor_of
from training.clock import peak_memory_bytes
from training.state import TrainState

# Averages are always shared.
_WHOLE, _OPTIMIZER = {"optimizer_sharding": "none"}, {"optimizer_sharding": "ranks"}
_ROWS = {"puzzle_emb_sharding": "rows"}
_SETTINGS: dict[str, dict[str, str]] = {
    "": _WHOLE,
    "optimizer_sharding=ranks": _OPTIMIZER,
    "puzzle_emb_sharding=rows": _WHOLE | _ROWS,
    "both": _OPTIMIZER | _ROWS,
}
# What models do not read.
_REST = {"pad_id": 0, "ignore_label_id": None, "blank_identifier_id": 0, "sets": ("all",)}
_REST |= {"total_groups": 1, "mean_puzzle_examples": 1.0}
_PUZZLES, _QUICK_ROWS = 1, 1000
_MIB = 2**20


def main(words: Sequence[str] | None = None) -> None:
    parser = benchmark_parser("memory", description="What each rank keeps in memory.", rounds=None)
    parser.add_argument("--processes", type=positive, nargs="+", default=[1, 2, 4], metavar="N")
    parser.add_argument("--rows", type=positive, default=10**6, metavar="N", help="default: %(default)s")
    arguments = parse(parser, words)
    arguments.processes, arguments.threads = sorted(set(arguments.processes)), 1
    if arguments.processes[0] != 1:
        parser.error("--processes must contain 1: that is what every rank keeps where nothing is shared")
    try:
        choose_device(arguments.device)
    except ValueError as error:
        fail(error)
    if arguments.quick:
        arguments.rows = _QUICK_ROWS
    found = {}
    for processes in arguments.processes:
        for setting in _SETTINGS if processes > 1 else ("",):
            found[processes, setting] = _measure(processes, setting, arguments)
    _print(found, arguments)


def _measure(processes: int, setting: str, arguments: argparse.Namespace) -> dict[str, int]:
    """Returns bytes by what they hold, each the most that a rank has."""
    ours, theirs = Pipe(duplex=False)
    workers = start(processes, lambda _: (_work, (theirs, setting, arguments)))
    theirs.close()
    for worker in workers:
        worker.join()
    if any(worker.exitcode for worker in workers):
        fail(f"a process of {processes} ended with an error")
    return ours.recv()


def _work(connection: Connection, setting: str, arguments: argparse.Namespace) -> None:
    torch.set_num_threads(arguments.threads)
    device = choose_device(arguments.device)
    with group(device):
        config = build_config(
            global_batch_size=_PUZZLES * world_size(),
            sizes=TINY if arguments.quick else None,
            ema=0.999,
            **_SETTINGS[setting],
        )
        metadata = Metadata(**vars(METADATA) | {"num_puzzle_identifiers": arguments.rows}, **_REST)
        trainee = Trainee(config, device, metadata=metadata)
        trainee.state.model.network.puzzle_emb.weights.fill_(0.5)  # memory that nobody wrote is not there
        trainee.state.ema.restart()
        trainee.step(random_batch(_PUZZLES, seed=rank(), device=device, metadata=metadata))
        ranks = gather_objects(_kept(trainee.state) | {"resident": _resident_bytes(device)})
        if is_main():
            connection.send({name: max(each[name] for each in ranks) for name in ranks[0]})


def _kept(state: TrainState) -> dict[str, int]:
    """Returns the bytes that this rank keeps, by what they are."""
    averages = state.ema.state()
    of_table = {name: each for name, each in averages.items() if name.startswith("table.")}
    tensors = {
        "table": [state.model.network.puzzle_emb.weights],
        "its averages": map(tensor_of, of_table.values()),
        "weights and gradients": [state.flat.padded, state.flat.message],
        "their averages": [tensor_of(each) for name, each in averages.items() if name not in of_table],
        "moments": map(tensor_of, state.moments().values()),
    }
    return {name: sum(each.numel() * each.element_size() for each in kept) for name, kept in tensors.items()}


def _resident_bytes(device: torch.device) -> int:
    """Returns what the process has in memory now, where the system tells it, else at most so far."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return peak_memory_bytes(device)
    (line,) = (line for line in lines if line.startswith("VmRSS:"))
    return int(line.split()[1]) * 1024


def _print(found: dict[tuple[int, str], dict[str, int]], arguments: argparse.Namespace) -> None:
    rows, result = [], {"rows": arguments.rows}
    for (processes, setting), kept in found.items():
        total = sum(each for name, each in kept.items() if name != "resident")
        which = "_".join((str(processes), *setting.split("=")[:1])).strip("_")
        result |= {f"kept_mib_{which}": total / _MIB, f"resident_mib_{which}": kept["resident"] / _MIB}
        values = [*(each for part, each in kept.items() if part != "resident"), total, kept["resident"]]
        rows.append([f"{processes} {setting}".strip(), *(f"{each / _MIB:.0f}" for each in values)])
    names = [name for name in next(iter(found.values())) if name != "resident"]
    notes: list[Any] = [
        "MiB of the rank that has most; resident: its whole process, with activations, torch and libraries",
        "where nothing is shared, every rank keeps what one process does: the first row",
    ]
    print_report(
        "memory",
        header=["processes", *names, "all kept", "resident"],
        rows=rows,
        notes=notes,
        result=result,
        samples={},
        arguments=arguments,
    )


if __name__ == "__main__":
    main()
