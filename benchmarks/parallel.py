"""Measures the cost of training one model on several processes, with four benchmarks.

    python -m benchmarks.parallel                                # all: exchange scaling memory layout
    python -m benchmarks.parallel scaling --processes 1 2 4
    python -m benchmarks.parallel exchange --line 100mbit 25     # emulated machines (root): rate, one-way ms
    python -m benchmarks.parallel layout --device cuda --layout pipeline_parallel_degree=2
    python -m benchmarks.parallel scaling --at-least 0.85        # exit status 1 if two processes scale worse
    torchrun ... -m benchmarks.parallel --at-least 0.85          # on the machines of a run

exchange: times a training step with each method to sum gradients. `alone` is the step without messages.
`default` uses the defaults of a run. `shared`, `flat`, `ddp` and `bfloat16` set sync and sync_dtype, without
sharding of the optimizer. `per_parameter` is a blocking all-reduce for each parameter. `copy` copies all
gradients in memory on each rank. This is the lower limit of `shared`.

scaling: efficiency relative to one process. weak: --puzzles in every process. strong: --puzzles over all
processes. apart: the same processes without messages. This is the limit of memory and caches on this machine.
The program exits with status 1 if a weak efficiency is below --at-least.

memory: MiB that each rank stores, and its peak, with and without sharding.

layout: tests the messages of a pipeline. Compares stored and sent bytes with formulas (docs/parallel.md).

Under torchrun, the program measures the time of a step without messages / the time of a step. It exits with
status 1 if this efficiency is below --at-least.
"""

from runtime.environment import num_cores

from collections.abc import Sequence
from typing import Any

from benchmarks.exchange import measure_cluster, measure_exchange
from benchmarks.harness import (
    benchmark_parser,
    parse,
    positive,
    run_main,
)
from benchmarks.layout import measure_layout
from benchmarks.memory import measure_memory
from benchmarks.scaling import measure_scaling
from distributed.process_group import (
    world_size,
)
from runtime.command_line import OneLineParser


def main(argv: Sequence[str] | None = None) -> None:
    parser = _parser()
    options = parse(parser, argv)
    if world_size() > 1:
        return measure_cluster(options)
    if options.at_least is not None:
        if options.questions != ["scaling"]:
            parser.error("--at-least applies only to scaling and under torchrun. Pass only scaling.")
        most = max(options.processes or [2])
        if most == 1 or (options.device == "cpu" and most > num_cores()):
            parser.error(
                "--at-least compares several processes with one, and each needs its own core: "
                f"{most} processes, {num_cores()} cores. Pass --processes from 2 to the number of cores."
            )
    if options.line and options.questions != ["exchange"]:
        parser.error("--line applies only to exchange. Remove it, or pass only exchange.")
    questions = options.questions or list(_QUESTIONS)
    if len(options.processes or []) > 1 and {"exchange", "layout"} & {*questions}:
        parser.error("several --processes apply only to scaling and memory. Pass one number.")
    for question in questions:
        _QUESTIONS[question](options)


def _parser() -> OneLineParser:
    description = "Measures the cost of training one model on several processes."
    parser = benchmark_parser("parallel", description=description, rounds=7, threads="1")
    parser.add_argument(
        "questions",
        nargs="*",
        choices=[[], *_QUESTIONS],
        help=f"benchmarks to run: {', '.join(_QUESTIONS)} (default: all)",
    )
    processes = "number of processes (default: 2). scaling and memory take several (default: 1 2)"
    parser.add_argument("--processes", type=positive, nargs="+", metavar="N", help=processes)
    parser.add_argument(
        "--puzzles", type=positive, default=8, metavar="N", help="puzzles per process (default: 8)"
    )
    parser.add_argument(
        "--rows", type=positive, default=10**6, metavar="N", help="memory: number of puzzle embeddings"
    )
    line = (
        "exchange: emulate a machine for each process, and a slow network (needs root). RATE: bandwidth in "
        "the syntax of tc, such as 1gbit. MS: delay of a message in ms"
    )
    least = "scaling, or under torchrun: exit with status 1 if the efficiency is lower than FRACTION"
    parser.add_argument("--at-least", type=float, metavar="FRACTION", help=least)
    keys = "layout: config keys of the training, as for pretrain.py"
    parser.add_argument("--layout", nargs="+", default=(), metavar="KEY=VALUE", help=keys)
    parser.add_argument("--line", nargs=2, metavar=("RATE", "MS"), help=line)
    return parser


_QUESTIONS: dict[str, Any] = {
    "exchange": measure_exchange,
    "scaling": measure_scaling,
    "memory": measure_memory,
    "layout": measure_layout,
}


if __name__ == "__main__":
    run_main(main)
