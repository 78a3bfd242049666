"""Kills random ranks of a run with `kill -9`, and compares its result with that of an undisturbed run.

    python -m tests.stress.kills --kills 10                # also measures how long a recovery takes
    python -m tests.stress.kills --minutes 120             # also changes the clock and measures memory

Both runs train the demo under torchrun up to the same last training step. The disturbed run is stopped and
resumed before that. At the end, the bytes of the last checkpoints and the names of the files must be equal. A
recovery is the time from a kill until the first new training step is done.

With --minutes, a rank is killed about every --kill-seconds, and both runs train at the same time. After half
of the time, the clock of the disturbed run is set back by a day for one minute. The memory of each torchrun
and rank is sampled. A line is fitted to the samples of each process after its first ten minutes. All
processes of one kind get the same slope.
"""

import argparse
import contextlib
import math
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from benchmarks.harness import (
    REPOSITORY,
    Load,
    positive,
    print_report,
    program,
    program_environment,
    run_main,
)
from benchmarks.worlds import TINY
from checkpointing.files import checkpoints_in, step_of
from dataset.build import build_dataset
from runtime.command_line import OneLineParser
from tests.stress.processes import Memory, find_parents, kill_all_with, rank_of

_LONGEST_WAIT_SECONDS = 3.0  # from a new step to the next kill
_GIVE_UP_SECONDS = 1800.0
_RECOVERED = re.compile(r"recovered: step \d+ is done (-?[\d.]+) s after the failure, (\d+) steps? done")
_MAY_BE_LEFT = {"logs", "starts.jsonl", "heartbeat", "wandb_step"}  # of a run folder: what happened to it
_MORE_STEPS = 50  # from where the run that has come further is stopped to the last one
_HOLD_SECONDS = 60.0  # of the wrong clock
_SETTLING_SECONDS = 600.0  # of a process, after which its memory should be flat
# A sitecustomize.py: a clock that is a day late while a file is there. (With libfaketime `time.sleep` fails.)
_CLOCK = """
import os, time
right = time.time
def late():
    is_late = os.path.exists({path!r})
    if is_late:
        open({path!r} + ".read", "w").close()
    return right() - is_late * 86400
time.time = late
"""


