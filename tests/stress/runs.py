"""A training under torchrun, seen from outside: its processes, and what it leaves in its folder."""

import contextlib
import hashlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

_RECOVERED = re.compile(
    r"recovered: step \d+ is done (-?[\d.]+) s after the failure, (\d+) steps? done again"
)
_LAST_WORDS = 3000  # characters


# -------------------------------------------------------------------------------------------------- processes
def workers(torchrun: int) -> list[int]:
    """Returns the process ids of the ranks: children of torchrun that have a RANK."""
    return sorted(pid for pid, parent in parents().items() if parent == torchrun and rank_of(pid) is not None)


def parents() -> dict[int, int]:
    """Returns the parent of every process of this machine."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            found[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # the process has ended in the meantime
            continue
    return found


def rank_of(pid: int) -> int | None:
    """Returns the RANK that torchrun gave to a process or to an ancestor of it; None where there is none."""
    try:
        environment = Path("/proc", str(pid), "environ").read_bytes().split(b"\0")
    except OSError:
        return None
    return next((int(item[5:]) for item in environment if item.startswith(b"RANK=")), None)


def wait_for(
    condition: Callable[[], bool], torchruns: list[subprocess.Popen], output: Path, *, seconds: float
) -> None:
    """Waits for the condition; where a torchrun ends before, or it takes too long, ends this program."""
    deadline = time.monotonic() + seconds
    while not condition():
        if any(each.poll() is not None for each in torchruns) or time.monotonic() > deadline:
            raise SystemExit(f"the run does not go on, its last words:\n{last_words(output)}")
        time.sleep(0.05)


def kill_run(run: Path) -> None:
    """Kills torchrun, its ranks and their readers of data, known by the run folder on their command line."""
    word = f"\0checkpoint_path={run}\0".encode()
    while found := [pid for pid in parents() if word in _command_line(pid)]:
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def _command_line(pid: int) -> bytes:
    """Returns the words, each with a zero byte at its end; nothing of a process that has ended."""
    try:
        return Path("/proc", str(pid), "cmdline").read_bytes()
    except OSError:
        return b""


def last_words(output: Path) -> str:
    return output.read_text(errors="replace")[-_LAST_WORDS:]


# ------------------------------------------------------------------------------------------------ run folders
def num_rows(run: Path) -> int:
    """Counts the rows of the log."""
    path = run / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def recoveries(run: Path) -> list[tuple[float, int]]:
    """Reads (seconds, steps redone) of each recovery from the log of rank 0, by its clock."""
    path = run / "logs" / "rank_0.log"
    text = path.read_text() if path.exists() else ""
    return [(float(seconds), int(steps)) for seconds, steps in _RECOVERED.findall(text)]


def newest_step(run: Path) -> int:
    """Returns the step of the newest checkpoint; 0 where there is none."""
    return max((int(path.name[5:]) for path in run.glob("step_*") if path.name[5:].isdigit()), default=0)


def digest(run: Path, pattern: str = "weights.safetensors") -> str:
    """Returns a sha256 over the files of the newest checkpoint that match the pattern."""
    paths = sorted((run / f"step_{newest_step(run)}").glob(pattern))
    assert paths, f"there is no {pattern} in the newest checkpoint of {run}"
    return hashlib.sha256(b"".join(hashlib.sha256(path.read_bytes()).digest() for path in paths)).hexdigest()
