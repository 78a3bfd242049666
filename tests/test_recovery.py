"""What only a real torchrun does: a frozen rank is started again, a signal stops the run."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from checkpointing.rows import read_rows
from parallel.watchdog import EXIT_HANG
from tests.ranks import REPOSITORY, complete_program
from tests.stress.processes import find_parents, rank_of
from tests.tiny import OVERRIDES, logged_rows
from tests.waiting import wait_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not os.path.exists("/proc/self/environ"), reason="finds the workers in /proc"),
]
_OPTIONS = ("checkpoint_interval=7", "log_interval=1", "compile=false")
_STEP_TIMEOUT = 5  # seconds, also where the machine is busy


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


def assert_recovers_and_stops(folder: Path, data: Path, *, is_killed: bool) -> None:
    """Kills rank 0 if told so, then freezes rank 1, and stops the run by a signal after that.

    The weights and the log must be those of a run that is left alone.
    """
    epochs = 18 if is_killed else 12  # of 200 puzzles, in batches of 24
    length, num_steps = (*_OPTIONS, f"epochs={epochs}", f"eval_interval={epochs}"), epochs * 200 // 24
    words = (*length, f"step_timeout_seconds={_STEP_TIMEOUT}")
    options = ("--max-restarts=9", "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGUSR1")
    with Launch(folder, data, *words, options=options) as run:
        run.wait_for(lambda: run.step >= 10, what="the run does not start")
        if is_killed:
            os.kill(run.workers()[0], signal.SIGKILL)
            run.wait_for(lambda: "recovered: " in run.log(0), what="the kill is not recovered from")

        survivor, frozen = (run.workers()[number] for number in (0, 1))
        os.kill(frozen, signal.SIGSTOP)
        run.wait_for(lambda: survivor not in run.workers().values(), what="nobody misses rank 1")
        assert run.workers().get(1, frozen) == frozen, "only others can end it"
        os.kill(frozen, signal.SIGKILL)  # torchrun would do so after 30 seconds
        failure = "the hang is not recovered from"
        run.wait_for(lambda: run.log(0).count("recovered: ") > is_killed, what=failure)

        run.process.send_signal(signal.SIGUSR1)
        run.wait_for(lambda: not run.workers(), what="the workers do not end")
        assert run.process.wait(60) == 1, "so torchrun ends after a signal, whatever the workers do"
        output, log = run.output, run.log(0)

    assert "stopped: the same command goes on from here" in output
    stopped = json.loads((run.run / "status").read_text())
    assert stopped["status"] == "stopped"
    assert (run.run / f"step_{stopped['step']}").is_dir()
    assert re.search(rf"failed \(exitcode: {EXIT_HANG}\) local_rank: 0 ", output)
    told = re.compile(
        rf"^error \(rank 0\): no (?:progress|sign of life) of rank \d for {_STEP_TIMEOUT} s "
        r"\(step_timeout_seconds\)\. rank 1: not responding, last heard of \d+ s ago .*; "
        r"rank 0: in step \d+, .*$",
        flags=re.MULTILINE,
    )
    assert told.search(output), output
    assert told.search(log)
    assert re.search(r'File ".*pretrain.py", line \d+ in train\n', log)
    assert re.search(r"recovered: step \d+ is done [\d.]+ s after the failure", log)

    for path in (run.run, "whole"):
        command = (f"data_path={data}", *OVERRIDES, *length, f"checkpoint_path={path}")
        complete_program("pretrain", *command, folder=folder, world_size=2)
    rows, whole = logged_rows(run.run), logged_rows(folder / "whole")
    recovered = [row.pop("train/recovery_seconds", None) for row in rows]
    assert any(recovered)
    assert [row["step"] for row in rows] == list(range(1, num_steps + 1))
    assert rows == whole
    ours, theirs = (path / f"step_{num_steps}" for path in (run.run, folder / "whole"))
    assert (ours / "weights.safetensors").read_bytes() == (theirs / "weights.safetensors").read_bytes()


def test_a_frozen_rank_costs_only_time_and_a_signal_stops_the_run_after_a_step(tmp_path, sudoku_folder):
    """After a kill: system/test_long_runs.py."""
    assert_recovers_and_stops(tmp_path, sudoku_folder, is_killed=False)


def test_a_restart_continues_a_run_that_was_not_named(tmp_path, sudoku_folder):
    """All restarts of one launch have the name that was drawn first."""
    words = (*_OPTIONS, "epochs=6", "eval_interval=6", "max_steps=20")
    with Launch(tmp_path, sudoku_folder, *words, options=("--max-restarts=2",), has_name=False) as run:
        run.wait_for(lambda: run.step >= 8, what="the run does not start")
        os.kill(run.workers()[1], signal.SIGKILL)
        assert run.process.wait(120) == 0, run.output
        assert len(list(tmp_path.glob("checkpoints/*/*"))) == 1
        assert len((run.run / "starts.jsonl").read_text().splitlines()) == 2
        assert [row["step"] for row in logged_rows(run.run)] == list(range(1, 21))
