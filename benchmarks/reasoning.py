"""Measures what more steps and samples gain at test time, on models trained here, whole and stopped early.

    python -m benchmarks.reasoning [--seeds 3] [--folder FOLDER]
    python -m benchmarks.reasoning --checkpoint PATH [PATH ...] --evaluators KIND

The first trains an HRM (the demo's), a TRM and an SE-RRM on 4x4 Sudoku, and an SE-RRM on 6x6, from several
seeds; of each run the last checkpoint and one from half of the way are evaluated, on test puzzles that are
no variants of training ones. The second takes checkpoints that are there, on the data of their configs; a
mean is over all of them. Nothing is tuned on the test puzzles: noise is PTRM's (arXiv 2605.19943), and a gain
is that of means over seeds. With --folder the runs are kept, and a second start goes on with them.

plain: one run without noise. gain_samples: the most that any number of samples and way to select add to plain
at as many steps; gain_steps: the most that steps add to plain at the steps of training. Both are means over
the models stopped early; `rules`, which looks at the question, does not count. size_transfer_6x6: exact
accuracy on 6x6 of the SE-RRM that saw 4x4 alone. Cost: seconds of a grid over those of its corners evaluated
one by one, each a start of the program; calls alone would give grid_calls_over_parts.
"""

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.harness import Parser, positive
from benchmarks.processes import run_program
from parallel.process_group import num_cores

_BOXES = {"4x4": "2x2", "6x6": "2x3"}
_SIZES = ("arch.hidden_size=64", "arch.num_heads=2", "arch.L_layers=2", "arch.halt_max_steps=4")
_SERRM = (
    *("arch=serrm", "arch.hidden_size=32", "arch.num_heads=2", "arch.head_dim=16", "arch.num_heads_t=2"),
    *("arch.head_dim_t=16", "arch.L_layers=2", "arch.H_cycles=1", "arch.L_cycles=3", "arch.halt_max_steps=4"),
    "global_batch_size=64",  # a step costs by the number of symbols
)
_TRM = ("arch=trm", *_SIZES, "arch.H_cycles=2", "arch.L_cycles=3")
_HRM = ("arch=hrm", *_SIZES, "arch.H_layers=2", "arch.q_target=deferred")
MODELS = {"hrm_4x4": _HRM, "trm_4x4": _TRM, "serrm_4x4": _SERRM, "serrm_6x6": _SERRM}
_TRAINING = (
    *("global_batch_size=128", "optimizer=muon", "lr=5e-3", "lr_warmup_steps=50", "weight_decay=1.0"),
    *("puzzle_emb_lr=2e-3", "eval_interval=null", "keep_checkpoints=null"),
    *("compile=false", "sanity_check=false"),
    *("wandb_mode=disabled", "device=cpu", "cpu_threads=1"),
)
_SELECT = ("q_head", "q_head_any_step", "first_to_halt", "vote", "residual", "rules")
_PLAIN, _ANY = "plain", "any"

# {(steps, samples): {way to select, plain or any: exact accuracy}}
Grid = dict[tuple[int, int], dict[str, float]]


def main(words: Sequence[str] | None = None) -> None:
    parser = Parser(
        prog="python -m benchmarks.reasoning",
        description="What more steps and samples gain, on models trained here.",
        allow_abbrev=False,
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), metavar="NAME")
    parser.add_argument("--seeds", type=positive, default=3, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--train-steps", type=positive, default=1000, metavar="N", help="default: %(default)s"
    )
    parser.add_argument("--steps", type=positive, nargs="+", default=[4, 16, 64], metavar="N")
    parser.add_argument("--samples", type=positive, nargs="+", default=[1, 8, 32], metavar="N")
    parser.add_argument("--noise", type=float, default=0.3, help="default: %(default)s")
    parser.add_argument("--folder", type=Path, metavar="PATH", help="of data and runs; default: none is kept")
    parser.add_argument("--checkpoint", nargs="+", metavar="PATH", help="evaluate these, and train nothing")
    parser.add_argument("--evaluators", default="sudoku", help="kind of their puzzles, for rules, or none")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: to see that it works")
    arguments = parser.parse_args(words)
    if arguments.quick:
        arguments.seeds, arguments.train_steps = 1, 3
        arguments.steps, arguments.samples = [4, 8], [1, 2]
    with tempfile.TemporaryDirectory() as temporary:
        arguments.scratch = Path(temporary)  # for the results of evaluations
        folder = (arguments.folder or Path(temporary)).absolute()
        if arguments.checkpoint:
            groups = {"checkpoints": [Path(path).absolute() for path in arguments.checkpoint]}
            result = _measure(groups, folder, arguments)
        else:
            _train_all(folder, arguments)
            result = _measure(_checkpoints(folder, arguments), folder, arguments)
    print(json.dumps({"benchmark": "reasoning", **result}))


