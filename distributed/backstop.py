"""Kills a process if none of its Python threads can run, because native code holds the interpreter's lock.

A helper process, `python backstop.py PID`, waits for messages of the watched process. If no message arrives
in time, the helper makes the watched process print the stacks of its threads, and kills it. Time in which the
helper or the watched process was suspended (SIGSTOP) does not count. Python's faulthandler also has a timer,
but this timer would count such time.
"""

import contextlib
import faulthandler
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

_TICK_SECONDS = 0.5
_PRINT_SECONDS = 2.0  # time to print the stacks before the kill
_DUMP_SIGNAL = signal.SIGQUIT  # Python does not use this signal; Ctrl-\ sends it


class Backstop:
    """Starts a helper process that kills this process if `renew` is not called in time.

    `renew(seconds)` sets the time limit for the next call of `renew`. If the limit is exceeded, the helper
    first makes this process print the stacks of its threads.
    """

    def __init__(self) -> None:
        faulthandler.register(
            _DUMP_SIGNAL, all_threads=True
        )  # the handler does not need the interpreter's lock
        command = [sys.executable, "-I", "-S", __file__, str(os.getpid())]
        self._helper = subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0)
        os.set_blocking(self._helper.stdin.fileno(), False)

    def renew(self, seconds: float) -> None:
        with contextlib.suppress(OSError):  # the helper has ended, or is stopped and its pipe is full
            self._helper.stdin.write(f"{seconds}\n".encode())

    def close(self) -> None:
        self._helper.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):  # a forked child may still hold the pipe
            self._helper.wait(timeout=4 * _TICK_SECONDS)
        faulthandler.unregister(_DUMP_SIGNAL)


def is_stopped(process: int) -> bool:
    """Returns whether a process is suspended, for example by SIGSTOP or a debugger.

    Returns False on systems without /proc.

    process: Process ID (PID).
    """
    with contextlib.suppress(OSError, IndexError):
        fields = Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()
        return fields[0] in (b"T", b"t")
    return False


def _watch(process: int) -> None:
    # Each line on stdin is a message: the number of seconds until the next line must arrive.
    limit, waited, last = float("inf"), 0.0, time.monotonic()
    while os.getppid() == process:
        is_readable = select.select([0], [], [], _TICK_SECONDS)[0]
        now = time.monotonic()
        passed, last = now - last, now
        if is_readable:
            lines = os.read(0, 2**16).split()
            if not lines:
                return
            limit, waited = float(lines[-1]), 0.0
        elif not is_stopped(process):
            waited += min(passed, 2 * _TICK_SECONDS)  # if more time has passed, this helper was stopped
        if waited > limit:
            os.kill(process, _DUMP_SIGNAL)
            time.sleep(_PRINT_SECONDS)
            print(
                f"error: process {process} ran no Python code for {waited:.0f} s. It is killed. The stacks "
                "of its threads are printed above.",
                file=sys.stderr,
            )
            os.kill(process, signal.SIGKILL)
            return


if __name__ == "__main__":
    for signal_number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(signal_number, signal.SIG_IGN)  # the watched process decides when it ends
    with contextlib.suppress(ProcessLookupError):  # the process has just ended
        _watch(int(sys.argv[1]))
