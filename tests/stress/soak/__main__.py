"""Trains for hours on a machine that goes wrong: does the run end with the same bits, and leave nothing?

    python -m tests.stress.soak --minutes 120
    python -m tests.stress.soak --quick                      # three minutes, a tiny model

Two processes train the demo's model under torchrun, with a checkpoint and an evaluation every so often. Two
more, which take as much of the processor, do the same training left alone. About every three minutes
`kill -9` ends one of the first two. Once each, for a minute, or until the run has noticed,

- the disk is full (root: the run folder is on a small tmpfs)
- the clock is set back by a day: what `time.time` says in every process of the run
- the run folder is read-only (root: another mount covers it)

At the end both runs are stopped, go on to a common last step, and are compared: the files of the last
checkpoint, and which files there are. The memory of each torchrun, rank and reader of data is sampled all the
while. Its slope is that of lines through the samples of each process, one slope for all processes of a kind,
after the ten minutes in which a process comes to all that it does: ranks that are killed every three minutes
have none, those left alone do.

Mounts are made in a mount namespace of its own, and are gone with it however this ends.
"""

import argparse
import contextlib
import glob
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import (
    Sample,
    add_processes,
    benchmark_parser,
    parse,
    print_report,
)
from dataset.build import build_dataset
from tests.stress.runs import digest, kill_run, newest_step, recoveries, workers
from tests.stress.soak.job import Job
from tests.stress.soak.memory import Memory
from tests.stress.soak.troubles import IN_NAMESPACE, Trouble, can_mount, mount, troubles_of

_MORE_STEPS = 50  # from where the run that has come further is stopped to the last one
_HOLD_SECONDS = 60.0  # of each of the three
_LATER = 10  # times as long where the run has not noticed yet: no save was due, or the machine is slow
_SAMPLE_SECONDS = 2.0
_SETTLING_SECONDS = 600.0  # of a process, after which its memory should be flat
_DISK_MEGABYTES = 192
_LONGEST_RECOVERY_SECONDS = 3600.0  # what is longer was measured by a clock that moved
_USUAL = {"minutes": 120.0, "kill_seconds": 180.0}
_QUICK = {"minutes": 3.0, "kill_seconds": 30.0, "hold": 10.0, "settling": 10.0}
_TORCH_CACHE = "torchinductor_"  # a folder for the next run, whether anything is compiled or not
_MAY_BE_LEFT = {"logs", "starts.jsonl", "heartbeat", "wandb_step"}  # of a run folder: they tell what happened


def main(words: Sequence[str] | None = None) -> None:
    parser = benchmark_parser(
        "soak", description="Trains for hours on a machine that goes wrong.", rounds=None
    )
    parser.add_argument("--minutes", type=_amount, metavar="N", help="of disturbance; default: 120")
    parser.add_argument(
        "--kill-seconds", type=_amount, metavar="N", help="between kills, about; default: 180"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the kills; default: 0")
    add_processes(parser)
    arguments = parse(parser, words)
    if not Path("/proc/self/environ").exists():
        parser.error("the ranks to kill are found in /proc, which is not here")
    for name, usual in _USUAL.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, _QUICK[name] if arguments.quick else usual)
    if IN_NAMESPACE not in os.environ and can_mount():
        command = [
            "unshare",
            "--mount",
            "--propagation",
            "private",
            sys.executable,
            "-m",
            "tests.stress.soak",
        ]
        command += sys.argv[1:] if words is None else words
        os.execvpe(command[0], command, os.environ | {IN_NAMESPACE: "1"})
    with contextlib.ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        measure(arguments, folder, opened)