# ------------------------------------------------------------------------------------------------- training
def _train_all(folder: Path, arguments: argparse.Namespace) -> None:
    """Builds the data and trains every model from every seed, one process on each core."""
    for size in {name.partition("_")[2] for name in arguments.models}:
        if not (folder / size).is_dir():
            words = ["--output-dir", folder / size, "--box", _BOXES[size], "--num-aug", "8"]
            words += ["--generate", "100" if arguments.quick else "1000"]
            run_program("-m", "dataset.build", "sudoku", *words)
    with ThreadPoolExecutor(num_cores()) as pool:
        runs = [(name, seed) for seed in range(arguments.seeds) for name in arguments.models]
        list(pool.map(lambda run: _train(folder, *run, arguments), runs))


def _train(folder: Path, name: str, seed: int, arguments: argparse.Namespace) -> None:
    run_program(
        *("pretrain.py", *_TRAINING, *MODELS[name], f"data_path={folder / name.partition('_')[2]}"),
        *(f"checkpoint_path={folder / name}_{seed}", f"seed={seed}", "epochs=100000"),
        *(f"max_steps={arguments.train_steps}", f"checkpoint_interval={_early(arguments)}"),
    )


def _early(arguments: argparse.Namespace) -> int:
    """Returns the step at which a model counts as stopped early."""
    return math.ceil(arguments.train_steps / 2)


def _checkpoints(folder: Path, arguments: argparse.Namespace) -> dict[str, list[Path]]:
    return {
        f"{name} {stage}": [folder / f"{name}_{seed}" / f"step_{step}" for seed in range(arguments.seeds)]
        for name in arguments.models
        for stage, step in (("early", _early(arguments)), ("whole", arguments.train_steps))
    }


