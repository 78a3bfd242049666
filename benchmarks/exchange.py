"""Times a training step on several processes, for each method to sum gradients over ranks.

    python -m benchmarks.exchange
    python -m benchmarks.exchange --line 100mbit 25        # emulated machines (root): rate, one-way ms
    torchrun ... -m benchmarks.exchange --at-least 0.85    # on the machines of a run

alone           a step without messages between processes
default         default values of the config keys
shared          sync=auto, which sums gradients in shared memory. Only on the CPUs of this machine
flat, ddp       sync=flat, sync=ddp
bfloat16        sync_dtype=bfloat16
per_parameter   a step without messages, then a blocking all-reduce for each parameter
local_steps_N   local_steps=N: ranks train without messages for N steps, then take the mean of their weights.
                Computed from `alone` and from a step that merges the weights, with sync_dtype=bfloat16
copy            only a copy of all gradients in memory, on each rank. The sum of `shared` cannot be faster

Only `default` may shard the optimizer. The efficiency of a method is the time of `alone` / its time. Under
torchrun, the program measures only `alone` and `default`. It exits with status 1 if the efficiency is below
--at-least.
"""

import runtime.environment  # noqa: F401 - sets variables that OpenMP reads when torch is imported

import argparse
import contextlib
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.harness import cells, fail, fraction, measurement, parse, print_report, ratio, run_main
from benchmarks.worlds import Trainer, World, model_sizes, take_turns, timed, world_parser
from distributed.backend import choose_device, process_group, set_cpu_threads
from distributed.collectives import all_ranks
from distributed.errors import abort_all
from distributed.world import is_main, num_nodes, world_size

_WHOLE_UPDATE = "data_parallel_shard_degree=1"  # without sharding of the optimizer
_NEVER = 10**5  # with so many local_steps, no step of a benchmark sends messages
_EXCHANGES: dict[str, tuple[str, ...]] = {
    "alone": (f"local_steps={_NEVER}", "sync_dtype=bfloat16"),
    "default": (),
    "shared": ("sync=auto", _WHOLE_UPDATE),
    "flat": ("sync=flat", _WHOLE_UPDATE),
    "ddp": ("sync=ddp", _WHOLE_UPDATE),
    "bfloat16": ("sync_dtype=bfloat16", _WHOLE_UPDATE),
}
_LOCAL_STEPS = (8, 32)


class _Exchange:
    """Several models in training, which sum gradients over ranks with different methods, `ways`.

    turns: {name of the method, such as "flat": function to time}. Usually, this is a training step.
    """

    def __init__(self, device: torch.device, options: argparse.Namespace, ways: Sequence[str]):
        trainers = {
            way: Trainer(device, *model_sizes(options), *_EXCHANGES[way], puzzles=options.puzzles)
            for way in ways
        }
        self._alone = alone = trainers["alone"]
        # As the other methods, it sends float32, also if the parameters are bfloat16.
        views = [view for flat in alone.state.weights.flats for view in flat.gradient_views.values()]
        gradients = [torch.zeros_like(view) for view in views]
        flat = [torch.zeros(alone.state.weights.num_parameters, device=device) for _ in range(2)]

        def per_parameter() -> None:
            alone.step()
            for gradient in gradients:
                dist.all_reduce(gradient)

        self.turns = {way: trainer.step for way, trainer in trainers.items()}
        self.turns |= {"per_parameter": per_parameter, "rarely": self._exchange}
        self.turns["copy"] = lambda: flat[0].copy_(flat[1])

    def _exchange(self) -> None:
        """Makes a training step, then averages the weights over ranks. All ranks call it."""
        self._alone.state.step = _NEVER - 1
        self._alone.step()
        self._alone.state.step = 0


def main(argv: Sequence[str] | None = None) -> None:
    description = "Times a training step on several processes, for each method to sum gradients over ranks."
    parser = world_parser("exchange", description=description)
    line = (
        "emulate a machine for each process, and a slow network (needs root). RATE: bandwidth in the syntax "
        "of tc, such as 1gbit. MS: delay of a message in ms"
    )
    parser.add_argument("--line", nargs=2, metavar=("RATE", "MS"), help=line)
    least = "under torchrun: exit with status 1 if the efficiency is lower than FRACTION"
    parser.add_argument("--at-least", type=fraction, metavar="FRACTION", help=least)
    options = parse(parser, argv)
    if world_size() > 1:
        if options.line:
            parser.error("--line emulates machines on this one. Remove it, or run without torchrun")
        return _measure_cluster(options)
    if options.at_least is not None:
        parser.error("--at-least applies only under torchrun. For one machine, run benchmarks.scaling")
    if options.processes == 1:
        parser.error("--processes 1: this benchmark needs several processes. Pass --processes 2 or more")
    processes = options.processes
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
        seconds = ((num - 1) * np.asarray(alone.times) + rarely.times) / num
        times[f"local_steps_{num}"] = measurement(seconds)
    added = {
        name: measurement(np.maximum(np.subtract(measured.times, alone.times), 1e-6))
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
        "exchange",
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


def _measure_cluster(options: argparse.Namespace) -> None:
    """Measures the efficiency of a training on the machines of torchrun. All ranks call it."""
    set_cpu_threads(options.threads)
    device, seconds = choose_device(options.device), {"alone": [], "default": []}
    with process_group(device):
        sizes, puzzles = model_sizes(options), options.puzzles
        trainers = {way: Trainer(device, *sizes, *_EXCHANGES[way], puzzles=puzzles) for way in seconds}
        ranks = SimpleNamespace(turns={way: trainer.step for way, trainer in trainers.items()})
        for turn in range(2 + options.rounds):
            for way, step_times in seconds.items():
                local_time = torch.tensor([timed(ranks, way, 0)], dtype=torch.float64)
                by_rank = all_ranks().all_gather_rows(local_time, [1] * world_size())
                step_times += by_rank.max()[None].tolist()[: turn >= 2]
        del trainers, ranks  # nothing may refer to the group when it closes
        times = {way: measurement(step_times) for way, step_times in seconds.items()}
        efficiency = ratio(times["alone"], times["default"])
        options.load.count_ranks()
        if is_main():
            print_report(
                "cluster",
                options,
                header=["exchange", "step ms", "spread ms"],
                rows=[[way, *cells(measured)] for way, measured in times.items()],
                notes=[f"{world_size()} processes on {num_nodes()} nodes. Efficiency: {efficiency:.3f}."],
                result={"efficiency": efficiency},
            )
        if efficiency < (options.at_least or 0):
            abort_all(f"efficiency {efficiency:.3f} is below --at-least {options.at_least:g}")


def _machines(options: argparse.Namespace, count: int, opened: contextlib.ExitStack) -> list[str]:
    from tests.system.machines import emulate, why_not

    rate, milliseconds = options.line
    if reason := why_not(delays=float(milliseconds) > 0):
        fail(f"cannot emulate machines: {reason}")
    folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
    emulated = emulate(count, folder, rate=rate, delay_seconds=float(milliseconds) / 1000)
    return opened.enter_context(emulated).namespaces


if __name__ == "__main__":
    run_main(main)
