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

import argparse
import contextlib
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness import (
    benchmark_parser,
    cells,
    fail,
    measurement,
    parse,
    positive,
    print_report,
    ratio,
    run_main,
)
from benchmarks.layouts import measure_layout
from benchmarks.worlds import TINY, Trainer, World, take_turns, timed
from distributed.collectives import all_ranks
from distributed.errors import abort_all
from distributed.process_group import (
    choose_device,
    is_main,
    num_nodes,
    process_group,
    set_cpu_threads,
    world_size,
)
from runtime.command_line import OneLineParser
from training.clock import peak_memory_bytes

_MIB = 2**20
_WHOLE_UPDATE = "data_parallel_shard_degree=1"
_NEVER = 10**5  # local_steps that no benchmark reaches, so that no step synchronizes
_EXCHANGES: dict[str, tuple[str, ...]] = {
    "alone": (f"local_steps={_NEVER}", "sync_dtype=bfloat16"),
    "default": (),
    "shared": ("sync=auto", _WHOLE_UPDATE),
    "flat": ("sync=flat", _WHOLE_UPDATE),
    "ddp": ("sync=ddp", _WHOLE_UPDATE),
    "bfloat16": ("sync_dtype=bfloat16", _WHOLE_UPDATE),
}
_LOCAL_STEPS = (8, 32)
_MEMORY: dict[str, tuple[str, ...]] = {
    "": (_WHOLE_UPDATE,),
    "data_parallel_shard_degree=-1": ("data_parallel_shard_degree=-1",),
    "puzzle_emb_sharding=rows": (_WHOLE_UPDATE, "puzzle_emb_sharding=rows"),
    "both": ("data_parallel_shard_degree=-1", "puzzle_emb_sharding=rows"),
    "activation_checkpointing=block": (_WHOLE_UPDATE, "activation_checkpointing=block"),
}


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


def _sizes(options: argparse.Namespace) -> tuple[str, ...]:
    """Returns the arguments of pretrain.py that set the size of the model.

    They select a tiny model with --quick. Otherwise there are none. The model is then HRM with 27 M
    parameters.
    """
    return TINY if options.quick else ()


# -------------------------------------------------------------------------------------------------- exchange
class _Exchange:
    """Several models in training. Each sums its gradients over ranks with another method.

    The benchmark `exchange` compares the times of their training steps.

    ways: Names of the methods, keys of _EXCHANGES.
    """

    def __init__(self, device: torch.device, options: argparse.Namespace, ways: Sequence[str]):
        trainers = {
            way: Trainer(device, *_sizes(options), *_EXCHANGES[way], puzzles=options.puzzles) for way in ways
        }
        self._alone = alone = trainers["alone"]
        gradients = [torch.zeros_like(parameter) for parameter in alone.state.model.parameters()]
        flat = [torch.zeros(alone.state.weights.num_parameters, device=device) for _ in range(2)]

        def per_parameter() -> None:
            alone.step()
            for gradient in gradients:
                dist.all_reduce(gradient)

        self.turns = {way: trainer.step for way, trainer in trainers.items()}
        self.turns |= {"per_parameter": per_parameter, "rarely": self._exchange}
        self.turns["copy"] = lambda: flat[0].copy_(flat[1])

    def _exchange(self) -> None:
        """Makes a training step after which the ranks average their weights.

        With the config key `local_steps`, ranks train independently for many steps between two such steps.
        """
        self._alone.state.step = _NEVER - 1
        self._alone.step()
        self._alone.state.step = 0


def measure_exchange(options: argparse.Namespace) -> None:
    (processes,) = options.processes or [2]
    if processes == 1:
        fail("exchange needs several processes. Pass --processes 2 or more.")
    is_in_memory = options.device == "cpu" and not options.line
    ways = [way for way in _EXCHANGES if way != "shared" or is_in_memory]
    names = [*ways, "per_parameter", "rarely", *(["copy"] if is_in_memory else [])]
    with contextlib.ExitStack() as opened:
        namespaces = _machines(options, processes, opened) if options.line else ()
        world = World(options, _Exchange, options, ways, processes=processes, namespaces=namespaces)
        opened.enter_context(world)
        times = take_turns({name: (world, name) for name in names}, rounds=options.rounds, warmup_rounds=2)
    copy, rarely = times.pop("copy", None), times.pop("rarely")
    alone, rows, result = times["alone"], [], {}
    for num in _LOCAL_STEPS:
        seconds = [
            ((num - 1) * step_time + last) / num
            for step_time, last in zip(alone.times, rarely.times, strict=True)
        ]
        times[f"local_steps_{num}"] = measurement(seconds)
    added = {
        name: measurement(
            [
                max(1e-6, step_time - alone_time)
                for step_time, alone_time in zip(measured.times, alone.times, strict=True)
            ]
        )
        for name, measured in times.items()
    }
    for name, measured in times.items():
        result[f"efficiency_{name}"] = ratio(alone, measured)
        rows.append([name, *cells(measured), *cells(added[name]), f"{result[f'efficiency_{name}']:.3f}"])
    for name, baseline in (("shared", "ddp"), ("shared", "flat"), ("flat", "ddp"), ("flat", "per_parameter")):
        if name in times:
            result[f"{name}_over_{baseline}"] = added[name].median / added[baseline].median
            result[f"step_{name}_over_{baseline}"] = ratio(times[name], times[baseline])
    if copy:
        result["shared_over_copy"] = added["shared"].median / copy.median
    where = f"machines, line {' '.join(options.line)} ms" if options.line else "processes on this machine"
    print_report(
        "parallel exchange",
        options,
        header=["exchange", "step ms", "spread ms", "exchange ms", "spread ms", "efficiency"],
        rows=rows,
        notes=[
            f"{processes} {where}. exchange ms: step ms minus step ms of alone (a step without messages). "
            "efficiency: step ms of alone / step ms.",
            ", ".join(f"{name} {value:.2f}" for name, value in result.items() if "_over_" in name),
        ],
        result=result,
    )


