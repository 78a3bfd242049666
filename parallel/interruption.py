"""Asked to stop (Ctrl-C, a scheduler's SIGTERM or SIGUSR1), all ranks agree on the step after which they do.

A signal may reach one rank or all, at any moment, also in the middle of a collective. So the handler only
takes note of it, and ranks ask each other between steps. A rank that does not come to ask, because it waits
for one that is gone, is ended by a thread.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import socket
import sys
import threading

from parallel import log

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
EXIT_STUCK = 125  # of a rank that was asked to stop, and could not
_GRACE_SECONDS = 20  # from the signal to the first question; torchrun kills after 30


class Interruption:
    """Around the steps of a run: within it, the signals ask instead of ending the process.

    Entered after the reader is forked, which would else write its own signals into our pipe.
    """

    def __init__(self):
        self._signal: signal.Signals | None = None
        self._is_heard = threading.Event()

    def all_reduce_request(self) -> bool:
        """Whether any rank was asked to stop; all ranks call it, between steps, and get the same answer."""
        import torch

        from parallel.collectives import all_reduce_sum_

        is_asked = bool(all_reduce_sum_(torch.tensor(int(self._signal is not None))))
        if is_asked:
            self._is_heard.set()
        return is_asked

    def __enter__(self) -> Interruption:
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._wakeup_before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        threading.Thread(target=self._listen, name="interruption", daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self._is_heard.set()
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        self._writer.close()  # ends the thread

    def _note(self, number: int, _frame) -> None:
        self._signal = signal.Signals(number)

    def _listen(self) -> None:
        """Learns of a signal at once, while the main thread may be anywhere outside Python."""
        with contextlib.closing(self._reader):
            while received := self._reader.recv(1):
                number = received[0]
                if number not in SIGNALS:
                    continue
                self._signal = signal.Signals(number)
                if not self._is_heard.wait(_GRACE_SECONDS):
                    log.warning(
                        f"{self._signal.name} came {_GRACE_SECONDS} s ago and this rank has not come to the "
                        "end of a step: it ends without saving"
                    )
                    faulthandler.dump_traceback(sys.stderr)
                    os._exit(EXIT_STUCK)
