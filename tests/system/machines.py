"""Emulates machines by network namespaces at one switch. Each has a host name, an address and a line.

    with emulate(2, folder, rate="1gbit", delay_seconds=0.025) as machines:
        processes = [machines.start(i, ["torchrun", ...], cwd=folder) for i in range(2)]
        machines.kill(1)

The machines share the disk, as the nodes of a cluster do. They can communicate only over their network. This
needs Linux and root. `rate` needs tc. `delay_seconds` needs iptables (`tests.system.delay`).
"""

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

_NEEDED = ("ip", "nsenter", "unshare", "hostname", "mount")
_PREFIX = "emulated"  # of the namespaces of all machines
_emulations = itertools.count()
# No name server is there to be waited for.
_FILES = {"nsswitch.conf": "hosts: files\npasswd: files\ngroup: files\nshadow: files\n"}
_ENTER = """
hostname "$1"
for file in hosts nsswitch.conf; do mount --bind "$2/$file" "/etc/$file"; done
shift 2
exec "$@"
"""


def why_not(*, delays: bool = False) -> str:
    """Returns the reason why this machine cannot emulate others, "" if it can.

    delays: Whether the emulated lines must have a delay.
    """
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "only root may make network namespaces"
    if missing := [name for name in _NEEDED if shutil.which(name) is None]:
        return f"{', '.join(missing)} not found (apt-get install iproute2 util-linux hostname mount)"
    name = f"try-{os.getpid()}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if tried.returncode:
        return f"network namespaces are refused here ({tried.stderr.strip()})"
    try:
        reason = _queue(name) if delays else ""
        return reason and f"there is no queue for packets ({reason}): apt-get install iptables"
    finally:
        _ip("netns", "del", name)


class Machines:
    """Machines, usually node0, node1, ..., with addresses 10.77.0.1, 10.77.0.2, ... on interface eth0.

    hosts: Host name of each machine. folder: Folder with their /etc/hosts. namespaces: Name of the network
    namespace of each machine.
    """

    def __init__(self, hosts: list[str], folder: Path, namespaces: list[str]):
        self.count, self._hosts = len(hosts), hosts
        self._folder, self.namespaces = folder, namespaces
        self._started: list[list[subprocess.Popen]] = [[] for _ in hosts]

    def command(self, machine: int, words: Sequence[object]) -> list[str]:
        """Returns the command line that runs the command `words` on a machine. machine: Index, from 0."""
        enter = ["nsenter", f"--net=/run/netns/{self.namespaces[machine]}", "unshare", "--uts", "--mount"]
        return [*enter, "bash", "-c", _ENTER, "-", self._hosts[machine], str(self._folder), *map(str, words)]

    def start(self, machine: int, words: Sequence[object], **options) -> subprocess.Popen:
        """Starts a program on a machine. Returns its process. options: Options of subprocess.Popen."""
        self._started[machine].append(subprocess.Popen(self.command(machine, words), **options))
        return self._started[machine][-1]

    def run(self, machine: int, words: Sequence[object], **options) -> subprocess.CompletedProcess:
        """Runs a program on a machine to its end. Returns its exit status and output."""
        return subprocess.run(self.command(machine, words), capture_output=True, text=True, **options)

    def kill(self, machine: int) -> None:
        """Ends every process on a machine with `kill -9`. New programs may be started there afterwards."""
        while _kill_all_in(self.namespaces[machine]):
            while self._started[machine]:
                self._started[machine].pop().wait()


@contextlib.contextmanager
def emulate(
    count: int,
    folder: Path,
    *,
    rate: str | None = None,
    delay_seconds: float = 0.0,
    name: str = "node{}",
    domain: str = "local",
) -> Iterator[Machines]:
    """Yields `count` machines. At the end, kills all processes on the machines and removes the machines.

    folder: Folder for the /etc/hosts of the machines. rate: Rate of each line in both directions, such as
    "1gbit". delay_seconds: Delay from one machine to another. A round trip takes twice this time, and at
    least about 0.1 ms. name: Pattern of the host names, with {} for the number of the machine. The machines
    know each other as <name> and <name>.<domain>.
    """
    _clear_leftovers()
    prefix = f"{_PREFIX}-{os.getpid()}-{next(_emulations)}"
    switch, names = f"{prefix}-switch", [f"{prefix}-{number}" for number in range(count)]
    hosts = [name.format(number) for number in range(count)]
    lines = [f"10.77.0.{number + 1} {host} {host}.{domain}\n" for number, host in enumerate(hosts)]
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (_FILES | {"hosts": f"127.0.0.1 localhost\n{''.join(lines)}"}).items():
        (folder / name).write_text(text)
    machines = Machines(hosts, folder, names)
    try:
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge", "up")
        for number, space in enumerate(names):
            port = f"port{number}"
            _ip("netns", "add", space)
            _ip("-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", space)
            _ip("-n", switch, "link", "set", port, "master", "bridge", "up")
            _ip("-n", space, "addr", "add", f"10.77.0.{number + 1}/24", "dev", "eth0")
            _ip("-n", space, "link", "set", "lo", "up")
            _ip("-n", space, "link", "set", "eth0", "up")
            for namespace, interface in ((space, "eth0"), (switch, port)) if rate else ():
                words = ["tbf", "rate", rate, "burst", "256kb", "latency", "200ms"]
                subprocess.check_call(
                    ["tc", "-n", namespace, "qdisc", "add", "dev", interface, "root", *words]
                )
        with _held_back(names, delay_seconds) if delay_seconds else contextlib.nullcontext():
            yield machines
    finally:
        listed = _namespaces()
        for number, space in enumerate(names):
            if space in listed:
                machines.kill(number)
        for space in {switch, *names} & set(listed):
            _ip("netns", "del", space)


def _clear_leftovers() -> None:
    """Removes machines that remain because the process that emulated them was killed."""
    for space in _namespaces():
        prefix, _, rest = space.partition("-")
        if prefix == _PREFIX and not Path("/proc", rest.partition("-")[0]).exists():
            while _kill_all_in(space):
                time.sleep(0.1)
            _ip("netns", "del", space)


def _namespaces() -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    return [line.split()[0] for line in listed.splitlines()]


def _kill_all_in(space: str) -> bool:
    """Kills the processes of a namespace. Returns whether there were any."""
    pids = subprocess.check_output(["ip", "netns", "pids", space]).split()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    return bool(pids)


def _queue(namespace: str) -> str:
    """Adds a rule that makes packets from eth0 wait in a queue. Returns an error message, "" on success."""
    if shutil.which("iptables") is None:
        return "iptables not found"
    rule = ["iptables", "-w", "-A", "INPUT", "-i", "eth0", "-j", "NFQUEUE", "--queue-num", "0"]
    words = ["ip", "netns", "exec", namespace, *rule, "--queue-bypass"]
    return subprocess.run(words, capture_output=True, text=True).stderr.strip().partition("\n")[0]


@contextlib.contextmanager
def _held_back(names: list[str], seconds: float) -> Iterator[None]:
    """Delays all packets that the namespaces `names` receive, until the context ends."""
    if reason := next(filter(None, map(_queue, names)), None):
        raise OSError(reason)
    command = [sys.executable, "-c", "from tests.system import delay; delay.main()", str(seconds), *names]
    folder = Path(__file__).resolve().parent.parent.parent
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as program:
        try:
            os.setpriority(os.PRIO_PROCESS, program.pid, -15)  # its clock is right on busy cores too
            if program.stdout.readline() != "ready\n":
                raise OSError(f"tests/system/delay.py ended with status {program.wait()}")
            yield
        finally:
            program.kill()


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
