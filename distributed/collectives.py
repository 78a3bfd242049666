"""Collectives, metric sums over ranks, and the check that ranks hold equal tensors.

Without a process group, everything works as for one rank. All ranks must call each collective, in the same
order, with tensors of equal dtype and shape. In functions named `..._rows`, the number of rows may differ.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distributed.world import rank, world_size

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes per element


@dataclasses.dataclass(frozen=True)
class Ranks:
    """A group of ranks that includes this rank, with collectives as methods.

    All ranks of the group call each method together.

    Attributes:
        index: Rank of this process within the group.
        size: Number of ranks. If 1, no method communicates.
        group: Process group of torch.distributed. If None, the default group.
    """

    index: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None

    @property
    def is_distributed(self) -> bool:
        return self.size > 1 and dist.is_initialized()

    def barrier(self) -> None:
        self.all_reduce_sum_(torch.zeros(1))

    def broadcast_(self, tensors: list[Tensor], *, source: int = 0) -> None:
        if not self.is_distributed:
            return
        for dtype in sorted({tensor.dtype for tensor in tensors}, key=str):
            same = [tensor for tensor in tensors if tensor.dtype == dtype]
            flat = torch.cat([tensor.detach().reshape(-1) for tensor in same])
            dist.broadcast(flat, group_src=source, group=self.group)
            for tensor, piece in zip(same, flat.split([tensor.numel() for tensor in same]), strict=True):
                tensor.detach().copy_(piece.view_as(tensor))

    def all_reduce_sum_(self, tensor: Tensor) -> Tensor:
        if self.is_distributed:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def reduce_sum_(self, tensor: Tensor) -> Tensor:
        # On other ranks than rank 0, the values become undefined.
        if self.is_distributed:
            dist.reduce(tensor, group_dst=0, group=self.group)
        return tensor

    def all_gather_counts(self, count: int, *, device: torch.device) -> list[int]:
        """Returns the `count` of every rank, in the order of ranks.

        device: Device of the tensor in which the integers are sent. The backend of the group must support
        this device.
        """
        if not self.is_distributed:
            return [count]
        return self.all_gather_rows(torch.tensor([count], device=device), [1] * self.size).tolist()

    def all_gather_rows(self, rows: Tensor, counts: list[int]) -> Tensor:
        """Returns the rows of all ranks, concatenated in the order of ranks.

        rows: Tensor [n, ...]. n may differ from rank to rank, and may be 0. counts: The n of every rank, the
        same list on all ranks.
        """
        if not self.is_distributed:
            return rows
        padded = rows
        if len(rows) < max(counts):
            padded = rows.new_zeros(max(counts), *rows.shape[1:])
            padded[: len(rows)] = rows
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded, group=self.group)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    def all_gather_numbered_rows(
        self, numbers: Tensor, rows: Tensor, counts: list[int]
    ) -> tuple[Tensor, Tensor]:
        """Gathers rows and one integer for each row from all ranks.

        Returns (numbers, rows), concatenated in the order of ranks.

        numbers: Integers [n], such as row numbers. They are sent as signed integers with as many bits as an
        element of `rows`, so they must fit into these bits. rows: Tensor [n, k], one row for each number.
        counts: The n of every rank, the same list on all ranks.
        """
        if not self.is_distributed:
            return numbers, rows
        integer = _INTEGERS[rows.element_size()]
        numbered_rows = torch.cat([numbers[:, None].to(integer), rows.view(integer)], dim=1)
        gathered = self.all_gather_rows(numbered_rows, counts)
        return gathered[:, 0].to(numbers.dtype), gathered[:, 1:].view(rows.dtype)

    def all_to_all_rows(self, rows: Tensor, *, sent: list[int], received: list[int]) -> Tensor:
        """Sends some rows to each rank. Returns the rows that this rank received.

        The first sent[0] rows go to rank 0, the next sent[1] rows to rank 1, and so on. The received rows are
        in the order of the ranks that sent them.

        rows: Tensor [n, ...]. sent: Number of rows for each rank. received: Number of rows from each rank.
        """
        if not self.is_distributed:
            return rows
        arrived = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(arrived, rows, received, sent, group=self.group)
        return arrived

    def gather(self, tensor: Tensor, *, destination: int) -> list[Tensor] | None:
        if not self.is_distributed:
            return [tensor]
        gathered = [torch.empty_like(tensor) for _ in range(self.size)] if self.index == destination else None
        dist.gather(tensor.contiguous(), gathered, group_dst=destination, group=self.group)
        return gathered

    def scatter(self, tensors: list[Tensor] | None, *, like: Tensor, source: int) -> Tensor:
        """Sends one tensor to each rank. Returns the tensor that this rank received.

        tensors: On rank `source` of the group, one tensor for each rank. On other ranks, None. like: Any
        tensor with the shape and dtype of the result.
        """
        if not self.is_distributed:
            return tensors[0]
        part = torch.empty_like(like)
        dist.scatter(part, tensors, group_src=source, group=self.group)
        return part

    def all_gather_ranges_(self, full: Tensor, ranges: Sequence[slice]) -> None:
        """Fills the tensor `full` on all ranks. Rank r sends `full[ranges[r]]` to the others.

        One collective sends all ranges if three conditions hold, where L is the length of the first range:
        range r starts at r * L (or is empty), no range is longer than L, and `full` has at least L elements
        for each rank. Then rank r sends the L elements from r * L on, also those outside of its range. In all
        other cases, one broadcast sends each range that is not empty.

        full: Tensor [n] to fill in place. ranges: One range for each rank, disjoint. All ranks pass the same
        ranges.
        """
        if not self.is_distributed:
            return
        length = ranges[0].stop - ranges[0].start
        are_alike = all(
            part.start in (index * length, part.stop) and part.stop - part.start <= length
            for index, part in enumerate(ranges)
        )
        if are_alike and len(full) >= length * self.size:
            new_name = getattr(dist, "all_gather_single", None)  # in torch 2.13 or later
            full, local = full[: length * self.size], full[self.index * length :][:length]
            (new_name or dist.all_gather_into_tensor)(full, local, group=self.group)
            return
        works = [
            dist.broadcast(full[part], group_src=source, async_op=True, group=self.group)
            for source, part in enumerate(ranges)
            if part.start < part.stop
        ]
        for work in works:
            work.wait()


ALONE = Ranks()


class AllToAllPlan:
    """Exchanges rows of a table that is divided among ranks.

    With P ranks, rank i % P stores row i of the table, as row i // P of its own part. All ranks of the group
    create an `AllToAllPlan` together, and call its methods together.

    Args:
        identifiers: int64 [n], indices of the table rows that this rank needs.
        ranks: Ranks that divide the table.

    Attributes:
        local_rows: int64 [m], indices of rows within this rank's part, for all ranks that need them. The rows
            for rank 0 come first. If two ranks need the same row, its index appears twice.
    """

    def __init__(self, identifiers: Tensor, ranks: Ranks):
        self.num_rows, self._ranks = len(identifiers), ranks
        owners = identifiers % ranks.size
        self._order = owners.argsort(stable=True)
        num_read, ones = torch.bincount(owners, minlength=ranks.size), [1] * ranks.size
        self._num_read = num_read.tolist()  # rows read from each owner
        self._num_lent = ranks.all_to_all_rows(num_read, sent=ones, received=ones).tolist()  # to each rank
        numbers = identifiers[self._order] // ranks.size
        self.local_rows = ranks.all_to_all_rows(numbers, sent=self._num_read, received=self._num_lent)

    def fetch(self, owned_rows: Tensor) -> Tensor:
        """Returns the table rows that this rank needs, [n, ...].

        These are the rows `identifiers` that the constructor got, in the same order.

        owned_rows: The part of the table that this rank stores, [number of its rows, ...].
        """
        lent = owned_rows[self.local_rows]
        arrived = self._ranks.all_to_all_rows(lent, sent=self._num_lent, received=self._num_read)
        return torch.empty_like(arrived).index_copy_(0, self._order, arrived)

    def send(self, rows: Tensor) -> Tensor:
        """Sends row i of `rows` [n, ...] to the rank that stores table row `identifiers[i]`.

        The constructor got `identifiers`. Returns the rows that this rank received, [m, ...]. Received row j
        belongs to row `local_rows[j]` of the part that this rank stores.
        """
        ordered = rows[self._order]
        return self._ranks.all_to_all_rows(ordered, sent=self._num_read, received=self._num_lent)


def all_ranks() -> Ranks:
    return Ranks(rank(), world_size())


def barrier() -> None:
    all_ranks().barrier()


def all_gather_objects(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Returns a list with the value of every rank.

    All ranks of the group call it. The values are pickled. If torch.distributed is not initialized, returns
    [value].

    group: Process group that takes part. If None, all ranks.
    """
    if not dist.is_initialized():
        return [value]
    gathered = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group=group)
    return gathered


