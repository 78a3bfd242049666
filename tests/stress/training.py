"""A training under torchrun that is to be disturbed, and what can go wrong around it."""

import argparse
import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.harness import REPOSITORY
from tests.stress.processes import find_parents, rank_of
from tests.system.machines import Machines

LONGEST_WAIT_SECONDS = 3.0  # from a new step to the next kill, and of a machine until it starts again
GIVE_UP_SECONDS = 1800.0
IN_NAMESPACE = "STRESSIN_NAMESPACE"  # of mounts: an environment variable
_TINY = ("arch.hidden_size=32", "arch.H_layers=1", "arch.L_layers=1")
_RECOVERED = re.compile(r"recovered: step \d+ is done (-?[\d.]+) s after the failure, (\d+) steps? done")
_COMPLAINTS = ("COULD NOT BE SAVED", "No space left on device", "Read-only file system")
_MAY_BE_LEFT = {"logs", "starts.jsonl", "heartbeat", "wandb_step"}  # of a run folder: what happened to it
_DAY = 86400.0
_MEETING_POINT = (
    *("--rdzv-backend", "c10d", "--rdzv-endpoint", "node0:29400", "--rdzv-id", "kills"),
    *("--rdzv-conf", "keep_alive_interval=1,keep_alive_max_attempt=3"),  # missed after 3 s instead of 15
)
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


