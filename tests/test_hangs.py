"""A worker of a real torchrun run is stopped: the other one ends in time, says why, and torchrun ends too."""

import os
import re
import signal
import time

import pytest

from parallel.watchdog import EXIT_HANG
from tests.torchrun import launch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not os.path.exists("/proc/self/environ"), reason="finds the workers in /proc"),
]

_STEP_TIMEOUT = 5
_PROMISED = _STEP_TIMEOUT + 10  # seconds


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_stopped_worker_ends_the_run(tmp_path, sudoku_folder, culprit):
    survivor = 1 - culprit
    endless = ("epochs=100000", "eval_interval=100000", f"step_timeout_seconds={_STEP_TIMEOUT}")
    with launch(tmp_path, sudoku_folder, *endless) as run:
        run.wait_for(lambda: run.step >= 6, what="the run does not start")
        workers = run.workers()
        assert sorted(workers) == [0, 1]
        time.sleep(2)  # until heartbeats have told of these steps
        os.kill(workers[culprit], signal.SIGSTOP)
        run.wait_for(
            lambda: not _is_alive(workers[survivor]), what=f"rank {survivor} waits on", seconds=_PROMISED
        )
        assert _is_alive(workers[culprit])
        os.kill(workers[culprit], signal.SIGKILL)  # torchrun would do so after 30 seconds
        status = run.process.wait(60)
        told = run.output
    assert status != 0
    assert f"exitcode  : {EXIT_HANG}" in told
    (line,) = re.findall(rf"^error \(rank {survivor}\): (.*)$", told, flags=re.MULTILINE)
    found = re.fullmatch(
        rf"no (?:progress|sign of life) of rank \d for {_STEP_TIMEOUT} s \(step_timeout_seconds\)\. "
        rf"rank {culprit}: not responding, last heard of \d+ s ago in step (\d+), .*; "
        rf"rank {survivor}: in step (\d+), .*",
        line,
    )
    assert found, line
    assert 5 < int(found[1]) <= int(found[2])
    assert "(most recent call first):" in told
    assert re.search(r'File ".*pretrain.py", line \d+ in train\n', told)
    assert line in (run.run / "logs" / f"rank_{survivor}.log").read_text()
