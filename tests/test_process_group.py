"""Devices, threads and agreement between processes."""

from runtime.environment import num_cores

import os
import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from distributed.backend import choose_backend, choose_device, set_cpu_threads
from distributed.errors import collective_errors, connection_errors, local_errors
from distributed.world import is_elastic, rank, value_of_launch, world_size
from tests.ranks import REPOSITORY, call_each, run_ranks
from training.run_config import draw_name


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
    cores = num_cores()
    assert threads(3) == 3
    assert threads("auto") == cores
    assert threads("auto", LOCAL_WORLD_SIZE=str(cores)) == 1
    assert threads("auto", LOCAL_WORLD_SIZE=str(2 * cores)) == 1
    assert threads("auto", OMP_NUM_THREADS="7") == 7
    assert threads("auto", OMP_NUM_THREADS="1") == 1
    for ignored in ("0", "many", "\u00b2", "99999999999"):  # by OpenMP too
        assert threads("auto", OMP_NUM_THREADS=ignored) == cores


@pytest.mark.skipif(
    not os.path.exists("/proc/self/environ"), reason="only /proc tells torchrun's choice from the user's"
)
@pytest.mark.parametrize(("chosen", "expected"), [({}, num_cores()), ({"OMP_NUM_THREADS": "1"}, 1)])
def test_one_thread_that_torchrun_chose_is_not_the_users_choice(threads, monkeypatch, chosen, expected):
    """torchrun sets OMP_NUM_THREADS=1 for its workers; its own environment, the parent's, tells who chose."""
    with subprocess.Popen(["sleep", "60"], env={"PATH": os.environ["PATH"], **chosen}) as parent:
        while not Path(f"/proc/{parent.pid}/environ").read_bytes():
            time.sleep(0.001)  # just begun, it has none yet
        monkeypatch.setattr(os, "getppid", lambda: parent.pid)
        number = threads("auto", OMP_NUM_THREADS="1", TORCHELASTIC_RUN_ID="x", LOCAL_WORLD_SIZE="1")
        parent.kill()
    assert number == expected


@pytest.mark.skipif(not os.path.exists("/proc/self/cmdline"), reason="only /proc shows torchrun's words")
@pytest.mark.parametrize(
    ("words", "variables", "expected"),
    [
        (["--nnodes", "1:3"], {}, True),
        (["--nnodes=2:64"], {}, True),
        (["--nnodes", "2:2"], {}, False),
        (["--nnodes", "3"], {"PET_NNODES": "1:3"}, False),
        ([], {}, False),
        ([], {"PET_NNODES": "1:3"}, True),
        ([], {"PET_NNODES": "3"}, False),
    ],
)
def test_torchrun_is_elastic_where_least_and_most_nodes_differ(monkeypatch, words, variables, expected):
    for name, value in ({"TORCHELASTIC_RUN_ID": "a"} | variables).items():
        monkeypatch.setenv(name, value)
    with subprocess.Popen([sys.executable, "-c", "input()", *words, "x.py"], stdin=subprocess.PIPE) as parent:
        while not Path(f"/proc/{parent.pid}/cmdline").read_bytes():
            time.sleep(0.001)  # just begun, it has none yet
        monkeypatch.setattr(os, "getppid", lambda: parent.pid)
        assert is_elastic() is expected
        parent.kill()


def _fail_on(failing: list[int]) -> str:
    try:
        with collective_errors():
            if rank() in failing:
                raise ValueError(f"rank {rank()} has no data")
    except SystemExit as error:
        return f"ended with {error.code}"
    return "went on"


def test_a_failure_on_one_rank_ends_all():
    found = run_ranks(call_each, 3, _fail_on, [([],), ([0],), ([1, 2],)])
    assert found == [["went on", "ended with 1", "ended with 1"]] * 3


def test_a_rank_that_fails_before_there_is_a_group_says_so(monkeypatch, capsys):
    """As on a node without the device that rank 0 has."""
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(SystemExit) as ended, local_errors():
        raise ValueError("no CUDA device\non this node")
    assert ended.value.code == 1
    assert capsys.readouterr().err == "error (rank 3): no CUDA device on this node\n"


def test_a_name_that_is_too_long_for_a_path_is_one_line(capsys):
    with pytest.raises(SystemExit), local_errors():
        Path("a" * 300).stat()
    assert capsys.readouterr().err == f"error: {'a' * 300}: File name too long. Choose another path.\n"


