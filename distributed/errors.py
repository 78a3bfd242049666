"""Context managers that end ranks with a short error message, instead of a traceback from each rank.

`collective_errors` ends all ranks if one fails. Without it, the other ranks could wait forever for the failed
one. `local_errors`, `connection_errors` and `memory_errors` end only the rank that fails.
"""

import contextlib
import errno
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from distributed import log
from distributed.collectives import all_gather_objects
from distributed.world import is_elastic, is_main, is_under_torchrun, num_nodes, rank

EXIT_FAILURE = 1
_OF_PATHS = (errno.EACCES, errno.ENAMETOOLONG)  # errors of a path that the user has chosen


@contextlib.contextmanager
def collective_errors() -> Iterator[None]:
    """Context manager that exits on all ranks with status 1 if any rank fails.

    All ranks enter it. Rank 0 prints the error message of the lowest rank that raised an exception. If the
    exception is neither a ValueError nor an out-of-memory error, each failing rank also prints its traceback.
    The block must not communicate with other ranks, because they would wait forever for a failed rank.
    """
    failure = None
    try:
        with path_errors():
            yield
    except ValueError as error:
        failure = str(error)
    except Exception as error:
        failure = _lack_of_memory(error)
        log.exception(error, on_console=failure is None)
        failure = failure or f"{type(error).__name__}: {error}"
    failures = all_gather_objects(failure)
    failing = [number for number, message in enumerate(failures) if message is not None]
    if failing:
        abort_all(failures[failing[0]], failed_rank=failing[0])


def abort_all(message: str, *, failed_rank: int = 0) -> NoReturn:
    """Prints an error message on rank 0, then exits on all ranks with status 1.

    All ranks call it.

    failed_rank: Rank that the message is about. If it is not 0, its number is added to the message.
    """
    log.error(message, failed_rank=failed_rank, on_console=is_main())
    # Wait until the message is printed: torchrun ends all ranks as soon as one exits.
    all_gather_objects(None)
    raise SystemExit(EXIT_FAILURE)


@contextlib.contextmanager
def local_errors() -> Iterator[None]:
    """Context manager that prints a ValueError as one line, and exits on this rank with status 1.

    Use it before the process group exists. After that, use `collective_errors`.
    """
    try:
        with path_errors():
            yield
    except ValueError as error:
        log.error(error, failed_rank=rank())
        raise SystemExit(EXIT_FAILURE) from None


@contextlib.contextmanager
def path_errors() -> Iterator[None]:
    """Context manager that converts two kinds of OSError into a ValueError with advice.

    The two kinds are: a path is too long, and this user may not access a path. Other errors do not change.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _OF_PATHS or error.filename is None:
            raise
        raise ValueError(f"{error.filename}: {error.strerror}. Choose another path.") from error


@contextlib.contextmanager
def connection_errors(is_already_reported: Callable[[], bool]) -> Iterator[None]:
    """Context manager that exits with status 1 if the connection to another rank is lost.

    Prints one line. The traceback goes to this rank's log file.

    is_already_reported: Function that returns whether the watchdog (`distributed.watchdog`) is about to end
    all ranks. If the result is True, the exception is raised again without a message, because the watchdog
    prints its own.
    """
    try:
        yield
    except RuntimeError as error:
        reason = lost_connection(error)
        if reason is None or is_already_reported():
            raise
        log.exception(error, on_console=False)
        what = f"lost the connection to another rank ({reason})"
        cause = "Its process or node has terminated, or the network failed."
        is_nccl = isinstance(error, dist.DistBackendError)
        hint = "Set NCCL_DEBUG=INFO to print the cause. " if is_nccl else ""
        if is_under_torchrun():
            hint += "torchrun's line with local_rank names the rank of this node that ended first. "
        message = f"{what}. {cause} {hint}{restart_advice()}."
        log.error(message, failed_rank=rank(), is_consequence=True)
        raise SystemExit(EXIT_FAILURE) from None


@contextlib.contextmanager
def memory_errors(advice: str, *, folder: Path | None = None) -> Iterator[None]:
    """Context manager that prints an out-of-memory error as one line, and exits with status 1.

    Only the rank that is out of memory prints and exits. The traceback goes to this rank's log file.

    advice: Text that is added to the line, such as "lower eval_batch_size". folder: Folder for a snapshot of
    the GPU's memory. If None, no snapshot is written.
    """
    try:
        yield
    except (MemoryError, OSError, RuntimeError) as error:
        reason = _lack_of_memory(error)
        if reason is None:
            raise
        log.exception(error, on_console=False)
        log.error(f"{reason}: {advice}{_write_snapshot(folder)}", failed_rank=rank())
        raise SystemExit(EXIT_FAILURE) from None


def _lack_of_memory(error: BaseException) -> str | None:
    text = str(error)
    is_known = isinstance(error, (MemoryError, torch.OutOfMemoryError))
    if not is_known and getattr(error, "errno", None) != errno.ENOMEM and "can't allocate memory" not in text:
        return None
    match = re.search(r"[Tt]ri?e?d? to allocate ([\d.]+ \w+)", text)
    return f"out of memory (tried to allocate {match[1]})" if match else "out of memory"


def _write_snapshot(folder: Path | None) -> str:
    # Returns the end of the error message: "" if nothing was written.
    if folder is None or not torch.cuda.is_initialized():
        return ""
    path = folder / f"memory_{rank()}.pickle"
    try:
        torch.cuda.memory._dump_snapshot(str(path))
    except (OSError, RuntimeError):
        return ""
    return f"; memory snapshot: {path} (open it at pytorch.org/memory_viz)"


def restart_advice() -> str:
    """Returns advice for a user whose run lost a process or a machine.

    Example: "With --max-restarts, torchrun restarts all ranks". The text has no full stop at its end.
    """
    advice = "With --max-restarts, torchrun restarts all ranks"
    if is_elastic():
        return f"{advice} on the remaining nodes"
    if num_nodes() == 1:
        return advice
    return (
        f"{advice}, unless the node of --rdzv-endpoint is lost. If it is lost, start the job again on all "
        "nodes, or let a scheduler do it (docs/many_machines.md)"
    )


def lost_connection(error: BaseException) -> str | None:
    """Returns why a connection to another rank was lost, such as "Connection closed by peer".

    Recognizes errors of gloo, NCCL and the key-value store. For any other error, returns None.
    """
    text = str(error)
    if "gloo/transport" in text:  # "[file:line] reason. Typical causes."
        text = text.partition("] ")[2].partition(". ")[0]
    elif not isinstance(error, (dist.DistBackendError, dist.DistNetworkError)):
        return None
    return " ".join(text.partition("\n")[0].split())
