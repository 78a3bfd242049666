"""python -m parallel.info: what it tells of one process, and how it names the rank that is out of reach."""

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from parallel import connectivity
from parallel.connectivity import explain, listen_like_gloo
from parallel.stages import name_ranks
from tests.ranks import REPOSITORY, Finished, _program, _run

_NOTHING = {}
_TIMEOUT_SECONDS = 2
_VALUES = r" +\d+ us +\d+\.\d\d GB/s"


def _info(
    folder: Path,
    world_size: int,
    *arguments: str,
    prepare: dict[int, Callable[[], None]] = _NOTHING,
    **variables,
) -> Finished:
    """Runs the program on forked ranks, some of which are spoilt before."""

    def task(rank: int) -> tuple[Callable, tuple]:
        program = ("parallel/info", arguments, folder, folder / str(rank), variables)
        return _prepared_program, (prepare.get(rank), program)

    statuses = _run(world_size, task)
    texts = {
        stream: "".join(path.read_text() for path in sorted(folder.glob(f"*.{stream}")))
        for stream in ("stdout", "stderr")
    }
    return Finished(statuses, **texts)


def _prepared_program(prepare: Callable[[], None] | None, program: tuple) -> None:
    if prepare:
        prepare()
    _program(*program)


def _errors(finished: Finished) -> list[str]:
    """Without what C++ code says of itself."""
    return [line for line in finished.error_lines if line.startswith("error")]


@pytest.fixture(scope="module")
def started_server() -> None:
    """Starts what ranks are forked from, so that the time of a test is its own."""
    _run(1, lambda rank: (os.getpid, ()))


def test_one_process(tmp_path):
    finished = _info(tmp_path, 1, NCCL_DEBUG="WARN", GLOO_SOCKET_IFNAME="lo")
    assert (finished.statuses, finished.stderr) == ([0], "")
    told = dict(line.split(maxsplit=1) for line in finished.stdout.splitlines() if "  " in line)
    assert told["torch"].startswith(torch.__version__)
    assert told["backends"].startswith("gloo")
    assert told["NCCL_DEBUG"] == "WARN"
    assert told["WORLD_SIZE"] == "1"
    assert told["memory"].endswith("GiB")
    assert {"python", "host", "cores", "threads", "cpu", "GLOO_SOCKET_IFNAME"} <= told.keys()
    assert "WANDB_MODE" not in told, "it is set, and does not concern processes"


@pytest.mark.parametrize("world_size", [2, 3])
def test_all_ranks_reach_each_other(tmp_path, world_size):
    finished = _info(tmp_path, world_size, "--quick", "--device=cpu")
    assert (finished.statuses, _errors(finished)) == ([0] * world_size, [])
    rows = re.findall(r"^(\d) +(\S+) +(\d+) +cpu +\d+ +(\S+) ", finished.stdout, flags=re.MULTILINE)
    assert [(int(rank), host, version) for rank, host, _, version in rows] == [
        (rank, socket.gethostname(), torch.__version__) for rank in range(world_size)
    ]
    assert len({pid for _, _, pid, _ in rows}) == world_size
    pairs = re.findall(rf"^(\d) <-> (\d){_VALUES}$", finished.stdout, flags=re.MULTILINE)
    assert sorted(pairs) == [(str(a), str(b)) for a in range(world_size) for b in range(a + 1, world_size)]
    assert re.search(rf"^all-reduce{_VALUES} on the bus, 4 MiB in \d+\.\d ms$", finished.stdout, re.MULTILINE)
    assert finished.stdout.endswith(f"all {world_size} ranks reach each other\n")


@pytest.mark.slow
@pytest.mark.parametrize("absent", [[0], [1, 2]])
def test_ranks_that_never_come_are_named(tmp_path, started_server, absent):
    started = time.monotonic()
    finished = _info(tmp_path, 3, f"--timeout={_TIMEOUT_SECONDS}", prepare=dict.fromkeys(absent, sys.exit))
    assert time.monotonic() - started < 3 * _TIMEOUT_SECONDS
    assert finished.statuses == [0 if rank in absent else 1 for rank in range(3)]
    assert finished.error_lines == [
        f"error: {name_ranks(absent)} of 3 did not come within 2 seconds: hung, gone, or out of reach"
    ]


def _sleep(*_) -> None:
    time.sleep(60)


def _hang_while_the_group_opens() -> None:
    connectivity.ConnectivityCheck._open_group = _sleep


def _hang_in_messages() -> None:
    connectivity._round_trip_seconds = _sleep


def _tell_a_dead_address() -> None:
    def bind_only() -> list[socket.socket]:
        dead = socket.socket()
        dead.bind(("127.0.0.1", 0))
        return [dead]

    connectivity.listen_like_gloo = bind_only


def _be_out_of_reach() -> None:
    _tell_a_dead_address()
    _hang_while_the_group_opens()