# ----------------------------------------------------------------------------------------------- evaluating
def _measure(groups: dict[str, list[Path]], folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Evaluates every checkpoint on the grid, prints the means of each group, and returns the last line."""
    gains: dict[str, tuple[float, float]] = {}
    with ThreadPoolExecutor(num_cores()) as pool:
        for name, group in groups.items():
            grids = list(pool.map(lambda path: _grid(path, arguments), group))
            print(_table(name, grids), flush=True)
            gains[name] = _gains(grids)
    early = [gain for name, gain in gains.items() if not name.endswith("whole")]
    result: dict[str, Any] = {
        "gain_samples": statistics.mean(samples for samples, _ in early),
        "gain_steps": statistics.mean(steps for _, steps in early),
        "gains": {name: {"samples": samples, "steps": steps} for name, (samples, steps) in gains.items()},
    }
    if {"serrm_4x4", "serrm_6x6"} <= set(arguments.models) and not arguments.checkpoint:
        other = f"data_path={folder / '6x6'}"
        scores = [_exact(_evaluate(path, arguments.scratch, other)) for path in groups["serrm_4x4 whole"]]
        result["size_transfer_6x6"] = statistics.mean(scores)
        print(f"serrm_4x4 whole on 6x6: {_mean(scores)}")
    first = next(iter(groups.values()))[0]
    return result | _equal_over_processes(first, arguments) | _cost(first, arguments)


def _grid(path: Path, arguments: argparse.Namespace) -> Grid:
    select = [way for way in _SELECT if way != "rules" or arguments.evaluators != "none"]
    noisy = _evaluate(
        path,
        arguments.scratch,
        *(f"samples={arguments.samples}", f"noise={arguments.noise}", f"select=[{','.join(select)}]"),
        *_steps(arguments),
        *([] if arguments.evaluators == "none" else [f"evaluators=[{arguments.evaluators}]"]),
    )
    grid: Grid = {}
    for corner in _corners(noisy):
        ways = corner["selected"] | ({"rules": corner["by_rules"]} if "by_rules" in corner else {})
        shares = {**ways, _ANY: corner["any"]}
        where = corner["steps"], corner["samples"]
        grid[where] = {way: share["exact_accuracy"] for way, share in shares.items()}
    for corner in _corners(_evaluate(path, arguments.scratch, *_steps(arguments))):
        for (steps, _), shares in grid.items():
            if steps == corner["steps"]:
                shares[_PLAIN] = corner["any"]["exact_accuracy"]
    return grid


def _steps(arguments: argparse.Namespace) -> list[str]:
    return [f"halt_max_steps={arguments.steps}".replace(" ", ""), "compile=false"]


def _evaluate(path: Path, scratch: Path, *overrides: str, processes: int = 1) -> Path:
    """Evaluates a checkpoint with one thread; returns the folder with the results."""
    folder = Path(tempfile.mkdtemp(dir=scratch))
    words = [override.replace(" ", "") for override in overrides]
    where = (f"checkpoint={path}", f"output_dir={folder}", "device=cpu", "cpu_threads=1")
    run_program("evaluate.py", *where, *words, processes=processes)
    return folder


def _corners(folder: Path) -> list[dict[str, Any]]:
    (content,) = json.loads((folder / "scaling.json").read_text())["sets"].values()
    return content["corners"]


def _exact(folder: Path) -> float:
    (metrics,) = json.loads((folder / "metrics.json").read_text()).values()
    return metrics["exact_accuracy"]


def _gains(grids: list[Grid]) -> tuple[float, float]:
    """Returns the most that samples add at any number of steps, and that steps add alone, of means."""
    mean = {
        where: {way: statistics.mean(grid[where][way] for grid in grids) for way in shares}
        for where, shares in grids[0].items()
    }
    allowed = {
        where: [share for way, share in shares.items() if way not in (_PLAIN, _ANY, "rules")]
        for where, shares in mean.items()
    }
    plain = {steps: shares[_PLAIN] for (steps, _), shares in mean.items()}
    of_samples = max(max(allowed[steps, samples]) - plain[steps] for steps, samples in mean)
    return of_samples, max(plain.values()) - plain[min(plain)]


def _equal_over_processes(path: Path, arguments: argparse.Namespace) -> dict[str, bool]:
    words = (f"samples={arguments.samples[-1]}", f"noise={arguments.noise}", *_steps(arguments)[:1])
    folders = [_evaluate(path, arguments.scratch, *words, processes=processes) for processes in (1, 2)]
    one, two = ((folder / "scaling.json").read_bytes() for folder in folders)
    return {"equal_over_processes": one == two}


def _cost(path: Path, arguments: argparse.Namespace) -> dict[str, float]:
    """Times the grid once against its corners, one by one."""
    noise = (f"noise={arguments.noise}", "compile=false")

    def seconds(steps: object, samples: object) -> float:
        begin = time.perf_counter()
        _evaluate(path, arguments.scratch, f"halt_max_steps={steps}", f"samples={samples}", *noise)
        return time.perf_counter() - begin

    whole = seconds(arguments.steps, arguments.samples)
    corners = [(steps, samples) for steps in arguments.steps for samples in arguments.samples]
    parts = sum(seconds(*corner) for corner in corners)
    calls = max(math.prod(corner) for corner in corners) / sum(math.prod(corner) for corner in corners)
    return {"grid_seconds_over_parts": whole / parts, "grid_calls_over_parts": calls}


# ------------------------------------------------------------------------------------------------ reporting
def _table(name: str, grids: list[Grid]) -> str:
    """Lays out a group: a line for each corner, with mean and deviation over its checkpoints."""
    ways = [_PLAIN, *(way for way in next(iter(grids[0].values())) if way != _PLAIN)]
    lines = [f"\n{name}, {len(grids)} seeds", "steps  samples" + "".join(f"  {way:>15}" for way in ways)]
    for where in sorted(grids[0]):
        cells = "".join(f"  {_mean([grid[where][way] for grid in grids]):>15}" for way in ways)
        lines.append(f"{where[0]:>5}  {where[1]:>7}{cells}")
    return "\n".join(lines)


def _mean(values: Sequence[float]) -> str:
    deviation = f" +- {statistics.stdev(values):.3f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.3f}{deviation}"


if __name__ == "__main__":
    main()
