"""Measures the efficiency of a training on several processes, relative to one process.

    python -m benchmarks.scaling --processes 1 2 4
    python -m benchmarks.scaling --at-least 0.85    # exit status 1 if two processes scale worse

weak     each of the n processes has --puzzles puzzles. Efficiency: time of a step with one process / time of
         a step with n processes
strong   the n processes share --puzzles puzzles. Efficiency: the same quotient, divided by n
apart    the same processes without messages. They only share the memory and caches of this machine

The program exits with status 1 if a weak efficiency is below --at-least.
"""

from runtime.environment import num_cores

import argparse
import contextlib
from collections.abc import Mapping, Sequence

import torch

from benchmarks.harness import cells, fail, fraction, parse, print_report, ratio, run_main
from benchmarks.worlds import Trainer, World, model_sizes, take_turns, world_parser


class _Step:
    """Models in training, to measure weak and strong scaling.

    turns: {"weak" or "strong": training step}. puzzles: {"weak" or "strong": batch size of each process}.
    """

    def __init__(self, device: torch.device, options: argparse.Namespace, puzzles: Mapping[str, int]):
        sizes = model_sizes(options)
        self.turns = {mode: Trainer(device, *sizes, puzzles=num).step for mode, num in puzzles.items()}


def main(argv: Sequence[str] | None = None) -> None:
    description = "Measures the efficiency of a training on several processes, relative to one process."
    parser = world_parser("scaling", description=description, compares_numbers=True)
    least = "exit with status 1 if a weak efficiency is lower than FRACTION"
    parser.add_argument("--at-least", type=fraction, metavar="FRACTION", help=least)
    options = parse(parser, argv)
    most = max(options.processes)
    if options.at_least is not None and (most == 1 or (options.device == "cpu" and most > num_cores())):
        parser.error(
            "--at-least compares several processes with one, and each needs its own core: "
            f"{most} processes, {num_cores()} cores. Pass --processes from 2 to the number of cores"
        )
    counts = sorted({1, *options.processes})
    turns: dict[tuple[str, int], tuple[World, str]] = {}
    with contextlib.ExitStack() as opened:
        for count in counts:
            if options.puzzles % count:
                fail(f"--puzzles {options.puzzles} is not divisible by {count} processes")
            puzzles = {"weak": options.puzzles} | ({"strong": options.puzzles // count} if count > 1 else {})
            for apart in (False, True)[: 1 + (1 < count <= num_cores())]:
                arguments = (options, _Step, options, puzzles)
                world = opened.enter_context(World(*arguments, processes=count, apart=apart))
                turns |= {(mode + " apart" * apart, count): (world, mode) for mode in puzzles}
        times = take_turns(turns, rounds=options.rounds)
    alone, rows, result = times["weak", 1], [], {}
    for (mode, count), measured in times.items():
        efficiency = ratio(alone, measured) / (count if mode.startswith("strong") else 1)
        shares_cores = options.device == "cpu" and count > num_cores()
        key = f"{mode.replace(' ', '_')}_efficiency_{count}"
        result |= {} if shares_cores else {key: efficiency}
        if mode.endswith(" apart"):
            together = mode.removesuffix(" apart")
            result[f"{together}_over_apart_{count}"] = ratio(measured, times[together, count])
        shown = "oversubscribed" if shares_cores else f"{efficiency:.3f}"
        rows.append([f"{mode} {count}", *cells(measured), shown])
    print_report(
        "scaling",
        options,
        header=["mode, processes", "step ms", "spread ms", "efficiency"],
        rows=rows,
        notes=[
            f"weak: {options.puzzles} puzzles in each process. strong: {options.puzzles} in all processes "
            "together. apart: the processes run at the same time, without messages."
        ],
        result=result,
    )
    for count in counts[1:] if options.at_least is not None else ():
        if (efficiency := result[f"weak_efficiency_{count}"]) < options.at_least:
            fail(f"efficiency {efficiency:.3f} of {count} processes is below --at-least {options.at_least:g}")


if __name__ == "__main__":
    run_main(main)
