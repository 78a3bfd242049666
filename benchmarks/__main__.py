"""Runs every benchmark but those of `LEFT_OUT`, and prints a last table with a row for each.

    python -m benchmarks
    python -m benchmarks --only optimizers dataset --record

Sizes and rounds are such that all take less than 10 minutes on two cores. A benchmark that fails, or exceeds
its time limit, is named at the end, and the others run all the same. --record puts the rows in RESULTS.md,
each in the place of the row that its benchmark has there.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import REPOSITORY, Parser

RESULTS = Path(__file__).with_name("RESULTS.md")
BENCHMARKS = {
    "start": "--rounds 2",
    "optimizers": "--threads 1",
    "gradient_sync": "--rounds 5",
    "collectives": "--rounds 5",
    "sparse_optimizer": "--rounds 15",
    "scaling": "--processes 1 2",
    "checkpoint": "--rounds 2 --rows 300000",
    "memory": "--processes 1 2",
    "dataset": "--rounds 2",
    "evaluation": "--rounds 2",
    "train_step": "--dtype bfloat16 --rounds 6",
}
# Three that look for failures, one for root, one for a GPU, and three that train for half an hour or more.
LEFT_OUT = {"chaos", "fuzz", "gpu", "network", "reasoning", "records", "sizes", "soak"}
_TIMEOUT_SECONDS = 600.0
_GRACE_SECONDS = 10.0
_COLUMNS = ("command", "date", "commit", "hardware", "torch", "result")
_HEAD = (f"| {' | '.join(_COLUMNS)} |", "|---" * len(_COLUMNS) + "|")
_BEGIN, _END = "<!-- last lines -->", "<!-- end of last lines -->"


def main(words: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = Parser(
        prog="python -m benchmarks",
        description=f"Every benchmark but {', '.join(sorted(LEFT_OUT))}, and a last table.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--only", nargs="+", choices=BENCHMARKS, default=list(BENCHMARKS), metavar="NAME", help="%(choices)s"
    )
    parser.add_argument("--quick", action="store_true", help="to see that they work, not how fast")
    parser.add_argument("--record", action="store_true", help="write the rows into benchmarks/RESULTS.md")
    arguments = parser.parse_args(words)
    if arguments.record:
        if arguments.quick:
            parser.error("--record and --quick do not go together: quick times mean nothing")
        try:
            with_rows(RESULTS.read_text(), {})  # before minutes are spent on rows that have no place
        except (OSError, ValueError) as error:
            parser.error(str(error))

    rows, failures = {}, {}
    for name in arguments.only:
        options = BENCHMARKS[name] + (" --quick" if arguments.quick else "")
        command = [sys.executable, "-m", f"benchmarks.{name}", *options.split()]
        print(f"\npython -m benchmarks.{name} {options}", flush=True)
        began = time.monotonic()
        try:
            rows[name] = table_row(run_benchmark(command, timeout_seconds=_TIMEOUT_SECONDS), options)
        except RuntimeError as error:
            failures[name] = str(error)
            print(f"benchmarks.{name} {error}")
        print(f"({time.monotonic() - began:.0f} s)", flush=True)

    print("", *_HEAD, *rows.values(), sep="\n", flush=True)
    for name, failure in failures.items():
        print(f"failed: benchmarks.{name} {failure}", file=sys.stderr)
    if arguments.record:
        RESULTS.write_text(with_rows(RESULTS.read_text(), rows))
    return 1 if failures else 0


def run_benchmark(command: Sequence[str], *, timeout_seconds: float) -> dict[str, Any]:
    """Prints the output of a benchmark and returns its last line, read.

    RuntimeError, which says how the benchmark failed.
    """
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,  # nothing stays of what is killed
        subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env=os.environ | {"TMPDIR": folder},
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as process,
    ):
        try:
            output, _ = process.communicate(timeout=timeout_seconds)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"takes longer than {timeout_seconds:g} s") from None
        finally:
            _stop(process)
    print(output, end="", flush=True)
    if process.returncode:
        raise RuntimeError(f"ends with status {process.returncode}")
    try:
        return json.loads(output.splitlines()[-1])
    except (IndexError, ValueError):
        raise RuntimeError("does not end with a line of JSON") from None


def _stop(process: subprocess.Popen) -> None:
    """Ends a benchmark, and the processes that the benchmark has started even where it has ended itself."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_SECONDS)
        os.killpg(process.pid, signal.SIGKILL)


# --------------------------------------------------------------------------------------------- the last table
def table_row(result: Mapping[str, Any], options: str) -> str:
    cells = (
        f"`{result['benchmark']} {options}`",
        time.strftime("%Y-%m-%d"),
        result["commit"],
        f"{result['device_name']}, {result['cores']} cores",
        result["torch"],
        ", ".join(f"`{name}` {_short(value)}" for name, value in _measured(result)) + _doubt(result),
    )
    return f"| {' | '.join(cells)} |"


def _measured(result: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yields the floats of a last line and of its groups: what is measured is a float, a count is not."""
    for name, value in result.items():
        group = value if isinstance(value, dict) else {"": value}
        yield from (
            (f"{name} {key}".rstrip(), each) for key, each in group.items() if isinstance(each, float)
        )


def _doubt(result: Mapping[str, Any]) -> str:
    return "; too uneven to tell, estimates" if result.get("uneven") else ""


def _short(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def with_rows(text: str, rows: Mapping[str, str]) -> str:
    """Returns the text of RESULTS.md with these rows, by benchmark; rows of other benchmarks stay."""
    before, begin, rest = text.partition(_BEGIN)
    table, end, after = rest.partition(_END)
    if not begin or not end:
        raise ValueError(f"{RESULTS.name} lacks the lines {_BEGIN} and {_END}, between which the rows belong")
    there = {line.split()[1].strip("`"): line for line in table.splitlines() if line.startswith("| `")}
    return "\n".join([before + begin, *_HEAD, *(there | rows).values(), end + after])


if __name__ == "__main__":
    sys.exit(main())
