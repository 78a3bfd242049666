"""Devices, threads and agreement between processes."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch

from parallel.agreement import own_outcome, shared_outcome
from parallel.collectives import broadcast_object, gather_objects
from parallel.process_group import choose_device, rank, set_cpu_threads
from tests.ranks import REPOSITORY, run_ranks


def test_devices_that_are_not_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert choose_device("auto") == choose_device("cpu") == torch.device("cpu")
    with pytest.raises(ValueError, match="no CUDA device"):
        choose_device("cuda")
    with pytest.raises(ValueError, match="no Apple GPU"):
        choose_device("mps")


@pytest.fixture
def threads(monkeypatch):
    """Sets the threads as in a process with the given environment, and torch's own back at the end."""
    before = torch.get_num_threads()

    def choose(chosen: int | str, **environment: str) -> int:
        for key in ("OMP_NUM_THREADS", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
            monkeypatch.delenv(key, raising=False)
        for key, value in environment.items():
            monkeypatch.setenv(key, value)
        number = set_cpu_threads(chosen)
        assert torch.get_num_threads() == number
        return number

    yield choose
    torch.set_num_threads(before)


def test_threads_are_the_users_choice_or_the_cores_over_the_processes(threads):
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert threads(3) == 3
    assert threads("auto") == cores
    assert threads("auto", LOCAL_WORLD_SIZE=str(cores)) == 1
    assert threads("auto", LOCAL_WORLD_SIZE=str(2 * cores)) == 1
    assert threads("auto", OMP_NUM_THREADS="7") == 7
    assert threads("auto", OMP_NUM_THREADS="1") == 1


@pytest.mark.skipif(
    not os.path.exists("/proc/self/environ"), reason="only /proc tells torchrun's choice from the user's"
)
def test_one_thread_that_torchrun_chose_is_not_the_users_choice():
    """torchrun sets OMP_NUM_THREADS=1 for its workers; its own environment, the parent's, tells who chose."""
    parent = textwrap.dedent("""
        import os, subprocess, sys
        os.environ.update(OMP_NUM_THREADS="1", TORCHELASTIC_RUN_ID="x", LOCAL_WORLD_SIZE="1")
        code = "from parallel.process_group import set_cpu_threads; print(set_cpu_threads('auto'))"
        sys.exit(subprocess.run([sys.executable, "-c", code]).returncode)
    """)
    clean = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    cores = len(os.sched_getaffinity(0))
    for chosen, expected in (({}, cores), ({"OMP_NUM_THREADS": "1"}, 1)):
        run = subprocess.run(
            [sys.executable, "-c", parent],
            cwd=REPOSITORY,
            env=clean | chosen,
            capture_output=True,
            text=True,
            check=True,
        )
        assert int(run.stdout) == expected


def _fail_on(failing: list[int]) -> str:
    try:
        with shared_outcome():
            if rank() in failing:
                raise ValueError(f"rank {rank()} has no data")
    except SystemExit as error:
        return f"ended with {error.code}"
    return "went on"


@pytest.mark.parametrize("failing", [[], [0], [1], [1, 2], [0, 1, 2]])
def test_a_failure_on_one_rank_ends_all(failing):
    assert run_ranks(_fail_on, 3, failing) == ["ended with 1" if failing else "went on"] * 3


def test_a_rank_that_fails_before_there_is_a_group_says_so(monkeypatch, capsys):
    """As on a node without the device that rank 0 has."""
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(SystemExit) as ended, own_outcome():
        raise ValueError("no CUDA device\non this node")
    assert ended.value.code == 1
    assert capsys.readouterr().err == "error (rank 3): no CUDA device on this node\n"


def _exchange() -> tuple:
    return broadcast_object(f"from {rank()}"), gather_objects(rank())


def test_objects_travel():
    assert run_ranks(_exchange, 3) == [("from 0", [0, 1, 2]), ("from 0", None), ("from 0", None)]