def gather_objects(value: Any, ranks: Ranks | None = None) -> list[Any] | None:
    """Gathers a Python object from every rank. All ranks of the group call it.

    Returns the list of objects on the first rank of the group, and None on other ranks. The objects are
    pickled.

    ranks: Group that takes part. If None, all ranks.
    """
    ranks = ranks or all_ranks()
    if not ranks.is_distributed:
        return [value]
    gathered = [None] * ranks.size if ranks.index == 0 else None
    dist.gather_object(value, gathered, group_dst=0, group=ranks.group)
    return gathered


def broadcast_object(value: Any) -> Any:
    """Returns rank 0's value on every rank.

    All ranks call it. The values of other ranks are ignored.
    """
    if not dist.is_initialized():
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


class RankSums:
    """Sums named numbers, such as the loss, over training steps and over ranks.

    `add` sums on this rank, without waiting for the GPU. `reduce` then sums over ranks.

    Args:
        names: Names of the numbers.
        device: Device of the sums. They are float64 (on mps, float32).
        ranks: Ranks over which `reduce` sums.

    Attributes:
        steps: Number of calls of `add` since the last `reset`.
    """

    def __init__(self, names: Sequence[str], device: torch.device, ranks: Ranks):
        dtype = torch.float32 if device.type == "mps" else torch.float64
        self._names, self.ranks = tuple(names), ranks
        self._sums = torch.zeros(len(self._names), dtype=dtype, device=device)
        self._present: set[str] = set()
        self.steps = 0

    def add(self, scalars: dict[str, Tensor]) -> None:
        """Adds the numbers of one step to the sums.

        All ranks must pass the same names. Names that were not passed to the constructor are ignored.

        scalars: Numbers of this rank, {name: scalar tensor}.
        """
        zero = self._sums.new_zeros(())
        self._sums += torch.stack([scalars.get(name, zero).to(self._sums.dtype) for name in self._names])
        self._present.update(scalars)
        self.steps += 1

    def reduce(self) -> dict[str, float]:
        """Returns {name: sum over all ranks} on the first rank of the group.

        All ranks call it. On other ranks, the values are undefined. Names that were not added since the last
        `reset` are left out. This method does not reset the sums.
        """
        return self._by_name(self.ranks.reduce_sum_(self._sums.clone()))

    def reset(self) -> None:
        self._sums.zero_()
        self._present.clear()
        self.steps = 0

    def own(self) -> dict[str, float]:
        return self._by_name(self._sums)

    def gather(self) -> list[dict[str, float]] | None:
        """Returns the sums of each rank for a checkpoint: [{"loss": 70.5, "steps_summed": 10, ...}, ...].

        All ranks call it. Returns None on all ranks of the group except the first.
        """
        return gather_objects({**self.own(), "steps_summed": self.steps}, self.ranks)

    def load_(self, saved: list[dict[str, float]]) -> None:
        """Overwrites the sums with those of a checkpoint, which any number of ranks may have saved.

        If the group has as many ranks as have saved the checkpoint, rank i loads the sums that rank i saved.
        Later sums over ranks are then bit-identical to those of an uninterrupted run. Otherwise, the first
        rank of the group loads the total over all ranks that have saved, and the others load zeros.

        saved: Sums of each rank that saved the checkpoint, from `gather`: [{"loss": 70.5, ...}, ...].
        """
        if len(saved) == self.ranks.size:
            loaded = [saved[self.ranks.index]]
        else:
            loaded = saved if self.ranks.index == 0 else []
        self.steps, self._present = saved[0]["steps_summed"], saved[0].keys() & set(self._names)
        values = [math.fsum(sums.get(name, 0.0) for sums in loaded) for name in self._names]
        self._sums.copy_(torch.tensor(values, dtype=self._sums.dtype))

    def _by_name(self, sums: Tensor) -> dict[str, float]:
        named = zip(self._names, sums.tolist(), strict=True)
        return {name: value for name, value in named if name in self._present}


