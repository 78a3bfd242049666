"""Messages of a run, on the console and in a log file of each rank: `from distributed import log`.

    function           console                                    file <run>/logs/rank_<r>.log
    info               stdout of rank 0                           of every rank
    note               stderr of rank 0                           of every rank
    warning            stderr of every rank, each text once       of every rank, each time
    error, exception   stderr of the calling rank                 of the calling rank

On stderr, each warning and error is one line, with the rank if there are several ranks. Only `exception`
prints a traceback. The file adds time, rank and tracebacks. After `capture_library_warnings`, warnings of
libraries (from logging or Python's `warnings`) are printed in this format too, except those of C++ code.
"""

import contextlib
import io
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TextIO

from distributed.world import is_main, rank, world_size
from runtime import print_interrupted
from runtime.reading import printable
from runtime.writing import Patient, open_to_append, write_json

_MAX_NAMED = 8  # ranks in one sentence
_TORCHRUN_SECONDS = 2  # in which torchrun has seen that a process ended


class _Console(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.shown: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if record.levelno >= logging.WARNING:
                self._show_line(record)
            elif is_main():
                stream = sys.stderr if hasattr(record, "is_note") else sys.stdout
                _print(getattr(record, "colored", None) or printable(record.getMessage()), stream)
        except OSError as failure:  # a full disk
            text = f"warning: {_describe_failure('standard output', failure)}"
            if text not in self.shown:
                self.shown.add(text)
                with contextlib.suppress(OSError):
                    _print(text, sys.stderr)
        except Exception:
            self.handleError(record)

    def _show_line(self, record: logging.LogRecord) -> None:
        text, is_error = record.getMessage(), record.levelno >= logging.ERROR
        if record.exc_info and record.exc_info[0]:  # the traceback is in the file
            text += f" ({record.exc_info[0].__name__}: {record.exc_info[1]})"
        where = getattr(record, "where", f" ({name_ranks([rank()])})" if world_size() > 1 else "")
        line = printable(f"{'error' if is_error else 'warning'}{where}: {' '.join(text.split())}")
        once = getattr(record, "once", line)
        if is_error or once not in self.shown:
            self.shown.add(once)
            _print(line, sys.stderr)


class _RankFile(logging.StreamHandler):
    # If the disk is full, prints one warning on the console.
    def __init__(self, path: Path):
        # Write each message unbuffered, in one call. A forked process and faulthandler can then write to the
        # same file. If the disk is full, nothing remains to be written when the process ends.
        raw, encoding = open_to_append(path), {"encoding": "utf-8", "errors": "backslashreplace"}
        super().__init__(io.TextIOWrapper(raw, write_through=True, **encoding))
        self.path = path
        self.setFormatter(logging.Formatter(f"%(asctime)s rank {rank()} %(levelname)s %(name)s: %(message)s"))

    def format(self, record: logging.LogRecord) -> str:
        # A terminal that shows the file later would obey control characters.
        return printable(super().format(record))

    def handleError(self, record: logging.LogRecord) -> None:
        text = _describe_failure(self.path, sys.exc_info()[1])
        _console.handle(logging.makeLogRecord({"levelno": logging.WARNING, "msg": text}))


class _Forward(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        _logger.handle(record)


_console, _forward = _Console(), _Forward(logging.WARNING)
_file: _RankFile | None = None
_position: Callable[[int], str] | None = None
_logger = logging.getLogger("run")
_logger.setLevel(logging.INFO)
_logger.propagate = False
_logger.addHandler(_console)


def info(message: str) -> None:
    """Prints a message of one or several lines on stdout of rank 0."""
    _logger.info(message)


def warning(message: str) -> None:
    """Prints a warning as one line on stderr, with the rank if there are several ranks.

    The console shows each text only once. If the text is the same on all ranks, only rank 0 should call it.
    """
    _logger.warning(message)


@contextlib.contextmanager
def warn_once(name: str, *, then: str = "The run continues without it.") -> Iterator[None]:
    """Context manager that turns any `Exception` into a warning, so that the run continues.

    The console shows only the first warning with the same name and the same `then`. The log file of the rank
    has all of them.

    name: First words of the warning. Example: "the upload" gives "the upload failed (...)".
    then: Last sentence of the warning.
    """
    try:
        yield
    except Exception as failure:
        text = f"{name} failed ({type(failure).__name__}: {failure}). {then}"
        _logger.warning(text, extra={"once": f"{name} fails: {then}"})


def note(message: str, *, colored: str | None = None) -> None:
    """Prints a message about progress on stderr of rank 0.

    colored: The same text with ANSI color codes, for the terminal. It is printed without a check. Pass text
    from files or users through `runtime.reading.printable` first.
    """
    _logger.info(message, extra={"is_note": True, "colored": colored})


def error(
    message: object, *, failed_rank: int = 0, on_console: bool = True, is_consequence: bool = False
) -> None:
    """Prints an error as one line on stderr, as the reason why this rank ends.

    Does not end the process. Also writes the error to the log file of this rank, and to the file from which
    torchrun reads errors.

    failed_rank: Rank that failed. If it is not 0, its number is added to the text. on_console: If False, the
    error is only written to torchrun's file. If one error ends all ranks, pass True on only one of them.
    is_consequence: Whether another rank has failed before, so that torchrun should name that rank first.
    """
    where = f" ({name_ranks([failed_rank])})" if failed_rank else ""
    if on_console:
        _logger.error(str(message), extra={"where": where})
    leave_last_words(f"error{where}: {message}", is_consequence=is_consequence)


def exception(raised: BaseException, *, on_console: bool = True) -> None:
    """Writes the traceback of an exception into the log file of this rank.

    on_console: Whether to also print the traceback on stderr, and to write the exception to the file from
    which torchrun reads why this rank ends.
    """
    if on_console:
        sys.stderr.write(printable("".join(traceback.format_exception(raised))))
        leave_last_words(f"{type(raised).__name__}: {raised}")
    if _file is not None:
        exc_info = (type(raised), raised, raised.__traceback__)
        _file.handle(logging.LogRecord("run", logging.ERROR, "", 0, "ended by an exception", None, exc_info))


def leave_last_words(text: str, *, is_consequence: bool = False) -> None:
    """Writes the reason why this process ends into the file from which torchrun reads errors.

    torchrun prints the reason of the process that failed first. If one error ends several ranks, each of them
    must call this function. If this process has already written a reason, or if torchrun did not start it,
    nothing is written.

    is_consequence: Whether another rank has failed before. The reason then gets a later time, so that
    torchrun prints the reason of the other rank.
    """
    # torchrun counts whole seconds. It sees the end of a killed process later than other ranks do.
    delay = _TORCHRUN_SECONDS if is_consequence else 0
    path = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", os.devnull))
    if not path.exists():
        reason = {
            "message": " ".join(printable(text).split()),
            "extraInfo": {"timestamp": str(int(time.time()) + delay)},
        }
        with contextlib.suppress(OSError):
            write_json(path, {"message": reason})


def capture_library_warnings() -> None:
    """Prints warnings of libraries in the format of this module, also into the log file.

    Call it after importing the libraries. Some libraries, such as torch, do not pass their messages to
    Python's root logger. If such a library is imported later, its messages are not changed.
    """
    logging.captureWarnings(True)
    logging.getLogger().addHandler(_forward)
    console = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    loggers = [
        entry for entry in logging.root.manager.loggerDict.values() if isinstance(entry, logging.Logger)
    ]
    for logger in loggers:
        for handler in logger.handlers:
            if getattr(handler, "stream", None) in console:
                handler.addFilter(lambda record: record.levelno < logging.WARNING)
        if not logger.propagate and logger is not _logger:
            logger.addHandler(_forward)


def open_rank_file(folder: Path) -> None:
    """Opens the log file of this rank, `folder`/logs/rank_<r>.log. All ranks call it.

    From then on, messages are also written to this file. If an exception ends the process, its traceback is
    written there too. If the file cannot be written, prints a warning, and the run continues.
    """
    global _file
    path = folder / "logs" / f"rank_{rank()}.log"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        opened = _RankFile(path)
    except OSError as failure:
        warning(_describe_failure(path, failure))
        return
    if _file is not None:
        _logger.removeHandler(_file)
        _file.stream.close()
    _file = opened
    _logger.addHandler(_file)
    sys.excepthook = _log_last_exception


def _log_last_exception(_kind: object, raised: BaseException, _trace: object) -> None:
    is_interrupt = isinstance(raised, KeyboardInterrupt)
    exception(raised, on_console=not is_interrupt)
    if is_interrupt:
        print_interrupted()
        leave_last_words("interrupted")


def rank_file() -> TextIO | None:
    return None if _file is None else _file.stream


def rank_folder() -> Path | None:
    return None if _file is None else _file.path.parent


def locate_ranks(position: Callable[[int], str]) -> None:
    """Sets the text that messages add to a rank, such as "stage 1" in "rank 3 (stage 1)".

    position: Function that returns the text for a rank. Example: position(3) returns "stage 1".
    """
    global _position
    _position = position


def name_ranks(numbers: Sequence[int]) -> str:
    """Returns a text that names ranks, such as "rank 3" or "ranks 3, 5".

    In a run with pipeline or tensor parallelism, the text also contains positions, such as "rank 3 (stage
    1)". If there are more than 8 ranks, the text contains 8 of them and the number of the others.
    """
    chosen = numbers[:_MAX_NAMED]
    named = ", ".join(f"{number} ({_position(number)})" if _position else str(number) for number in chosen)
    more = f" and {len(numbers) - _MAX_NAMED} more" if len(numbers) > _MAX_NAMED else ""
    return f"rank{'s' if len(numbers) > 1 else ''} {named}{more}"


def _print(text: str, stream: TextIO) -> None:
    # Write in one call, after clearing a progress bar. There can be a bar only if tqdm is imported.
    tqdm, output = sys.modules.get("tqdm"), Patient(stream)
    with tqdm.tqdm.external_write_mode(stream, nolock=True) if tqdm else contextlib.nullcontext():
        output.write(f"{text}\n")
        output.flush()


def _describe_failure(path: Path | str, failure: BaseException | None) -> str:
    return f"cannot write {path} ({getattr(failure, 'strerror', failure)}). The run continues without it."
