"""launch/slurm.sbatch on a real Slurm of emulated machines: what ends a job costs only time, but scancel."""

import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.ranks import REPOSITORY, run_program
from tests.system.machines import why_not
from tests.system.slurm import Cluster, slurm, why_no_slurm
from tests.tiny import OVERRIDES
from tests.waiting import PATIENCE, read, wait_for

_REASON = why_not() or why_no_slurm()
pytestmark = [pytest.mark.skipif(bool(_REASON), reason=_REASON), pytest.mark.timeout(6 * PATIENCE)]
_WORDS = (*OVERRIDES, "compile=false", "epochs=9", "eval_interval=null", "checkpoint_interval=7")
_NUM_STEPS = 75


class _Job:
    """launch/slurm.sbatch as a person submits it, from a folder with the programs and .venv."""

    def __init__(self, cluster: Cluster, folder: Path, *words: str, options: Sequence[str] = ()):
        for name in ("pretrain.py", ".venv"):
            (folder / name).symlink_to((REPOSITORY / name).resolve())
        self._cluster = cluster
        script, options = REPOSITORY / "launch" / "slurm.sbatch", ("--job-name", "run", *options)
        self.number = cluster.submit(script, *words, options=options, cwd=folder)
        self.run = folder / "checkpoints" / "run"
        self.output_file = folder / f"slurm-{self.number}{'_0' if '--array' in options else ''}.out"

    @property
    def state(self) -> str:
        return self._cluster.state(self.number)

    def wait_for_start(self, *, processes: int) -> None:
        """Waits until the newest start has so many processes, and for a checkpoint of it."""

        def newest() -> dict:
            lines = read(self.run / "starts.jsonl").splitlines()
            return json.loads(lines[-1]) if lines else {"processes": 0}

        wait_for(lambda: newest()["processes"] == processes, f"not {processes}", output=self.output_file)
        self.wait_for_checkpoint(after=newest()["step"])

    @property
    def output(self) -> str:
        return read(self.output_file)

    @property
    def status(self) -> dict:
        return json.loads((self.run / "status").read_text())

    def wait_until_back(self, step: int) -> None:
        line = f"resuming from checkpoints/run/step_{step}\n"
        wait_for(lambda: line in self.output, "not back", output=self.output_file)

    def wait_for_checkpoint(self, *, after: int) -> int:
        """Waits for the first one after a step, and returns its step."""

        def newer() -> list[int]:
            found = [path.name.removeprefix("step_") for path in self.run.glob("step_*")]
            return [int(name) for name in found if name.isdigit() and int(name) > after]

        wait_for(newer, f"no checkpoint after {after}", output=self.output_file)
        return min(newer())

    def wait_for_state(self, state: str) -> None:
        wait_for(lambda: self.state == state, f"not {state}", output=self.output_file)


@pytest.fixture
def cluster(machines, tmp_path) -> Iterator[Cluster]:
    with slurm(machines, tmp_path / "slurm") as opened:
        yield opened


def _submit(cluster: Cluster, folder: Path, *words: str, setup: str = "") -> Path:
    """Submits a script with `srun python pretrain.py` and four tasks. Returns the file of its output."""
    arguments = shlex.join([str(REPOSITORY / "pretrain.py"), *words, "checkpoint_path=run"])
    script = folder / "job.sbatch"
    script.write_text(f"#!/bin/bash\n{setup}\nsrun {sys.executable} {arguments}\n")
    options = ("--nodes", "2", "--ntasks-per-node", "2", "--output", "output.txt")
    cluster.submit(script, options=options, cwd=folder)
    return folder / "output.txt"


def test_srun_starts_each_rank(cluster, tmp_path, sudoku_folder):
    output = _submit(cluster, tmp_path, f"data_path={sudoku_folder}", *_WORDS, "max_steps=3")
    wait_for(lambda: not cluster.run("squeue", "-h"), "not ended", output=output)
    assert json.loads(read(tmp_path / "run" / "status")) == {"status": "max_steps", "step": 3}, read(output)
    start = json.loads(read(tmp_path / "run" / "starts.jsonl"))
    assert start["processes"] == 4
    assert "warning" not in read(output)


