"""Memory that all ranks of one machine have in common, in which they add up tensors without sending them.

Each rank makes a piece of anonymous memory (`memfd_create`), which the others map from its list of open
files in /proc. It has no name in any file system: it is gone with the last process that maps it, however
that ended.
"""

import os
import secrets
import socket

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.collectives import Ranks
from parallel.process_group import all_gather_objects, num_nodes, rank, world_size

_CHUNK = 2**16  # elements that are added up at a time: their sum is in the cache when it is written to all
_ALIGNMENT = 1024  # elements: where a rank's slice may begin


class SharedTensors:
    """One tensor of each rank, of equal sizes, which all ranks of the machine can read and write.

    of_ranks: [size] each, in the order of `ranks`, which are of this machine. own: this rank's.
    leaders: the first rank of each machine, where there are several and this is one; else None.
    """

    def __init__(self, of_ranks: list[Tensor], ranks: Ranks, leaders: Ranks | None = None):
        self.of_ranks, self.own, self._ranks = of_ranks, of_ranks[ranks.index], ranks
        self._leaders, self.spans_nodes = leaders, ranks.size < world_size()

    def all_reduce_sum_(self) -> None:
        """Overwrites the tensor of every rank with the sum of all; all ranks call it.

        Each rank adds up a slice, in the order of ranks, so that all hold the same bits, and every run does.
        Of several machines, the first rank of each then sends the sum of its own.
        A rank may write its own tensor before it calls, and again after the call returns.
        """
        self._ranks.barrier()
        share = -(-len(self.own) // (_ALIGNMENT * self._ranks.size)) * _ALIGNMENT
        slices = [each[self._ranks.index * share :][:share].split(_CHUNK) for each in self.of_ranks]
        for first, *others in zip(*slices, strict=True):
            for other in others:
                first += other
            for other in () if self.spans_nodes else others:
                other.copy_(first)
        self._ranks.barrier()
        if self.spans_nodes:
            if self._leaders is not None:
                self._leaders.all_reduce_sum_(self.own)
            self._ranks.barrier()
            self.own.copy_(self.of_ranks[0])
            self._ranks.barrier()

    def all_gather_(self, own_range: slice) -> None:
        """Overwrites the tensors of all other ranks in a range where only this one has changed its own.

        All ranks call it, each with another range; none reads there between its change and its return.
        """
        for number, other in enumerate(self.of_ranks):
            if number != self._ranks.index:
                other[own_range] = self.own[own_range]
        self._ranks.barrier()


def open_shared_tensors(
    size: int, dtype: torch.dtype, ranks: Ranks, *, spans_nodes: bool = False
) -> SharedTensors | None:
    """Makes a tensor of zeros [size] for each rank; all ranks call it.

    None on all ranks where they are not several of one node, or the system does not let one process map the
    memory of another (as outside of Linux, or for processes in containers of their own).
    spans_nodes: whether sums over all ranks of several nodes will do, where these have several ranks.
    """
    everyone, leaders, nodes = ranks.group, None, num_nodes()
    if ranks.size <= nodes or (nodes > 1 and not (spans_nodes and ranks.size == world_size())):
        return None
    if nodes > 1:
        ranks, leaders = _split_by_node()
    name = f"ranks_{secrets.token_hex(8)}"
    file = _create(name, size * dtype.itemsize)
    names = all_gather_objects((os.getpid(), file, name), ranks.group)
    of_ranks = [_map(*each, size=size, dtype=dtype) for each in names]
    # From here on nobody needs the files.
    are_mapped = all(all_gather_objects(None not in of_ranks, everyone))
    if file is not None:
        os.close(file)
    return SharedTensors(of_ranks, ranks, leaders) if are_mapped else None


def _split_by_node() -> tuple[Ranks, Ranks | None]:
    """Opens a group of the ranks of each node, and one of the first rank of each, if this is one of these."""
    members: dict[str, list[int]] = {}
    for number, host in enumerate(all_gather_objects(socket.gethostname())):
        members.setdefault(host, []).append(number)
    own = members[socket.gethostname()]
    of_nodes = {host: dist.new_group(numbers) for host, numbers in members.items()}  # all ranks make all
    first = [numbers[0] for numbers in members.values()]
    of_first = dist.new_group(first)
    ranks = Ranks(own.index(rank()), len(own), of_nodes[socket.gethostname()])
    return ranks, Ranks(first.index(rank()), len(first), of_first) if rank() in first else None


def _create(name: str, num_bytes: int) -> int | None:
    """Makes memory, and returns the file that it is; None where the system cannot."""
    try:
        file = os.memfd_create(name)
    except (AttributeError, OSError):
        return None
    try:
        os.truncate(file, num_bytes)
    except OSError:
        os.close(file)
        return None
    return file


def _map(process: int, file: int | None, name: str, *, size: int, dtype: torch.dtype) -> Tensor | None:
    """Maps the memory that is a file of a process of this name; None where this cannot be done."""
    path = f"/proc/{process}/fd/{file}"
    try:
        # The name is random: what another machine, or another container, calls the same is never opened.
        if not os.readlink(path).startswith(f"/memfd:{name} "):
            return None
        return torch.from_file(path, shared=True, size=size, dtype=dtype)
    except (OSError, RuntimeError):
        return None
