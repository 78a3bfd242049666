"""What may befall a real torchrun run (kills, signals, a frozen rank): it goes on, with the same bits."""

import hashlib
import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.torchrun import SIGNALS, launch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not os.path.exists("/proc/self/environ"), reason="finds the workers in /proc"),
]
_LENGTH = ("epochs=60", "eval_interval=60", "checkpoint_interval=7")  # 496 steps


def _weights(run: Path) -> str:
    newest = max(run.glob("step_*"), key=lambda path: int(path.name[5:]))
    return hashlib.sha256((newest / "weights.safetensors").read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory, sudoku_folder) -> Path:
    """Left alone."""
    with launch(tmp_path_factory.mktemp("whole"), sudoku_folder, *_LENGTH) as run:
        assert run.process.wait(120) == 0, run.output
        return run.run


def test_killed_five_times_and_frozen_once(tmp_path, whole_run, sudoku_folder):
    options = ("--max-restarts", "9")
    timeouts = ("step_timeout_seconds=4",)
    with launch(tmp_path, sudoku_folder, *_LENGTH, *timeouts, options=options) as run:
        for number in range(6):
            goal = 25 * (number + 1)
            run.wait_for(lambda goal=goal: run.step >= goal, what=f"step {goal} does not come")
            worker = run.workers()[number % 2]
            os.kill(worker, signal.SIGSTOP if number == 5 else signal.SIGKILL)
            if number == 5:  # the other rank ends by itself; torchrun would kill this one after 30 s
                run.wait_for(lambda: 0 not in run.workers(), what="nobody misses rank 1")
                os.kill(worker, signal.SIGKILL)
            log = run.run / "logs" / "rank_0.log"
            run.wait_for(
                lambda number=number, log=log: log.read_text().count("recovered: ") > number,
                what=f"failure {number + 1} is not recovered from",
            )
        assert run.process.wait(120) == 0, run.output
        assert _weights(run.run) == _weights(whole_run)
        lines, expected = (
            [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
            for folder in (run.run, whole_run)
        )
        assert [line["step"] for line in lines] == [line["step"] for line in expected]
        assert [line["train/lm_loss"] for line in lines] == [line["train/lm_loss"] for line in expected]
        seconds = [line["train/recovery_seconds"] for line in lines if "train/recovery_seconds" in line]
        assert seconds, "the lines of the first steps after a failure have it, unless done again later"
        told = re.findall(r"recovered: step (\d+) is done ([\d.]+) s after the failure", log.read_text())
        assert len(told) == 6


@pytest.mark.parametrize(
    ("number", "to_torchrun"),
    [(signal.SIGTERM, True), (signal.SIGINT, True), (signal.SIGUSR1, True), (signal.SIGTERM, False)],
)
def test_a_signal_stops_all_ranks_and_loses_nothing(tmp_path, whole_run, sudoku_folder, number, to_torchrun):
    with launch(tmp_path, sudoku_folder, *_LENGTH, options=(SIGNALS,)) as run:
        run.wait_for(lambda: run.step >= 20, what="the run does not start")
        workers = run.workers()
        began = time.monotonic()
        os.kill(run.process.pid if to_torchrun else workers[1], number)
        run.wait_for(lambda: not run.workers(), what="the workers do not end", seconds=10)
        assert time.monotonic() - began < 10
        status = run.process.wait(30)
        assert (status == 0) is not to_torchrun, (
            "torchrun ends with 1 after a signal, whatever the workers do"
        )
        assert "stopped: the same command goes on from here" in run.output
        stopped = json.loads((run.run / "status").read_text())
        assert stopped["status"] == "stopped"
        assert stopped["step"] >= 20
        assert (run.run / f"step_{stopped['step']}").is_dir()
    with launch(tmp_path, sudoku_folder, *_LENGTH) as run:
        assert run.process.wait(120) == 0, run.output
        assert f"going on from {run.run / 'step_'}{stopped['step']}" in run.output
        assert _weights(run.run) == _weights(whole_run)
        assert json.loads((run.run / "status").read_text())["status"] == "finished"
