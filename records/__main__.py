"""Runs a rung (a benchmark task of the records) with several seeds, and writes records and tables.

    python -m records --rung demo --seeds 5 --first-seed 0
    python -m records --rung demo --seeds 5 --folder checkpoints/records/demo \\
        --test-time --write "A sentence on what is new."
    python -m records --table

The first command prints a line for each seed, and then a line of JSON. The time of a seed starts with
building the data and ends with the final evaluation. The data is built once, and its time counts for every
seed.

--folder keeps data and runs. The same command continues after an interruption and skips completed seeds.
--test-time also evaluates each model with more thinking steps. Overrides such as max_steps=100 change the
config of the task. They cannot be combined with --write. All trainings in a folder have the same number
format, bfloat16 or float32. The first one fixes it: the value of --dtype, or else the fast one on this
machine. --write stores the result in records/ and updates the tables of all rungs. It replaces the stored
result of the rung with the same instruction set and number format. --table only updates the tables.
"""

import runtime.environment  # noqa: F401

import argparse
import dataclasses
import json
import math
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import BUSY_CORES, commit, positive, run_main
from evaluation.intervals import goal_p, mean_and_deviation, mean_interval
from records.machine import FORMATS
from records.page import pages
from records.record import write_record
from records.rungs import RUNGS, Rung
from records.seeds import Rerun
from runtime.command_line import OneLineParser
from runtime.writing import write_text

_SOURCE = "RECORDS_SOURCE"


def main(argv: Sequence[str] | None = None) -> None:
    arguments = _read(argv)
    if arguments.table:
        return _write_pages()
    rung = RUNGS[arguments.rung]
    rung = dataclasses.replace(rung, processes=arguments.processes or rung.processes)
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.folder or Path(temporary)).absolute()
        rerun = Rerun(
            rung,
            folder,
            source=arguments.source and arguments.source.absolute(),
            overrides=tuple(arguments.overrides),
            dtype=arguments.dtype,
        )
        seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
        result = _run(rerun, seeds, with_test_time=arguments.test_time)
        if arguments.write:
            data_seconds = rerun.build_data()
            rows = {seed: rerun.rows(seed, data_seconds=data_seconds) for seed in seeds}
            command = _command(arguments, forward_dtype=rerun.forward_dtype)
            print(f"wrote {write_record(result, rows, change=arguments.write, command=command)}")
            _write_pages()
        print(json.dumps(result))


def _write_pages() -> None:
    for path, content in pages().items():
        write_text(path, content)
        print(f"wrote {path}")


