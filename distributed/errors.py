"""If one rank fails, ends all ranks together, with one message.

Otherwise eight ranks would print eight tracebacks, or seven ranks would wait forever for the failed one.
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
from distributed.backend import all_gather_objects
from distributed.world import is_elastic, is_main, num_nodes, rank

EXIT_FAILURE = 1


@contextlib.contextmanager
def collective_errors() -> Iterator[None]:
    """Context manager for a block that all ranks run. If it fails on any rank, all ranks end with status 1.

    The block itself must not communicate. Rank 0 prints one line: the message of the first rank that failed.
    If the exception is neither a ValueError nor a lack of memory, the failing rank also prints a traceback.
    """
    failure = None
    try:
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
    """Ends all ranks with status 1. All ranks call it. Rank 0 prints the message.

    failed_rank: Rank that the message is about. The message names it, unless it is rank 0.
    """
    log.error(message, failed_rank=failed_rank, on_console=is_main())
    # Wait until the message is printed: torchrun ends all ranks as soon as one exits.
    all_gather_objects(None)
    raise SystemExit(EXIT_FAILURE)


@contextlib.contextmanager
def local_errors() -> Iterator[None]:
    """Context manager that turns a ValueError into one printed line, and ends this rank with status 1.

    For code that runs before the process group exists. After that, use `collective_errors`.
    """
    try:
        yield
    except ValueError as error:
        log.error(error, failed_rank=rank())
        raise SystemExit(EXIT_FAILURE) from None


@contextlib.contextmanager
def connection_errors(is_already_reported: Callable[[], bool]) -> Iterator[None]:
    """Context manager for code that communicates. If the connection to a rank is lost, ends this rank.

    The exit status is 1. The rank prints a message of one line. The traceback goes to its log file.

    is_already_reported: Function that returns whether the watchdog, which detects hanging ranks, is about to
    end all ranks. If it returns True, the exception is raised again without a message.
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
        log.error(f"{what}. {cause} {hint}{restart_advice()}.", failed_rank=rank())
        raise SystemExit(EXIT_FAILURE) from None


@contextlib.contextmanager
def memory_errors(advice: str, *, folder: Path | None = None) -> Iterator[None]:
    """Context manager that turns an out-of-memory error into one printed line, and ends this rank.

    The exit status is 1. The line contains `advice`, such as "lower eval_batch_size". The traceback goes to
    this rank's log file.

    folder: Folder for a snapshot of the CUDA device's memory. If None, no snapshot is written.
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
    """Returns a text such as "out of memory (tried to allocate 2.00 GiB)". None for any other error.

    If the size is unknown, the text is only "out of memory".
    """
    text = str(error)
    is_known = isinstance(error, (MemoryError, torch.OutOfMemoryError))
    if not is_known and getattr(error, "errno", None) != errno.ENOMEM and "can't allocate memory" not in text:
        return None
    match = re.search(r"[Tt]ri?e?d? to allocate ([\d.]+ \w+)", text)
    return f"out of memory (tried to allocate {match[1]})" if match else "out of memory"


def _write_snapshot(folder: Path | None) -> str:
    """Writes a snapshot of the CUDA device's memory. Returns a text such as "; memory snapshot: <path> ...".

    Returns "" if nothing was written: there is no folder, no CUDA device, or the write failed.
    """
    if folder is None or not torch.cuda.is_initialized():
        return ""
    path = folder / f"memory_{rank()}.pickle"
    try:
        torch.cuda.memory._dump_snapshot(str(path))
    except (OSError, RuntimeError):
        return ""
    return f"; memory snapshot: {path} (open it at pytorch.org/memory_viz)"


def restart_advice() -> str:
    """Returns advice for a user who has lost a rank.

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
    """Returns the reason of a lost connection, such as "Connection closed by peer". None for other errors.

    Recognizes errors of gloo, NCCL and the key-value store.
    """
    text = str(error)
    if "gloo/transport" in text:  # "[file:line] reason. Typical causes."
        text = text.partition("] ")[2].partition(". ")[0]
    elif not isinstance(error, (dist.DistBackendError, dist.DistNetworkError)):
        return None
    return " ".join(text.partition("\n")[0].split())
