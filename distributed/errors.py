"""Ends all ranks together, with one message, when one of them fails.

Otherwise eight ranks would print eight tracebacks, or seven would wait forever for the one that failed.
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
from distributed.process_group import all_gather_objects, is_elastic, is_main, num_nodes, rank

EXIT_FAILURE = 1


@contextlib.contextmanager
def collective_errors() -> Iterator[None]:
    """Ends all ranks with status 1 if the block has failed on any; otherwise all continue.

    All ranks enter; the block itself must not communicate. Rank 0 prints the message of the lowest failing
    rank in one line; for other exceptions than ValueError (bugs), the failing rank prints a traceback too.
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
    """Ends all ranks with status 1; rank 0 prints the message, about `failed_rank`. All ranks call it."""
    if is_main():
        log.error(message, failed_rank=failed_rank)
    all_gather_objects(
        None
    )  # nobody leaves before it is printed: torchrun ends all ranks when the first one goes
    raise SystemExit(EXIT_FAILURE)


@contextlib.contextmanager
def local_errors() -> Iterator[None]:
    """Ends this rank with one line for a ValueError; to be used before the process group exists."""
    try:
        yield
    except ValueError as error:
        log.error(error, failed_rank=rank())
        raise SystemExit(EXIT_FAILURE) from None


@contextlib.contextmanager
def connection_errors(is_already_reported: Callable[[], bool]) -> Iterator[None]:
    """Turns a lost connection to another rank into a one-line message and the end of this rank.

    The traceback goes to this rank's log file. is_already_reported: returns whether the watchdog is about to
    end all ranks; then the exception is only a consequence, and is raised again.
    """
    try:
        yield
    except RuntimeError as error:
        reason = lost_connection(error)
        if reason is None or is_already_reported():
            raise
        log.exception(error, on_console=False)
        gone = f"lost the connection to another rank ({reason}): its process or node is gone"
        of_nccl = "NCCL_DEBUG=INFO prints why; " if isinstance(error, dist.DistBackendError) else ""
        log.error(f"{gone}; {of_nccl}{restart_advice()}", failed_rank=rank())
        raise SystemExit(EXIT_FAILURE) from None


@contextlib.contextmanager
def memory_errors(advice: str, *, folder: Path | None = None) -> Iterator[None]:
    """Turns an out-of-memory error into a one-line message with advice, and the end of this rank.

    The traceback goes to this rank's log file. folder: for a snapshot of a CUDA device's memory.
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
    """Returns a phrase if the error is a lack of memory, with the size that was asked for; None otherwise."""
    text = str(error)
    is_known = isinstance(error, (MemoryError, torch.OutOfMemoryError))
    if not is_known and getattr(error, "errno", None) != errno.ENOMEM and "can't allocate memory" not in text:
        return None
    asked = re.search(r"[Tt]ri?e?d? to allocate ([\d.]+ \w+)", text)
    return f"out of memory ({asked[1]} more are not there)" if asked else "out of memory"


def _write_snapshot(folder: Path | None) -> str:
    """Writes a snapshot of a CUDA device's memory into a folder; returns words with its path, or ""."""
    if folder is None or not torch.cuda.is_initialized():
        return ""
    path = folder / f"memory_{rank()}.pickle"
    try:
        torch.cuda.memory._dump_snapshot(str(path))
    except (OSError, RuntimeError):
        return ""
    return f"; what fills it is in {path} (drop it on pytorch.org/memory_viz)"


def restart_advice() -> str:
    """Returns a sentence of advice for the case that processes of other ranks have ended."""
    advice = "with --max-restarts torchrun starts all ranks again"
    if is_elastic():
        return f"{advice}, on the nodes that are there"
    if num_nodes() == 1:
        return advice
    return (
        f"{advice}, but not where the node of --rdzv-endpoint is gone: then start the job again on all "
        "nodes, as a scheduler does by itself (docs/many_machines.md)"
    )


def lost_connection(error: BaseException) -> str | None:
    """Returns the reason if gloo, NCCL or the store has lost the connection to a rank; None otherwise."""
    text = str(error)
    if "gloo/transport" in text:  # "[file:line] reason. Typical causes."
        text = text.partition("] ")[2].partition(". ")[0]
    elif not isinstance(error, (dist.DistBackendError, dist.DistNetworkError)):
        return None
    return " ".join(text.partition("\n")[0].split())
