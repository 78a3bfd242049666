"""A short soak: kills, a full disk and a read-only folder where root may mount."""

import json
import subprocess
import sys

from tests.ranks import REPOSITORY
from tests.stress.soak.troubles import can_mount


def test_a_disturbed_run_ends_with_the_same_bits():
    words = ("--quick", "--minutes", "0.8", "--kill-seconds", "20", "--threads", "1")
    command = [sys.executable, "-m", "tests.stress.soak", *words]
    finished = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    result = json.loads(finished.stdout.splitlines()[-1])
    assert result["identical"]
    assert result["left_behind"] == 0
    assert result["kills"] >= 1
    assert {"torchrun", "rank 0, left alone", "below rank 1, left alone"} <= result["rss_slopes"].keys()
    expected = {"clock set back"} | ({"full disk", "read-only folder"} if can_mount() else set())
    assert result["happened"] == dict.fromkeys(expected, True)
