"""Prepares a process for torch. Programs import this module before torch.

The import makes stdin, stdout and stderr safe to use, and ends the process if the working folder was removed.
On rank 0 of a program, it prints the line "<program>: loading PyTorch", because torch takes seconds to load.
Then the import sets environment variables that OpenMP reads when torch loads.

With these variables, a waiting OpenMP thread spins only briefly, then sleeps. Spinning threads would take
cores from other processes. If the user has set one of the variables, none is changed. Example: with two busy
processes on the machine, a step of the demo on two threads takes 140 ms with these settings, and 2300 ms with
OMP_WAIT_POLICY=ACTIVE. Without other processes, a step takes 49 ms with both, and 80 ms with PASSIVE.
"""

import contextlib
import os
import sys
from pathlib import Path

from runtime.writing import check_working_folder, prepare_streams

prepare_streams()
try:
    check_working_folder()
except ValueError as _error:
    sys.exit(f"error: {_error}")


def _announce() -> None:
    path = Path(getattr(sys.modules["__main__"], "__file__", None) or "/")  # a notebook has no file
    is_ours = Path(__file__).parents[1] in path.resolve().parents and "tests" not in path.parts
    if is_ours and "torch" not in sys.modules and os.environ.get("RANK", "0") == "0":
        name = path.parent.name if path.stem == "__main__" else path.stem
        with contextlib.suppress(OSError):
            print(f"{name}: loading PyTorch", file=sys.stderr, flush=True)


_announce()

_WAITING = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"}
if not _WAITING & os.environ.keys():
    os.environ["GOMP_SPINCOUNT"] = "10000"  # for GNU OpenMP (torch on Linux): a fraction of a millisecond
    os.environ["KMP_BLOCKTIME"] = "1"  # for LLVM's and Intel's OpenMP: milliseconds


def num_cores(cgroups: Path = Path("/sys/fs/cgroup"), cgroup_list: Path = Path("/proc/self/cgroup")) -> int:
    """Returns how many CPU cores this process may use, at least 1.

    On Linux, CPU affinity and cgroup quotas limit this number.

    cgroups: Folder with the quotas of all cgroups. cgroup_list: File that lists the cgroups of this process.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        lines = cgroup_list.read_text(encoding="utf-8").splitlines()
    except OSError:  # not on Linux
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
    try:
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text(encoding="utf-8").split()
        else:
            paths = (group / f"cpu.cfs_{name}_us" for name in ("quota", "period"))
            quota, period = (path.read_text(encoding="utf-8") for path in paths)
        return max(1, int(quota) // int(period)) if int(quota) > 0 else None
    except (OSError, ValueError):  # ValueError: the quota is "max"
        return None
