"""Trains for hours on a machine that goes wrong: does the run end with the same bits, and leave nothing?

    python -m benchmarks.soak --minutes 120
    python -m benchmarks.soak --quick                      # three minutes, a tiny model

Two processes train the demo's model under torchrun, with a checkpoint and an evaluation every so often, while
a process for each core does nothing but compute. About every three minutes `kill -9` ends one of the two.
Once each, for a minute, or until the run has noticed,

- the disk is full (root: the run folder is on a small tmpfs)
- the clock is set back by a day: what `time.time` says in every process of the run
- the run folder is read-only (root: another mount covers it)

At the end the run is stopped, goes on to a last step undisturbed, and is compared with a run that was left
alone all the way: the files of the last checkpoint, and which files there are. The memory of torchrun, of
each rank and of its reader of data is sampled all the while. Its slope is that of lines through the samples
of each process, one slope for all processes of a kind, as a process lives only from kill to kill.

Mounts are made in a mount namespace of its own, and are gone with it however this ends.
"""

import argparse
import contextlib
import glob
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import numpy as np

from benchmarks.harness import (
    REPOSITORY,
    Sample,
    add_processes,
    benchmark_parser,
    num_cores,
    parse,
    print_report,
)
from benchmarks.runs import (
    digest,
    kill_run,
    last_words,
    newest_step,
    num_rows,
    parents,
    rank_of,
    recoveries,
    wait_for,
    workers,
)
from dataset.build_sudoku import main as build_sudoku

_STEPS_PER_EPOCH = 31  # 4000 puzzles in batches of 128
_MOST_STEPS_PER_SECOND = 1000  # so that it does not come to its end by itself
_MORE_STEPS = 50  # from where the run is stopped to its last one
_CHECKPOINT_INTERVAL, _EVALUATION_EPOCHS = 40, 8
_HOLD_SECONDS = 60.0  # of each of the three
_LATER = 10  # times as long where the run has not noticed yet: no save was due, or the machine is slow
_SAMPLE_SECONDS, _FILL_SECONDS = 2.0, 0.2
_SETTLING_SECONDS = 60.0  # of a process, after which its memory should be flat
_GIVE_UP_SECONDS = 1800.0  # after which a run that should come to its end does not
_DISK_MEGABYTES = 192
_LONGEST_RECOVERY_SECONDS = 3600.0  # what is longer was measured by a clock that moved
# What a run says that cannot write: while it steps, and at its start.
_COMPLAINTS = ("COULD NOT BE SAVED", "No space left on device", "Read-only file system")
_USUAL = {"minutes": 120.0, "kill_seconds": 180.0}
_QUICK = {"minutes": 3.0, "kill_seconds": 30.0, "hold": 10.0, "settling": 10.0}
_QUICK_SIZES = ("arch.hidden_size=32", "arch.H_layers=1", "arch.L_layers=1")
_IN_NAMESPACE = "SOAK_IN_NAMESPACE"
# A sitecustomize.py: a clock that a file shifts. (libfaketime makes `time.sleep` fail since Python 3.11.)
_CLOCK = """
import time
right, shift, read = time.time, 0.0, float("-inf")
def shifted():
    global shift, read
    if time.monotonic() > read + 1:
        with open({path!r}) as file:
            shift, read = float(file.read() or 0), time.monotonic()
        if shift:
            open({path!r} + ".felt", "w").close()
    return right() + shift
time.time = shifted
"""
_DAY = 86400.0
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
    if _IN_NAMESPACE not in os.environ and _can_mount():
        command = ["unshare", "--mount", "--propagation", "private", sys.executable, "-m", "benchmarks.soak"]
        command += sys.argv[1:] if words is None else words
        os.execvpe(command[0], command, os.environ | {_IN_NAMESPACE: "1"})
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


def _can_mount() -> bool:
    """Tells whether this process may mount, in a namespace of its own."""
    if os.geteuid() or not shutil.which("unshare"):
        return False
    with tempfile.TemporaryDirectory() as folder:
        command = ["unshare", "--mount", "--propagation", "private", "mount", "-t", "tmpfs", "tmpfs", folder]
        return subprocess.run(command, capture_output=True).returncode == 0