def measure_cluster(options: argparse.Namespace) -> None:
    """Measures how efficient a training is on the machines of torchrun. Rank 0 prints it. All ranks call it.

    The efficiency is (time of a training step without messages) / (time with messages).
    """
    set_cpu_threads(options.threads)
    device, seconds = choose_device(options.device), {"alone": [], "default": []}
    with process_group(device):
        sizes, puzzles = _sizes(options), options.puzzles
        trainers = {way: Trainer(device, *sizes, *_EXCHANGES[way], puzzles=puzzles) for way in seconds}
        ranks = SimpleNamespace(turns={way: trainer.step for way, trainer in trainers.items()})
        for turn in range(2 + options.rounds):
            for way, step_times in seconds.items():
                local_time = torch.tensor([timed(ranks, way, 0)], dtype=torch.float64)
                step_times += all_ranks().all_gather_rows(local_time).max()[None].tolist()[: turn >= 2]
        del trainers, ranks  # nothing may refer to the group when it closes
        times = {way: measurement(step_times) for way, step_times in seconds.items()}
        efficiency = ratio(times["alone"], times["default"])
        if is_main():
            print_report(
                "parallel cluster",
                options,
                header=["exchange", "step ms", "spread ms"],
                rows=[[way, *cells(measured)] for way, measured in times.items()],
                notes=[f"{world_size()} processes on {num_nodes()} nodes. Efficiency: {efficiency:.3f}."],
                result={"efficiency": efficiency},
            )
        if efficiency < (options.at_least or 0):
            abort_all(f"efficiency {efficiency:.3f} is below --at-least {options.at_least:g}")


def _machines(options: argparse.Namespace, count: int, opened: contextlib.ExitStack) -> list[str]:
    """Emulates several machines with a network on this machine. Returns their Linux network namespaces.

    count: Number of machines. The option --line sets their bandwidth and delay.
    opened: Stack that ends the emulation when it is closed.
    """
    from tests.system.machines import emulate, why_not

    rate, milliseconds = options.line
    if reason := why_not(delays=float(milliseconds) > 0):
        fail(f"cannot emulate machines: {reason}")
    folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
    emulated = emulate(count, folder, rate=rate, delay_seconds=float(milliseconds) / 1000)
    return opened.enter_context(emulated).namespaces


# --------------------------------------------------------------------------------------------------- scaling
class _Step:
    def __init__(self, device: torch.device, options: argparse.Namespace, puzzles: Mapping[str, int]):
        sizes = _sizes(options)
        self.turns = {mode: Trainer(device, *sizes, puzzles=num).step for mode, num in puzzles.items()}


def measure_scaling(options: argparse.Namespace) -> None:
    counts = sorted(set(options.processes or [1, 2]) | {1})
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
        rows.append(
            [f"{mode} {count}", *cells(measured), "oversubscribed" if shares_cores else f"{efficiency:.3f}"]
        )
    print_report(
        "parallel scaling",
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


# ---------------------------------------------------------------------------------------------------- memory
class _Memory:
    """A model after one training step, to measure memory (benchmark `memory`).

    It has a large table of puzzle embeddings and a moving average of its weights.

    overrides: key=value arguments of pretrain.py, such as "puzzle_emb_sharding=rows".
    """

    def __init__(self, device: torch.device, options: argparse.Namespace, overrides: Sequence[str]):
        arguments = (*_sizes(options), "ema=0.999", *overrides)
        rows = 1000 if options.quick else options.rows
        trainer = Trainer(device, *arguments, puzzles=options.puzzles, rows=rows)
        trainer.state.model.network.puzzle_emb.weights.fill_(
            0.5
        )  # memory pages that are never written would not count
        trainer.step()
        self._trainer, self._device = trainer, device

    def memory_bytes(self) -> dict[str, int]:
        """Returns the memory that this rank uses, in bytes.

        Keys are the parts of a checkpoint, such as "optimizer", and "peak", the peak memory of the process.
        """
        parts = {
            part: sum(tensor.nbytes for tensor in tensors.values())
            for part, tensors in self._trainer.parts().items()
        }
        return parts | {"peak": peak_memory_bytes(self._device)}


def measure_memory(options: argparse.Namespace) -> None:
    rows, result = [], {}
    for count in sorted(set(options.processes or [1, 2]) | {1}):
        for setting, overrides in _MEMORY.items():
            if count == 1 and setting not in ("", "activation_checkpointing=block"):
                continue
            with World(options, _Memory, options, overrides, processes=count) as world:
                ranks = world.call("memory_bytes")
            memory = {name: max(of_rank.get(name, 0) for of_rank in ranks) / _MIB for name in ranks[0]}
            peak = memory.pop("peak")
            name = "_".join([str(count), *setting.split("=")[:1]]).strip("_")
            result |= {f"kept_mib_{name}": sum(memory.values()), f"peak_mib_{name}": peak}
            rows.append(
                [
                    f"{count} {setting}".strip(),
                    *(f"{mebibytes:.0f}" for mebibytes in (*memory.values(), peak)),
                ]
            )
            header = ["processes", *memory, "peak"]
    print_report(
        "parallel memory",
        options,
        header=header,
        rows=rows,
        notes=["MiB, maximum over ranks. peak: peak memory of the process, with activations and libraries."],
        result=result,
    )


_QUESTIONS: dict[str, Any] = {
    "exchange": measure_exchange,
    "scaling": measure_scaling,
    "memory": measure_memory,
    "layout": measure_layout,
}


if __name__ == "__main__":
    run_main(main)
