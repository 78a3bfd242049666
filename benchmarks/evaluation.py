"""Compares the time of two evaluations: the model halts puzzles, or takes all steps.

    python -m benchmarks.evaluation [--checkpoint PATH]

With halting=act, an output of the model, the Q head, decides after how many thinking steps (calls of the
model) a puzzle ends. With halting=max, every puzzle takes the maximum number of steps. Without --checkpoint,
the model of the demo is trained first, and evaluated with 16 thinking steps instead of 4. Both variants
evaluate the same test puzzles, in turns, in one process.
"""

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import (
    benchmark_parser,
    cells,
    measurement,
    parse,
    print_report,
    ratio,
    run_main,
    run_program,
)
from benchmarks.worlds import TINY
from checkpointing.finding import find_checkpoint
from checkpointing.loading import load_trained_model
from dataset.mixture import open_datasets
from distributed.backend import choose_device, set_cpu_threads
from distributed.number_format import choose_evaluation_format
from evaluation.passes import evaluate_split

_TRAINING = ("experiment=demo", "arch.eval_halt_max_steps=16", "eval_interval=null", "epochs=3")
_TRAINING += ("sanity_check=false",)


def main(argv: Sequence[str] | None = None) -> None:
    description = (
        "Compares evaluations with halting=act (the model halts puzzles) and halting=max (all steps)."
    )
    parser = benchmark_parser("evaluation", description=description, rounds=5)
    checkpoint = "checkpoint to evaluate (default: train one first)"
    parser.add_argument("--checkpoint", type=Path, metavar="PATH", help=checkpoint)
    options = parse(parser, argv)
    set_cpu_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        path = options.checkpoint or _train(Path(folder), is_quick=options.quick)
        checkpoint, device = find_checkpoint(path), choose_device(options.device)
        data = open_datasets(checkpoint.find_data(), splits=("test",), read_everything=False)
        arch = checkpoint.arch
        number_format = choose_evaluation_format(arch.forward_dtype, device, allowed=arch.formats)
        model = load_trained_model(checkpoint, data.metadata, forward_dtype=number_format.name).to(device)
        seconds, results = {"max": [], "act": []}, {}
        for _ in range(1 + options.rounds):
            for halting in seconds:
                began = time.perf_counter()
                results[halting] = evaluate_split(
                    model,
                    data,
                    global_batch_size=checkpoint.global_batch_size,
                    reasoning=model.eval_reasoning(halting),
                )
                seconds[halting].append(time.perf_counter() - began)
    times = {halting: measurement(values[1:]) for halting, values in seconds.items()}
    rows, exact, steps = [], {}, {}
    for halting, found in times.items():
        sets = [result.metrics for result in results[halting].values() if result.metrics]
        count = sum(metrics["count"] for metrics in sets)
        exact[halting], steps[halting] = (
            sum(metrics[metric] * metrics["count"] for metrics in sets) / count
            for metric in ("exact_accuracy", "steps")
        )
        rate = f"{count / found.median:.0f}"
        rows.append([halting, f"{exact[halting]:.4f}", f"{steps[halting]:.2f}", rate, *cells(found)])
    print_report(
        "evaluation",
        options,
        header=["halting", "exact", "mean steps", "puzzles/s", "median ms", "spread ms"],
        rows=rows,
        notes=[f"Number format: {number_format.name}, because {number_format.reason}."],
        result={
            "act_speedup": ratio(times["max"], times["act"]),
            "accuracy_difference": abs(exact["max"] - exact["act"]),
            "mean_steps": steps["act"],
        },
    )


def _train(folder: Path, *, is_quick: bool) -> Path:
    count = "200" if is_quick else "20000"
    run_program(
        "-m", "dataset.build", "sudoku", "--output-dir", folder / "data", "--box", "2x2", "--generate", count
    )
    paths = (f"data_path={folder / 'data'}", f"checkpoint_path={folder / 'run'}")
    run_program("pretrain.py", *_TRAINING, *(TINY if is_quick else ()), *paths)
    return folder / "run"


if __name__ == "__main__":
    run_main(main)
