"""What the soak measures with; whole soaks are in tests/system."""

import signal
import subprocess
import sys

import numpy as np
import pytest

from tests.stress.runs import kill_run
from tests.stress.soak import __main__ as soak
from tests.stress.soak import memory as soak_memory


def test_slope_is_of_each_kind_of_process_over_all_lives(monkeypatch):
    """Two lives of rank 0 at other levels, each growing by 36 MiB an hour; the first growth is left out."""
    memory = soak_memory.Memory(settling_seconds=10)
    for pid, level in ((1, 100.0), (2, 500.0)):
        seconds = np.arange(0.0, 60.0, 2.0)
        grown = np.where(seconds < 10, 10 * seconds, 100) + 0.01 * seconds
        memory._lives["rank 0", pid] = list(zip(1000 * pid + seconds, level + grown, strict=True))
    memory._lives["torchrun", 3] = [(0.0, 7.0), (20.0, 7.0), (40.0, 7.0), (60.0, 7.0)]
    memory._lives["rank 1", 4] = [(0.0, 1.0)]  # it did not live long enough
    assert memory.slopes() == pytest.approx({"rank 0": 36.0, "torchrun": 0.0})


def test_kinds_of_processes(monkeypatch):
    monkeypatch.setattr(soak_memory, "rank_of", {11: 0, 12: 1, 13: 1}.get)
    above = {10: 1, 11: 10, 12: 10, 13: 12, 14: 10, 15: 1}
    kinds = [soak_memory.kind_of(pid, 10, above) for pid in (10, 11, 12, 13, 14, 15)]
    assert kinds == ["torchrun", "rank 0", "rank 1", "below rank 1", None, None]


def test_files_that_tell_of_the_run_alone_are_not_compared(tmp_path):
    for name in ("config.yaml", "step_2/weights", "logs/rank_0.log", "starts.jsonl", "wandb_step"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert soak._files(tmp_path) == {"config.yaml", "step_2/weights"}


@pytest.mark.parametrize(
    "words",
    [
        ["--minutes", "0"],
        ["--kill-seconds", "-1"],
        ["--minutes", "two"],
        ["--minutes", "nan"],
        ["--minutes", "inf"],
    ],
)
def test_a_wrong_argument_is_one_line(capsys, words):
    with pytest.raises(SystemExit) as ended:
        soak.main(words)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words[0] in line


def test_all_that_has_the_run_folder_on_its_command_line_is_killed(tmp_path):
    """Another run's folder may begin with the same name."""
    sleep = [sys.executable, "-c", "import time; time.sleep(200)"]
    ours = [subprocess.Popen([*sleep, f"checkpoint_path={tmp_path / 'run'}", "seed=1"]) for _ in range(2)]
    other = subprocess.Popen([*sleep, f"checkpoint_path={tmp_path / 'run2'}"])
    try:
        kill_run(tmp_path / "run")
        assert [process.wait(10) for process in ours] == [-signal.SIGKILL] * 2
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()
