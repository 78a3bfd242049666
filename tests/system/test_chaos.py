"""Whole machines killed at random times: the benchmark counts them, and the weights stay the same."""

import json
import subprocess
import sys

import pytest

from tests.ranks import REPOSITORY
from tests.system.machines import why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())


def test_a_run_survives_kills_of_whole_machines():
    command = [sys.executable, "-m", "tests.stress.chaos", "--quick", "--nodes", "2"]
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
    result = json.loads(ended.stdout.splitlines()[-1])
    assert (result["kills"], result["survived"], result["identical"]) == (2, 2, True)
    assert result["recovery_seconds_max"] >= result["recovery_seconds_median"] > 0
    assert "kills of nodes" in ended.stdout


def test_machines_that_cannot_hold_the_processes_evenly_are_refused():
    command = [sys.executable, "-m", "tests.stress.chaos", "--nodes", "3", "--processes", "2"]
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert "error: --processes 2 cannot be spread evenly over --nodes 3" in ended.stderr
