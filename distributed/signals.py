"""Stops all ranks after the same step if one receives a signal: Ctrl-C, SIGHUP, SIGTERM or SIGUSR1.

A signal may reach one rank or all ranks, at any moment, also during a collective. The handler therefore only
sets a flag. The ranks sum their flags together with the gradients. If a flag is set too late for one step,
all ranks stop after the next step. With local_steps > 1, the ranks sum their flags only when they merge
their weights.

If a rank that has received a signal does not finish its training step within 20 s, a thread ends this rank.
Example: the rank waits for another rank that has ended. A save or an evaluation has no time limit until a
second signal arrives.
"""

import contextlib
import faulthandler
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

import torch
from torch import Tensor

from distributed import log
from distributed.collectives import all_ranks, barrier
from distributed.world import is_elastic, is_under_torchrun, local_rank, num_nodes, world_size

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
EXIT_STUCK = 125  # exit status of a rank that was asked to stop, but did not finish its step
EXIT_AGAIN = 123  # exit status of a stopped rank that makes an elastic torchrun restart it
# If a rank that has received a signal finishes no training step for this long, it exits. torchrun kills it
# after 30 s.
_GRACE_SECONDS = 20
_TICK_SECONDS = 0.5


def stop_signals() -> list[signal.Signals]:
    """Returns the signals that stop a training run: SIGINT (Ctrl-C), SIGTERM, SIGHUP and SIGUSR1.

    If this process ignores SIGHUP (started with nohup), SIGHUP is left out.
    """
    is_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [signal_number for signal_number in SIGNALS if not (is_ignored and signal_number == signal.SIGHUP)]


def end_torchrun() -> int:
    """Ends torchrun on every machine of a run, after a signal has stopped all ranks.

    All ranks call it. A torchrun that did not receive the signal would otherwise wait for the other machines.
    On a single machine, torchrun ends by itself. Returns the exit status for this process, usually 0.

    If torchrun may continue with fewer machines (--nnodes MIN:MAX), this function does not end torchrun. The
    exit status is then 123, so that torchrun starts the processes again on the remaining machines.
    """
    if is_under_torchrun():
        log.info(
            "If torchrun received the signal, it ends with a traceback (SignalException). It is not an error."
        )
    barrier()  # wait until rank 0 has printed everything
    if is_elastic():
        return EXIT_AGAIN
    if is_under_torchrun() and num_nodes() > 1 and local_rank() == 0 and os.getppid() > 1:
        os.kill(os.getppid(), signal.SIGTERM)
    return 0


class Interruption:
    """Context manager to stop all ranks after the same training step if one receives a signal.

    An example of a signal is Ctrl-C. If a rank does not finish its training step within 20 s after a signal,
    the rank exits without saving.

    is_paused: Function that returns whether the ranks do something other than a training step, such as
    saving. During such work, there is no time limit until a second signal arrives.
    """

    def __init__(self, is_paused: Callable[[], bool] = lambda: False) -> None:
        self._is_paused, self._is_requested = is_paused, False
        self._all_stop = threading.Event()
        self._asked_at = 0.0
        self._last_requests: tuple[Tensor, torch.cuda.Event] | None = None

    def is_requested(self) -> bool:
        # Other ranks may not know it yet.
        return self._is_requested

    def is_agreed(self) -> bool:
        """Returns whether all ranks know that one of them received a signal to stop.

        If True, all ranks can stop after this step. The result is equal on all ranks. Does not communicate.
        """
        return self._all_stop.is_set()

    def record_requests(self, requests: Tensor | None) -> None:
        """Records whether any rank has received a signal to stop. All ranks call it after each step.

        If `requests` is not 0, `is_agreed` returns True from then on. On CUDA, `is_agreed` changes only at
        the next call with a tensor, so that the CPU does not wait for the GPU.

        requests: Number of stop requests of all ranks, a scalar tensor, equal on all ranks. If the ranks did
        not exchange requests in this step (local_steps > 1), None.
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
        """Returns on all ranks whether any rank received a signal to stop.

        All ranks call it, during work between training steps, such as an evaluation. It calls a collective.
        """
        self._asked_at = time.monotonic()
        if all_ranks().all_reduce_sum_(torch.tensor(int(self._is_requested))):
            self._all_stop.set()
        return self._all_stop.is_set()

    def __enter__(self) -> "Interruption":
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._wakeup_before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._handlers_before = {
            signal_number: signal.signal(signal_number, self._request) for signal_number in stop_signals()
        }
        threading.Thread(target=self._listen, name="interruption", daemon=True).start()
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, *__: object) -> None:
        # If this rank is about to end (all ranks stop, or after an error), ignore signals from now on:
        # torchrun's own signal may still arrive.
        ends = (self._all_stop.is_set() or error is not None) and world_size() > 1
        self._all_stop.set()
        for signal_number, handler in self._handlers_before.items():
            signal.signal(signal_number, signal.SIG_IGN if ends else handler)
        signal.set_wakeup_fd(self._wakeup_before)
        self._writer.close()  # ends the thread

    def _request(self, _number: int, _frame: FrameType | None) -> None:
        self._is_requested = True

    def _listen(self) -> None:
        # Python writes the number of a signal into the socket immediately. A signal handler runs only
        # when the main thread returns from C++ code, perhaps never.
        with contextlib.closing(self._reader):
            while received := self._reader.recv(1):
                if received[0] not in SIGNALS:
                    continue
                self._is_requested = True
                self._asked_at = time.monotonic()
                while not self._all_stop.wait(_TICK_SECONDS):
                    is_alone = not select.select([self._reader], [], [], 0)[0]  # no second signal came
                    if is_alone and self._is_paused():
                        self._asked_at = time.monotonic()
                    if time.monotonic() - self._asked_at < _GRACE_SECONDS:
                        continue
                    name = signal.Signals(received[0]).name
                    log.warning(
                        f"{name} received, but the current operation did not finish within "
                        f"{_GRACE_SECONDS} s. Exiting without saving."
                    )
                    faulthandler.dump_traceback(sys.stderr)
                    os._exit(EXIT_STUCK)
