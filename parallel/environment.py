"""What libraries read when they load. Every program imports this module first, before torch.

Threads of OpenMP that wait for others spin for a moment and then sleep, unless the user has said how they
wait: those that spin on take the cores of whatever runs beside them. A step of the demo on two threads beside
two busy processes takes 2300 ms with OMP_WAIT_POLICY=ACTIVE, and 140 ms so; alone, 49 ms either way, and 80
ms with PASSIVE.
"""

import os
from pathlib import Path

from config.writing import open_closed_streams

open_closed_streams()

_WAITING = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"}
if not _WAITING & os.environ.keys():
    os.environ["GOMP_SPINCOUNT"] = "10000"  # GNU's OpenMP, of torch on Linux: a fraction of a millisecond
    os.environ["KMP_BLOCKTIME"] = "1"  # LLVM's and Intel's: milliseconds


def num_cores(cgroups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """Returns how many cores this process may use: by its affinity, and by the quotas of its control groups.

    cgroups, own: where Linux shows the groups, version 1 or 2, and which of them are this process's.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        lines = own.read_text().splitlines()
    except OSError:  # no Linux
        return cores
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = cgroups / controllers if controllers else cgroups
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder.is_relative_to(root):
                cores = min(cores, _quota(folder) or cores)
    return cores


def _quota(group: Path) -> int | None:
    """Returns how many whole cores a group may use, at least one; None where it has no quota."""
    try:
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return max(1, int(quota) // int(period)) if int(quota) > 0 else None
    except (OSError, ValueError):  # "max" is none
        return None
