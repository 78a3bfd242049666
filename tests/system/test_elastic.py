"""An elastic run on emulated machines that join, leave, die and come back; node0 only holds the store."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.float64 import TOLERANCE
from tests.ranks import REPOSITORY, complete_program
from tests.system.machines import Machines, emulate, why_not
from tests.tiny import OVERRIDES, assert_same_row, logged_rows
from tests.waiting import PATIENCE, read, wait_for

pytestmark = [pytest.mark.skipif(bool(why_not()), reason=why_not()), pytest.mark.timeout(6 * PATIENCE)]
_WORDS = (
    *OVERRIDES,
    *("compile=false", "epochs=1000", "eval_interval=null", "log_interval=1", "sanity_check=false"),
    *("global_batch_size=25", "checkpoint_interval=5", "keep_checkpoints=null"),
)
# In float64, so that only mistakes are seen after many steps; and slow, as a larger model is.
_PROGRAM = """
import runpy, sys, time
sys.path.insert(0, {repository!r})
import runtime.environment
import training.step
from tests.float64 import float64

step = training.step.train_step
training.step.train_step = lambda *given, **named: time.sleep(0.1) or step(*given, **named)
with float64():
    runpy.run_path({repository!r} + "/pretrain.py", run_name="__main__")
"""


class _ElasticRun:
    """A run of one process a machine, on node1 to node3."""

    def __init__(self, machines: Machines, folder: Path, data: Path):
        self._machines, self._folder, self.run = machines, folder, folder / "run"
        self.program = folder / "slow.py"
        self.program.write_text(_PROGRAM.format(repository=str(REPOSITORY)))
        self._words = (f"data_path={data}", *_WORDS, f"checkpoint_path={self.run}")
        self._environment = os.environ | {"OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled"}
        self._environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        self._start(0, [sys.executable, "-m", "launch.rendezvous"])

    def _start(self, number: int, words: list) -> subprocess.Popen:
        with self.output(number).open("a") as file:
            options = {"cwd": REPOSITORY, "env": self._environment, "stdout": file, "stderr": file}
            return self._machines.start(number, words, **options)

    def output(self, number: int) -> Path:
        return self._folder / f"node{number}.txt"

    def start(self, number: int) -> subprocess.Popen:
        words = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:3", "--nproc-per-node", 1),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", "node0:29400", "--rdzv-id", "run"),
            *(
                "--rdzv-conf",
                "is_host=false,last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3",
            ),
            *("--max-restarts", 9, self.program, *self._words),
        ]
        return self._start(number, words)

    def starts(self) -> list[tuple[int, int]]:
        """Returns step and number of processes of each start."""
        rows = [json.loads(line) for line in read(self.run / "starts.jsonl").splitlines()]
        return [(row["step"], row["processes"]) for row in rows]

    def wait_for(self, size: int) -> None:
        """Waits for a start with so many processes, and for checkpoints of it."""
        wait_for(lambda: self.starts()[-1:] and self.starts()[-1][1] == size, f"no world of {size}")
        later = self.starts()[-1][0] // 5 * 5 + 10
        wait_for(lambda: (self.run / f"step_{later}").exists(), "no steps", output=self.output(3))


def test_machines_join_leave_die_and_come_back_and_the_run_computes_the_same(tmp_path, sudoku_folder):
    """The first machine too may leave. Only the death of one costs steps."""
    with emulate(4, tmp_path / "machines") as machines:
        elastic = _ElasticRun(machines, tmp_path, sudoku_folder)
        nodes = {1: elastic.start(1)}
        elastic.wait_for(1)
        nodes |= {number: elastic.start(number) for number in (2, 3)}
        elastic.wait_for(3)
        nodes[1].send_signal(signal.SIGTERM)
        assert nodes[1].wait(PATIENCE) == 1
        elastic.wait_for(2)
        machines.kill(2)
        elastic.wait_for(1)
        nodes[1] = elastic.start(1)
        elastic.wait_for(2)
        for number in (1, 3):
            nodes[number].send_signal(signal.SIGTERM)
        assert [nodes[number].wait(PATIENCE) for number in (1, 3)] == [1, 1]
        texts = "".join(read(elastic.output(number)) for number in (1, 2, 3))

    stops = [int(step) for step in re.findall(r"stopped: .* is at training step (\d+) of", texts)]
    lost = [step for step, _ in elastic.starts()[1:] if step not in stops]
    assert len(lost) == texts.count("recovered: ") == 1
    status = json.loads(read(elastic.run / "status"))
    assert status == {"status": "stopped", "step": max(stops)}

    words = (f"data_path={sudoku_folder}", *_WORDS, f"max_steps={status['step']}", "checkpoint_path=alone")
    complete_program("pretrain", *words, folder=tmp_path, is_float64=True)
    rows = [logged_rows(run)[: status["step"] - 1] for run in (elastic.run, tmp_path / "alone")]
    for ours, theirs in zip(*rows, strict=True):  # all rows but the last, which a next start would log
        ours.pop("train/recovery_seconds", None)
        assert_same_row(ours, theirs, tolerance=TOLERANCE)
    ours, theirs = (
        load_file(folder / f"step_{status['step']}" / "weights.safetensors")
        for folder in (elastic.run, tmp_path / "alone")
    )
    for name, weight in theirs.items():
        torch.testing.assert_close(ours[name], weight, rtol=TOLERANCE, atol=TOLERANCE, msg=name)
