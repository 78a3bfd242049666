"""What benchmarks share: a command line, rounds in which contenders take turns, a report.

A machine is noisy over minutes. So contenders are not timed one after the other, but in rounds (A B C, A B C,
...) in processes that live all the while, and a ratio compares what ran within seconds. A round counts the
slowest rank.
"""

import argparse
import dataclasses
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist

from parallel import log
from parallel.collectives import barrier
from parallel.process_group import choose_device, is_main, num_cores, world_size

REPOSITORY = Path(__file__).resolve().parent.parent
_USAGE_STATUS = 2  # argparse's
_QUICK_ROUNDS = 3
MOST_SPREAD = 0.15  # of a sample, beyond which the machine was too uneven for a ratio


# ---------------------------------------------------------------------------------------------- command line
class Parser(argparse.ArgumentParser):
    """An argparse parser that says what is wrong in one line, on rank 0 for all."""

    def error(self, message: str) -> NoReturn:
        fail(f"{message} (--help lists the options)", status=_USAGE_STATUS)


def fail(reason: object, *, status: int = 1) -> NoReturn:
    """Ends this process, with one line on rank 0."""
    if is_main():
        log.error(reason)
    sys.exit(status)


def positive(text: str) -> int:
    """Reads the value of an option: an integer from 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer from 1, not {text!r}")
    return int(text)


def benchmark_parser(name: str, *, description: str, rounds: int | None) -> argparse.ArgumentParser:
    """Returns a parser with the options of every benchmark. rounds: the default of --rounds, if any."""
    parser = Parser(prog=f"python -m benchmarks.{name}", description=description, allow_abbrev=False)
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="gloo or NCCL (default: %(default)s)"
    )
    if rounds is None:
        parser.set_defaults(rounds=None)
    else:
        parser.add_argument(
            "--rounds", type=positive, default=rounds, metavar="N", help="default: %(default)s"
        )
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes and few rounds: to see that it works, not how fast"
    )
    return parser


def add_processes(parser: argparse.ArgumentParser) -> None:
    """Adds the options of a benchmark that measures in one process group of some size."""
    parser.add_argument("--processes", type=positive, metavar="N", help="default: torchrun's, else 2")
    add_threads(parser)


def add_threads(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--threads",
        type=lambda text: text if text == "auto" else positive(text),
        default="auto",
        metavar="N",
        help="of each process; auto: OMP_NUM_THREADS if set, else cores over processes (default: auto)",
    )


def parse(
    parser: argparse.ArgumentParser, words: Sequence[str] | None, *, takes_torchrun: bool = False
) -> argparse.Namespace:
    """Reads the command line; the number of processes is torchrun's, or the one asked for.

    takes_torchrun: False for a benchmark that starts its processes itself.
    """
    arguments = parser.parse_args(words)
    if arguments.quick and arguments.rounds is not None:
        arguments.rounds = min(arguments.rounds, _QUICK_ROUNDS)
    if is_under_torchrun():
        if not takes_torchrun:
            parser.error("this benchmark starts its own processes: start it without torchrun")
        if arguments.processes not in (None, world_size()):
            parser.error(f"--processes {arguments.processes}, but torchrun started {world_size()}: drop it")
        arguments.processes = world_size()
    arguments.processes = arguments.processes or 2
    return arguments


def is_under_torchrun() -> bool:
    return "RANK" in os.environ


def open_device(name: str) -> torch.device:
    """Returns the device of this process, or ends it with one line where that device is not there."""
    try:
        return choose_device(name)
    except ValueError as error:
        fail(error)


# ----------------------------------------------------------------------------------------------------- rounds
def now(device: torch.device) -> float:
    """Returns seconds, read when the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def timed(name: str, function: Callable[[], Any], device: torch.device) -> Callable[[], dict[str, float]]:
    """Makes a contender of a function that is timed as a whole."""

    def contender() -> dict[str, float]:
        begin = now(device)
        function()
        return {name: now(device) - begin}

    return contender


def time_rounds(
    contenders: Sequence[Callable[[], dict[str, float]]], *, rounds: int, warmup_rounds: int = 1
) -> dict[str, np.ndarray]:
    """Lets the contenders take turns and returns, by name, the seconds [rounds] of the slowest rank.

    All ranks call it. A contender returns what it timed, by names of its own; all ranks start it together.
    """
    timings = []
    for _ in range(warmup_rounds + rounds):
        timing = {}
        for contender in contenders:
            barrier()
            timing |= contender()
        timings.append(timing)
    names = list(timings[0])
    seconds = torch.tensor(
        [[timing[name] for name in names] for timing in timings[warmup_rounds:]], dtype=torch.float64
    )
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return dict(zip(names, seconds.T.numpy(), strict=True))


