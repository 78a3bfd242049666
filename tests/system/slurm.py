"""Starts a Slurm cluster on emulated machines: real daemons, without systemd, cgroups or a database."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.system.machines import Machines
from tests.waiting import wait_for

_NEEDED = ("munged", "slurmctld", "slurmd", "sbatch")
_CPUS = 2

# A requeued job waits as long as a credential is valid, two minutes by default. Nodes may claim more than the
# machine has. A node that is silent for 5 s is lost.
_CONF = """
ClusterName=emulated
SlurmctldHost=node0
SlurmctldPort=6817
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SlurmdTimeout=5
ReturnToService=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=1 GraceTime=30
PartitionName=urgent Nodes=ALL MaxTime=INFINITE PriorityTier=10 PreemptMode=OFF
"""


def why_no_slurm() -> str:
    """Returns the reason why this machine cannot run a Slurm cluster, "" if it can."""
    missing = [name for name in _NEEDED if shutil.which(name) is None]
    return f"{', '.join(missing)} not found (apt-get install slurm-wlm munge)" if missing else ""


class Cluster:
    """A Slurm cluster. node0 runs the controller.

    The partitions `main` and `urgent` contain all machines. Jobs in `urgent` preempt jobs in `main`.
    """

    def __init__(self, machines: Machines, folder: Path):
        self._machines, self._folder = machines, folder
        self._environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}

    def start_daemon(self, machine: int, *words: str) -> None:
        """Starts the daemon slurmctld or slurmd on a machine. words: Its command line."""
        with (self._folder / f"{words[0]}_{machine}.txt").open("a") as output:
            options = {"env": self._environment, "stdout": output, "stderr": output}
            self._machines.start(machine, [*words, "-D"], **options)

    def start_node(self, machine: int) -> None:
        self.start_daemon(machine, "slurmd", "-N", f"node{machine}")

    def num_idle(self) -> int:
        """Returns the number of idle nodes. Returns 0 if the controller does not answer."""
        try:
            return int(self.run("sinfo", "-h", "-o", "%D", "-t", "idle", "-p", "main") or 0)
        except AssertionError:
            return 0

    def run(self, *words: object, cwd: Path | None = None) -> str:
        """Runs a Slurm command on node0. Returns its output. Raises AssertionError if the command fails."""
        done = self._machines.run(0, words, env=self._environment, cwd=cwd)
        assert done.returncode == 0, f"{words}: {done.stderr}"
        return done.stdout.strip()

    def submit(self, script: Path | str, *words: object, options: Sequence[object] = (), cwd: Path) -> str:
        """Submits a job with sbatch. Returns the id of the job.

        words: Arguments of the script. options: Options of sbatch.
        """
        return self.run("sbatch", "--parsable", *options, script, *words, cwd=cwd)

    def state(self, job: str) -> str:
        """Returns the state of a job: PENDING, RUNNING, COMPLETED, CANCELLED, ..."""
        return self.show(job, "JobState")

    def show(self, job: str, key: str) -> str:
        entries = self.run("scontrol", "show", "job", job).split()
        return next(entry.partition("=")[2] for entry in entries if entry.startswith(f"{key}="))


@contextlib.contextmanager
def slurm(machines: Machines, folder: Path) -> Iterator[Cluster]:
    """Yields a cluster of all machines when every node is idle. Its Slurm daemons end with the machines."""
    for name in ("munge", "state", *(f"spool/node{number}" for number in range(machines.count))):
        (folder / name).mkdir(parents=True)
    nodes = (
        f"NodeName=node{number} NodeAddr=10.77.0.{number + 1} CPUs={_CPUS} RealMemory=4000"
        for number in range(machines.count)
    )
    (folder / "slurm.conf").write_text(_CONF.format(folder=folder, nodes="\n".join(nodes)))
    key = folder / "munge" / "key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    (folder / "munge").chmod(0o700)
    files = {"key-file": key, "pid-file": folder / "munge" / "pid", "seed-file": folder / "munge" / "seed"}
    files |= {"log-file": folder / "munge" / "log", "socket": folder / "munge" / "socket"}
    words = ["munged", "--foreground", "--force", *(f"--{name}={path}" for name, path in files.items())]
    munged = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(lambda: files["socket"].exists() or munged.poll() is not None, "no munged")
        assert munged.poll() is None, files["log-file"].read_text()
        cluster = Cluster(machines, folder)
        cluster.start_daemon(0, "slurmctld", "-c")
        for number in range(machines.count):
            cluster.start_node(number)
        wait_for(lambda: cluster.num_idle() == machines.count, "the nodes do not come up")
        yield cluster
    finally:
        munged.terminate()
        munged.wait()
