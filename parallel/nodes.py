"""What the nodes of a run must have in common, compared at its start: one run folder, one dataset.

All ranks call these functions, inside the process group; where nodes differ, all end with one line.
"""

import secrets
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from parallel import log
from parallel.collectives import broadcast_object, gather_objects
from parallel.errors import collective_errors
from parallel.process_group import is_main, num_nodes


def check_folder_is_shared(folder: Path) -> None:
    """Checks that all ranks see rank 0's folder, into which each of them is to write its part."""
    if num_nodes() == 1:
        return
    token = folder / f".start_{secrets.token_hex(8)}"  # a name that no node has asked for before
    with collective_errors():
        if is_main():
            try:
                token.touch()
            except OSError as error:
                raise ValueError(f"{token} cannot be written ({error.strerror})") from None
    token = broadcast_object(token)
    try:
        _check_all(
            token.exists(),
            bool,
            what=f"rank 0's run folder {folder.absolute()} is not the one",
            advice="share it among all nodes, as by NFS or sshfs, at the same path (docs/many_machines.md)",
        )
    finally:
        if is_main():
            token.unlink(missing_ok=True)


def check_same_data(fingerprint: str, *, names: Sequence[str]) -> None:
    """Checks that the nodes have one dataset.

    fingerprint: of its content; empty on ranks that leave it to another of their node. names: of its folders.
    """
    ours = broadcast_object(fingerprint)
    _check_all(
        fingerprint,
        lambda theirs: theirs in ("", ours),
        what=f"rank 0's data in {', '.join(names)} is not that",
        advice="copy it to all nodes, or share the folder",
    )


def _check_all(value: Any, is_good: Callable[[Any], bool], *, what: str, advice: str) -> None:
    gathered = gather_objects((socket.gethostname(), value))
    with collective_errors():
        bad = {number: host for number, (host, found) in enumerate(gathered or ()) if not is_good(found)}
        if bad:
            hosts = ", ".join(dict.fromkeys(bad.values()))
            raise ValueError(f"{what} of {log.name_ranks(list(bad))} on {hosts}: {advice}")
