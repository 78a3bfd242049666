"""What only a real torchrun does: it starts the processes again. A frozen rank: system/test_long_runs.py."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from runtime.metrics_file import read_rows
from tests.ranks import REPOSITORY
from tests.stress.processes import find_parents, rank_of
from tests.tiny import OVERRIDES, logged_rows
from tests.waiting import wait_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not os.path.exists("/proc/self/environ"), reason="finds the workers in /proc"),
]
OPTIONS = ("checkpoint_interval=7", "log_interval=1", "compile=false")
STEP_TIMEOUT = 5  # seconds, also where the machine is busy


class Launch:
    """A real torchrun in the background: workers of pretrain.py, a small model, in `folder`/run.

    has_name: False: the run is not named, and its folder is where it wants.
    """

    def __init__(
        self,
        folder: Path,
        data: Path,
        *arguments: str,
        options: tuple = (),
        num_ranks: int = 2,
        has_name: bool = True,
    ):
        self.folder, self._has_name = folder, has_name
        command = (sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={num_ranks}", *options)
        command += (str(REPOSITORY / "pretrain.py"), f"data_path={data}", *OVERRIDES, *arguments)
        environment = os.environ | {"OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled"}
        with (folder / "output.txt").open("a") as output:
            options = {"cwd": folder, "env": environment, "stdout": output, "stderr": output}
            name = (f"checkpoint_path={self.run}",) if has_name else ()
            self.process = subprocess.Popen([*command, *name], **options)

    @property
    def run(self) -> Path:
        found = [] if self._has_name else sorted(self.folder.glob("checkpoints/*/*"))
        return found[0] if found else self.folder / "run"

    @property
    def output(self) -> str:
        return (self.folder / "output.txt").read_text()

    @property
    def step(self) -> int:
        """The newest logged one."""
        return max((values["step"] for values, _ in read_rows(self.run)), default=0)

    def log(self, rank: int) -> str:
        return (self.run / "logs" / f"rank_{rank}.log").read_text()

    def wait_for(self, condition: Callable[[], bool], *, what: str) -> None:
        wait_for(condition, what, output=self.folder / "output.txt")

    def workers(self) -> dict[int, int]:
        """Process ids by rank."""
        children = [pid for pid, parent in find_parents().items() if parent == self.process.pid]
        return {rank: pid for pid in children if (rank := rank_of(pid)) is not None}

    def __enter__(self) -> "Launch":
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers().values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)
        self.process.kill()
        self.process.wait()


@pytest.mark.long
def test_a_restart_continues_a_run_that_was_not_named(tmp_path, sudoku_folder):
    """All restarts of one launch have the name that was drawn first."""
    words = (*OPTIONS, "epochs=6", "eval_interval=6", "max_steps=20")
    with Launch(tmp_path, sudoku_folder, *words, options=("--max-restarts=2",), has_name=False) as run:
        run.wait_for(lambda: run.step >= 8, what="the run does not start")
        os.kill(run.workers()[1], signal.SIGKILL)
        assert run.process.wait(120) == 0, run.output
        assert len(list(tmp_path.glob("checkpoints/*/*"))) == 1
        assert len((run.run / "starts.jsonl").read_text().splitlines()) == 2
        assert [row["step"] for row in logged_rows(run.run)] == list(range(1, 21))