class Training:
    """A run under torchrun that trains until `stop` is called, or up to the last step of `finish`."""

    def __init__(self, options: argparse.Namespace, folder: Path, name: str):
        self.run, self._options, self._folder = folder / name, options, folder
        self._clock, self._code = folder / f"{name}.clock", folder / f"{name}.code"
        self._output = folder / f"{name}.txt"
        self._code.mkdir()
        (self._code / "sitecustomize.py").write_text(_CLOCK.format(path=str(self._clock)))

    def start(self, *overrides: str) -> None:
        folder = self._folder
        command = program(
            *(REPOSITORY / "pretrain.py", "experiment=demo", "epochs=800000", "eval_interval=8"),
            *(f"data_path={folder / 'data'}", f"checkpoint_path={self.run}", "checkpoint_interval=20"),
            *("keep_checkpoints=2", "keep_best=null", "ema=0.999", "compile=false", "cpu_threads=1"),
            *("device=cpu", "log_interval=10", *(TINY if self._options.quick else ()), *overrides),
            processes=2,
        )
        code = os.pathsep.join(filter(None, [str(self._code), os.environ.get("PYTHONPATH")]))
        environment = program_environment() | {"PYTHONPATH": code, "TMPDIR": str(folder / "scratch")}
        environment |= {"PET_MAX_RESTARTS": "100000", "PET_LOG_DIR": str(folder / "torchrun")}  # of torchrun
        with open(self._output, "a") as output:
            streams = {"stdout": output, "stderr": output}
            self.torchrun = subprocess.Popen(command, cwd=folder, env=environment, **streams)

    def kill_rank(self, chance: random.Random) -> bool:
        """Kills a random rank. Returns whether there was one. Right after a failure, there may be none."""
        parents, torchrun = find_parents(), self.torchrun.pid
        ranks = [pid for pid, parent in parents.items() if parent == torchrun and rank_of(pid) is not None]
        if ranks:
            os.kill(chance.choice(sorted(ranks)), signal.SIGKILL)
        return bool(ranks)

    def is_stepping(self) -> bool:
        path = self.run / "metrics.jsonl"
        return path.exists() and path.stat().st_size > 0

    def recoveries(self) -> list[tuple[float, int]]:
        """Reads (seconds, repeated training steps) of each recovery from the log of rank 0.

        The seconds are wrong if the clock of the run was changed during the recovery.
        """
        path = self.run / "logs" / "rank_0.log"
        text = path.read_text() if path.exists() else ""
        return [(float(seconds), int(steps)) for seconds, steps in _RECOVERED.findall(text)]

    def newest_step(self) -> int:
        return max(map(step_of, checkpoints_in(self.run)), default=0)

    def set_clock_back(self, is_late: bool) -> None:
        self._clock.touch() if is_late else self._clock.unlink(missing_ok=True)

    def has_read_wrong_clock(self) -> bool:
        return Path(f"{self._clock}.read").exists()

    def check(self) -> None:
        """Ends this program with an error if torchrun has ended."""
        if self.torchrun.poll() is not None:
            self._give_up("a run has ended")

    def wait_for(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _GIVE_UP_SECONDS
        while not condition():
            self.check()
            if time.monotonic() > deadline:
                self._give_up("a run does not go on")
            time.sleep(0.05)

    def stop(self) -> None:
        """Stops the run after its current training step. The run saves a checkpoint before it ends."""
        self.torchrun.terminate()
        self.torchrun.wait(_GIVE_UP_SECONDS)

    def finish(self, last_step: int, *, seconds: float) -> None:
        """Resumes or starts the run, and waits until it ends after the training step `last_step`.

        Ends this program with an error if the run fails.
        """
        self.start(f"max_steps={last_step}")
        if self.torchrun.wait(seconds) or self.newest_step() != last_step:
            self._give_up("a run fails")

    def _give_up(self, what: str) -> NoReturn:
        raise SystemExit(f"{what}, its last words:\n{self._output.read_text()[-3000:]}")

    def final_bytes(self) -> dict[str, bytes]:
        paths = sorted((self.run / f"step_{self.newest_step()}").glob("*.safetensors"))
        assert paths, f"there are no weights in the newest checkpoint of {self.run}"
        return {path.name: path.read_bytes() for path in paths}

    def files(self) -> set[str]:
        """Returns the paths of the files in the run folder, except records of what happened, such as logs."""
        paths = (path.relative_to(self.run) for path in self.run.rglob("*") if path.is_file())
        return {str(path) for path in paths if path.parts[0] not in _MAY_BE_LEFT}


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 if both runs end with equal bytes and no other files are left."""
    options = _read(argv)
    with contextlib.ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        (folder / "scratch").mkdir()
        size = ["--box", "2x2", "--generate", "400" if options.quick else "4000", "--num-aug", "8"]
        build_dataset("sudoku", ["--output-dir", str(folder / "data"), *size])
        disturbed, alone = (Training(options, folder, name) for name in ("disturbed", "alone"))
        for each in (disturbed, alone):
            opened.callback(kill_all_with, f"checkpoint_path={each.run}")
        return _measure(options, disturbed, alone, folder / "scratch")


def _read(argv: Sequence[str] | None) -> argparse.Namespace:
    about = __doc__.partition("\n")[0]
    parser = OneLineParser("tests.stress.kills", description=about)
    parser.add_argument("--kills", type=positive, default=10, metavar="N", help="default: %(default)s")
    minutes, between = "of disturbance, in place of --kills", "between kills, with --minutes"
    parser.add_argument("--minutes", type=float, default=0.0, metavar="N", help=minutes)
    parser.add_argument("--kill-seconds", type=float, default=180.0, metavar="N", help=between)
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the kills; default: 0")
    parser.add_argument("--quick", action="store_true", help="a tiny model")
    parser.set_defaults(device="cpu", rounds=1, threads=1, load=Load())
    options = parser.parse_args(argv)
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
        each.finish(last_step, seconds=_GIVE_UP_SECONDS + 60 * options.minutes)
    is_identical = disturbed.final_bytes() == alone.final_bytes()
    left = sorted(disturbed.files() ^ alone.files())
    left += [path.name for path in scratch.iterdir() if not path.name.startswith("torchinductor_")]
    recovered = disturbed.recoveries()
    if options.minutes:  # what is longer was measured by a clock that moved
        seconds = [each for each, _ in recovered if 0 < each < _GIVE_UP_SECONDS] or [math.nan]
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
    """Kills a random rank --kills times, at a random time after each recovery.

    Returns the seconds from each kill until the recovery from it.
    """
    chance, seconds = random.Random(options.seed), []
    for number in range(options.kills):
        time.sleep(chance.uniform(0.0, _LONGEST_WAIT_SECONDS))
        killed = time.monotonic()
        training.wait_for(lambda: training.kill_rank(chance))
        training.wait_for(lambda number=number: len(training.recoveries()) > number)
        seconds.append(time.monotonic() - killed)
    return seconds


def _disturb(
    options: argparse.Namespace, training: Training, alone: Training
) -> tuple[int, bool, dict[str, float]]:
    """Disturbs a run for --minutes with kills and a wrong clock, and samples the memory of both runs.

    Returns (number of kills, whether the run has read the wrong clock, {kind of process: MiB per hour}).
    """
    chance, seconds, kills = random.Random(options.seed), 60 * options.minutes, 0
    settling, hold = (10.0, 10.0) if options.quick else (_SETTLING_SECONDS, _HOLD_SECONDS)
    memory, began = Memory(settling), time.monotonic()
    next_kill = options.kill_seconds * chance.uniform(0.7, 1.3)
    while (passed := time.monotonic() - began) < seconds:
        training.check()
        alone.check()
        training.set_clock_back(seconds / 2 < passed < seconds / 2 + hold)
        if passed > next_kill and training.kill_rank(chance):
            kills += 1
            next_kill = passed + options.kill_seconds * chance.uniform(0.7, 1.3)
        memory.sample(training.torchrun.pid, run="")
        memory.sample(alone.torchrun.pid, run=", left alone")
        time.sleep(2.0)
    training.set_clock_back(False)
    return kills, training.has_read_wrong_clock(), memory.slopes()


if __name__ == "__main__":
    run_main(lambda: sys.exit(main()))  # a signal is as Ctrl-C: nothing of the runs is left
