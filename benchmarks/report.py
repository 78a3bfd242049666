"""What a benchmark says: a table for a person, and a last line of JSON for a program. Rank 0 prints."""

import argparse
import dataclasses
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import torch

_REPOSITORY = Path(__file__).resolve().parent.parent


@dataclasses.dataclass(frozen=True)
class Sample:
    """The median over rounds and the spread around it: 10th and 90th percentile."""

    median: float
    p10: float
    p90: float

    @classmethod
    def of(cls, values: np.ndarray) -> "Sample":
        p10, median, p90 = np.percentile(values, (10, 50, 90)).tolist()
        return cls(median, p10, p90)

    def cells(self, *, unit: float = 1e-3, digits: int = 1) -> list[str]:
        """Two cells of a table, in units of so many seconds: the median, and the spread."""
        median, p10, p90 = (f"{value / unit:.{digits}f}" for value in (self.median, self.p10, self.p90))
        return [median, f"{p10} - {p90}"]


def num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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
    """Prints the table, where and on what it was measured, notes, and `result` with all samples as JSON.

    samples: seconds. arguments: the command line, with the resolved numbers of processes and threads.
    """
    print(f"benchmarks.{name}" + (" --quick: these times mean nothing" * arguments.quick))
    for line in _table([header, *rows]):
        print(line)
    facts = _facts(arguments)
    processes = " ".join(map(str, np.atleast_1d(arguments.processes)))
    print(
        f"{facts['device_name']}, {facts['cores']} cores; device {arguments.device}; processes {processes}; "
        f"threads of each {arguments.threads}; torch {facts['torch']}; commit {facts['commit']}; "
        f"medians of {arguments.rounds} rounds, spread: 10th - 90th percentile"
    )
    for note in notes:
        print(note)
    seconds = {key: dataclasses.asdict(sample) for key, sample in samples.items()}
    print(json.dumps(_rounded({"benchmark": name, **result, **facts, "seconds": seconds})), flush=True)


def _table(rows: list[list[str]]) -> list[str]:
    """The first column to the left, numbers to the right, a rule below the header."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells]).rstrip())
    lines.insert(1, "-" * (sum(widths) + 2 * len(widths) - 2))
    return lines


def _facts(arguments: argparse.Namespace) -> dict[str, Any]:
    """Where this was measured, and on what."""
    on_gpu = arguments.device == "cuda"
    return {
        "device": arguments.device,
        "device_name": torch.cuda.get_device_name() if on_gpu else _cpu_name(),
        "cores": num_cores(),
        "world_size": arguments.processes,
        "threads": arguments.threads,
        "rounds": arguments.rounds,
        "quick": arguments.quick,
        "torch": torch.__version__,
        "commit": _commit(),
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _commit() -> str:
    """Short, with -dirty where files differ from it; unknown where this is no git checkout."""
    command = ["git", "-C", str(_REPOSITORY), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _rounded(value: Any) -> Any:
    """Six digits are more than a clock knows."""
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return float(f"{value:.6g}") if isinstance(value, float) else value
