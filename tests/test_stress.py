"""What the stress programs measure with; short runs of them are in tests/system."""

import numpy as np
import pytest

from tests.stress import processes
from tests.stress.kills import Training


def test_slope_is_of_each_kind_of_process_over_all_lives():
    """Two lives of rank 0 at other levels, each growing by 36 MiB an hour; the first growth is left out."""
    memory = processes.Memory(settling_seconds=10)
    for pid, level in ((1, 100.0), (2, 500.0)):
        seconds = np.arange(0.0, 60.0, 2.0)
        grown = np.where(seconds < 10, 10 * seconds, 100) + 0.01 * seconds
        memory._lives["rank 0", pid] = list(zip(1000 * pid + seconds, level + grown, strict=True))
    memory._lives["torchrun", 3] = [(0.0, 7.0), (20.0, 7.0), (40.0, 7.0), (60.0, 7.0)]
    memory._lives["rank 1", 4] = [(0.0, 1.0)]  # it did not live long enough
    assert memory.slopes() == pytest.approx({"rank 0": 36.0, "torchrun": 0.0})


def test_files_that_tell_of_the_run_alone_are_not_compared(tmp_path):
    training = Training(None, tmp_path, "run")
    for name in ("config.yaml", "step_2/weights", "logs/rank_0.log", "starts.jsonl", "wandb_step"):
        (training.run / name).parent.mkdir(parents=True, exist_ok=True)
        (training.run / name).touch()
    assert training.files() == {"config.yaml", "step_2/weights"}
