"""Helpers of all benchmarks: command line, statistics, a report with a line of JSON, subprocesses."""

from runtime.environment import num_cores

import argparse
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from torch.utils.benchmark import Measurement, TaskSpec

from distributed import log
from distributed.collectives import gather_objects
from distributed.launch import REPOSITORY
from distributed.processor import describe_processor
from distributed.signals import stop_signals
from runtime.command_line import OneLineParser, integer, matching

BUSY_CORES = 0.1  # if other programs use more cores, times are only estimates
_QUICK_ROUNDS = 2


# ---------------------------------------------------------------------------------------------- command line
positive = integer(at_least=1)
_auto_or_threads = matching(
    r"(auto|\d+)",
    "auto or an integer from 1 to 4096",
    lambda text: text if text == "auto" or 1 <= int(text) <= 4096 else None,
)
fraction = matching(r"(\d*\.?\d+)", "a number such as 0.85", float)


def fail(reason: object) -> NoReturn:
    log.error(reason)
    sys.exit(1)


def run_main(main: Callable[[], None]) -> None:
    """Runs the `main` function of a benchmark.

    OSError and ValueError become a one-line message and status 1. Signals such as SIGTERM raise SystemExit,
    so that `main` can end its child processes.
    """
    for signal_number in {*stop_signals()} - {signal.SIGINT}:
        signal.signal(signal_number, lambda signal_number, _: sys.exit(128 + signal_number))
    try:
        main()
    except (OSError, ValueError) as error:
        fail(error)


def benchmark_parser(
    name: str, *, description: str, rounds: int | None, threads: str = "auto"
) -> OneLineParser:
    """Returns a command-line parser with the options that all benchmarks have, such as --quick.

    rounds: Default number of repetitions. If None, the benchmark chooses it. If 0, nothing is repeated, and
    there is no option --rounds.
    threads: Default number of threads per process, or "auto".
    """
    parser = OneLineParser(f"benchmarks.{name}", description=description)
    device = "device (default: %(default)s)"
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help=device)
    of_rounds = f"number of rounds (default: {'%(default)s' if rounds else 'depends on the time of a round'})"
    if rounds != 0:
        parser.add_argument("--rounds", type=positive, default=rounds, metavar="N", help=of_rounds)
    of_each = "threads per process. auto: OMP_NUM_THREADS, else cores / processes (default: %(default)s)"
    parser.add_argument("--threads", type=_auto_or_threads, default=threads, metavar="N", help=of_each)
    quick = "run a tiny workload to check that the benchmark works. The times are meaningless"
    parser.add_argument("--quick", action="store_true", help=quick)
    return parser


def parse(parser: OneLineParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses and checks the command line of a benchmark. Raises ValueError if it is invalid.

    If --device is cuda and torch finds no CUDA device, exits the program.

    The result has an additional attribute `load` (`Load`), which measures how many CPU cores other programs
    use from now on.
    """
    arguments = parser.parse_args(argv)
    if arguments.quick and hasattr(arguments, "rounds"):
        arguments.rounds = min(arguments.rounds or _QUICK_ROUNDS, _QUICK_ROUNDS)
    if arguments.threads == "auto" and isinstance(getattr(arguments, "processes", None), list):
        parser.error(
            "--threads auto is not possible here, because it depends on the number of processes. Pass an "
            "integer of at least 1"
        )
    if arguments.device == "cuda" and not torch.cuda.device_count():
        fail("--device cuda: torch finds no CUDA device. Use --device cpu.")
    arguments.load = Load()
    return arguments


def measurement(seconds: Sequence[float], *, repeats: int = 1) -> Measurement:
    """Returns a torch.utils.benchmark `Measurement`. Its times are those of one call.

    seconds: Duration of each round. A round consists of `repeats` calls.
    """
    return Measurement(repeats, [*map(float, seconds)], TaskSpec(stmt="", setup=""))


def ratio(first: Measurement, second: Measurement) -> float:
    """Returns the median over rounds of the time of `first` divided by the time of `second`.

    2.0 means that `first` takes twice as long as `second`. Both must have equally many rounds.
    """
    return float(np.median(np.divide(first.times, second.times)))


def cells(found: Measurement, *, unit: float = 1e-3, digits: int = 1) -> list[str]:
    """Formats a measurement as two table cells: the median and the spread of its times.

    Example: ["12.3", "11.9 - 13.0"]. The spread is the range from the 10th to the 90th percentile.

    unit: Unit of the numbers, in seconds. 1e-3 means milliseconds.
    """
    low, high = np.percentile(found.times, (10, 90))
    return [f"{found.median / unit:.{digits}f}", f"{low / unit:.{digits}f} - {high / unit:.{digits}f}"]


# ---------------------------------------------------------------------------------------------------- report
class Load:
    """Measures how many CPU cores other programs use, from the creation of this object on."""

    def __init__(self) -> None:
        self._began, self._cpu, self._ranks_cpu = time.perf_counter(), cpu_seconds(), 0.0

    def count_ranks(self) -> None:
        """Counts the CPU time of all ranks on rank 0's machine as time of this program. All ranks call it."""
        now, host = cpu_seconds(), socket.gethostname()
        used = 0.0 if now is None or self._cpu is None else now[1] - self._cpu[1]
        others = (gather_objects((host, used)) or [])[1:]
        self._ranks_cpu = sum(seconds for other_host, seconds in others if other_host == host)

    def other_cores(self) -> float | None:
        """Returns the mean number of cores that other programs used since this object was created.

        Returns None if the system is not Linux. Call it after the child processes of this program have ended,
        because the system counts their CPU time only then.
        """
        now = cpu_seconds()
        if now is None or self._cpu is None:
            return None
        everyone, ours = (after - before for after, before in zip(now, self._cpu, strict=True))
        return max(everyone - ours - self._ranks_cpu, 0.0) / (time.perf_counter() - self._began)


def cpu_seconds() -> tuple[float, float] | None:
    """Returns used CPU time in seconds: (all programs on the machine, this program).

    The first number counts from the start of the machine. The second includes ended child processes. Returns
    None if the system is not Linux.
    """
    try:
        with open("/proc/stat", encoding="utf-8") as file:
            user, nice, system, _, _, irq, softirq, steal, *_ = map(int, file.readline().split()[1:])
    except (OSError, ValueError):  # not on Linux
        return None
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_CHILDREN, resource.RUSAGE_SELF)]
    everyone = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
    return everyone, sum(usage.ru_utime + usage.ru_stime for usage in usages)


