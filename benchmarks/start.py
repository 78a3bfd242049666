"""Times --help, the start until the first training step of the demo, and later steps.

    python -m benchmarks.start
    python -m benchmarks.start --beside ../other       # alternates with another checkout

The programs are timed from outside. first step: seconds until its record is in metrics.jsonl. This includes
imports, reading the data, and the evaluation of one batch. step: median seconds of a step, in the second half
of the log. One process is started with python, several with torchrun. Each process has one thread by default,
and nothing is compiled. The data is built before. A first round, which reads files from disk, is not counted.
"""

import argparse
import contextlib
import io
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import (
    REPOSITORY,
    benchmark_parser,
    cells,
    fail,
    measurement,
    parse,
    positive,
    print_report,
    program,
    program_environment,
    ratio,
    run_main,
)
from dataset.build import build_dataset

_POLL_SECONDS = 0.01


def main(argv: Sequence[str] | None = None) -> None:
    description = "Times --help, the start until the first step, and a step."
    parser = benchmark_parser("start", description=description, rounds=5, threads="1")
    processes = "numbers of processes (default: %(default)s)"
    parser.add_argument("--processes", type=positive, nargs="+", default=[1, 2], metavar="N", help=processes)
    steps = "training steps per run (default: %(default)s)"
    parser.add_argument("--steps", type=positive, default=20, metavar="N", help=steps)
    parser.add_argument("--beside", type=Path, metavar="FOLDER", help="another checkout to compare with")
    options = parse(parser, argv)
    trees = {"": REPOSITORY} | ({"beside ": options.beside.absolute()} if options.beside else {})
    seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        size = ["--generate", "200"] if options.quick else ["--generate", "4000", "--num-aug", "8"]
        with contextlib.redirect_stdout(io.StringIO()):
            build_dataset("sudoku", ["--output-dir", f"{folder}/data", "--box", "2x2", *size])
        for _ in range(options.rounds + (not options.quick)):
            for label, tree in trees.items():
                seconds.setdefault(f"{label}help", []).append(_seconds_of_help(tree))
                for num in options.processes:
                    run = Path(tempfile.mkdtemp(dir=folder))
                    first, step = _seconds_of_run(run, tree, num, options)
                    seconds.setdefault(f"{label}first step of {num}", []).append(first)
                    seconds.setdefault(f"{label}step of {num}", []).append(step)
    times = {name: measurement(values[-options.rounds :]) for name, values in seconds.items()}
    rows, result = [], {}
    for name, found in times.items():
        over = f"{ratio(times[f'beside {name}'], found):.2f}" if f"beside {name}" in times else ""
        rows.append([name, *cells(found, unit=1, digits=3), over])
        result[f"{name}_seconds".replace(" ", "_")] = found.median
        result |= {f"{name}_speedup".replace(" ", "_"): float(over)} if over else {}
    print_report(
        "start", options, header=["what", "median s", "spread s", "beside / here"], rows=rows, result=result
    )


def _seconds_of_help(tree: Path) -> float:
    began = time.perf_counter()
    command = [sys.executable, "pretrain.py", "--help"]
    if subprocess.run(command, cwd=tree, stdout=subprocess.DEVNULL).returncode:
        fail(f"pretrain.py --help fails in {tree}. See its error above.")
    return time.perf_counter() - began


def _seconds_of_run(
    run: Path, tree: Path, processes: int, options: argparse.Namespace
) -> tuple[float, float]:
    arguments = ("pretrain.py", "experiment=demo", f"max_steps={options.steps}", "log_interval=1")
    arguments += ("compile=false", "global_batch_size=32")
    where = (f"device={options.device}", f"data_path={run.parent / 'data'}", f"checkpoint_path={run}")
    log, metrics = run.with_suffix(".txt"), run / "metrics.jsonl"
    with log.open("wb") as output:
        began = time.perf_counter()
        process = subprocess.Popen(
            program(*arguments, *where, processes=processes),
            cwd=tree,
            env=program_environment(threads=int(options.threads)),
            stdout=output,
            stderr=output,
        )
        while not (metrics.exists() and metrics.stat().st_size) and process.poll() is None:
            time.sleep(_POLL_SECONDS)
        seconds = time.perf_counter() - began
        if process.wait():
            lines = log.read_text(encoding="utf-8").strip().splitlines()
            fail(f"pretrain.py in {tree} fails: {''.join(lines[-1:])}")
    rows = metrics.read_text(encoding="utf-8").splitlines()
    steps = [json.loads(row)["train/step_seconds"] for row in rows]
    return seconds, statistics.median(steps[len(steps) // 2 :])


if __name__ == "__main__":
    run_main(main)
