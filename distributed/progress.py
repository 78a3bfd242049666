"""The progress display of long work: a bar on a terminal, otherwise a plain line once a minute.

The environment variable PROGRESS_SECONDS sets the time between plain lines.
"""

import io
import os
import sys
from collections.abc import Callable
from typing import Any

from tqdm import tqdm

from distributed import log
from distributed.world import is_main

_BAR = "{desc} {n_fmt} of {total_fmt} |{bar:12}| {elapsed}, {remaining} left{postfix}"
_LINE = "{desc}: {n:.0f} of {total_fmt} {unit} in {elapsed}, {remaining} left{postfix}"


class Progress(tqdm):
    """A tqdm progress bar on rank 0, without tqdm's background thread.

    If stderr is not a terminal, rank 0 prints a plain line once a minute instead. The line is also written to
    the log file.

    Args:
        shown: Function that returns the text to show after the bar. It is called whenever the bar is drawn.
        options: Options of tqdm, such as total. `unit` is a plural, such as "steps".
    """

    monitor_interval = 0

    def __init__(self, *, shown: Callable[[], str] | None = None, **options: Any):
        self._shown, self._is_plain = shown, not sys.stderr.isatty()
        if self._is_plain:
            seconds = float(os.environ.get("PROGRESS_SECONDS", 60))
            options |= {"file": io.StringIO(), "mininterval": seconds, "bar_format": _LINE}
        options = {"mininterval": 0.2, "miniters": 0, "disable": not is_main(), "bar_format": _BAR} | options
        super().__init__(dynamic_ncols=True, **options)

    def close(self) -> None:
        if self._is_plain and not self.disable and self.n == self.last_print_n:
            self.leave = False  # the last line has said the same
        super().close()

    def display(self, msg: str | None = None, pos: int | None = None) -> bool | None:
        if self._shown is not None and msg is None:
            self.postfix = self._shown()
        if not self._is_plain:
            return super().display(msg, pos)
        began = getattr(self, "start_t", self._time())  # tqdm also calls this method before it starts
        if msg is None and (self.n > self.initial or self._time() - began >= self.mininterval):
            log.note(str(self))
        return True
