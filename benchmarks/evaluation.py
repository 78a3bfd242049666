"""Measures what halting saves in an evaluation: slots that stop when the Q head says so, against all steps.

    python -m benchmarks.evaluation [--checkpoint PATH]

Without a checkpoint the demo's model is trained first; evaluated with 16 steps, as published models, not 4.
Both ways evaluate the same test puzzles in turn, in one process.
"""

import argparse
import dataclasses
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.harness import (
    REPOSITORY,
    Sample,
    add_threads,
    benchmark_parser,
    parse,
    positive,
    print_report,
    time_rounds,
    timed,
)
from benchmarks.processes import run
from checkpointing.pretrained import find_checkpoint, load_trained_model
from dataset.build import build_dataset
from dataset.mixture import open_datasets
from evaluation.passes import SetResult, evaluate_split

_TRAINING = ["experiment=demo", "arch.eval_halt_max_steps=16", "eval_interval=null", "sanity_check=false"]
_QUICK = [
    "arch.hidden_size=32",
    "arch.num_heads=2",
    "arch.H_layers=1",
    "arch.L_layers=1",
    "arch.halt_max_steps=4",
]


def main(words: Sequence[str] | None = None) -> None:
    parser = benchmark_parser("evaluation", description="Halting by the Q head against all steps.", rounds=5)
    add_threads(parser)
    parser.set_defaults(processes=1)
    parser.add_argument("--checkpoint", type=Path, metavar="PATH", help="default: one that is trained first")
    parser.add_argument(
        "--epochs", type=positive, default=3, metavar="N", help="of that training; default: 3"
    )
    arguments = parse(parser, words)
    if arguments.quick:
        arguments.epochs = 1
    with tempfile.TemporaryDirectory() as folder:
        if arguments.checkpoint is None:
            arguments.checkpoint = _train(Path(folder), epochs=arguments.epochs, quick=arguments.quick)
        run(measure, arguments)


def _train(folder: Path, *, epochs: int, quick: bool) -> Path:
    """Trains a model and returns its run folder, beside its data."""
    count = "200" if quick else "20000"
    build_dataset("sudoku", ["--output-dir", str(folder / "data"), "--box", "2x2", "--generate", count])
    paths = [f"data_path={folder / 'data'}", f"checkpoint_path={folder / 'run'}"]
    command = [sys.executable, "pretrain.py", *_TRAINING, *(_QUICK if quick else []), f"epochs={epochs}"]
    subprocess.run([*command, *paths], cwd=REPOSITORY, check=True)
    return folder / "run"


def measure(arguments: argparse.Namespace, device: torch.device) -> None:
    checkpoint = find_checkpoint(arguments.checkpoint)
    data = open_datasets(checkpoint.find_data(), splits=("test",), read_everything=False)
    model = load_trained_model(checkpoint, data.metadata).to(device)
    results: dict[str, dict[str, SetResult]] = {}

    def evaluate(halting: str) -> None:
        results[halting] = evaluate_split(
            model,
            data,
            global_batch_size=checkpoint.global_batch_size,
            reasoning=dataclasses.replace(model.eval_reasoning, halts_early=halting == "act"),
        )

    ways = ("max", "act")
    seconds = time_rounds(
        [timed(way, lambda way=way: evaluate(way), device) for way in ways], rounds=arguments.rounds
    )
    samples = {way: Sample.of(seconds[way]) for way in ways}
    totals = {way: _totals(results[way]) for way in ways}
    rows = []
    for way in ways:
        count, exact, steps = totals[way]
        rate = count / samples[way].median
        rows.append([way, f"{count}", f"{exact:.4f}", f"{steps:.2f}", f"{rate:.0f}", *samples[way].cells()])
    print_report(
        "evaluation",
        header=["halting", "puzzles", "exact", "mean steps", "puzzles/s", "median ms", "spread ms"],
        rows=rows,
        notes=[f"{arguments.checkpoint}, {model.eval_reasoning.max_steps} steps"],
        result={
            "act_speedup": samples["max"].median / samples["act"].median,
            "accuracy_difference": abs(totals["max"][1] - totals["act"][1]),
            "mean_steps": totals["act"][2],
        },
        samples=samples,
        arguments=arguments,
    )


def _totals(results: dict[str, SetResult]) -> tuple[int, float, float]:
    """Returns (puzzles, exact accuracy, mean steps) over all sets."""
    metrics = [result.metrics for result in results.values() if result.metrics]
    count = sum(each["count"] for each in metrics)
    exact, steps = (
        sum(each[name] * each["count"] for each in metrics) / count for name in ("exact_accuracy", "steps")
    )
    return int(count), exact, steps


if __name__ == "__main__":
    main()