def measure(arguments: argparse.Namespace, folder: Path, opened: contextlib.ExitStack) -> None:
    build_sudoku(
        ["--output-dir", str(folder / "data"), "--box", "2x2", "--generate", "4000", "--num-aug", "8"]
    )
    disk, scratch = folder / "disk", folder / "scratch"
    disk.mkdir()
    scratch.mkdir()
    if _IN_NAMESPACE in os.environ:
        _mount(disk, megabytes=_DISK_MEGABYTES)
        opened.callback(subprocess.run, ["umount", "--lazy", str(disk)])
        _mount(Path("/dev/shm"), megabytes=4096)
    job = _Job(arguments, folder, disk / "run")
    opened.callback(kill_run, job.run)
    troubles, skipped = _troubles(disk, job)
    job.start()
    job.wait_until_it_steps()
    with _burners(num_cores()):
        memory, kills, happened = _disturb(arguments, job, troubles)
        job.stop()
    last_step = newest_step(job.run) + _MORE_STEPS
    job.finish(last_step)
    alone = _Job(arguments, folder, folder / "alone")
    opened.callback(kill_run, alone.run)
    alone.finish(last_step)

    pattern = "*.safetensors"
    is_identical = digest(job.run, pattern) == digest(alone.run, pattern)
    left = sorted(_files(job.run) ^ _files(alone.run)) + sorted(
        str(path) for path in scratch.iterdir() if not path.name.startswith(_TORCH_CACHE)
    )
    if _IN_NAMESPACE in os.environ:
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
    arguments: argparse.Namespace, job: "_Job", troubles: "dict[str, Trouble]"
) -> tuple["_Memory", int, dict[str, bool]]:
    """Lets the time pass: kills, one trouble after the other, and memory sampled.

    Returns the memory, the number of kills, and by trouble whether the run noticed it.
    """
    chance, seconds = random.Random(arguments.seed), 60 * arguments.minutes
    settling = _QUICK["settling"] if arguments.quick else _SETTLING_SECONDS
    memory, kills, happened = _Memory(settling), 0, {}
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
            time.sleep(_SAMPLE_SECONDS)
    return memory, kills, happened


Trouble = Callable[[], contextlib.AbstractContextManager[Callable[[], bool]]]  # gives: has the run noticed?


def _troubles(disk: Path, job: "_Job") -> tuple[dict[str, Trouble], dict[str, str]]:
    """Returns by name what can go wrong here, and why the rest cannot."""
    troubles, skipped = {"clock set back": lambda: _clock_set_back(job.clock)}, {}
    if _IN_NAMESPACE in os.environ:
        troubles |= {"full disk": lambda: _full(disk, job), "read-only folder": lambda: _read_only(job)}
    else:
        skipped |= dict.fromkeys(("full disk", "read-only folder"), "this process may not mount")
    return troubles, skipped


def _mount(folder: Path, *, megabytes: int) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)], check=True)


@contextlib.contextmanager
def _full(disk: Path, job: "_Job") -> Iterator[Callable[[], bool]]:
    """Fills the disk, and again whatever becomes free: of a failed save its files, and older checkpoints."""
    filler, is_over, begin = disk / "filler", threading.Event(), job.num_said()

    def fill() -> None:
        while not is_over.wait(_FILL_SECONDS):
            with filler.open("ab", buffering=0) as file, contextlib.suppress(OSError):
                while True:
                    file.write(bytes(2**16))

    filling = threading.Thread(target=fill, daemon=True)
    filling.start()
    try:
        yield lambda: any(words in job.said(begin) for words in _COMPLAINTS)
    finally:
        is_over.set()
        filling.join()
        filler.unlink()


@contextlib.contextmanager
def _read_only(job: "_Job") -> Iterator[Callable[[], bool]]:
    """Covers the folder by a mount of itself that nobody can write to; open files stay what they are."""
    run, begin = str(job.run), job.num_said()
    subprocess.run(["mount", "--bind", run, run], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", run], check=True)
        yield lambda: any(words in job.said(begin) for words in _COMPLAINTS)
    finally:
        subprocess.run(["umount", "--lazy", run], check=True)


@contextlib.contextmanager
def _clock_set_back(clock: Path) -> Iterator[Callable[[], bool]]:
    clock.write_text(f"{-_DAY}")
    try:
        yield Path(f"{clock}.felt").exists
    finally:
        clock.write_text("0")


@contextlib.contextmanager
def _burners(count: int) -> Iterator[None]:
    """Takes the processor's time, in processes that end with this one at the latest."""
    code = "import os; parent = os.getppid()\nwhile os.getppid() == parent: sum(range(10**6))"
    burners = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(count)]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


