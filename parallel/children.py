"""Processes that do not outlive the one that started them."""

import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1  # of Linux's prctl.h
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None  # loaded before a fork, which may not load


def end_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Asks the system to send this process a signal when its parent ends, however that ends.

    A child that is forked holds the connections of its parent open: as long as it lives, other ranks do not
    learn that its parent is gone. Elsewhere than on Linux it does nothing.
    """
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, number)