# ----------------------------------------------------------------------------------------------------- report
@dataclasses.dataclass(frozen=True)
class Sample:
    """The median over rounds and the spread around it: 10th and 90th percentile."""

    median: float
    p10: float
    p90: float

    @classmethod
    def of(cls, values: Sequence[float] | np.ndarray) -> "Sample":
        p10, median, p90 = np.percentile(values, (10, 50, 90)).tolist()
        return cls(median, p10, p90)

    @property
    def spread(self) -> float:
        """The distance of the percentiles over the median."""
        return (self.p90 - self.p10) / abs(self.median) if self.median else 0.0

    def cells(self, *, unit: float = 1e-3, digits: int = 1) -> list[str]:
        """Returns two cells of a table: the median, and the spread. unit: in seconds."""
        median, p10, p90 = (f"{value / unit:.{digits}f}" for value in (self.median, self.p10, self.p90))
        return [median, f"{p10} - {p90}"]


def print_report(
    name: str,
    *,
    header: list[str],
    rows: list[list[str]],
    notes: list[str],
    result: dict[str, Any],
    samples: dict[str, Sample],
    arguments: argparse.Namespace,
) -> None:
    """Prints a table for a person, where and on what it was measured, notes, and a last line of JSON.

    result: what the last line holds beside the samples, which are of seconds. arguments: the command line,
    with the resolved numbers of processes and threads. Only rank 0 calls it. Where a sample spreads by more
    than `MOST_SPREAD`, both say that ratios are estimates: the last line names such samples as `uneven`.
    """
    print(f"benchmarks.{name}" + (" --quick: these times mean nothing" * arguments.quick))
    print(*table([header, *rows]), sep="\n")
    machine = _describe_machine(arguments)
    processes = " ".join(map(str, np.atleast_1d(arguments.processes)))
    print(
        f"{machine['device_name']}, {machine['cores']} cores; device {arguments.device}; "
        f"processes {processes}; threads of each {arguments.threads}; "
        f"torch {machine['torch']}; commit {machine['commit']}"
        + (
            f"; medians of {arguments.rounds} rounds, spread: 10th - 90th percentile"
            if arguments.rounds
            else ""
        )
    )
    print(*notes, sep="\n")
    uneven = {} if arguments.quick or (arguments.rounds or 1) < 2 else _uneven(samples)
    if uneven:
        worst = max(uneven, key=uneven.get)
        print(
            f"too uneven to tell: {worst!r} spreads by {uneven[worst]:.0%} (at most {MOST_SPREAD:.0%}); "
            "take what is above for estimates, and measure again on a quiet machine"
        )
        result = result | {"uneven": sorted(uneven)}
    seconds = {key: dataclasses.asdict(sample) for key, sample in samples.items()}
    print(json.dumps(_rounded({"benchmark": name, **result, **machine, "seconds": seconds})), flush=True)


def _uneven(samples: dict[str, Sample]) -> dict[str, float]:
    """Returns the spread of those that spread too far."""
    return {name: sample.spread for name, sample in samples.items() if sample.spread > MOST_SPREAD}


def table(rows: list[list[str]]) -> list[str]:
    """Lays out the first column to the left, numbers to the right, a rule below the header."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells]).rstrip())
    lines.insert(1, "-" * (sum(widths) + 2 * len(widths) - 2))
    return lines


def _describe_machine(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        **describe_device(arguments.device),
        "cores": num_cores(),
        "world_size": arguments.processes,
        "threads": arguments.threads,
        "rounds": arguments.rounds,
        "quick": arguments.quick,
    }


def describe_device(device: str) -> dict[str, str]:
    """Says what is measured: the device, the version of torch and this repository's commit."""
    on_gpu = device == "cuda"
    return {
        "device": device,
        "device_name": torch.cuda.get_device_name() if on_gpu else cpu_name(),
        "torch": torch.__version__,
        "commit": commit(),
    }


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def commit() -> str:
    """Returns the short name, with -dirty where files differ; `unknown` where this is no git checkout.

    Pages and records do not count: one measurement writes them, and the next follows it.
    """
    git = ["git", "-C", str(REPOSITORY)]
    head = [*git, "rev-parse", "--short", "HEAD"]
    code = [".", *(f":(exclude){what}" for what in ("records", "docs", "*.md"))]
    try:
        name = subprocess.run(head, capture_output=True, text=True, check=True).stdout.strip()
        changes = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", *code], capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return name + ("-dirty" if changes.returncode else "")


def _rounded(value: Any) -> Any:
    """Keeps six digits, more than a clock knows."""
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return float(f"{value:.6g}") if isinstance(value, float) else value