def test_a_number_of_processes_that_is_no_number_is_one_line(monkeypatch):
    """solve.py reads it without a process group."""
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(SystemExit, match="error: WORLD_SIZE='two' is not an integer. Correct it, or unset"):
        world_size()


_OF_GLOO = (
    "[/__w/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.77.0.2]:15493. This is typically "
    "caused by a remote worker crashing. Check the logs."
)


@pytest.mark.parametrize(
    ("error", "is_told", "reason"),
    [
        (RuntimeError(_OF_GLOO), False, "Connection closed by peer [10.77.0.2]:15493"),
        (RuntimeError(_OF_GLOO), True, None),
        (dist.DistNetworkError("Broken pipe\nframe #0"), False, "Broken pipe"),
        (RuntimeError("shapes differ"), False, None),
    ],
)
def test_a_lost_connection_is_one_line_that_says_what_to_do(monkeypatch, capsys, error, is_told, reason):
    """The real errors of gloo meet it in `system/test_nodes`."""
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with pytest.raises(SystemExit if reason else RuntimeError), connection_errors(lambda: is_told):
        raise error
    line = capsys.readouterr().err
    assert line.count("\n") == (reason is not None)
    if reason:
        assert (
            f"lost the connection to another rank ({reason}). Its process or node has terminated, or" in line
        )
        assert "torchrun's line with local_rank names the rank of this node that ended first. With" in line
        assert "If it is lost, start the job again on all nodes, or let a scheduler do it" in line


@pytest.mark.parametrize(
    ("name", "device", "backends", "expected"),
    [
        ("auto", "cpu", "gloo nccl", "^gloo$"),
        ("auto", "mps", "gloo", "^gloo$"),
        ("auto", "cuda:1", "gloo nccl", "^cpu:gloo,cuda:nccl$"),
        ("auto", "cuda:1", "gloo", "^cpu:gloo,cuda:gloo$"),
        ("nccl", "cuda:0", "gloo nccl", "^cpu:gloo,cuda:nccl$"),
        ("gloo", "cuda:0", "gloo nccl", "^cpu:gloo,cuda:gloo$"),
        ("gloo", "cpu", "gloo", "^gloo$"),
        ("nccl", "cpu", "gloo nccl", "error: backend=nccl .*device=cpu"),
        ("nccl", "cuda", "gloo", "error: .*built without NCCL. Install a CUDA build of torch"),
        ("auto", "cpu", "", "error: 2 processes, but this torch was built without gloo"),
    ],
)
def test_backends(monkeypatch, name, device, backends, expected):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for each in ("nccl", "gloo"):
        monkeypatch.setattr(dist, f"is_{each}_available", lambda is_there=each in backends: is_there)
    try:
        chosen = choose_backend(name, torch.device(device))
    except ValueError as error:
        chosen = f"error: {error}"
    assert re.search(expected, chosen), chosen


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="only /proc names the threads")
def test_a_closed_group_leaves_no_thread_behind():
    """Not in a fork: there torch._dynamo, which kept the group alive, is imported before there is one."""
    code = textwrap.dedent("""
        import gc
        import os
        import torch
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel
        from distributed.backend import close_group, open_group

        gc.disable()

        def of_gloo():
            names = [open(f"/proc/self/task/{task}/comm").read() for task in os.listdir("/proc/self/task")]
            return sum("gloo" in name for name in names)

        open_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        import torch._dynamo
        opened = of_gloo()
        model = DistributedDataParallel(torch.nn.Linear(2, 2))
        model.itself = [model]
        del model  # garbage, which holds the group
        close_group()
        print(opened > 0, of_gloo())
    """)
    command = [sys.executable, "-c", code]
    finished = subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, check=True)
    assert finished.stdout == "True 0\n"


def test_all_starts_of_a_launch_have_one_value(monkeypatch):
    """And the same run id in another launch, which has a store of its own, has another one."""
    for first in ("a", "b"):
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(store.port))
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "mine")
        assert [value_of_launch("name", value) for value in (first, "x", "y")] == [first] * 3
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "other")
        assert value_of_launch("name", "z") == "z"


def test_a_restart_that_would_draw_another_name_needs_one(monkeypatch):
    """As with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, where rank 0 serves the store."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "mine")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    assert draw_name() != draw_name()
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    with pytest.raises(ValueError, match="run_name is not set, and torchrun may restart this run"):
        draw_name()