def _amount(text: str) -> float:
    """Reads a number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0, not {text!r}")
    return value


def measure(arguments: argparse.Namespace, folder: Path, opened: contextlib.ExitStack) -> None:
    build_dataset(
        "sudoku",
        ["--output-dir", str(folder / "data"), "--box", "2x2", "--generate", "4000", "--num-aug", "8"],
    )
    disk, scratch = folder / "disk", folder / "scratch"
    disk.mkdir()
    scratch.mkdir()
    if IN_NAMESPACE in os.environ:
        mount(disk, megabytes=_DISK_MEGABYTES)
        opened.callback(subprocess.run, ["umount", "--lazy", str(disk)])
        mount(Path("/dev/shm"), megabytes=4096)
    job = Job(arguments, folder, disk / "run")
    opened.callback(kill_run, job.run)
    alone = Job(arguments, folder, folder / "alone")
    opened.callback(kill_run, alone.run)
    runs = (job, alone)
    troubles, skipped = troubles_of(disk, job)
    for each in runs:
        each.start()
    for each in runs:
        each.wait_until_it_steps()
    memory, kills, happened = _disturb(arguments, job, alone, troubles)
    for each in runs:
        each.stop()
    last_step = max(newest_step(each.run) for each in runs) + _MORE_STEPS
    for each in runs:
        each.finish(last_step)

    pattern = "*.safetensors"
    is_identical = digest(job.run, pattern) == digest(alone.run, pattern)
    left = sorted(_files(job.run) ^ _files(alone.run)) + sorted(
        str(path) for path in scratch.iterdir() if not path.name.startswith(_TORCH_CACHE)
    )
    if IN_NAMESPACE in os.environ:
        left += glob.glob("/dev/shm/*")
    slopes = memory.slopes()
    recovered = [each for each, _ in recoveries(job.run)]
    timed = [each for each in recovered if 0 < each < _LONGEST_RECOVERY_SECONDS]
    print_report(
        "soak",
        header=["process", "samples", "lives", "MiB, median", "slope MiB / h"],
        rows=memory.rows(),
        notes=[
            f"{arguments.minutes:g} minutes, {kills} kills, {len(recovered)} recoveries, {last_step} steps",
            *(
                f"happened: {name}{'' if is_felt else ', and the run did not notice'}"
                for name, is_felt in happened.items()
            ),
            *(f"left out: {name}: {reason}" for name, reason in skipped.items()),
            f"the last checkpoint is {'the same' if is_identical else 'ANOTHER'} to the bit",
            *(f"left behind: {name}" for name in left),
        ],
        result={
            "kills": kills,
            "identical": is_identical,
            "rss_slope_mb_per_hour": max(slopes.values(), default=float("nan")),
            "rss_slopes": slopes,
            "left_behind": len(left),
            "happened": happened,
            "steps": last_step,
        },
        samples={"recovery": Sample.of(timed or [math.nan])},
        arguments=arguments,
    )
    if not is_identical or left:
        raise SystemExit(1)


# ---------------------------------------------------------------------------------------------- disturbance
def _disturb(
    arguments: argparse.Namespace, job: Job, alone: Job, troubles: dict[str, Trouble]
) -> tuple[Memory, int, dict[str, bool]]:
    """Lets the time pass: kills of the job, one trouble after the other, and memory of both runs sampled.

    Returns the memory, the number of kills, and by trouble whether the run noticed it.
    """
    chance, seconds = random.Random(arguments.seed), 60 * arguments.minutes
    settling = _QUICK["settling"] if arguments.quick else _SETTLING_SECONDS
    memory, kills, happened = Memory(settling), 0, {}
    current_name, felt = None, lambda: False
    hold = _QUICK["hold"] if arguments.quick else _HOLD_SECONDS
    waiting = [
        (seconds * (number + 1) / (len(troubles) + 1), name, trouble)
        for number, (name, trouble) in enumerate(troubles.items())
    ]
    began = time.monotonic()
    ends, next_kill = began + seconds, began + arguments.kill_seconds * chance.uniform(0.7, 1.3)
    with contextlib.ExitStack() as current:
        current_ends = math.inf
        while (now := time.monotonic()) < ends or waiting or current_name is not None:
            job.check()
            alone.check()
            if current_name is not None:
                happened[current_name] = happened[current_name] or felt()
            if now > current_ends and (happened[current_name] or now > current_ends + _LATER * hold):
                current.close()
                current_name, current_ends = None, math.inf
            if current_name is None and waiting and now > began + waiting[0][0]:
                _, current_name, trouble = waiting.pop(0)
                felt = current.enter_context(trouble())
                happened[current_name], current_ends = False, now + hold
            if now > next_kill and (current_name is None or happened[current_name]):
                ranks = workers(job.torchrun.pid)
                if ranks:
                    os.kill(chance.choice(ranks), signal.SIGKILL)
                    kills += 1
                    next_kill = now + arguments.kill_seconds * chance.uniform(0.7, 1.3)
            memory.sample(job.torchrun.pid)
            memory.sample(alone.torchrun.pid, run=", left alone")
            time.sleep(_SAMPLE_SECONDS)
    return memory, kills, happened


def _files(run: Path) -> set[str]:
    """Returns the files of a run folder that do not tell what happened to the run."""
    paths = (path.relative_to(run) for path in run.rglob("*") if path.is_file())
    return {str(path) for path in paths if path.parts[0] not in _MAY_BE_LEFT}


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGHUP):  # as Ctrl-C: nothing of the run is left
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    main()
