"""The start of a run: all ranks come, and rank 0 warns of those that run other code. Imports no torch."""

import contextlib
import hashlib
import json
import socket
from collections import defaultdict
from datetime import timedelta
from importlib import metadata
from pathlib import Path

from parallel import log
from parallel.process_group import is_main, rank, rendezvous_store, world_size

REPOSITORY = Path(__file__).resolve().parent.parent
_NOT_RUN = {"tests", "benchmarks"}
_MAX_NAMED = 3  # files in one warning


def wait_for_all_ranks(*, timeout_seconds: float) -> None:
    """Waits until all ranks have started; rank 0 warns of those that run other code or torch.

    All ranks call it, before there is a process group. A rank that does not come within the timeout is named,
    and the others end with status 1.
    """
    if world_size() == 1:
        return
    store, timeout = rendezvous_store(), timedelta(seconds=timeout_seconds)
    keys = [f"started/{number}" for number in range(world_size())]
    store.set(keys[rank()], json.dumps({"host": socket.gethostname(), "code": _code()}))
    if is_main():
        with contextlib.suppress(RuntimeError):  # the timeout: below is told who is missing
            store.wait(keys, timeout)
        missing = [number for number, key in enumerate(keys) if not store.check([key])]
        if missing:
            log.error(
                f"{log.name_ranks(missing)} of {world_size()} did not start within {timeout_seconds:g} "
                "seconds (init_timeout_seconds): are all nodes up, and was every node launched?"
            )
        else:
            _warn_of_other_code([json.loads(value) for value in store.multi_get(keys)])
        store.set("all_started", json.dumps(not missing))
    else:
        try:
            store.wait(["all_started"], 2 * timeout)  # rank 0 says first who is missing
        except RuntimeError:
            log.error(f"rank 0 did not answer within {2 * timeout_seconds:g} seconds", failed_rank=rank())
            raise SystemExit(1) from None
    if not json.loads(store.get("all_started")):
        raise SystemExit(1)


def code_files() -> list[Path]:
    """Returns the files that a run may execute or compose its config from."""
    folders = [path.parent for path in REPOSITORY.glob("*/__init__.py") if path.parent.name not in _NOT_RUN]
    paths = [*REPOSITORY.glob("*.py"), *(path for folder in folders for path in folder.rglob("*"))]
    return [path for path in paths if path.suffix in (".py", ".yaml")]


def _code() -> dict[str, str]:
    """Returns the hash of each of these files by its path; torch's version is one more name among them."""
    hashes = {
        path.relative_to(REPOSITORY).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in code_files()
    }
    return {f"torch {metadata.version('torch')}": ""} | hashes


def _warn_of_other_code(starts: list[dict]) -> None:
    """Prints one warning for each host and difference from rank 0.

    starts: the host and the code of each rank.
    """
    ours, ranks = starts[0]["code"], defaultdict(list)
    for number, start in enumerate(starts):
        theirs = start["code"]
        names = sorted(name for name in ours | theirs if ours.get(name) != theirs.get(name))
        ranks[start["host"], tuple(names)].append(number)
    for (host, names), numbers in ranks.items():
        if names:
            more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
            log.warning(
                f"{log.name_ranks(numbers)} on {host}: other code than rank 0 in "
                f"{', '.join(names[:_MAX_NAMED])}{more}: bring all nodes to one commit and one torch"
            )