def _read(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = OneLineParser("records", description=__doc__.partition("\n")[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--rung", choices=RUNGS, metavar="NAME", help="rung to run: %(choices)s")
    what.add_argument("--table", action="store_true", help="only update the tables of all records")
    seeds, first = "number of seeds (default: %(default)s)", "first seed (default: %(default)s)"
    parser.add_argument("--seeds", type=positive, default=3, metavar="N", help=seeds)
    parser.add_argument("--first-seed", type=int, default=0, metavar="S", help=first)
    folder = "folder that keeps data and runs (default: none)"
    parser.add_argument("--folder", type=Path, metavar="PATH", help=folder)
    source = f"source of data that is not in the repository (default: ${_SOURCE}, or the public dataset)"
    parser.add_argument("--source", type=Path, metavar="PATH", help=source)
    processes = "number of processes (default: that of the rung). Use it on a shared machine"
    parser.add_argument("--processes", type=positive, metavar="N", help=processes)
    dtype = "number format: %(choices)s (default: that of the folder, or the fast one on this machine)"
    parser.add_argument("--dtype", choices=FORMATS, help=dtype)
    longer = "also evaluate each model with more test-time compute, not counted in the time"
    parser.add_argument("--test-time", action="store_true", help=longer)
    write = "store the record with a sentence on what is new, and update the tables"
    parser.add_argument("--write", metavar="TEXT", help=write)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides of the recipe")
    arguments = parser.parse_intermixed_args(argv)
    if arguments.table:
        if vars(arguments) != vars(parser.parse_intermixed_args(["--table"])):
            parser.error("--table only updates the tables. Remove the other arguments.")
        return arguments
    if arguments.write and arguments.overrides:
        parser.error(
            f"--write stores a record of the recipe without overrides. Remove {arguments.overrides[0]}."
        )
    if arguments.first_seed < 0:
        parser.error("--first-seed must be an integer of at least 0")
    rung = RUNGS[arguments.rung]
    if rung.needs_source and arguments.source is None and (source := os.environ.get(_SOURCE)):
        arguments.source = Path(source)
    is_missing = not rung.public if arguments.source is None else not arguments.source.exists()
    if rung.needs_source and is_missing:
        parser.error(f"--rung {rung.name} needs external data ({rung.builder}). Pass --source PATH.")
    if arguments.source and not rung.needs_source:
        parser.error(f"--rung {rung.name} generates its data. Remove --source.")
    return arguments


def _command(arguments: argparse.Namespace, *, forward_dtype: str) -> str:
    # Without paths of this machine, so that the command also works on others.
    command = f"python -m records --rung {arguments.rung} --seeds {arguments.seeds}"
    command += f" --first-seed {arguments.first_seed}" + (" --source PATH" if arguments.source else "")
    command += f" --processes {arguments.processes}" if arguments.processes else ""
    command += f" --dtype {forward_dtype}"
    return command + (" --test-time" if arguments.test_time else "")


def _run(rerun: Rerun, seeds: range, *, with_test_time: bool) -> dict[str, Any]:
    rerun.check(seeds)
    data_seconds = rerun.build_data()
    runs = []
    for seed in seeds:
        runs.append(rerun.train(seed, data_seconds=data_seconds))
        print(_describe(rerun.rung, runs[-1]), flush=True)
    if with_test_time:
        for run in runs:
            run["test_time"] = rerun.reason_longer(run["seed"])
            texts = ("{steps} x {samples}: {exact_accuracy:.4f}".format(**each) for each in run["test_time"])
            print(f"seed {run['seed']}, steps x samples at test time: {', '.join(texts)}", flush=True)
    return summarize(rerun.rung, runs) | rerun.machine | {"runs": runs}


def _describe(rung: Rung, run: dict[str, Any]) -> str:
    text = f"seed {run['seed']}: {rung.metric} {run[rung.metric]:.4f}"
    if rung.metric != "exact_accuracy" and "exact_accuracy" in run:
        text += f" (exact_accuracy {run['exact_accuracy']:.4f})"
    text += f" after {run['seconds']:.0f} s, {run['steps']} steps"
    text += f", {run['petaflops']:.3g} PF, {run['processor_hours']:.3g} processor-hours"
    if run["interruptions"]:
        text += f", interrupted {run['interruptions']} times"
    if is_busy(run):
        text += f"; other programs used {run['other_cores']:.1f} cores"
    return text


def is_busy(run: dict[str, Any]) -> bool:
    return run["other_cores"] is not None and run["other_cores"] > BUSY_CORES


def summarize(rung: Rung, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns statistics over the seeds and facts about the task, as one dict.

    Keys are for example "exact_accuracy_mean", "seconds_max", "goal" and "commit" (of git).

    runs: Results of each seed, such as {"exact_accuracy": 0.9, "seconds": 600, ...}, from `Rerun.train`.
    """
    summary: dict[str, Any] = {"rung": rung.name}
    for metric in ("exact_accuracy", rung.metric):
        if values := [run[metric] for run in runs if metric in run]:
            mean, deviation = mean_and_deviation(values)
            summary |= {f"{metric}_mean": mean, f"{metric}_min": min(values)}
            summary |= {f"{metric}_deviation": deviation, f"{metric}_interval": mean_interval(values)}
    seconds, hours = ([run[name] for run in runs] for name in ("seconds", "processor_hours"))
    return summary | {
        "petaflops": runs[0]["petaflops"],
        "processor_hours_max": max(hours),
        "seconds_max": max(seconds),
        "seconds_mean": math.fsum(seconds) / len(seconds),
        "seeds": len(runs),
        "processes": rung.processes,
        "first_seed": runs[0]["seed"],
        "metric": rung.metric,
        "goal": rung.goal,
        "goal_seconds": rung.seconds,
        "goal_p": goal_p([run[rung.metric] for run in runs], rung.goal),
        "interruptions": sum(run["interruptions"] for run in runs),
        "is_busy": any(map(is_busy, runs)),
        "commit": commit(),
    }


if __name__ == "__main__":
    run_main(main)