class Training:
    """A training under torchrun, or one torchrun on each machine, that ends only when it is asked to."""

    def __init__(self, options: argparse.Namespace, folder: Path, run: Path, machines: Machines | None):
        self.run, self._options, self._folder, self._machines = run, options, folder, machines
        self.clock, self._code = folder / f"{run.name}.clock", folder / f"{run.name}.code"
        self._output = folder / f"{run.name}.txt"
        self.clock.write_text("0")
        self._code.mkdir()
        (self._code / "sitecustomize.py").write_text(_CLOCK.format(path=str(self.clock)))
        self.torchruns: list[subprocess.Popen] = []

    def start(self, *overrides: str) -> None:
        self.torchruns = [self._start(node, *overrides) for node in range(self._options.nodes)]

    def _start(self, node: int, *overrides: str) -> subprocess.Popen:
        options, folder = self._options, self._folder
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--log-dir", str(folder / "torchrun")),
            *("--nproc-per-node", str(options.processes // options.nodes), "--max-restarts", "100000"),
            *("--nnodes", str(options.nodes), *(_MEETING_POINT if self._machines else ())),
            *(str(REPOSITORY / "pretrain.py"), "experiment=demo", "epochs=800000", "eval_interval=8"),
            *(f"data_path={folder / 'data'}", f"checkpoint_path={self.run}", "checkpoint_interval=20"),
            *("keep_checkpoints=2", "keep_best=null", "ema=0.999", "compile=false", "cpu_threads=1"),
            *("device=cpu", "log_interval=10", *(_TINY if options.quick else ()), *overrides),
        ]
        code = os.pathsep.join(filter(None, [str(self._code), os.environ.get("PYTHONPATH")]))
        environment = os.environ | {"PYTHONPATH": code, "TMPDIR": str(folder / "scratch")}
        environment |= {"WANDB_MODE": "disabled"}
        with open(self._output, "a") as output:
            if self._machines is None:
                return subprocess.Popen(command, cwd=folder, stdout=output, stderr=output, env=environment)
            environment |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
            how = {"cwd": folder, "stdout": output, "stderr": output, "env": environment}
            return self._machines.start(node, command, **how)

    def kill_something(self, chance: random.Random) -> bool:
        """Kills a rank, or a machine, which starts again soon; False where there is none at the moment."""
        if self._machines:
            node = chance.randrange(1, len(self.torchruns))
            self._machines.kill(node)
            time.sleep(chance.uniform(0.0, LONGEST_WAIT_SECONDS))
            self.torchruns[node] = self._start(node)
            return True
        parents, torchrun = find_parents(), self.torchruns[0].pid
        ranks = [pid for pid, parent in parents.items() if parent == torchrun and rank_of(pid) is not None]
        if ranks:
            os.kill(chance.choice(sorted(ranks)), signal.SIGKILL)
        return bool(ranks)

    def is_stepping(self) -> bool:
        path = self.run / "metrics.jsonl"
        return path.exists() and path.stat().st_size > 0

    def recoveries(self) -> list[tuple[float, int]]:
        """Reads (seconds, steps redone) of each recovery from the log of rank 0, by its clock."""
        path = self.run / "logs" / "rank_0.log"
        text = path.read_text() if path.exists() else ""
        return [(float(seconds), int(steps)) for seconds, steps in _RECOVERED.findall(text)]

    def newest_step(self) -> int:
        return max(
            (int(path.name[5:]) for path in self.run.glob("step_*") if path.name[5:].isdigit()), default=0
        )

    def has_complained(self, since: int) -> bool:
        """Tells whether the run has said, after so many bytes, that it cannot write."""
        said = self._output.read_bytes()[since:].decode(errors="replace")
        return any(words in said for words in _COMPLAINTS)

    def num_said(self) -> int:
        return self._output.stat().st_size

    def check(self) -> None:
        """Ends this program if the run has ended."""
        if any(torchrun.poll() is not None for torchrun in self.torchruns):
            raise SystemExit(f"a run has ended, its last words:\n{self._output.read_text()[-3000:]}")

    def wait_for(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + GIVE_UP_SECONDS
        while not condition():
            self.check()
            if time.monotonic() > deadline:
                raise SystemExit(f"a run does not go on, its last words:\n{self._output.read_text()[-3000:]}")
            time.sleep(0.05)

    def stop(self) -> None:
        """Stops the run after a step, saved; torchrun's own status is 1 then."""
        for torchrun in self.torchruns:
            torchrun.terminate()
        for torchrun in self.torchruns:
            torchrun.wait(GIVE_UP_SECONDS)

    def finish(self, last_step: int, *, seconds: float) -> None:
        """Goes on to this step, or begins."""
        self.start(f"max_steps={last_step}")
        statuses = [torchrun.wait(seconds) for torchrun in self.torchruns]
        if any(statuses) or self.newest_step() != last_step:
            raise SystemExit(f"a run fails, its last words:\n{self._output.read_text()[-3000:]}")

    def final_bytes(self) -> dict[str, bytes]:
        paths = sorted((self.run / f"step_{self.newest_step()}").glob("*.safetensors"))
        assert paths, f"there are no weights in the newest checkpoint of {self.run}"
        return {path.name: path.read_bytes() for path in paths}

    def files(self) -> set[str]:
        """Returns the files of the run folder that do not tell what happened to the run."""
        paths = (path.relative_to(self.run) for path in self.run.rglob("*") if path.is_file())
        return {str(path) for path in paths if path.parts[0] not in _MAY_BE_LEFT}


Trouble = Callable[[], contextlib.AbstractContextManager[Callable[[], bool]]]  # gives: has the run noticed?


def can_mount() -> bool:
    """Tells whether this process may mount, in a namespace of its own."""
    command = ["unshare", "--mount", "--propagation", "private", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except OSError:
        return False


def troubles_of(training: Training) -> dict[str, Trouble]:
    """Returns by name what can go wrong here."""
    troubles: dict[str, Trouble] = {"clock set back": lambda: _clock_set_back(training.clock)}
    if IN_NAMESPACE in os.environ:
        troubles |= {"full disk": lambda: _full(training), "read-only folder": lambda: _read_only(training)}
    return troubles


@contextlib.contextmanager
def _full(training: Training) -> Iterator[Callable[[], bool]]:
    """Fills the disk, and again whatever becomes free: of a failed save its files, and older checkpoints."""
    filler, is_over, since = training.run.parent / "filler", threading.Event(), training.num_said()

    def fill() -> None:
        while not is_over.wait(0.2):
            with filler.open("ab", buffering=0) as file, contextlib.suppress(OSError):
                while True:
                    file.write(bytes(2**16))

    filling = threading.Thread(target=fill, daemon=True)
    filling.start()
    try:
        yield lambda: training.has_complained(since)
    finally:
        is_over.set()
        filling.join()
        filler.unlink(missing_ok=True)


@contextlib.contextmanager
def _read_only(training: Training) -> Iterator[Callable[[], bool]]:
    """Covers the folder by a mount of itself that nobody can write to; open files stay what they are."""
    run, since = str(training.run), training.num_said()
    subprocess.run(["mount", "--bind", run, run], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", run], check=True)
        yield lambda: training.has_complained(since)
    finally:
        subprocess.run(["umount", "--lazy", run], check=True)


@contextlib.contextmanager
def _clock_set_back(clock: Path) -> Iterator[Callable[[], bool]]:
    clock.write_text(f"{-_DAY}")
    try:
        yield Path(f"{clock}.felt").exists
    finally:
        clock.write_text("0")
