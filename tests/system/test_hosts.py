"""launch/hosts.sh over real sshd of emulated machines."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ranks import REPOSITORY
from tests.system.machines import Machines, emulate, why_not
from tests.tiny import OVERRIDES
from tests.waiting import PATIENCE, read, wait_for

_SSHD = shutil.which("sshd") or "/usr/sbin/sshd"
_REASON = why_not() or ("" if Path(_SSHD).exists() else "no sshd here (apt-get install openssh-server)")
pytestmark = pytest.mark.skipif(bool(_REASON), reason=_REASON)
_HOSTS = REPOSITORY / "launch" / "hosts.sh"


@pytest.fixture(scope="module")
def machines(tmp_path_factory) -> Iterator[Machines]:
    """Two, with keys of their own; `ssh` between them needs nothing of this machine's."""
    folder = tmp_path_factory.mktemp("ssh")
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    (folder / "sshd_config").write_text(
        f"HostKey {folder}/host\nAuthorizedKeysFile {folder}/user.pub\nStrictModes no\nPidFile none\n"
        "PermitRootLogin yes\nUsePAM no\n"
    )
    (folder / "ssh").write_text(
        f"#!/bin/sh\nexec {shutil.which('ssh')} -F none -i {folder}/user -o StrictHostKeyChecking=no "
        f'-o UserKnownHostsFile={folder}/known -o LogLevel=ERROR "$@"\n'
    )
    (folder / "ssh").chmod(0o755)
    Path("/run/sshd").mkdir(exist_ok=True)
    with emulate(2, folder / "machines") as emulated:
        emulated.folder_of_ssh = folder
        for number in (0, 1):
            emulated.start(
                number, [_SSHD, "-D", "-e", "-f", folder / "sshd_config"], stderr=subprocess.DEVNULL
            )
        wait_for(lambda: not emulated.run(0, [folder / "ssh", "node1", "true"]).returncode, "no sshd")
        yield emulated


def _environment(machines: Machines) -> dict[str, str]:
    path = f"{machines.folder_of_ssh}:{os.environ['PATH']}"
    return os.environ | {"PATH": path, "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled"}


def _ended(machines: Machines, hosts: str, **environment: str) -> subprocess.CompletedProcess:
    command, environment = [_HOSTS, hosts, "pretrain.py"], _environment(machines) | environment
    return machines.run(0, command, env=environment, timeout=PATIENCE)


def test_a_run_on_a_list_of_hosts_stops_saved(machines, tmp_path, sudoku_folder, heeds_interrupts):
    run, output = tmp_path / "run", tmp_path / "output.txt"
    words = [*OVERRIDES, "compile=false", "epochs=1000", "eval_interval=null", "log_interval=1"]
    words += [f"data_path={sudoku_folder}", f"checkpoint_path={run}", "evaluators=[]"]
    with output.open("w") as file:
        environment = _environment(machines)
        command = [_HOSTS, "node0,root@node1", "pretrain.py", *words]
        started = machines.start(0, command, env=environment, stdout=file, stderr=file)
    wait_for(lambda: read(run / "metrics.jsonl"), "no step", output=output)
    started.send_signal(signal.SIGINT)
    assert started.wait(PATIENCE) == 1, "as torchrun after a signal"
    lines = read(output).splitlines()
    status = json.loads(read(run / "status"))
    assert status["status"] == "stopped"
    assert (run / f"step_{status['step']}").exists()
    assert any(line.startswith("node0: stopped: the same command goes on from here") for line in lines)
    assert {"node0: ended with status 1", "node1: ended with status 1"} <= set(lines)
    assert all(line.startswith(("node0: ", "node1: ")) for line in lines), read(output)
    assert sorted(path.name for path in (run / "logs").glob("rank_*")) == ["rank_0.log", "rank_1.log"]


def test_a_host_that_cannot_be_reached_ends_all(machines):
    finished = _ended(machines, "node0,node7")
    assert finished.returncode == 255
    assert "node7: ssh: Could not resolve hostname node7" in finished.stdout
    assert "node0: ended with status" in finished.stdout


def test_a_taken_port_and_an_unknown_first_host_are_one_line(machines):
    listen = "import socket, time; s = socket.create_server(('', 4711)); print(flush=True); time.sleep(1e4)"
    other = machines.start(0, [sys.executable, "-c", listen], stdout=subprocess.PIPE)
    try:
        other.stdout.readline()
        finished = _ended(machines, "node0,node1", PORT="4711")
    finally:
        other.kill()
        other.communicate()
    assert finished.returncode == 1
    taken = "cannot use node0:4711 for the rendezvous: Address already in use. Set PORT to a free port."
    assert f"node0: error: {taken}" in finished.stdout.splitlines()
    finished = _ended(machines, "localhost,node1")
    assert finished.returncode == 1
    itself = "cannot use localhost:29400 for the rendezvous: the name resolves to the local machine. Pass a"
    advice = "name of the first host that all hosts can resolve."
    assert f"node1: error: {itself} {advice}" in finished.stdout.splitlines()


def test_without_ssh_the_commands_are_printed(tmp_path):
    printed = subprocess.run(
        [_HOSTS, "--print", "alpha,me@beta", "pretrain.py", "run_name=it's mine"],
        env=os.environ | {"PROCESSES": "3", "PORT": "4711", "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert [printed[0], printed[3]] == ["# on alpha:", "# on me@beta:"]
    for lines, address in ((printed[1:3], "alpha"), (printed[4:6], "beta")):
        assert lines[0] == f"cd {REPOSITORY} && . .venv/bin/activate"
        words = subprocess.check_output(["bash", "-c", f"printf '%s\\n' {lines[1]}"], text=True).splitlines()
        assert words[:3] == ["env", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1", "OMP_NUM_THREADS=2"]
        options = dict(zip(words[4:-2:2], words[5:-2:2], strict=True))
        assert options["--local-addr"] == address
        assert options["--rdzv-endpoint"] == "alpha:4711"
        assert (options["--nnodes"], options["--nproc-per-node"]) == ("2", "3")
        assert words[-2:] == ["pretrain.py", "run_name=it's mine"]
    assert (
        printed[2].partition("--rdzv-id ")[2].split()[0] == printed[5].partition("--rdzv-id ")[2].split()[0]
    )
