"""launch/slurm.sbatch and launch/kubernetes/job.yaml, with stand-ins for Slurm and torchrun."""

import os
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.ranks import REPOSITORY

_SLURM = ["bash", str(REPOSITORY / "launch" / "slurm.sbatch")]
_WRITES = 'if [ -n "$STATUS" ]; then echo "$STATUS" > new && mv new checkpoints/run/status; fi; exit 1'
_PROGRAMS = {
    "srun": _WRITES,
    "torchrun": _WRITES,
    "scontrol": 'case $2 in hostnames) echo a ;; job) echo " PreemptTime=2026" ;; *) touch requeued ;; esac',
}


def _pod() -> list[str]:
    *_, job = yaml.safe_load_all((REPOSITORY / "launch" / "kubernetes" / "job.yaml").read_text())
    (container,) = job["spec"]["template"]["spec"]["containers"]
    return [*container["command"], *container["args"]]


def _launch(folder: Path, command: list[str], *, writes: str, **environment: str) -> int:
    """Starts a job whose program fails, after it has written a status or before. Returns the exit status."""
    environment |= {"STATUS": f'{{"status":"{writes}"}}' if writes else "", "RUN": "checkpoints/run"}
    environment |= {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_NAME": "run", "SLURM_JOB_ID": "7"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True).returncode


@pytest.fixture
def folder(tmp_path) -> Path:
    """A working folder with the stand-ins, and with a run that an earlier job has finished."""
    for name, text in _PROGRAMS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    for name in (".venv/bin/activate", "checkpoints/run/status"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text('# {"status":"finished"}\n')
    return tmp_path


def test_a_status_of_an_earlier_launch_does_not_end_a_slurm_job(folder):
    assert _launch(folder, _SLURM, writes="") != 0
    assert (folder / "requeued").exists()  # it was preempted before its first step
    (folder / "requeued").unlink()
    assert _launch(folder, _SLURM, writes="finished") == 0
    assert _launch(folder, _SLURM, writes="", ENDPOINT="login:29400", NODES="1:4") == 0, "a late job"
    assert not (folder / "requeued").exists()


def test_a_status_of_an_earlier_job_does_not_end_a_pod(folder):
    assert _launch(folder, _pod(), writes="", JOB="a") != 0
    assert _launch(folder, _pod(), writes="max_steps", JOB="a") == 0
    assert _launch(folder, _pod(), writes="", JOB="a") == 0, "a pod that restarts after the run has ended"
    assert _launch(folder, _pod(), writes="", JOB="b") != 0
