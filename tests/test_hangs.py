"""A worker of a real torchrun run is stopped: the other one ends in time, says why, and torchrun ends too."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from parallel.watchdog import EXIT_HANG
from tests.ranks import REPOSITORY
from tests.tiny import OVERRIDES

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not os.path.exists("/proc/self/environ"), reason="finds the workers in /proc"),
]

_STEP_TIMEOUT = 5
_PROMISED = _STEP_TIMEOUT + 10  # seconds


def _wait(condition: Callable[[], bool], *, seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def _workers(torchrun: int) -> dict[int, int]:
    """Process ids by rank."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            environment = (folder / "environ").read_bytes().split(b"\0") if parent == torchrun else []
        except OSError:  # it has ended in the meantime
            continue
        found.update(
            {int(entry[5:]): int(folder.name) for entry in environment if entry.startswith(b"RANK=")}
        )
    return found


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_stopped_worker_ends_the_run(tmp_path, sudoku_folder, culprit):
    run, survivor = tmp_path / "run", 1 - culprit
    with open(tmp_path / "stderr", "w") as stderr:
        torchrun = subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
                *(str(REPOSITORY / "pretrain.py"), f"data_path={sudoku_folder}", *OVERRIDES),
                *("epochs=100000", "eval_interval=100000", "log_interval=5", f"checkpoint_path={run}"),
                f"step_timeout_seconds={_STEP_TIMEOUT}",
            ],
            cwd=tmp_path,
            env=os.environ | {"OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled"},
            stderr=stderr,
        )

    def step() -> int:
        path = run / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return max([json.loads(line)["step"] for line in lines if line.endswith("\n")], default=0)

    workers = {}
    try:
        _wait(lambda: step() >= 5, seconds=120, what="the run does not start")
        workers = _workers(torchrun.pid)
        assert sorted(workers) == [0, 1]
        time.sleep(2)  # until heartbeats have told of these steps
        os.kill(workers[culprit], signal.SIGSTOP)
        _wait(lambda: not _is_alive(workers[survivor]), seconds=_PROMISED, what=f"rank {survivor} waits on")
        assert _is_alive(workers[culprit])
    finally:
        for process in workers.values():  # torchrun would do so after 30 seconds
            if _is_alive(process):
                os.kill(process, signal.SIGKILL)
        if not workers:
            torchrun.kill()
        status = torchrun.wait(60)
    assert status != 0
    told = (tmp_path / "stderr").read_text()
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
    assert line in (run / "logs" / f"rank_{survivor}.log").read_text()
