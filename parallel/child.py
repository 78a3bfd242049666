"""Runs a program of this repository as a child process of a Python session, such as a notebook."""

import os
import re
import subprocess
import sys
from collections.abc import Sequence

from parallel.launch import REPOSITORY

_PROGRESS_SECONDS = 10  # between two lines of progress
_ERROR = re.compile(r"error(?: \(rank \d+(?: \(.*?\))?\))?: (.*)")
# Linux's PR_SET_PDEATHSIG: when the session dies, in whatever way, the program receives a SIGTERM, and stops.
_LEASH = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); os.execv(sys.argv[1], sys.argv[1:])"


def run_child(program: str, words: Sequence[str], *, processes: int = 1) -> None:
    """Runs a program such as pretrain.py to its end, and prints the program's output on stdout.

    processes: more than 1 are started by torchrun. An exception during the wait, such as Ctrl-C, asks the
    program to stop and save; then the exception is raised again. ValueError if the program fails.
    """
    if processes < 1:
        raise ValueError(f"processes={processes}: give 1 or more")
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes)] if processes > 1 else []
    leash = [sys.executable, "-c", _LEASH] if sys.platform == "linux" else []
    child = subprocess.Popen(
        [*leash, sys.executable, *torchrun, str(REPOSITORY / program), *words],
        env=os.environ | {"PROGRESS_SECONDS": str(_PROGRESS_SECONDS)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,  # so that Ctrl-C reaches only this process, which then sends one SIGTERM
    )
    said = []
    with child:
        try:
            for line in child.stdout:
                print(line, end="", flush=True)
                said.append(line.strip())
        except BaseException:
            child.terminate()
            for line in child.stdout:
                print(line, end="", flush=True)
            raise
    if child.returncode:
        errors = [found[1] for found in map(_ERROR.match, said) if found]
        last = next(filter(None, reversed(said)), "it said nothing")
        raise ValueError(errors[0] if errors else f"{program} ended with status {child.returncode}: {last}")
