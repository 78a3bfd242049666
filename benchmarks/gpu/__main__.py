"""Measures in ten minutes of one GPU what a CPU cannot show, the most important first.

    python -m benchmarks.gpu --seconds 540 --output gpu.jsonl --data data/sudoku-extreme-1k-aug-1000
    python -m benchmarks.gpu --device cpu --tiny    # every part, to see that it works; no time means anything

- tests: tests/test_cuda.py, where pytest is there
- golden: the numbers of the public code replayed in float32, without TF32
- rates: what the card can do: matrix products, memory
- steps: a training step of the published runs in bfloat16, eager, compiled, compiled and replayed as a CUDA
  graph, compiled level by level, with kernels that the compiler tries out (max-autotune)
  over the public code (HRM, TRM) on this card; its share of the best rate, its memory, where the host waits
- attention: torch's kernels for it, at 81 to 916 positions
- optimizers: an update of all weights and of their average over the bare memory traffic
- learning: what is left of the time: TRM with an MLP, with the largest batch that pays, on --data, or on
  generated puzzles, which are easier

A machine with torch and numpy alone is enough: nothing of the project that needs another package is imported.
Each row is printed, and appended to --output, as soon as it is there. Every task runs in a process of its own
with a time limit: what fails is a row with its error, and the next goes on.
"""

import contextlib
import importlib.util
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import attention, checks, learning, steps
from benchmarks.gpu.tasks import Options, Row, Task, run_task
from benchmarks.harness import REPOSITORY, Parser, describe_device, num_cores, positive, table

_PARTS = ("tests", "golden", "rates", "steps", "attention", "optimizers", "learning")
_PACKAGES = (
    *("hydra", "omegaconf", "pydantic", "yaml", "safetensors", "wandb", "coolname", "tqdm", "pytest"),
    *("matplotlib", "triton"),
)
_RESERVED = 0.35  # of the seconds, for learning
_GENERATED = ("--generate", "1000", "--num-aug", "1000")
_GENERATED_TINY = ("--generate", "40", "--num-aug", "2", "--box", "2x2")
_LEAST_SECONDS = 1.0