def test_processes_of_the_same_rank_are_told(cluster, tmp_path, sudoku_folder):
    setup = "export RANK=0 WORLD_SIZE=4 MASTER_ADDR=node0 MASTER_PORT=29511"
    words = (f"data_path={sudoku_folder}", *_WORDS, "max_steps=3", "init_timeout_seconds=5")
    output = _submit(cluster, tmp_path, *words, setup=setup)
    wait_for(lambda: not cluster.run("squeue", "-h"), "not ended", output=output)
    for number in (1, 2, 3):
        assert f"several processes have the same rank: RANK=0, but SLURM_PROCID={number}. " in read(output)


def test_a_job_whose_time_is_up_and_that_loses_a_node_computes_the_same(
    machines, cluster, tmp_path, sudoku_folder
):
    job = _Job(cluster, tmp_path, f"data_path={sudoku_folder}", *_WORDS)
    job.wait_for_checkpoint(after=0)
    cluster.run("scancel", "--signal=USR1", "--batch", job.number)  # what Slurm sends before the limit
    wait_for(lambda: job.status["status"] == "stopped", "not stopped", output=job.output_file)
    saved = job.status["step"]
    job.wait_until_back(saved)

    job.wait_for_checkpoint(after=saved)
    machines.kill(1)
    wait_for(lambda: job.state != "RUNNING", "Slurm does not miss the node")
    cluster.start_node(1)
    job.wait_for_state("COMPLETED")
    assert cluster.show(job.number, "Restarts") == "2"
    assert "recovered: step" in job.output
    assert job.status == {"status": "finished", "step": _NUM_STEPS}

    alone = (f"data_path={sudoku_folder}", *_WORDS, "checkpoint_path=alone")
    assert run_program("pretrain", *alone, folder=tmp_path, world_size=2).statuses == [0, 0]
    files = [run / f"step_{_NUM_STEPS}" / "weights.safetensors" for run in (job.run, tmp_path / "alone")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_preempted_job_goes_on_and_scancel_is_final(cluster, tmp_path, sudoku_folder):
    job = _Job(cluster, tmp_path, f"data_path={sudoku_folder}", *_WORDS, "epochs=1800")
    job.wait_for_checkpoint(after=0)
    urgent = tmp_path / "urgent.sbatch"
    urgent.write_text("#!/bin/sh\n")
    cluster.submit(urgent, options=("--partition", "urgent", "--nodes", "2"), cwd=tmp_path)
    wait_for(lambda: job.state == "PENDING", "not preempted", output=job.output_file)
    saved = job.status["step"]
    job.wait_until_back(saved)

    job.wait_for_checkpoint(after=saved)
    cluster.run("scancel", job.number)
    job.wait_for_state("CANCELLED")
    assert job.status["status"] == "stopped"
    assert (job.run / f"step_{job.status['step']}").exists()
    assert cluster.show(job.number, "Restarts") == "1"
    assert cluster.run("squeue", "-h") == ""


def test_a_job_of_an_elastic_run_leaves_when_its_time_is_up_and_comes_back(
    machines, cluster, tmp_path, sudoku_folder
):
    machines.start(0, [sys.executable, "-m", "launch.rendezvous", "29500"], cwd=REPOSITORY)
    words = (f"data_path={sudoku_folder}", *_WORDS, "epochs=100000")
    elastic = ("--array", "0-1", "--nodes", "1", "--export", "ALL,NODES=1:2,ENDPOINT=node0:29500")
    job = _Job(cluster, tmp_path, *words, options=elastic)
    job.wait_for_start(processes=2)
    # Without free nodes, the job comes back only after the run has continued with one process.
    cluster.run("scontrol", "update", "NodeName=ALL", "State=DRAIN", "Reason=test")
    cluster.run("scancel", "--signal=USR1", "--batch", f"{job.number}_1")
    job.wait_for_start(processes=1)
    cluster.run("scontrol", "update", "NodeName=ALL", "State=RESUME")
    job.wait_for_start(processes=2)
    assert "recovered: " not in job.output
    cluster.run("scancel", job.number)
    wait_for(lambda: not cluster.run("squeue", "-h"), "not cancelled", output=job.output_file)
    assert job.status["status"] == "stopped"
