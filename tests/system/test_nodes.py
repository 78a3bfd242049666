"""Runs on several emulated machines, and one machine is lost."""

import os
import sys
import time

import pytest

from tests.ranks import REPOSITORY, run_program
from tests.system.machines import why_not
from tests.tiny import OVERRIDES
from tests.waiting import PATIENCE, read, wait_for

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())
_WORDS = (*OVERRIDES, "compile=false", "epochs=1000", "eval_interval=null")
_WORDS += ("checkpoint_interval=7", "keep_checkpoints=null")
_LAST_STEP = 21


def test_a_node_is_lost_and_comes_back_then_the_first_one_is_lost(machines, tmp_path, sudoku_folder):
    """The one costs only time, as the log says how much. The other ends all, saying what to do."""
    run, outputs = tmp_path / "run", [tmp_path / f"node{number}.txt" for number in (0, 1)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled"}
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"

    def start(number: int):
        words = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", 2, "--nproc-per-node", 1),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", "node0:29400", "--rdzv-id", "run"),
            *("--rdzv-conf", "keep_alive_interval=1,keep_alive_max_attempt=3", "--max-restarts", 9),
            *(REPOSITORY / "pretrain.py", f"data_path={sudoku_folder}", *_WORDS, f"checkpoint_path={run}"),
        ]
        with outputs[number].open("a") as output:
            options = {"cwd": tmp_path, "env": environment, "stdout": output, "stderr": output}
            return machines.start(number, words, **options)

    nodes = [start(number) for number in (0, 1)]
    wait_for(lambda: (run / "step_7").exists(), "the run does not start", output=outputs[0])
    machines.kill(1)
    began = time.time()
    nodes[1].wait()
    nodes[1] = start(1)
    wait_for(lambda: "recovered: " in read(outputs[0]), "node 1 is not back", output=outputs[0])
    told = float(read(outputs[0]).partition("is done ")[2].partition(" s after the failure")[0])
    assert told == pytest.approx(time.time() - began, abs=3)
    assert read(outputs[0]).count("lost the connection to another rank") == 1
    wait_for(lambda: (run / f"step_{_LAST_STEP}").exists(), "the run does not go on", output=outputs[0])

    machines.kill(0)
    assert nodes[1].wait(PATIENCE) == 1
    (line,) = (line for line in read(outputs[1]).splitlines() if line.startswith("error"))
    assert line.startswith("error (rank 1): lost the connection to another rank (")
    assert line.endswith(
        "start the job again on all nodes, or let a scheduler do it (docs/many_machines.md)."
    )

    alone = (f"data_path={sudoku_folder}", *_WORDS, f"max_steps={_LAST_STEP}", "checkpoint_path=alone")
    assert run_program("pretrain", *alone, folder=tmp_path, world_size=2).statuses == [0, 0]
    files = [folder / f"step_{_LAST_STEP}" / "weights.safetensors" for folder in (run, tmp_path / "alone")]
    assert files[0].read_bytes() == files[1].read_bytes()
