"""Stops all ranks after the same step when a signal asks: Ctrl-C, the end of the terminal
(SIGHUP), or a scheduler's SIGTERM or SIGUSR1.

A signal may reach one rank or all, at any moment, also in the middle of a collective. So the handler only
sets a flag, which travels with the gradients of the step: a signal that comes too late for that stops all
ranks after the next one. A thread ends a rank that does not come to ask because it waits for another one that
is gone.
"""

import contextlib
import faulthandler
import os
import signal
import socket
import sys
import threading
import time
from types import FrameType

import torch
from torch import Tensor

from parallel import log
from parallel.collectives import all_ranks, barrier
from parallel.process_group import is_elastic, local_rank, num_nodes, world_size

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
EXIT_STUCK = 125  # the exit status of a rank that was asked to stop, and could not
EXIT_AGAIN = 123  # of one that has stopped, and that an elastic torchrun is to start again
_GRACE_SECONDS = 20  # from the signal, and from a question, to the next; torchrun kills after 30
_TICK_SECONDS = 0.5


def stop_signals() -> list[signal.Signals]:
    """Returns the signals that ask for a stop: SIGHUP does not where it is ignored, as under nohup."""
    is_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [number for number in SIGNALS if not (is_ignored and number == signal.SIGHUP)]


def end_torchrun() -> int:
    """Ends torchrun on every node, once all ranks have stopped because a signal came; all of them call it.

    A torchrun that got no signal would take the end of its processes for success, and wait five minutes for
    the other nodes at its exit barrier. An elastic one lives on, and starts its processes again on the nodes
    that are there, for the status that is returned.
    """
    barrier()  # until rank 0 has said everything
    if is_elastic():
        return EXIT_AGAIN
    if num_nodes() > 1 and local_rank() == 0 and os.getppid() > 1:
        os.kill(os.getppid(), signal.SIGTERM)
    return 0


class Interruption:
    """Context in which the signals ask for a stop instead of ending the process."""

    def __init__(self) -> None:
        self._is_requested = False
        self._all_stop = threading.Event()
        self._asked_at = 0.0
        self._last_requests: tuple[Tensor, torch.cuda.Event] | None = None

    def is_requested(self) -> bool:
        """Returns whether this rank was asked to stop."""
        return self._is_requested

    def is_agreed(self) -> bool:
        """Returns whether all ranks know that one was asked to stop, the same on all; sends no message."""
        return self._all_stop.is_set()

    def record_requests(self, requests: Tensor | None) -> None:
        """Records how many ranks were asked to stop, as all know after a step; all of them call it.

        None: the ranks exchanged nothing in this step. On CUDA the host would have to wait for the number: it
        reads the one of the step before.
        """
        self._asked_at = time.monotonic()
        if requests is None:
            return
        if requests.is_cuda:
            copied, ready = requests.to("cpu", non_blocking=True), torch.cuda.Event()
            ready.record()
            last, self._last_requests = self._last_requests, (copied, ready)
            if last is None:
                return
            requests, ready = last
            ready.synchronize()
        if requests:
            self._all_stop.set()

    def all_reduce_request(self) -> bool:
        """Returns on all ranks whether any was asked to stop; all of them call it where they do no steps."""
        self._asked_at = time.monotonic()
        if all_ranks().all_reduce_sum_(torch.tensor(int(self._is_requested))):
            self._all_stop.set()
        return self._all_stop.is_set()

    def __enter__(self) -> "Interruption":
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._wakeup_before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._handlers_before = {number: signal.signal(number, self._request) for number in stop_signals()}
        threading.Thread(target=self._listen, name="interruption", daemon=True).start()
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, *__: object) -> None:
        # Torchrun's own signal then comes late, and need not end what ends by itself: once all have stopped,
        # or by an error, which is told behind this block.
        ends = (self._all_stop.is_set() or error is not None) and world_size() > 1
        self._all_stop.set()
        for number, handler in self._handlers_before.items():
            signal.signal(number, signal.SIG_IGN if ends else handler)
        signal.set_wakeup_fd(self._wakeup_before)
        self._writer.close()  # ends the thread

    def _request(self, _number: int, _frame: FrameType | None) -> None:
        self._is_requested = True

    def _listen(self) -> None:
        # Python writes the number of a signal into the pipe at once; its handlers run only when the main
        # thread comes back from C++ code, which may be never.
        with contextlib.closing(self._reader):
            while received := self._reader.recv(1):
                if received[0] not in SIGNALS:
                    continue
                self._is_requested = True
                self._asked_at = time.monotonic()
                while not self._all_stop.wait(_TICK_SECONDS):
                    if time.monotonic() - self._asked_at < _GRACE_SECONDS:
                        continue
                    name = signal.Signals(received[0]).name
                    log.warning(
                        f"{name} came and for {_GRACE_SECONDS} s this rank has not come to the end of a "
                        "step: it ends without saving"
                    )
                    faulthandler.dump_traceback(sys.stderr)
                    os._exit(EXIT_STUCK)
