"""Kills ranks of a training at random, by `kill -9`: does it end with the bits of one that is left alone?

    python -m tests.stress.kills --kills 10                # and how long a recovery takes
    python -m tests.stress.kills --kills 3 --nodes 2       # whole emulated machines (root)
    python -m tests.stress.kills --minutes 120             # beside the run left alone, with more trouble

Both runs train the demo under torchrun, are stopped, go on to a common last step, and are compared: the files
of the last checkpoint, and which files there are. A recovery is the time from the kill until the first new
step is done. The first machine, which holds the meeting point of all, is never killed; another starts again
up to three seconds later.

With --minutes a kill comes about every --kill-seconds, and both runs go on at the same time; after half of it
the clock of the run is set back by a day, for a minute. The memory of each torchrun, rank and reader of data
is sampled; its slope is that of lines through the samples of each process, one slope for all of a kind, after
the ten minutes in which a process comes to all that it does.
"""

import argparse
import contextlib
import math
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import Load, Parser, positive, print_report
from dataset.build import build_dataset
from tests.stress.processes import Memory, kill_all_with
from tests.stress.training import GIVE_UP_SECONDS, LONGEST_WAIT_SECONDS, Training
from tests.system.machines import emulate, why_not

_MORE_STEPS = 50  # from where the run that has come further is stopped to the last one
_HOLD_SECONDS = 60.0  # of the wrong clock
_SETTLING_SECONDS = 600.0  # of a process, after which its memory should be flat


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 where the bits are the same, and nothing is left behind."""
    options = _read(argv)
    with contextlib.ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        (folder / "scratch").mkdir()
        machines = opened.enter_context(emulate(options.nodes, folder / "net")) if options.nodes > 1 else None
        size = ["--box", "2x2", "--generate", "4000", "--num-aug", "8"]
        build_dataset("sudoku", ["--output-dir", str(folder / "data"), *size])
        disturbed, alone = (Training(options, folder, name, machines) for name in ("disturbed", "alone"))
        for each in (disturbed, alone):
            opened.callback(kill_all_with, f"checkpoint_path={each.run}")
        return _measure(options, disturbed, alone, folder / "scratch")


def _read(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="python -m tests.stress.kills", description=__doc__.partition("\n")[0], allow_abbrev=False
    )
    parser.add_argument("--kills", type=positive, default=10, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--minutes", type=float, default=0.0, metavar="N", help="of disturbance, in place of --kills"
    )
    parser.add_argument(
        "--kill-seconds", type=float, default=180.0, metavar="N", help="between kills, with --minutes"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the kills; default: 0")
    parser.add_argument("--processes", type=positive, default=2, metavar="N", help="default: 2")
    parser.add_argument(
        "--nodes", type=positive, default=1, metavar="N", help="emulated machines; default: none"
    )
    parser.add_argument("--quick", action="store_true", help="a tiny model")
    parser.set_defaults(device="cpu", rounds=1, threads=1, load=Load())
    options = parser.parse_args(argv)
    if options.processes % options.nodes:
        parser.error(f"--processes {options.processes} cannot be spread evenly over --nodes {options.nodes}")
    if options.nodes > 1 and (reason := "--minutes is for one machine" if options.minutes else why_not()):
        parser.error(f"--nodes {options.nodes}: {reason}")
    if not (0 <= options.minutes < math.inf and 0 < options.kill_seconds < math.inf):
        parser.error("--minutes and --kill-seconds must be numbers above 0")
    if not Path("/proc/self/environ").exists():
        parser.error("the ranks to kill are found in /proc, which is not here")
    return options


def _measure(options: argparse.Namespace, disturbed: Training, alone: Training, scratch: Path) -> int:
    felt_clock, slopes = False, {}
    disturbed.start()
    disturbed.wait_for(disturbed.is_stepping)
    if options.minutes:
        alone.start()
        alone.wait_for(alone.is_stepping)
        kills, felt_clock, slopes = _disturb(options, disturbed, alone)
        alone.stop()
    else:
        seconds = _kill(options, disturbed)
        kills = len(seconds)
    disturbed.stop()
    last_step = max(each.newest_step() for each in (disturbed, alone)) + _MORE_STEPS
    for each in (disturbed, alone):
        each.finish(last_step, seconds=GIVE_UP_SECONDS + 60 * options.minutes)
    is_identical = disturbed.final_bytes() == alone.final_bytes()
    left = sorted(disturbed.files() ^ alone.files())
    left += [path.name for path in scratch.iterdir() if not path.name.startswith("torchinductor_")]
    recovered = disturbed.recoveries()
    if options.minutes:  # what is longer was measured by a clock that moved
        seconds = [each for each, _ in recovered if 0 < each < GIVE_UP_SECONDS] or [math.nan]
    rows = [[kind, f"{slope:+.2f}"] for kind, slope in slopes.items()]
    print_report(
        "kills",
        options,
        header=["memory of", "MiB an hour"],
        rows=rows,
        notes=[
            f"{kills} kills, {len(recovered)} recoveries, {last_step} steps",
            f"a recovery takes {statistics.median(seconds):.1f} s, the worst {max(seconds):.1f}",
            *(["the clock was set back, and read"] if felt_clock else []),
            f"the last checkpoint is {'the same' if is_identical else 'ANOTHER'} to the bit",
            *(f"left behind: {name}" for name in left),
        ],
        result={
            "kills": kills,
            "identical": is_identical,
            "recovery_seconds_median": statistics.median(seconds),
            "recovery_seconds_max": max(seconds),
            "steps_redone": sum(steps for _, steps in recovered),
            "rss_slopes": slopes,
            "clock_set_back": felt_clock,
            "left_behind": len(left),
        },
    )
    return 0 if is_identical and not left else 1


def _kill(options: argparse.Namespace, training: Training) -> list[float]:
    """Kills at random times, each after a recovery; returns the seconds of all recoveries."""
    chance, seconds = random.Random(options.seed), []
    for number in range(options.kills):
        time.sleep(chance.uniform(0.0, LONGEST_WAIT_SECONDS))
        killed = time.monotonic()
        training.wait_for(lambda: training.kill_something(chance))
        training.wait_for(lambda number=number: len(training.recoveries()) > number)
        seconds.append(time.monotonic() - killed)
    return seconds


def _disturb(
    options: argparse.Namespace, training: Training, alone: Training
) -> tuple[int, bool, dict[str, float]]:
    """Lets the time pass, with kills and a clock set back, and samples the memory of both runs.

    Returns the number of kills, whether the run has read the wrong clock, and the slopes of memory.
    """
    chance, seconds, kills = random.Random(options.seed), 60 * options.minutes, 0
    settling, hold = (10.0, 10.0) if options.quick else (_SETTLING_SECONDS, _HOLD_SECONDS)
    memory, began = Memory(settling), time.monotonic()
    next_kill = options.kill_seconds * chance.uniform(0.7, 1.3)
    while (passed := time.monotonic() - began) < seconds:
        training.check()
        alone.check()
        training.set_clock_back(seconds / 2 < passed < seconds / 2 + hold)
        if passed > next_kill and training.kill_something(chance):
            kills += 1
            next_kill = passed + options.kill_seconds * chance.uniform(0.7, 1.3)
        memory.sample(training.torchruns[0].pid, run="")
        memory.sample(alone.torchruns[0].pid, run=", left alone")
        time.sleep(2.0)
    training.set_clock_back(False)
    return kills, training.has_read_wrong_clock(), memory.slopes()


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGHUP):  # as Ctrl-C: nothing of the runs is left
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    sys.exit(main())