def checksum(tensor: Tensor) -> Tensor:
    """Views a tensor as integers, and returns their sum modulo 2^64 (int64 scalar).

    If a single bit of the tensor changes, the sum changes.
    """
    bits = tensor.detach().contiguous().reshape(-1).view(_INTEGERS[tensor.element_size()])
    return bits.sum(dtype=torch.int64)


Key = tuple[str, tuple]  # (name of a tensor, which part of the tensor)


def broadcast_difference(tensors: dict[Key, Tensor]) -> tuple[str, list[int], int] | None:
    """Checks whether tensors with the same key are equal on all ranks that have them.

    All ranks call it. If all are equal, returns None. Otherwise returns (name of one tensor that differs,
    ranks where it differs, lowest rank that has the tensor). Each rank is compared with this lowest rank.
    Example: ("lm_head.weight", [3], 0) means that this tensor on rank 3 differs from the one on rank 0. The
    result is the same on all ranks.

    tensors: {(name, part): tensor} of this rank. A rank may lack keys that other ranks have. If the tensor is
    a part of a larger tensor, `part` is a tuple that describes its position, such as the `spans` of a
    `Shard`. Otherwise, `part` is ().
    """
    sums = torch.stack([checksum(tensor) for tensor in tensors.values()]).tolist()
    gathered = gather_objects(dict(zip(tensors, sums, strict=True)))
    holders: dict[Key, dict[int, int]] = {}
    for index, sums_of_rank in enumerate(gathered or ()):
        for key, value in sums_of_rank.items():
            holders.setdefault(key, {})[index] = value
    for (name, _), values in holders.items():
        first, *others = values
        if different := [index for index in others if values[index] != values[first]]:
            return broadcast_object((name, different, first))
    return broadcast_object(None)
