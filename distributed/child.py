"""Runs a program of this repository as a child process, which is asked to stop when its parent ends."""

import io
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO

from distributed.launch import REPOSITORY

_PROGRESS_SECONDS = 10  # between two lines of progress
_ERROR = re.compile(r"(?:[\w .-]+: )?error(?: \(rank \d+(?: \(.*?\))?\))?: (.*)")
# Linux's PR_SET_PDEATHSIG: when the parent dies, in whatever way, the child receives a signal.
_LEASH = """import ctypes, os, signal, sys
for ignored_by_python in (signal.SIGPIPE, signal.SIGXFSZ):
    signal.signal(ignored_by_python, signal.SIG_DFL)
ctypes.CDLL(None).prctl(1, int(sys.argv[1]))
os.sched_setaffinity(0, map(int, sys.argv[2].split(",")))
os.execvp(sys.argv[3], sys.argv[3:])"""


def start_child(
    command: Sequence[str],
    output: IO[bytes] | int,
    *,
    stop_signal: signal.Signals = signal.SIGTERM,
    cores: Iterable[int] | None = None,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Starts a command, with stdout and stderr in `output`.

    A signal of the terminal, such as Ctrl-C, does not reach the child. On Linux it gets `stop_signal` when
    this process dies, and runs on `cores`; None: on those of this process. folder: in which it runs.
    """
    if sys.platform == "linux":
        cores = ",".join(map(str, cores or os.sched_getaffinity(0)))
        command = [sys.executable, "-c", _LEASH, str(int(stop_signal)), cores, *command]
    return subprocess.Popen(
        command,
        cwd=folder,
        env=os.environ | (environment or {}),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def why_it_failed(said: str, status: int) -> str:
    """Returns the text of the first error in a program's output, else exit status and last line."""
    lines = [line.strip() for line in said.splitlines() if line.strip("=- ")]
    errors = [found[1] for found in map(_ERROR.match, lines) if found]
    return errors[0] if errors else f"ended with status {status}: {(lines or ['it said nothing'])[-1]}"


def run_child(program: str, words: Sequence[str], *, processes: int = 1) -> None:
    """Runs a program such as pretrain.py to its end, and prints the program's output on stdout.

    processes: more than 1 are started by torchrun. An exception during the wait, such as Ctrl-C, asks the
    program to stop and save; then the exception is raised again. ValueError if the program fails.
    """
    if processes < 1:
        raise ValueError(f"processes={processes}: give 1 or more")
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes)] if processes > 1 else []
    command = [sys.executable, *torchrun, str(REPOSITORY / program), *words]
    said, environment = [], {"PROGRESS_SECONDS": str(_PROGRESS_SECONDS)}

    def show_output() -> None:
        for line in lines:
            print(line, end="", flush=True)
            said.append(line)

    with start_child(command, subprocess.PIPE, environment=environment) as child:
        lines = io.TextIOWrapper(child.stdout, encoding="utf-8", errors="replace")
        try:
            show_output()
        except BaseException:
            child.terminate()
            show_output()
            raise
    if child.returncode:
        raise ValueError(why_it_failed("".join(said), child.returncode))
