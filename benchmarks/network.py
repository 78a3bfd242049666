"""Measures the training step over the network, on emulated machines of one process each (root).

    python -m benchmarks.network --nodes 2 4

Weak scaling: every machine has --puzzles. Of each line (bandwidth, one-way delay): the time of a step by what
the ranks exchange in it, and its efficiency, the time of a step without any exchange over it. Both take turns
in the same processes, so that what shared cores cost counts in neither: where machines are more than cores,
only what the line adds is measured. The line `none` has no limits: what remains is the cost of the exchange
itself, on cores that also compute.

A step of local_steps=H counts one of its steps with the exchange, and H - 1 without. Changes of weights
travel in bfloat16, and with them the rows of the puzzles, here those of two steps.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from benchmarks.harness import (
    REPOSITORY,
    Sample,
    benchmark_parser,
    fail,
    parse,
    positive,
    print_report,
    time_rounds,
    timed,
)
from benchmarks.processes import group
from benchmarks.trainee import TINY, Trainee, build_config, random_batch
from parallel.launch import keep_freed_memory
from parallel.process_group import is_main, num_cores, rank, world_size
from tests.system.machines import emulate, why_not

LINES = {  # by name: rate as tc writes it, one-way delay in seconds
    "none": (None, 0.0),
    "10gbit": ("10gbit", 5e-5),
    "1gbit": ("1gbit", 5e-4),
    "1gbit_25ms": ("1gbit", 0.025),
    "100mbit_25ms": ("100mbit", 0.025),
}
_QUICK_LINE = "100mbit_25ms"
STEPS = {"flat": {"sync": "flat"}, "ddp": {"sync": "ddp"}, "bfloat16": {"sync_dtype": "bfloat16"}}
LOCAL_STEPS = (8, 32)
_NEVER = 10**5  # steps between exchanges
_PORT = 29500
_POLL_SECONDS = 0.1


def main(words: Sequence[str] | None = None) -> None:
    parser = benchmark_parser("network", description="The training step over slow networks.", rounds=3)
    parser.add_argument(
        "--nodes",
        dest="processes",
        type=positive,
        nargs="+",
        default=[2, 4],
        metavar="N",
        help="default: 2 4",
    )
    parser.add_argument("--puzzles", type=positive, default=8, metavar="N", help="default: %(default)s")
    parser.add_argument("--lines", nargs="+", choices=LINES, default=list(LINES), help="default: all")
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)  # of the processes on the machines
    arguments = parser.parse_args(words)
    if arguments.result:
        measure_here(arguments)
        return
    arguments = parse(parser, words)
    if 1 in arguments.processes:
        parser.error("--nodes 1: one machine has no line")
    if reason := why_not(delays=any(LINES[name][1] for name in arguments.lines)):
        fail(f"no machines can be emulated: {reason}")
    if arguments.quick:
        arguments.processes, arguments.lines, arguments.puzzles = [2], [_QUICK_LINE], 2
    seconds = {
        (nodes, line): measure(arguments, nodes=nodes, line=line)
        for nodes in arguments.processes
        for line in arguments.lines
    }
    print_network(seconds, arguments)


def measure(arguments: argparse.Namespace, *, nodes: int, line: str) -> dict[str, np.ndarray]:
    """Returns the seconds [rounds] of a step of the slowest machine, by what is exchanged."""
    rate, delay_seconds = LINES[line]
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        words = ["--rounds", arguments.rounds, "--puzzles", arguments.puzzles, "--device", arguments.device]
        words += ["--result", result, *(["--quick"] if arguments.quick else [])]
        ours = {"WORLD_SIZE": str(nodes), "MASTER_ADDR": "node0", "MASTER_PORT": str(_PORT)}
        ours |= {
            "GROUP_WORLD_SIZE": str(nodes),
            "LOCAL_WORLD_SIZE": "1",
            "LOCAL_RANK": "0",
            "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": "1",
        }
        with emulate(nodes, Path(folder) / "machines", rate=rate, delay_seconds=delay_seconds) as machines:
            command = [sys.executable, "-m", "benchmarks.network", *words]
            processes = [
                machines.start(node, command, cwd=REPOSITORY, env=os.environ | ours | {"RANK": str(node)})
                for node in range(nodes)
            ]
            # Where one fails, the others would wait for it; they end with their machines.
            while None in (statuses := [process.poll() for process in processes]) and not any(statuses):
                time.sleep(_POLL_SECONDS)
        if any(statuses):
            fail(f"{nodes} machines, line {line}: the processes ended with {statuses}")
        steps = {name: np.array(values) for name, values in json.loads(result.read_text()).items()}
    alone, exchange = steps["alone"], steps.pop("exchange")
    return steps | {f"local_steps_{num}": ((num - 1) * alone + exchange) / num for num in LOCAL_STEPS}


def print_network(
    seconds: dict[tuple[int, str], dict[str, np.ndarray]], arguments: argparse.Namespace
) -> None:
    rows, result, samples = [], {}, {}
    for (nodes, line), steps in seconds.items():
        alone = steps["alone"]
        for name, values in steps.items():
            sample = Sample.of(values)
            efficiency = float(np.median(alone) / np.median(values))
            added = 1e3 * (np.median(values) - np.median(alone))
            rows.append([line, str(nodes), name, *sample.cells(), f"{added:.0f}", f"{efficiency:.3f}"])
            samples[f"{line} {nodes} {name}"] = sample
            key = [f"efficiency_{line}", *_suffix(name), *([f"{nodes}_nodes"] if nodes > 2 else [])]
            if name != "alone":
                result["_".join(key)] = efficiency
    arguments.threads = 1
    print_report(
        "network",
        header=["line", "nodes", "exchange", "step ms", "spread ms", "exchange ms", "efficiency"],
        rows=rows,
        notes=[
            "alone: the same step in the same processes, without exchange; efficiency: its share of a step",
            *(
                f"{nodes} machines are {nodes} processes on {num_cores()} cores, in `alone` too"
                for nodes in arguments.processes
                if nodes > num_cores()
            ),
        ],
        result=result,
        samples=samples,
        arguments=arguments,
    )


def _suffix(name: str) -> list[str]:
    """Names a contender in the last line: nothing for what a run does by default."""
    return {"flat": [], f"local_steps_{LOCAL_STEPS[-1]}": ["local_steps"]}.get(name, [name])


# ------------------------------------------------------------------------------------------- on the machines
def measure_here(arguments: argparse.Namespace) -> None:
    """Takes turns on this machine as one rank; rank 0 writes the seconds of the slowest one."""
    torch.set_num_threads(1)
    device = torch.device(arguments.device)
    keep_freed_memory(device)
    with group(device):
        seconds = _time_steps(arguments, device)
        if is_main():
            arguments.result.write_text(json.dumps({name: each.tolist() for name, each in seconds.items()}))


def _time_steps(arguments: argparse.Namespace, device: torch.device) -> dict[str, np.ndarray]:
    """Times the steps; when this returns, nothing but garbage holds the group (`close_group`)."""
    batch = random_batch(arguments.puzzles, seed=rank(), device=device)
    contenders = []
    for name, changes in STEPS.items():
        trainee = _trainee(arguments, device, **changes)
        contenders.append(timed(name, lambda trainee=trainee: trainee.step(batch), device))
    rarely = {"local_steps": _NEVER, "sync_dtype": "bfloat16"}
    local = _trainee(arguments, device, **rarely)

    def exchange() -> None:
        local.state.step = _NEVER - 1  # the next one ends with the exchange
        local.step(batch)
        local.state.step = 0

    contenders += [
        timed("alone", lambda: local.step(batch), device),
        timed("exchange", exchange, device),
    ]
    return time_rounds(contenders, rounds=arguments.rounds)


def _trainee(arguments: argparse.Namespace, device: torch.device, **changes: object) -> Trainee:
    sizes = TINY if arguments.quick else None
    size = arguments.puzzles * world_size()
    return Trainee(build_config(global_batch_size=size, sizes=sizes, **changes), device)


if __name__ == "__main__":
    main()
