"""One outcome for all ranks: what rank 0 decides all hold, what fails on one ends all, told once.

Without this, eight ranks print eight tracebacks, or seven of them wait forever for the one that failed.
"""

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import NoReturn

from parallel import log
from parallel.process_group import is_main, rank, rendezvous_store, world_size

EXIT_FAILURE = 1


def decide_on_rank_0(decide: Callable[[], str | None]) -> str:
    """Runs `decide` on rank 0, before there is a process group, and returns its text on every rank.

    All ranks call it.

    Its ValueError is printed as one line and ends every rank with status 1. None means that there is nothing
    to run (--help was asked for): every rank ends with status 0.
    """
    if is_main():
        text, status = None, EXIT_FAILURE
        try:
            text, status = decide(), 0
        except ValueError as error:
            log.error(error)
        except SystemExit as error:  # argparse has told the user already
            status = error.code if isinstance(error.code, int) else EXIT_FAILURE
        finally:
            if world_size() > 1:
                rendezvous_store().set("decision", json.dumps({"text": text, "status": status}))
    else:
        decision = json.loads(rendezvous_store().get("decision"))  # waits until rank 0 has decided
        text, status = decision["text"], decision["status"]
    if text is None:
        raise SystemExit(status)
    return text


@contextlib.contextmanager
def shared_outcome() -> Iterator[None]:
    """Runs a block that may fail on some ranks only: then all ranks go on, or all end.

    A ValueError is a person's mistake: rank 0 prints the message of the lowest failing rank, one line.
    Anything else is ours: the failing rank prints its traceback. All ranks enter; the block itself must not
    communicate.
    """
    failure = None
    try:
        yield
    except ValueError as error:
        failure = str(error)
    except Exception as error:
        log.exception(error)
        failure = f"{type(error).__name__}: {error}"
    failures = _all_gather(failure)
    failing = [number for number, message in enumerate(failures) if message is not None]
    if not failing:
        return
    if is_main():
        log.error(failures[failing[0]], failed_rank=failing[0])
    _all_gather(None)  # nobody leaves before it is printed: torchrun ends all ranks when the first one goes
    raise SystemExit(EXIT_FAILURE)


def end_together(message: str) -> NoReturn:
    """Ends all ranks with status 1, and one line. All ranks call it, for a reason that all of them know."""
    if is_main():
        log.error(message)
    _all_gather(None)  # nobody leaves before it is printed
    raise SystemExit(EXIT_FAILURE)


@contextlib.contextmanager
def own_outcome() -> Iterator[None]:
    """Before there is a group: a ValueError on this rank is one line and its end; torchrun ends the rest."""
    try:
        yield
    except ValueError as error:
        log.error(error, failed_rank=rank())
        raise SystemExit(EXIT_FAILURE) from None


def _all_gather(value: str | None) -> list[str | None]:
    if world_size() == 1:
        return [value]
    import torch.distributed as dist

    values: list[str | None] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values
