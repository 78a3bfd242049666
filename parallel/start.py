"""All ranks of a run were started alike: the same code, command line, torch and number of ranks.

A node with an older checkout, or launched with another argument, would otherwise train something else without
a word. Takes no torch.
"""

import hashlib
import json
import socket
import sys
from datetime import timedelta
from importlib import metadata
from pathlib import Path

from parallel import log
from parallel.agreement import EXIT_FAILURE
from parallel.process_group import is_main, rank, rendezvous_store, world_size

_REPOSITORY = Path(__file__).resolve().parent.parent
_NOT_RUN = {"tests", "benchmarks"}


def check_same_start(*, timeout_seconds: float) -> None:
    """Ends all ranks with status 1, and one line of rank 0, unless all were started alike.

    All ranks call it, before there is a process group. A rank that does not come within the timeout is named.
    """
    if world_size() == 1:
        return
    store = rendezvous_store()
    timeout = timedelta(seconds=timeout_seconds)
    store.set(f"start/{rank()}", json.dumps(_facts()))
    if is_main():
        difference = None
        for other in range(1, world_size()):
            try:
                store.wait([f"start/{other}"], timeout)
            except RuntimeError:
                difference = (
                    f"rank {other} of {world_size()} has not started within {timeout_seconds:g} seconds "
                    "(init_timeout_seconds): is its node up, and was every node launched?"
                )
            else:
                difference = _difference(_facts(), json.loads(store.get(f"start/{other}")), other)
            if difference:
                break
        store.set("started_alike", json.dumps(not difference))
        if difference:
            log.error(difference)
            raise SystemExit(EXIT_FAILURE)
        return
    try:
        store.wait(["started_alike"], 2 * timeout)  # rank 0 says first who is missing
    except RuntimeError:
        log.error(f"rank 0 has not answered within {2 * timeout_seconds:g} seconds", failed_rank=rank())
        raise SystemExit(EXIT_FAILURE) from None
    if not json.loads(store.get("started_alike")):
        raise SystemExit(EXIT_FAILURE)


def _facts() -> dict:
    """What must be equal on all ranks, and the host, which need not."""
    folders = [_REPOSITORY] + [path.parent for path in _REPOSITORY.glob("*/__init__.py")]
    files = [path for folder in folders if folder.name not in _NOT_RUN for path in folder.glob("*.py")]
    return {
        "host": socket.gethostname(),
        "world_size": world_size(),
        "arguments": sys.argv[1:],
        "torch": metadata.version("torch"),
        "files": {
            path.relative_to(_REPOSITORY).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()[:16]
            for path in sorted(files)
        },
    }


def _difference(ours: dict, theirs: dict, other: int) -> str | None:
    """One line about the first fact in which the rank `other` differs from rank 0."""
    who = f"rank {other} on host {theirs['host']}"
    for name, word in (("world_size", "ranks"), ("arguments", "arguments"), ("torch", "torch")):
        if ours[name] != theirs[name]:
            told = [
                " ".join(facts[name]) or "none" if name == "arguments" else facts[name]
                for facts in (ours, theirs)
            ]
            return f"{who} was started with other {word} ({told[1]}) than rank 0 ({told[0]}): start all alike"
    names = sorted(ours["files"].keys() | theirs["files"].keys())
    differing = [name for name in names if ours["files"].get(name) != theirs["files"].get(name)]
    if differing:
        more = f" and {len(differing) - 1} more files" if len(differing) > 1 else ""
        return (
            f"{who} runs other code than rank 0: {differing[0]}{more} differ: bring all nodes to one commit"
        )
    return None
