"""Runs every benchmark that needs neither hours nor root nor a GPU, and prints a table of what they measured.

    python -m benchmarks
    python -m benchmarks --only optimizers dataset

Sizes and rounds are such that all take less than 10 minutes on two cores. A benchmark that fails, or exceeds
its time limit, is named at the end, and the others run all the same. The table is for RESULTS.md.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.harness import REPOSITORY, Parser

BENCHMARKS = {
    "start": "--rounds 2",
    "optimizers": "--threads 1 --rounds 10",
    "parallel": "--rounds 5 --rows 300000",
    "checkpoint": "--rounds 2 --rows 300000",
    "dataset": "--rounds 2",
    "evaluation": "--rounds 2",
    "step": "--rounds 6",
}
_TIMEOUT_SECONDS = 600.0


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = Parser(
        prog="python -m benchmarks", description="Benchmarks, and a table of them.", allow_abbrev=False
    )
    names = list(BENCHMARKS)
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help="%(choices)s")
    parser.add_argument("--quick", action="store_true", help="to see that they work, not how fast")
    options = parser.parse_args(argv)
    rows, failed = [], []
    for name in options.only:
        command = f"{name} {BENCHMARKS[name]}" + " --quick" * options.quick
        print(f"\npython -m benchmarks.{command}", flush=True)
        status, results = _run(command)
        rows += [_row(command, result) for result in results]
        failed += [name] if status else []
    print(
        "\n| command | date | commit | machine | torch | measured |",
        "|---" * 6 + "|",
        *rows,
        sep="\n",
        flush=True,
    )
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _run(command: str) -> tuple[int, list[dict[str, Any]]]:
    """Runs a benchmark, and shows what it prints; returns its status, and its lines of JSON."""
    results = []
    process = subprocess.Popen(
        [sys.executable, "-m", *f"benchmarks.{command}".split()],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=_TIMEOUT_SECONDS)
        for line in output.splitlines():
            print(line, flush=True)
            results += [json.loads(line)] if line.startswith("{") else []
    except subprocess.TimeoutExpired:
        print(f"it takes longer than {_TIMEOUT_SECONDS:.0f} s", flush=True)
    finally:
        with contextlib.suppress(ProcessLookupError):  # it, and what it has started
            os.killpg(process.pid, signal.SIGKILL)
    return process.wait(), results


def _row(command: str, result: dict[str, Any]) -> str:
    """Returns a row of the table: what was measured are the floats."""
    measured = [f"`{name}` {value:.3g}" for name, value in result.items() if isinstance(value, float)]
    machine = f"{result['device']}, {result['cores']} cores"
    cells = (f"`{command}`", time.strftime("%Y-%m-%d"), result["commit"], machine, result["torch"])
    return f"| {' | '.join(cells)} | {', '.join(measured)} |"


if __name__ == "__main__":
    sys.exit(main())
