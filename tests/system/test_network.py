"""Several emulated machines with networks, folders or clocks that a run cannot use."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ranks import REPOSITORY
from tests.system.machines import Machines, emulate, why_not
from tests.tiny import OVERRIDES
from tests.waiting import PATIENCE, read

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())
_NO_DELAY = pytest.mark.skipif(bool(why_not(delays=True)), reason=why_not(delays=True))
_RUN = (*OVERRIDES, "compile=false", "eval_interval=null", "evaluators=[]", "keep_best=null")


@pytest.fixture(scope="module")
def machines(tmp_path_factory) -> Iterator[Machines]:
    with emulate(3, tmp_path_factory.mktemp("machines")) as emulated:
        yield emulated


def _torchrun(
    machines: Machines,
    folder: Path,
    words: tuple,
    *,
    nodes: int = 2,
    last: tuple[str, ...] = (),
    **environment: str,
) -> tuple[list[int], list[str]]:
    """Runs words with a rank on each node; returns their exit statuses, and what each printed.

    last: words that lead to the command on the last node. environment: of that node.
    """
    ours = os.environ | {"OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled"}
    outputs, started = [folder / f"node{number}.txt" for number in range(nodes)], []
    for number, output in enumerate(outputs):
        is_last = number == nodes - 1
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", nodes, "--node-rank", number]
        torchrun += ["--nproc-per-node", 1, "--master-addr", "node0", "--master-port", 29400]
        command = [*(last if is_last else ()), *torchrun, *words]
        with output.open("w") as file:
            options = {"stdout": file, "stderr": file, "env": ours | (environment if is_last else {})}
            started.append(machines.start(number, command, cwd=REPOSITORY, **options))
    return [each.wait(PATIENCE) for each in started], [read(output) for output in outputs]


def _told(text: str, level: str) -> list[str]:
    return [
        line for line in re.split(r"[\n\r]", text) if re.match(rf"{level}( \(rank \d+\))?:", line.strip())
    ]


def test_the_pair_that_does_not_reach_each_other_is_named(machines, tmp_path):
    """Node 0, where they meet, is in reach of both."""
    routes = [(1, "10.77.0.3/32"), (2, "10.77.0.2/32")]
    try:
        for number, address in routes:
            assert not machines.run(number, ["ip", "route", "add", "blackhole", address]).returncode
        words = ("-m", "launch.check", "--quick", "--timeout", "8", "--device", "cpu")
        statuses, (first, *_) = _torchrun(machines, tmp_path, words, nodes=3)
    finally:
        for number, address in routes:
            machines.run(number, ["ip", "route", "del", "blackhole", address])
    assert statuses == [1, 1, 1]
    (of_1, of_2) = _told(first, "warning")
    assert of_1.startswith(
        "warning (rank 0): rank 1 (node1, eth0 10.77.0.2) cannot be reached by rank 2 on node2 ("
    )
    assert of_2.startswith(
        "warning (rank 0): rank 2 (node2, eth0 10.77.0.3) cannot be reached by rank 1 on node1 ("
    )
    assert "GLOO_SOCKET_IFNAME" in of_1
    assert "firewall" in of_1
    assert _told(first, "error") == ["error: ranks 1 and 2 cannot connect to each other"]
    assert "Thread" not in first, "no stacks of a hang"


@_NO_DELAY
def test_a_slow_line_is_measured(tmp_path):
    words = ("-m", "launch.check", "--quick", "--device", "cpu")
    with emulate(2, tmp_path / "machines", rate="100mbit", delay_seconds=0.025) as slow:
        statuses, (told, _) = _torchrun(slow, tmp_path, words)
    assert statuses == [0, 0], told[-3000:]
    micros, megabits = map(float, re.search(r"0 <-> 1 +(\d+) us +(\d+) Mbit/s", told).groups())
    assert 50_000 <= micros < 150_000
    assert 5 < megabits < 200, "a line lets a first burst of 256 KiB pass"
    assert "the slowest link is between node0 (eth0) and node1 (eth0)" in told


@pytest.mark.parametrize("what", ["folder", "data"])
def test_what_nodes_must_share_is_asked_for_at_the_start(what, machines, tmp_path, sudoku_folder):
    """The last node has another folder under the same path, as where nothing is mounted."""
    data, run = tmp_path / "data", tmp_path / "run"
    shutil.copytree(sudoku_folder, data)
    run.mkdir()
    if what == "folder":
        other = f"mount -t tmpfs none {run}"
    else:  # no manifest, and one answer that differs
        copy = shutil.copytree(sudoku_folder, tmp_path / "copy")
        (labels,) = (copy / "train").glob("*__labels.npy")
        content = bytearray(labels.read_bytes())
        content[-1] = 2 if content[-1] != 2 else 3
        labels.write_bytes(content)
        other = f"mount --bind {copy} {data}"
    words = ("pretrain.py", *_RUN, f"data_path={data}", f"checkpoint_path={run}", "init_timeout_seconds=60")
    last = ("bash", "-c", f'{other}; exec "$@"', "-")
    statuses, (first, second) = _torchrun(machines, tmp_path, words, last=last)
    assert statuses == [1, 1]
    (line,) = _told(first + second, "error")
    expected = {
        "folder": f"rank 0's run folder {run} is not visible on rank 1 (node1). Share it among all nodes",
        "data": f"rank 0's data in {data} differs from the data on rank 1 (node1). Copy it to all nodes",
    }
    assert line.startswith(f"error: {expected[what]}")
    assert not list(run.glob("step_*"))
    assert not list(run.glob(".start_*"))


def test_a_node_with_a_full_disk_and_other_code(machines, tmp_path, sudoku_folder):
    """All go on; each is told, and the end says that nothing newer than the last checkpoint is saved."""
    run, words = tmp_path / "run", (*_RUN, f"data_path={sudoku_folder}", "checkpoint_interval=7")
    words = ("pretrain.py", *words, f"checkpoint_path={run}", "epochs=1000", "global_batch_size=8")
    assert _torchrun(machines, tmp_path, (*words, "max_steps=7"))[0] == [0, 0]

    code = tmp_path / "trm.py"
    code.write_text((REPOSITORY / "models" / "trm.py").read_text() + "# more\n")
    last = f'ulimit -f 4; mount --bind {code} {REPOSITORY}/models/trm.py; exec "$@"'
    environment = {"PYTHONDONTWRITEBYTECODE": "1"}
    statuses, (first, _) = _torchrun(
        machines, tmp_path, (*words, "max_steps=150"), last=("bash", "-c", last, "-"), **environment
    )
    assert statuses == [1, 1]
    warnings = "\n".join(_told(first, "warning"))
    assert "rank 1 on node1: code differs from rank 0 in models/trm.py. Use the same commit" in warnings
    assert f"checkpoint not saved: {run}/step_14 (" in first
    assert "rank 1: " in first.partition("checkpoint not saved")[2].partition("\n")[0]
    (line,) = _told(first, "error")
    assert line == f"error: the last checkpoint was not saved: {run} lacks the newest steps"
    assert [path.name for path in run.glob("step_*")] == ["step_7"]


@_NO_DELAY
def test_the_benchmark_measures_what_lines_cost():
    words = ("exchange", "--quick", "--rounds", "1", "--line", "100mbit", "25")
    command = [sys.executable, "-m", f"benchmarks.{words[0]}", *words[1:]]
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0, ended.stderr
    result = json.loads(ended.stdout.splitlines()[-1])
    assert 0 < result["efficiency_default"] < result["efficiency_local_steps_32"]