# -------------------------------------------------------------------------------------------------- the runs
class _Job:
    """A training under torchrun that does not end by itself, but at a step that `finish` is told."""

    def __init__(self, arguments: argparse.Namespace, folder: Path, run: Path):
        self._arguments, self._folder, self.run = arguments, folder, run
        self._output = folder / f"{run.name}.txt"
        self._output.touch()
        self.clock, self._code = folder / f"{run.name}.clock", folder / f"{run.name}.code"
        self.clock.write_text("0")
        self._code.mkdir()
        (self._code / "sitecustomize.py").write_text(_CLOCK.format(path=str(self.clock)))
        self.torchrun: subprocess.Popen | None = None

    def start(self, *words: str) -> None:
        arguments, folder = self._arguments, self._folder
        most_steps = 60 * arguments.minutes * _MOST_STEPS_PER_SECOND
        iterations = 1 + int(most_steps / _STEPS_PER_EPOCH / _EVALUATION_EPOCHS)
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--log-dir", str(folder / "torchrun")),
            *("--nproc-per-node", str(arguments.processes), "--max-restarts", "100000"),
            *(str(REPOSITORY / "pretrain.py"), "experiment=demo"),
            *(f"data_path={folder / 'data'}", f"checkpoint_path={self.run}"),
            *(f"epochs={iterations * _EVALUATION_EPOCHS}", f"eval_interval={_EVALUATION_EPOCHS}"),
            *(f"checkpoint_interval={_CHECKPOINT_INTERVAL}", "keep_checkpoints=2", "keep_best=null"),
            *("ema=0.999", "compile=false", f"cpu_threads={arguments.threads}", "log_interval=50"),
            *("device=" + arguments.device, *(_QUICK_SIZES if arguments.quick else ()), *words),
        ]
        code = os.pathsep.join(filter(None, [str(self._code), os.environ.get("PYTHONPATH")]))
        environment = {"TMPDIR": str(folder / "scratch"), "PYTHONPATH": code, "WANDB_MODE": "disabled"}
        with open(self._output, "a") as output:
            self.torchrun = subprocess.Popen(
                command, cwd=folder, stdout=output, stderr=output, env=os.environ | environment
            )

    def num_said(self) -> int:
        """Returns the number of bytes that the run has printed so far."""
        return self._output.stat().st_size

    def said(self, begin: int) -> str:
        """Returns what the run has printed since."""
        return self._output.read_bytes()[begin:].decode(errors="replace")

    def wait_until_it_steps(self) -> None:
        wait_for(lambda: num_rows(self.run) > 0, [self.torchrun], self._output, seconds=_GIVE_UP_SECONDS)

    def check(self) -> None:
        """Ends this program if the run has ended."""
        if self.torchrun.poll() is not None:
            self._fail("has ended")

    def stop(self) -> None:
        """Stops the run after a step, saved; torchrun's own status is 1 then."""
        self.torchrun.terminate()
        self._wait(_GIVE_UP_SECONDS)

    def finish(self, last_step: int) -> None:
        """Goes on to this step, or begins."""
        self.start(f"max_steps={last_step}")
        status = self._wait(_GIVE_UP_SECONDS + 60 * self._arguments.minutes)
        if status != 0 or newest_step(self.run) != last_step:
            self._fail("fails")

    def _wait(self, seconds: float) -> int:
        try:
            return self.torchrun.wait(seconds)
        except subprocess.TimeoutExpired:
            self._fail(f"does not end within {seconds:.0f} s")

    def _fail(self, how: str) -> NoReturn:
        raise SystemExit(f"the run {how}, its last words:\n{last_words(self._output)}")


def _files(run: Path) -> set[str]:
    """Returns the files of a run folder that do not tell what happened to the run."""
    paths = (path.relative_to(run) for path in run.rglob("*") if path.is_file())
    return {str(path) for path in paths if path.parts[0] not in _MAY_BE_LEFT}


# ----------------------------------------------------------------------------------------------------- memory
class _Memory:
    """The resident memory of torchrun and of all below it, by kind of process."""

    def __init__(self, settling_seconds: float):
        self._settling_seconds = settling_seconds
        self._lives: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)

    def sample(self, torchrun: int) -> None:
        above, now = parents(), time.monotonic()
        for pid in above:
            kind = _kind(pid, torchrun, above)
            if kind is None:
                continue
            try:
                pages = int(Path("/proc", str(pid), "statm").read_text().split()[1])
                started = Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[19]
            except (OSError, IndexError):  # it has ended
                continue
            self._lives[kind, f"{pid} {started}"].append((now, pages * os.sysconf("SC_PAGE_SIZE") / 2**20))

    def _settled(self) -> dict[str, list[np.ndarray]]:
        """Returns by kind the samples [n, 2] of each life, seconds and MiB, once it had settled."""
        found = defaultdict(list)
        for (kind, _), life in self._lives.items():
            samples = np.array(life)
            samples = samples[samples[:, 0] >= samples[0, 0] + self._settling_seconds]
            if len(samples) > 2:
                found[kind].append(samples)
        return dict(sorted(found.items()))

    def slopes(self) -> dict[str, float]:
        """Fits by kind one slope, MiB an hour, to all lives, each with a level of its own."""
        slopes = {}
        for kind, lives in self._settled().items():
            centred = np.concatenate([life - life.mean(axis=0) for life in lives])
            slopes[kind] = float(3600 * (centred[:, 0] @ centred[:, 1]) / (centred[:, 0] @ centred[:, 0]))
        return slopes

    def rows(self) -> list[list[str]]:
        slopes = self.slopes()
        return [
            [
                kind,
                str(sum(map(len, lives))),
                str(len(lives)),
                f"{np.median(np.concatenate(lives)[:, 1]):.0f}",
                f"{slopes[kind]:+.2f}",
            ]
            for kind, lives in self._settled().items()
        ]


def _kind(pid: int, torchrun: int, above: dict[int, int]) -> str | None:
    """Names what a process is to a run: torchrun, `rank 0`, `below rank 0`; None where it is not of it."""
    if pid == torchrun:
        return "torchrun"
    depth, current = 0, pid
    while current in above and current != torchrun:
        depth, current = depth + 1, above[current]
    if current != torchrun or (rank := rank_of(pid)) is None:
        return None
    return f"rank {rank}" if depth == 1 else f"below rank {rank}"


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGHUP):  # as Ctrl-C: nothing of the run is left
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    main()