def print_report(
    name: str,
    options: argparse.Namespace,
    *,
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    result: Mapping[str, Any],
    notes: Sequence[str] = (),
) -> None:
    """Prints a table with the results of a benchmark, facts about the machine, and JSON.

    Call it after all child processes have ended, because their CPU time is only known then.

    header, rows, notes: Head, rows and footer of the table. result: Values for the line of JSON.
    """
    print(name + (" --quick: these times are meaningless" * options.quick))
    print(*table([header, *rows]), *notes, sep="\n")
    device_name = torch.cuda.get_device_name() if options.device == "cuda" else describe_processor()
    machine = {"device": device_name, "cores": num_cores(), "torch": torch.__version__, "commit": commit()}
    names = ("rounds", "threads", "quick")
    settings = {setting: value for setting in names if (value := getattr(options, setting, None)) is not None}
    print(", ".join(f"{key} {value}" for key, value in (machine | settings).items()))
    others = options.load.other_cores()
    if others is not None and others > BUSY_CORES:
        print(f"other programs used {others:.1f} cores, so times are inexact. Stop them and measure again.")
    last = {"benchmark": name, **result, **machine, **settings, "other_cores": others}
    print(json.dumps({key: _rounded(value) for key, value in last.items()}), flush=True)


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns the lines of a text table. The first row is the header.

    The first column is left-aligned, the other columns are right-aligned.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        right = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *right]).rstrip())
    return [lines[0], "-" * (sum(widths) + 2 * len(widths) - 2), *lines[1:]]


def _rounded(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def commit() -> str:
    """Returns the short hash of the git commit, such as "1a2b3c4" or "1a2b3c4-dirty".

    "-dirty" means that code was changed since the commit. Returns "unknown" outside a git checkout.
    """
    git = ["git", "-C", str(REPOSITORY)]
    code = [".", *(f":(exclude){what}" for what in ("records/*/*", "docs", "*.md"))]
    try:
        command = [*git, "rev-parse", "--short", "HEAD"]
        head = subprocess.run(command, capture_output=True, text=True, check=True)
        changes = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", *code], capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + ("-dirty" if changes.returncode else "")


# -------------------------------------------------------------------------------------------------- programs
def program(*arguments: object, processes: int = 1) -> list[str]:
    """Returns the command that starts python with some arguments. If `processes` > 1, it uses torchrun."""
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", processes] if processes > 1 else []
    return [sys.executable, *map(str, [*torchrun, *arguments])]


def program_environment(threads: int = 1) -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": str(threads), "WANDB_MODE": "disabled"}


def run_program(*arguments: object, processes: int = 1, threads: int = 1) -> None:
    """Runs python with some arguments, such as "pretrain.py", "experiment=demo", to the end.

    If it fails, exits this program with a message that contains the last line of its output.
    """
    finished = subprocess.run(
        program(*arguments, processes=processes),
        cwd=REPOSITORY,
        env=program_environment(threads),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if finished.returncode:
        fail(f"{' '.join(map(str, arguments))}: {''.join(finished.stdout.strip().splitlines()[-1:])}")
