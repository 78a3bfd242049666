"""Measures weak and strong scaling of the training step over processes, one thread each.

    python -m benchmarks.scaling --processes 1 2 4

weak: every process has --puzzles; its efficiency is the time of one process over that of many.
strong: all processes share --puzzles; its efficiency is that over the number of processes.
weak apart, strong apart: the same, but nobody exchanges anything: what memory and caches, and for strong the
products of fewer puzzles, allow on this machine. Each updates all weights, of which ranks share the work.

All worlds are alive at once and take turns, so that an efficiency compares steps that ran within seconds.
More processes than cores share cores: their times are shown, and no efficiency.
"""

import argparse
import contextlib
import dataclasses
from collections.abc import Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

import numpy as np
import torch

from benchmarks.harness import Sample, benchmark_parser, fail, now, num_cores, parse, positive, print_report
from benchmarks.processes import group, start
from benchmarks.trainee import TINY, Trainee, build_config, random_batch
from parallel.collectives import barrier
from parallel.launch import keep_freed_memory
from parallel.process_group import choose_device, rank, world_size


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table: a world, and how many puzzles each of its processes has."""

    mode: str
    processes: int
    puzzles: int

    @property
    def key(self) -> str:
        return f"{self.mode} {self.processes}"


@dataclasses.dataclass(frozen=True)
class Worker:
    process: BaseProcess
    connection: Connection

    def receive(self) -> float | str:
        """Returns what the worker sends next. RuntimeError if the worker ends; it has printed why."""
        if self.connection not in wait([self.connection, self.process.sentinel]):
            raise RuntimeError(f"a worker ended with status {self.process.exitcode}")
        return self.connection.recv()


def main(words: Sequence[str] | None = None) -> None:
    parser = benchmark_parser(
        "scaling", description="Weak and strong scaling of the training step, one thread a process.", rounds=5
    )
    parser.add_argument("--processes", type=positive, nargs="+", default=[1, 2, 4], metavar="N")
    parser.add_argument("--puzzles", type=positive, default=8, metavar="N", help="default: %(default)s")
    arguments = parse(parser, words)
    arguments.processes, arguments.threads = sorted(set(arguments.processes)), 1
    if arguments.processes[0] != 1:
        parser.error("--processes must contain 1: every efficiency is over one process")
    for processes in arguments.processes:
        if arguments.puzzles % processes:
            parser.error(f"--puzzles {arguments.puzzles} is not divisible by --processes {processes}")
    try:
        print_scaling(measure(arguments), arguments)
    except ValueError as error:
        fail(error)


def measure(arguments: argparse.Namespace) -> dict[Row, np.ndarray]:
    """Returns the seconds [rounds] of a step of the slowest process, for each row of the table.

    ValueError where the device is not there.
    """
    turns: dict[Row, list[Worker]] = {}
    workers: list[Worker] = []
    for processes in arguments.processes:
        weak = Row("weak", processes, arguments.puzzles)
        together = [weak]
        if processes > 1:
            together.append(Row("strong", processes, arguments.puzzles // processes))
        turns |= dict.fromkeys(together, _start_workers(together, arguments, is_apart=False))
        workers += turns[weak]
        if 1 < processes <= num_cores():
            apart = [dataclasses.replace(row, mode=f"{row.mode} apart") for row in together]
            turns |= dict.fromkeys(apart, _start_workers(apart, arguments, is_apart=True))
            workers += turns[apart[0]]
    for message in [worker.receive() for worker in workers]:
        if message:
            raise ValueError(message)

    seconds = {row: [] for row in turns}
    for _ in range(1 + arguments.rounds):
        for row, workers in turns.items():
            for worker in workers:
                worker.connection.send(row)
            seconds[row].append(max(worker.receive() for worker in workers))
    return {row: np.array(values[1:]) for row, values in seconds.items()}  # the first round warms up


def efficiency(seconds: dict[Row, np.ndarray], row: Row, *, cores: int) -> tuple[float, Sample] | None:
    """Returns (of the medians, of the rounds), or None where there are more processes than cores."""
    if row.processes > cores:
        return None
    (one,) = (values for other, values in seconds.items() if other.processes == 1)
    ideal = one / (row.processes if row.mode.startswith("strong") else 1)
    return float(np.median(ideal) / np.median(seconds[row])), Sample.of(ideal / seconds[row])


def print_scaling(seconds: dict[Row, np.ndarray], arguments: argparse.Namespace) -> None:
    cores = num_cores() if arguments.device == "cpu" else torch.cuda.device_count()
    rows, result = [], {}
    for row, values in seconds.items():
        found = efficiency(seconds, row, cores=cores)
        sample = Sample.of(values)
        puzzles_per_second = row.puzzles * row.processes / sample.median
        cells = found[1].cells(unit=1, digits=3) if found else ["", "more processes than cores"]
        cells[0] = f"{found[0]:.3f}" if found else "none"
        rows.append(
            [
                row.mode,
                str(row.processes),
                str(row.puzzles),
                *sample.cells(),
                f"{puzzles_per_second:.2f}",
                *cells,
            ]
        )
        result[f"{row.mode.replace(' ', '_')}_efficiency_{row.processes}"] = found and found[0]
        if row.mode.endswith(" apart"):
            mode = row.mode.removesuffix(" apart")
            together = result[f"{mode}_efficiency_{row.processes}"]
            result[f"{mode}_over_apart_{row.processes}"] = together and found and together / found[0]
    print_report(
        "scaling",
        header=[
            "mode",
            "processes",
            "puzzles each",
            "step ms",
            "spread ms",
            "puzzles/s",
            "efficiency",
            "spread",
        ],
        rows=rows,
        notes=["apart: without any exchange; each updates all weights."],
        result=result,
        samples={row.key: Sample.of(values) for row, values in seconds.items()},
        arguments=arguments,
    )


# ---------------------------------------------------------------------------------------------------- workers
def _start_workers(rows: list[Row], arguments: argparse.Namespace, *, is_apart: bool) -> list[Worker]:
    """Starts the processes of one world, or as many worlds of one, that can make a step of each row."""
    pipes = [Pipe() for _ in range(rows[0].processes)]
    processes = start(
        len(pipes), lambda number: (_serve, (pipes[number][1], rows, arguments)), is_apart=is_apart
    )
    return [Worker(process, ours) for process, (ours, _) in zip(processes, pipes, strict=True)]


def _serve(connection: Connection, rows: list[Row], arguments: argparse.Namespace) -> None:
    """Sends "" or an error message; then makes a step of each row that it receives, and sends its seconds."""
    torch.set_num_threads(1)
    try:
        device = choose_device(arguments.device)
    except ValueError as error:
        connection.send(str(error))
        return
    keep_freed_memory(device)  # as in a run
    with group(device) if world_size() > 1 else contextlib.nullcontext():  # as in a run
        trainees = {}
        for row in rows:
            config = build_config(
                global_batch_size=row.puzzles * world_size(), sizes=TINY if arguments.quick else None
            )
            trainees[row] = (
                Trainee(config, device),
                random_batch(row.puzzles, seed=rank(), device=device),
            )
        connection.send("")
        while True:
            trainee, batch = trainees[connection.recv()]
            barrier()
            begin = now(device)
            trainee.step(batch)
            connection.send(now(device) - begin)


if __name__ == "__main__":
    main()