_UNREACHED = (
    f"rank 1 ({socket.gethostname()}, 127.0.0.1) cannot be reached by ranks 0, 2 (Connection refused)"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (_hang_while_the_group_opens, "error: rank 1 of 3 did not open the group within 2 seconds"),
        (_hang_in_messages, "error: rank 1 of 3 did not exchange messages (rank 0 with rank 1) within 2 sec"),
        (_be_out_of_reach, f"error: {_UNREACHED}"),
    ],
    ids=["group", "messages", "address"],
)
def test_a_rank_that_comes_and_is_out_of_reach_is_named(tmp_path, started_server, spoil, expected):
    """And all end, also the one that hangs."""
    started = time.monotonic()
    finished = _info(
        tmp_path, 3, "--quick", "--device=cpu", f"--timeout={_TIMEOUT_SECONDS}", prepare={1: spoil}
    )
    assert time.monotonic() - started < 4 * _TIMEOUT_SECONDS
    assert finished.statuses == [1, 1, 1]
    assert len([line for line in _errors(finished) if line.startswith(expected)]) == 1, finished.stderr
    assert "no store" not in finished.stderr, "even the rank that hangs knows what it hangs in"
    assert "Traceback" not in finished.stderr


def test_an_address_that_gloo_did_not_need_is_a_warning(tmp_path):
    finished = _info(tmp_path, 3, "--quick", "--device=cpu", prepare={1: _tell_a_dead_address})
    assert finished.statuses == [0, 0, 0]
    (line,) = finished.error_lines
    assert line.startswith(f"warning (rank 0): {_UNREACHED}")


@pytest.mark.parametrize(
    ("arguments", "status", "line"),
    [
        (["--backend=nccl", "--device=cpu"], 1, "error: rank 0: backend=nccl needs CUDA devices"),
        (["--timeout=0"], 2, "python -m parallel.info: error: --timeout 0 is not above 0"),
    ],
    ids=["backend", "timeout"],
)
def test_a_mistake_is_told_once(tmp_path, arguments, status, line):
    finished = _info(tmp_path, 3, *arguments)
    assert finished.statuses == [status] * 3
    assert finished.error_lines[-1].startswith(line)
    assert finished.stderr.count("error") == 1


def test_a_store_that_does_not_answer(tmp_path):
    finished = _info(tmp_path, 2, "--timeout=0.5", MASTER_PORT="1")
    assert finished.statuses == [1, 1]
    assert len(_errors(finished)) == 2
    assert "no store at MASTER_ADDR:MASTER_PORT, 127.0.0.1:1 (no answer)" in _errors(finished)[1]


def test_another_torch_is_marked(capsys):
    row = {"host": "a", "pid": 1, "device": "cpu", "threads": 1, "torch": "2.11.0", "addresses": [["::1", 2]]}
    connectivity._show_ranks({0: row, 1: row | {"torch": "2.12.0", "addresses": []}, 2: row})
    lines = capsys.readouterr().out.splitlines()
    assert ["<- not the torch of rank 0" in line for line in lines[-3:]] == [False, True, False]


@pytest.mark.parametrize(
    ("faults", "named"),
    [
        ([], []),
        ([(0, 2), (1, 2)], [2]),
        ([(2, 0), (2, 1)], [2]),
        ([(0, 2), (2, 0), (1, 2), (2, 1)], [2]),
        ([(0, 1)], [1]),
        ([(0, 1), (0, 2), (0, 3), (3, 2)], [0, 2]),
    ],
)
def test_the_rank_that_explains_most_faults_is_named(faults, named):
    assert list(explain(dict.fromkeys(faults, "refused"))) == named


def test_what_is_said_of_a_rank_out_of_reach():
    faults = {(0, 2): "refused", (1, 2): "refused", (2, 1): "timed out"}
    assert explain(faults) == {
        2: "cannot be reached by ranks 0, 1 (refused) and cannot reach rank 1 (timed out)"
    }


def test_many_ranks_are_counted():
    assert name_ranks(list(range(20))) == "ranks 0, 1, 2, 3, 4, 5, 6, 7, ... (20 in all)"


def test_addresses_are_those_of_the_chosen_interface(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-one")
    with pytest.raises(
        ValueError, match="GLOO_SOCKET_IFNAME=no-such-one, .* no such network interface: use one"
    ):
        listen_like_gloo()
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    for listener in listen_like_gloo():
        socket.create_connection(listener.getsockname()[:2], timeout=5).close()
        listener.close()


@pytest.mark.skipif(sys.platform != "linux", reason="asks as Linux wants to be asked")
def test_the_address_of_an_interface(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,lo")
    listeners = listen_like_gloo()
    assert [listener.getsockname()[0] for listener in listeners] == ["127.0.0.1", "127.0.0.1"]
    for listener in listeners:
        listener.close()


def test_the_command_line_answers_without_torch():
    code = "import sys, parallel.info; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("store", ["of the agent", "of rank 0"])
def test_under_torchrun(store):
    """The command of the README; and as across nodes, where rank 0 holds the store."""
    variables = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1" if store == "of rank 0" else "0"}
    finished = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            "2",
            "-m",
            "parallel.info",
            "--quick",
        ],
        cwd=REPOSITORY,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert finished.returncode == 0, finished.stderr
    assert re.search(rf"^0 <-> 1{_VALUES}$", finished.stdout, flags=re.MULTILINE)
    assert finished.stdout.endswith("all 2 ranks reach each other\n")
