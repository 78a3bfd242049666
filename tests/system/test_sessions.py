"""Python sessions that train: what a run does when its session ends, and the notebook from first to last."""

import os
import signal
import subprocess
import sys

import pytest

from config.reading import read_json
from tests.ranks import REPOSITORY
from tests.system.waiting import wait_for
from tests.tiny import OVERRIDES


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_run_saves_and_ends_when_its_session_does(tmp_path, sudoku_folder, number):
    """By the stop button of a notebook, or because its kernel is killed."""
    words = [f"data_path={sudoku_folder}", *OVERRIDES, "epochs=100000", "eval_interval=100000"]
    code = "import pretrain, sys; pretrain.run(sys.argv[1:])"
    session = subprocess.Popen(
        [sys.executable, "-c", code, *words, "checkpoint_path=run", "log_interval=1"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY), "WANDB_MODE": "disabled"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    log = tmp_path / "run" / "metrics.jsonl"
    wait_for(lambda: (log.exists() and log.stat().st_size > 0) or session.poll() is not None, "no row")
    session.send_signal(number)
    said, errors = session.communicate()
    assert session.returncode == -number, errors
    wait_for(lambda: read_json(log.with_name("status"))["status"] == "stopped", "the run goes on")
    if number == signal.SIGINT:
        assert "stopped: the same command goes on from here" in said
        assert errors.strip().splitlines()[-1] == "KeyboardInterrupt"