def main(words: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 where every task ended, and what it compares is equal."""
    parser = Parser(
        prog="python -m benchmarks.gpu", description=__doc__.partition("\n")[0], allow_abbrev=False
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default: %(default)s")
    parser.add_argument("--tiny", action="store_true", help="tiny models: to see that it works, not how fast")
    parser.add_argument(
        "--seconds",
        type=positive,
        default=540,
        metavar="N",
        help="of all parts together (default: %(default)s)",
    )
    parser.add_argument(
        "--only", nargs="+", choices=_PARTS, default=_PARTS, metavar="PART", help="%(choices)s"
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="where rows are appended; default: nowhere"
    )
    golden = REPOSITORY.parent / "shared" / "golden"
    parser.add_argument("--golden", type=Path, default=golden, metavar="FOLDER", help="of the golden vectors")
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="a Sudoku dataset; default: generated")
    arguments = parser.parse_args(words)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: there is no CUDA device here; --device cpu --tiny tries everything else")
    if arguments.data and not (arguments.data / "train" / "dataset.json").is_file():
        parser.error(f"--data {arguments.data} is no dataset: python -m dataset.build sudoku makes one")

    ends = time.monotonic() + arguments.seconds
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["torch", "torch._dynamo", *(f"benchmarks.gpu.{name}" for name in ("attention", "steps", "learning"))]
    )
    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        output = stack.enter_context(open(arguments.output, "a")) if arguments.output else None
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(scratch, "compiled")))
        data = arguments.data or Path(scratch, "data")
        builder = _start_builder(data, arguments.tiny) if not arguments.data else None
        options = Options(arguments.device, arguments.tiny, arguments.golden, data.absolute())
        rows = []
        try:
            for row in _measure(options, arguments.only, ends=ends, builder=builder):
                rows.append(row)
                _write(row, output)
        finally:
            if builder is not None:
                builder.kill()
                builder.wait()
        result = _result(rows)
        print(*_lines(rows), sep="\n")
        _write({"benchmark": "gpu", **result, "tiny": arguments.tiny}, output)
    return 1 if result["failed"] else 0


def _measure(
    options: Options, parts: Sequence[str], *, ends: float, builder: subprocess.Popen | None
) -> Iterator[Row]:
    whole = ends - time.monotonic()
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    yield {"part": "machine", **describe_device(options.device), "cores": num_cores(), "missing": missing}
    for task in tasks():
        if task.part not in parts:
            continue
        left = ends - time.monotonic()
        if task.part == "learning":
            seconds = left
            if builder is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    builder.wait(max(0.0, left))
                if builder.returncode:
                    yield {"part": task.part, "name": task.name, "error": "dataset.build sudoku failed"}
                    continue
                seconds = ends - time.monotonic()
        else:
            reserved = _RESERVED * whole if "learning" in parts else 0.0
            seconds = left if options.is_tiny else min(task.share * whole, left - reserved)
        if seconds < _LEAST_SECONDS:
            yield {"part": task.part, "name": task.name, "skipped": "no time is left"}
            continue
        began = time.monotonic()
        yield from run_task(task, options, seconds=seconds)
        yield {"part": task.part, "name": task.name, "took_seconds": time.monotonic() - began}


def tasks() -> Iterator[Task]:
    yield Task("tests", "test_cuda", 0.08, checks.run_tests)
    yield Task("golden", "replay", 0.06, checks.replay_golden)
    yield Task("rates", "device", 0.04, steps.measure_rates)
    ways = [("eager", steps.EXPERIMENTS), ("published", ("hrm", "trm")), ("compiled", steps.EXPERIMENTS)]
    ways += [("graphs", steps.EXPERIMENTS), ("deferred_compiled", ("hrm",))]
    for way, models in ways:
        for name in models:
            share = 0.05 if way in ("eager", "published") else 0.1
            yield Task("steps", f"{name} {way}", share, steps.measure_step, (name, way))
    yield Task("attention", "kernels", 0.05, attention.measure_attention)
    yield Task("optimizers", "hrm", 0.08, steps.measure_optimizers)
    # Those of which each may take minutes come last.
    for way in ("levels_compiled", "autotuned_compiled", "published_compiled"):
        for name in ("hrm", "trm"):
            yield Task("steps", f"{name} {way}", 0.12, steps.measure_step, (name, way))
    yield Task("learning", learning.EXPERIMENT, 1.0, learning.learn)


def _start_builder(folder: Path, is_tiny: bool) -> subprocess.Popen:
    words = _GENERATED_TINY if is_tiny else _GENERATED
    command = [sys.executable, "-m", "dataset.build", "sudoku", "--output-dir", str(folder), *words]
    return subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _write(row: Row, output: Any) -> None:
    line = json.dumps(row)
    print(line, flush=True)
    if output is not None:
        output.write(line + "\n")
        output.flush()
        os.fsync(output.fileno())


# ---------------------------------------------------------------------------------------------- what came out
def _result(rows: Sequence[Row]) -> dict[str, Any]:
    """Returns what the last line says: ratios, and which tasks failed."""
    timed = {row["name"]: row for row in rows if row["part"] == "steps" and "examples_per_second" in row}
    result: dict[str, Any] = {}
    for name, row in timed.items():
        model, way = name.split(maxsplit=1)
        for other in ("published", "published_compiled"):
            published = timed.get(f"{model} {other}")
            if published and not way.startswith("published"):
                ratio = row["examples_per_second"] / published["examples_per_second"]
                result[f"speedup_over_{other}_{model}_{way}"] = ratio
        if (share := _share_of_rate(rows, timed, name)) is not None:
            result[f"fraction_of_matmul_rate_{model}_{way}"] = share
    for row in rows:
        if "over_traffic" in row:
            result[f"{row['update']} over traffic".replace(" ", "_").replace(",", "")] = row["over_traffic"]
    result |= attention.compare(rows)
    learned = [row for row in rows if "exact_accuracy" in row]
    if learned:
        result |= {name: learned[-1][name] for name in ("exact_accuracy", "accuracy", "seconds", "step")}
    result["host_waits"] = {row["name"]: row["host_waits_at"] for row in rows if row.get("host_waits_at")}
    failed = [row for row in rows if "error" in row or row.get("passed") is False]
    result["failed"] = sorted({f"{row['part']} {row['name']}" for row in failed})
    return result


def _share_of_rate(rows: Sequence[Row], timed: dict[str, Row], name: str) -> float | None:
    """Returns the operations a second in a step over the best of the products; None where either lacks."""
    flops = timed.get(f"{name.split()[0]} eager", {}).get("flops_per_example")
    rates = [row["flops_per_second"] for row in rows if "flops_per_second" in row]
    if flops is None or not rates:
        return None
    return flops * timed[name]["examples_per_second"] / max(rates)


def _lines(rows: Sequence[Row]) -> Iterator[str]:
    """Lays out the steps as a table for a person."""
    timed = {row["name"]: row for row in rows if row["part"] == "steps" and "examples_per_second" in row}
    waits = {row["name"]: row["host_waits_at"] for row in rows if "host_waits_at" in row}
    cells = [["step", "batch", "ms", "examples/s", "over published", "of matmul", "GiB", "host waits"]]
    for name, row in timed.items():
        published = timed.get(f"{name.split()[0]} published")
        share = _share_of_rate(rows, timed, name)
        cells.append(
            [
                name,
                str(row["batch"]),
                f"{1000 * row['seconds']:.1f}",
                f"{row['examples_per_second']:.0f}",
                f"{row['examples_per_second'] / published['examples_per_second']:.2f}" if published else "",
                f"{share:.0%}" if share is not None else "",
                f"{row['peak_memory_bytes'] / 2**30:.1f}",
                "" if name not in waits else "yes" if waits[name] else "no",
            ]
        )
    if len(cells) > 1:
        yield from ("", *table(cells))
    if kernels := list(attention.cells(rows)):
        yield from ("", *table(kernels))
    for row in rows:
        for what in ("error", "skipped"):
            if what in row:
                where = f" ({row['where']})" if "where" in row else ""
                yield f"{what}: {row['part']} {row['name']}: {row[what]}{where}"


if __name__ == "__main__":
    sys.exit(main())
