"""Runs a program as a child process. On Linux, the child receives a signal when its parent dies."""

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
# The child receives a signal when the parent dies, for any reason (PR_SET_PDEATHSIG, Linux only).
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
    """Starts a command as a child process, and returns the process.

    The command's stdout and stderr go to `output`. Ctrl-C in the terminal does not reach the child. On
    Linux, the child receives `stop_signal` when this process dies.

    output: An open file, or subprocess.PIPE. cores: CPU cores that the child may use (Linux only). If None,
    the cores of this process. folder: Working directory of the child. environment: Variables to add to those
    of this process.
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


def why_it_failed(output: str, status: int) -> str:
    """Returns the first error message in the output of a failed program.

    An error message is the text after "error: " at the start of a line. The line may also start with the name
    of a program or name a rank: "solve.py: error: ..." or "error (rank 3): ...". If the output contains no
    error message, returns a text such as "ended with status 137: <last line of the output>".

    output: Text of stdout and stderr. status: Exit status of the program.
    """
    lines = [line.strip() for line in output.splitlines() if line.strip("=- ")]
    errors = [found[1] for found in map(_ERROR.match, lines) if found]
    return errors[0] if errors else f"ended with status {status}: {(lines or ['no output'])[-1]}"


def run_child(program: str, arguments: Sequence[str], *, processes: int = 1) -> None:
    """Runs a program such as pretrain.py to its end, and prints its output on stdout.

    If an exception such as KeyboardInterrupt interrupts this function, the program receives SIGTERM. The
    function waits until the program ends, and raises the exception again. Raises ValueError if the program
    fails.

    program: File name in this repository. arguments: Command-line arguments of the program. processes:
    Number of processes. If more than 1, torchrun starts them.
    """
    if processes < 1:
        raise ValueError(f"processes={processes} is less than 1. Set processes to 1 or more.")
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes)] if processes > 1 else []
    command = [sys.executable, *torchrun, str(REPOSITORY / program), *arguments]
    output, environment = [], {"PROGRESS_SECONDS": str(_PROGRESS_SECONDS)}

    def show_output() -> None:
        for line in lines:
            print(line, end="", flush=True)
            output.append(line)

    with start_child(command, subprocess.PIPE, environment=environment) as child:
        lines = io.TextIOWrapper(child.stdout, encoding="utf-8", errors="replace")
        try:
            show_output()
        except BaseException:
            child.terminate()
            show_output()
            raise
    if child.returncode:
        raise ValueError(why_it_failed("".join(output), child.returncode))
