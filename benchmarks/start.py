"""Times what a person waits for: --help, and from the command to the first training step of the demo.

    python -m benchmarks.start

Whole programs are timed from outside, in turns. The first step is done when its line is in metrics.jsonl;
before it come the imports, the reading of the data, and the evaluation of one batch, as in every run. With
one process it is started by python, with several by torchrun as `make demo` does; each has one thread, and
nothing is compiled. The data is there already, and a first round, in which files come from the disk, does not
count.
"""

import argparse
import contextlib
import io
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.harness import REPOSITORY, Sample, benchmark_parser, parse, positive, print_report
from benchmarks.processes import program, program_environment
from dataset.build import build_dataset

_STEPS = 2  # the first step's line is written before the second; the last step's only after an evaluation
_POLL_SECONDS = 0.01


def main(words: Sequence[str] | None = None) -> None:
    parser = benchmark_parser(
        "start", description="Seconds until --help, and until the first step.", rounds=5
    )
    parser.add_argument(
        "--processes",
        type=positive,
        nargs="+",
        default=[1, 2],
        metavar="N",
        help="default: %(default)s",
    )
    parser.set_defaults(threads=1)
    arguments = parse(parser, words)
    arguments.processes = sorted(set(arguments.processes))
    if arguments.quick:
        arguments.rounds = 1
    with tempfile.TemporaryDirectory() as folder:
        measure(arguments, Path(folder))


def measure(arguments: argparse.Namespace, folder: Path) -> None:
    # The demo's words, or less.
    size = ["--generate", "200"] if arguments.quick else ["--generate", "4000", "--num-aug", "8"]
    with contextlib.redirect_stdout(io.StringIO()):
        build_dataset("sudoku", ["--output-dir", str(folder / "data"), "--box", "2x2", *size])
    seconds: dict[str, list[float]] = {}
    for number in range(arguments.rounds if arguments.quick else 1 + arguments.rounds):
        seconds.setdefault("help_seconds", []).append(_seconds_of_help())
        for processes in arguments.processes:
            key = "first_step_seconds" + (f"_{processes}_processes" if processes > 1 else "")
            run = folder / f"{key}_{number}"
            seconds.setdefault(key, []).append(_seconds_to_first_step(run, processes, arguments.device))
    samples = {key: Sample.of(np.array(values[-arguments.rounds :])) for key, values in seconds.items()}
    print_report(
        "start",
        header=["until", "median s", "spread s"],
        rows=[
            [key.replace("_seconds", "").replace("_", " "), *sample.cells(unit=1, digits=2)]
            for key, sample in samples.items()
        ],
        notes=["first step: of the demo, nothing compiled, its data built before."],
        result={key: sample.median for key, sample in samples.items()},
        samples=samples,
        arguments=arguments,
    )


def _seconds_of_help() -> float:
    began = time.perf_counter()
    subprocess.run(
        [sys.executable, "pretrain.py", "--help"], cwd=REPOSITORY, stdout=subprocess.DEVNULL, check=True
    )
    return time.perf_counter() - began


def _seconds_to_first_step(run: Path, processes: int, device: str) -> float:
    """Times the first step of a run in a new folder beside the data; the run then goes on to its end."""
    words = ("pretrain.py", "experiment=demo", f"max_steps={_STEPS}", f"device={device}", "compile=false")
    where = (f"data_path={run.parent / 'data'}", f"checkpoint_path={run}")
    command = program(*words, *where, processes=processes)
    log, metrics = run.with_suffix(".txt"), run / "metrics.jsonl"
    with log.open("w") as output:
        began = time.perf_counter()
        process = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env=program_environment(threads=1),
            stdout=output,
            stderr=output,
        )
        while not (metrics.exists() and metrics.stat().st_size) and process.poll() is None:
            time.sleep(_POLL_SECONDS)
        seconds = time.perf_counter() - began
        if process.wait() != 0:
            raise SystemExit(f"the run fails, its last words:\n{log.read_text()[-3000:]}")
    return seconds


if __name__ == "__main__":
    main()
