"""What a run says to a person: rank 0 on the console, every rank in its file, warnings of all in both.

The warnings of libraries (what they log as WARNING or above, and Python's `warnings`) go the same way as
ours, through the standard library's logging:

    say                rank 0: stdout                     every rank: <run>/logs/rank_<r>.log
    warn, libraries    every rank: stderr, a text once    every rank: its file, each time
    print_error        the rank that calls it: stderr     its file

On stderr a message is one line, which names the rank where there are several; the file adds time and rank,
and has the tracebacks. What C++ code prints by itself does not pass here. Takes no torch.
"""

import contextlib
import io
import logging
import sys
import traceback
from pathlib import Path
from typing import TextIO

from parallel.process_group import is_main, rank, world_size

_logger = logging.getLogger("run")
_logger.setLevel(logging.INFO)


def set_up_console() -> None:
    """Leads the warnings of the libraries loaded so far to the console, and to the file once there is one.

    Called when a program starts, and again after loading libraries that keep their loggers apart (torch,
    wandb): what they print themselves then ends below WARNING. A second call does no harm.
    """
    logging.captureWarnings(True)
    logging.getLogger().addHandler(_messages)
    console = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    for logger in list(logging.root.manager.loggerDict.values()):
        if isinstance(logger, logging.Logger):  # some are mere places in the tree
            for handler in logger.handlers:
                if getattr(handler, "stream", None) in console:
                    handler.addFilter(_is_below_warning)
            if not logger.propagate:
                logger.addHandler(_messages)


def log_to_folder(folder: Path) -> None:
    """From here on `folder`/logs/rank_<r>.log receives this rank's messages, and the exception that ends it.

    Every rank calls it, once the folder is known. Where the file cannot be written, one warning says so.
    """
    set_up_console()
    path = folder / "logs" / f"rank_{rank()}.log"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _messages.open_file(path)
    except OSError as error:
        warn(_file_fails(path, error))
    if sys.excepthook is not _log_uncaught:
        _messages.show_uncaught, sys.excepthook = sys.excepthook, _log_uncaught


def log_file() -> TextIO | None:
    """The open file of this rank, unbuffered, for what must write without logging (the watchdog).

    None before `log_to_folder`, and where that failed.
    """
    return _messages.file


def say(message: str) -> None:
    """As it is on stdout, from rank 0 for all; may have several lines."""
    set_up_console()
    _logger.info(message)


def warn(message: str) -> None:
    """One line on stderr, naming the rank where there are several; once for each text."""
    set_up_console()
    _logger.warning(message)


def print_error(error: object, *, where: str = "") -> None:
    """One line on stderr.

    where: what follows the word `error`, such as " (rank 2)".
    """
    set_up_console()
    _logger.error(str(error), extra={"where": where})


def print_traceback(error: BaseException) -> None:
    """Where an exception comes from, on stderr and in this rank's file."""
    traceback.print_exception(error)
    _log_traceback(error)


class _Messages(logging.Handler):
    """Shows each record on the console if it belongs there, and writes it into the file if there is one.

    What fails here is told, never raised.
    """

    def __init__(self):
        super().__init__()
        self.file: TextIO | None = None
        self.show_uncaught = sys.excepthook
        self.shown: set[str] = set()
        self.addFilter(_is_for_a_person)

    def open_file(self, path: Path) -> None:
        # Unbuffered and appending: a message is one write, so that a forked reader and faulthandler can write
        # into the same file, and what a full disk refuses is not tried again when the process ends.
        raw = path.open("ab", buffering=0)
        file = io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", write_through=True)
        if self.file is not None:
            self.file.close()
        self.file = file
        self.setFormatter(logging.Formatter(f"%(asctime)s rank {rank()} %(levelname)s %(name)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if self.file is not None:
                self._write(record)
            if getattr(record, "is_shown", True):
                self._show(record.levelno, _text(record), where=getattr(record, "where", None))
        except Exception:
            self.handleError(record)

    def _write(self, record: logging.LogRecord) -> None:
        try:
            self.file.write(f"{self.format(record)}\n")
        except OSError as error:  # the next message tries again: by then the disk may have room
            self._show(logging.WARNING, _file_fails(Path(self.file.name), error))

    def _show(self, level: int, text: str, where: str | None = None) -> None:
        if level < logging.WARNING:
            if is_main():
                _print(text, sys.stdout)
            return
        if where is None:
            where = f" (rank {rank()})" if world_size() > 1 else ""
        line = f"{'error' if level >= logging.ERROR else 'warning'}{where}: {' '.join(text.split())}"
        if level < logging.ERROR:
            if line in self.shown:
                return
            self.shown.add(line)
        _print(line, sys.stderr)


def _text(record: logging.LogRecord) -> str:
    """What the console shows of a record: no traceback, but the exception that it is about."""
    if record.exc_info and record.exc_info[0]:
        kind, error, _ = record.exc_info
        return f"{record.getMessage()} ({kind.__name__}: {error})"
    return record.getMessage()


def _print(text: str, stream: TextIO) -> None:
    """One write, not into the line of a progress bar, which can only be there if tqdm has been loaded."""
    tqdm = sys.modules.get("tqdm")
    bars_aside = tqdm.tqdm.external_write_mode(stream, nolock=True) if tqdm else contextlib.nullcontext()
    with bars_aside:
        stream.write(f"{text}\n")
        stream.flush()


def _file_fails(path: Path, error: OSError) -> str:
    return f"{path} cannot be written, the run goes on without it ({error.strerror or error})"


def _is_for_a_person(record: logging.LogRecord) -> bool:
    return record.name == _logger.name or record.levelno >= logging.WARNING


def _is_below_warning(record: logging.LogRecord) -> bool:
    return record.levelno < logging.WARNING


def _log_uncaught(kind: type[BaseException], error: BaseException, trace) -> None:
    """In place of sys.excepthook, which it calls."""
    _log_traceback(error)
    _messages.show_uncaught(kind, error, trace)


def _log_traceback(error: BaseException) -> None:
    _logger.error("ended by an exception", exc_info=error, extra={"is_shown": False})


_messages = _Messages()
