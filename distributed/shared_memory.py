"""Tensors in memory that all ranks of one machine share. The ranks sum or gather them without messages.

Each rank creates anonymous memory (`memfd_create`). The other ranks map it through /proc/<process>/fd. The
memory has no name in a file system. The system frees it when the last process ends, for any reason.
"""

import os
import secrets

import torch
from torch import Tensor

from distributed.collectives import Ranks, all_gather_objects
from distributed.world import num_nodes

_CHUNK = 2**16  # elements per chunk: their sum is still in the cache when it is copied
_ALIGNMENT = 1024  # elements: a rank's slice starts at a multiple


class SharedTensors:
    """One tensor for each rank of a machine, in memory that all of them share.

    Every rank can read and write all tensors.

    Attributes:
        of_ranks: Tensors [size], one for each rank.
        local: Tensor of this rank.
    """

    def __init__(self, of_ranks: list[Tensor], ranks: Ranks):
        self.of_ranks, self.local, self._ranks = of_ranks, of_ranks[ranks.index], ranks

    def all_reduce_sum_(self) -> None:
        """Overwrites the tensor of every rank with the sum of all tensors.

        All ranks call it. The sum is bit-identical on all ranks and in every run. During the call, no rank
        may write to its tensor.
        """
        self._ranks.barrier()
        share = -(-len(self.local) // (_ALIGNMENT * self._ranks.size)) * _ALIGNMENT
        slices = [tensor[self._ranks.index * share :][:share].split(_CHUNK) for tensor in self.of_ranks]
        for first, *others in zip(*slices, strict=True):
            for other in others:
                first += other
            for other in others:
                other.copy_(first)
        self._ranks.barrier()

    def all_gather_(self, local_range: slice) -> None:
        """Copies a range of this rank's tensor into the tensors of all other ranks.

        All ranks call it, with disjoint ranges. When the method returns, all copies are complete. It does not
        wait at the start: another rank may write its range into this rank's tensor before this rank calls the
        method.
        """
        for index, other in enumerate(self.of_ranks):
            if index != self._ranks.index:
                other[local_range] = self.local[local_range]
        self._ranks.barrier()


def open_shared_tensors(size: int, dtype: torch.dtype, ranks: Ranks) -> SharedTensors | None:
    """Returns a tensor of zeros, [size], for each rank, in memory that all ranks share.

    All ranks call it. Returns None on all ranks if sharing is not possible. Examples: there is only one
    rank, there are several machines, the system is not Linux, or the processes run in separate containers.
    """
    if ranks.size == 1 or num_nodes() > 1:
        return None
    name = f"ranks_{secrets.token_hex(8)}"
    file = _create(name, size * dtype.itemsize)
    labels = all_gather_objects((os.getpid(), file, name), ranks.group)
    of_ranks = [_map(*label, size=size, dtype=dtype) for label in labels]
    # Now all ranks have mapped the files, or none will use them: the files can be closed.
    are_mapped = all(all_gather_objects(None not in of_ranks, ranks.group))
    if file is not None:
        os.close(file)
    return SharedTensors(of_ranks, ranks) if are_mapped else None


def _create(name: str, num_bytes: int) -> int | None:
    # The name appears in /proc.
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
    path = f"/proc/{process}/fd/{file}"
    try:
        # The random name detects a process with the same number in another container.
        if not os.readlink(path).startswith(f"/memfd:{name} "):
            return None
        return torch.from_file(path, shared=True, size=size, dtype=dtype)
    except (OSError, RuntimeError):
        return None
