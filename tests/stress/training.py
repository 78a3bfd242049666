"""A training under torchrun that is to be disturbed."""

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.harness import REPOSITORY
from tests.stress.processes import find_parents, rank_of
from tests.system.machines import Machines

LONGEST_WAIT_SECONDS = 3.0  # from a new step to the next kill, and of a machine until it starts again
GIVE_UP_SECONDS = 1800.0
_TINY = ("arch.hidden_size=32", "arch.H_layers=1", "arch.L_layers=1")
_RECOVERED = re.compile(r"recovered: step \d+ is done (-?[\d.]+) s after the failure, (\d+) steps? done")
_MAY_BE_LEFT = {"logs", "starts.jsonl", "heartbeat", "wandb_step"}  # of a run folder: what happened to it
_DAY = 86400.0
_MEETING_POINT = (
    *("--rdzv-backend", "c10d", "--rdzv-endpoint", "node0:29400", "--rdzv-id", "kills"),
    *("--rdzv-conf", "keep_alive_interval=1,keep_alive_max_attempt=3"),  # missed after 3 s instead of 15
)
# A sitecustomize.py: a clock that is a day late while a file is there. (With libfaketime `time.sleep` fails.)
_CLOCK = """
import os, time
right = time.time
def late():
    is_late = os.path.exists({path!r})
    if is_late:
        open({path!r} + ".read", "w").close()
    return right() - is_late * {day}
time.time = late
"""


class Training:
    """A training under torchrun, or one torchrun on each machine, that ends only when it is asked to."""

    def __init__(self, options: argparse.Namespace, folder: Path, name: str, machines: Machines | None):
        self.run, self._options, self._folder, self._machines = folder / name, options, folder, machines
        self._clock, self._code = folder / f"{name}.clock", folder / f"{name}.code"
        self._output = folder / f"{name}.txt"
        self._code.mkdir()
        (self._code / "sitecustomize.py").write_text(_CLOCK.format(path=str(self._clock), day=_DAY))
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

    def set_clock_back(self, is_late: bool) -> None:
        self._clock.touch() if is_late else self._clock.unlink(missing_ok=True)

    def has_read_wrong_clock(self) -> bool:
        return Path(f"{self._clock}.read").exists()

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
