"""Trains a published experiment of each model and kind of puzzle for a few hundred steps, at full width.

    python -m benchmarks.sizes --folder checkpoints/sizes
    python -m benchmarks.sizes --only sudoku_extreme trm_maze --steps 100

The batch is small. It shows that the real command runs, what memory a process takes, that the loss falls, and
how long all of it would take on this machine: the published examples at the measured rate. The puzzles are
generated, of the published form: 9x9 Sudokus, mazes of 30x30, ARC tasks on 30x30 cells, with fewer of them
and fewer variants, so that the table of puzzle embeddings is smaller than the published one. With --folder
the runs are kept, and the same command goes on where it was interrupted; experiments that are done are not
run again.
"""

import argparse
import dataclasses
import json
import signal
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import Sample, benchmark_parser, fail, parse, positive, print_report
from benchmarks.processes import run_program
from config.compose import compose_overrides
from config.schema import PretrainConfig
from dataset.mixture import open_datasets
from report.run import read_run
from tests.stress.runs import num_rows
from training.run_folder import has_ended

_PART = 0.1  # of the rows at the beginning and at the end, over which a loss is averaged
_DAY, _MEBIBYTE = 86400.0, 2**20
_QUICK_STEPS = 3
_QUICK_WIDTH = ("arch.hidden_size=32", "arch.num_heads=2", "arch.L_layers=1", "arch.puzzle_emb_ndim=32")


@dataclasses.dataclass(frozen=True)
class Data:
    """What generates puzzles of the published form, and how many groups of them are published."""

    builder: str
    quick_builder: str
    puzzles: int  # of a process in a step


_ARC = Data(
    "dataset.build arc --generate 400 --num-aug 100", "dataset.build arc --generate 10 --num-aug 1", puzzles=1
)
_SUDOKU = Data(
    "dataset.build sudoku --generate 1000 --num-test 20 --num-aug 1000",
    "dataset.build sudoku --generate 20 --num-test 2 --num-aug 1",
    puzzles=4,
)
_MAZE = Data(
    "dataset.build maze --generate 200 --num-test 20",
    "dataset.build maze --generate 4 --num-test 2 --size 8 --min-path-cells 8",
    puzzles=1,
)
_KINDS = {"sudoku": _SUDOKU, "maze": _MAZE, "arc": _ARC}
# By experiment: the kind of its puzzles, and the groups that an epoch of the published data has (puzzles, or
# ARC tasks: 400 + 400 + 160 of ConceptARC, 1000 + 120).
EXPERIMENTS = {
    "sudoku_extreme": ("sudoku", 1000),
    "maze_hard": ("maze", 1000),
    "arc1": ("arc", 960),
    "arc2": ("arc", 1120),
    "trm_sudoku_mlp": ("sudoku", 1000),
    "trm_maze": ("maze", 1000),
    "trm_arc1": ("arc", 960),
    "trm_arc2": ("arc", 1120),
}


def main(words: Sequence[str] | None = None) -> None:
    parser = benchmark_parser("sizes", description="The published experiments for a few steps.", rounds=None)
    parser.add_argument("--only", nargs="+", choices=EXPERIMENTS, metavar="NAME", help="%(choices)s")
    parser.add_argument("--steps", type=positive, default=300, metavar="N", help="default: %(default)s")
    parser.add_argument("--folder", type=Path, metavar="PATH", help="of data and runs; default: none is kept")
    parser.set_defaults(processes=2, threads=1)
    arguments = parse(parser, words)
    if arguments.quick:
        arguments.steps = min(arguments.steps, _QUICK_STEPS)
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.folder or Path(temporary)).absolute() / ("quick" if arguments.quick else "")
        measure(arguments, folder, arguments.only or list(EXPERIMENTS))


def measure(arguments: argparse.Namespace, folder: Path, names: Sequence[str]) -> None:
    found = {}
    for name in names:
        found[name] = train(arguments, folder, name)
        print(f"{name}: {json.dumps(found[name])}", flush=True)
    print_report(
        "sizes",
        header=[
            "experiment",
            "parameters",
            "puzzles",
            "s a step",
            "MiB a process",
            "loss",
            "days for all of it",
        ],
        rows=[
            [
                name,
                f"{each['parameters'] / 1e6:.1f} M",
                str(each["puzzles"]),
                f"{each['step_seconds']:.2f}",
                f"{each['peak_memory_bytes'] / _MEBIBYTE:.0f}",
                f"{each['first_loss']:.2f} -> {each['last_loss']:.2f}",
                f"{each['published_seconds'] / _DAY:.0f}",
            ]
            for name, each in found.items()
        ],
        notes=[
            f"{arguments.steps} steps; loss: of a token, mean of the first and of the last tenth of them",
            "days: the published epochs, at the rate measured here",
        ],
        result=found,
        samples={name: Sample.of([each["step_seconds"]]) for name, each in found.items()},
        arguments=arguments,
    )


def train(arguments: argparse.Namespace, folder: Path, name: str) -> dict[str, float]:
    """Trains an experiment up to the steps, unless that is done, and returns what its log says."""
    kind, groups = EXPERIMENTS[name]
    data, run = build(arguments, folder, kind), folder / name
    puzzles = arguments.processes * _KINDS[kind].puzzles
    words = [f"experiment={name}", f"data_path={data}", f"checkpoint_path={run}"]
    words += [f"global_batch_size={puzzles}", "log_interval=1"]
    words += ["sanity_check=false", f"device={arguments.device}", *(_QUICK_WIDTH if arguments.quick else ())]
    words += ["compile=false"] if arguments.quick else []
    try:
        config = compose_overrides(PretrainConfig, words)
    except ValueError as error:
        fail(error)
    if not has_ended(run, max_steps=arguments.steps):
        # Stopped from here, as max_steps would evaluate at its end: a day for ARC.
        threads = {"processes": arguments.processes, "threads": arguments.threads}
        run_program("pretrain.py", *words, **threads, until=lambda: num_rows(run) >= arguments.steps)
    report = read_run(run)
    rows = [row for row in report.rows[: arguments.steps] if "train/step_seconds" in row]
    if len(rows) < arguments.steps:
        fail(f"{run} has ended after {len(rows)} steps: remove it, and start again")
    part = max(1, int(_PART * len(rows)))
    losses = [row["train/lm_loss"] for row in rows if "train/lm_loss" in row]
    step_seconds = statistics.median(row["train/step_seconds"] for row in rows)
    mean_examples = open_datasets(
        [data], splits=("train",), read_everything=False
    ).metadata.mean_puzzle_examples
    examples = config.epochs * groups * mean_examples
    return {
        "parameters": report.num_parameters,
        "puzzles": puzzles,
        "step_seconds": step_seconds,
        "peak_memory_bytes": max(row["train/peak_memory_bytes"] for row in rows),
        "first_loss": statistics.fmean(losses[:part]),
        "last_loss": statistics.fmean(losses[-part:]),
        "published_seconds": examples * step_seconds / puzzles,
    }


def build(arguments: argparse.Namespace, folder: Path, kind: str) -> Path:
    """Builds the puzzles of a kind, unless they are there."""
    data = folder / "data" / kind
    if not data.exists():
        builder = _KINDS[kind].quick_builder if arguments.quick else _KINDS[kind].builder
        run_program("-m", *builder.split(), "--output-dir", data)
    return data


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGHUP):  # as Ctrl-C
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    main()
