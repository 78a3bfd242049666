"""Collectives, metric sums over ranks, and the check that ranks hold equal tensors.

Without a process group, everything works as for one rank. All ranks must call each collective, in the same
order, with tensors of equal dtype and shape. In functions named `..._rows`, the number of rows may differ.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distributed.world import rank, world_size

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes per element


def has_group() -> bool:
    return dist.is_available() and dist.is_initialized()


@dataclasses.dataclass(frozen=True)
class Ranks:
    """A group of ranks that includes this rank.

    Its methods are collectives: all ranks of the group call them.

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
        """Whether the methods communicate: there are several ranks, and torch.distributed is initialized."""
        return self.size > 1 and has_group()

    def barrier(self) -> None:
        self.all_reduce_sum_(torch.zeros(1))

    def broadcast_(self, tensors: list[Tensor], *, source: int = 0) -> None:
        """Overwrites the tensors on all ranks with those of rank `source` of the group. All ranks call it.

        Sends one message for each dtype.
        """
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
        """Overwrites `tensor` on rank 0 of the group with the sum over ranks. All ranks call it.

        Returns the same tensor. On other ranks, its values become undefined.
        """
        if self.is_distributed:
            dist.reduce(tensor, group_dst=0, group=self.group)
        return tensor

    def all_gather_counts(self, *counts: int, device: torch.device) -> list[list[int]]:
        """Gathers some integers from all ranks. All ranks call it.

        Returns one list for each of `counts`: its values on all ranks. Example: rank 0 calls it with (2, 5)
        and rank 1 with (3, 7). The result is [[2, 3], [5, 7]].

        device: Device of the tensor that is sent.
        """
        if not self.is_distributed:
            return [[count] for count in counts]
        local_counts = torch.tensor(counts, device=device)
        parts = [torch.empty_like(local_counts) for _ in range(self.size)]
        dist.all_gather(parts, local_counts, group=self.group)
        return torch.stack(parts, dim=1).tolist()

    def all_gather_rows(self, rows: Tensor, counts: list[int] | None = None) -> Tensor:
        """Returns the rows of all ranks, concatenated. All ranks call it. Rank r passes `rows` [n_r, ...].

        The number n_r may differ from rank to rank, and may be 0.

        counts: List of all n_r, if every rank already knows it. If None, an extra message gathers it.
        """
        if not self.is_distributed:
            return rows
        if counts is None:
            (counts,) = self.all_gather_counts(len(rows), device=rows.device)
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
        """Gathers rows, each with an integer such as its row number, from all ranks. All ranks call it.

        Returns (numbers, rows) of all ranks, concatenated in the order of ranks. Numbers and rows are sent in
        one message. Each number must therefore fit into the bits of one element of `rows`.

        numbers: Integers [n_r] on rank r. rows: [n_r, k] on rank r. counts: List of all n_r, which every rank
        must know.
        """
        if not self.is_distributed:
            return numbers, rows
        integer = _INTEGERS[rows.element_size()]
        numbered_rows = torch.cat([numbers[:, None].to(integer), rows.view(integer)], dim=1)
        gathered = self.all_gather_rows(numbered_rows, counts)
        return gathered[:, 0].to(numbers.dtype), gathered[:, 1:].view(rows.dtype)

    def all_to_all_rows(self, rows: Tensor, *, sent: list[int], received: list[int]) -> Tensor:
        """Sends some rows to each rank. Returns the rows that this rank received. All ranks call it.

        The first sent[0] rows go to rank 0, the next sent[1] rows to rank 1, and so on. The received rows are
        in the order of the ranks that sent them.

        rows: [n, ...]. sent: Number of rows for each rank. received: Number of rows from each rank.
        """
        if not self.is_distributed:
            return rows
        arrived = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(arrived, rows, received, sent, group=self.group)
        return arrived

    def gather(self, tensor: Tensor, *, destination: int) -> list[Tensor] | None:
        """Gathers a tensor from every rank. All ranks call it, with tensors of equal shapes.

        Returns the list of tensors on rank `destination`, and None on other ranks.
        """
        if not self.is_distributed:
            return [tensor]
        gathered = [torch.empty_like(tensor) for _ in range(self.size)] if self.index == destination else None
        dist.gather(tensor.contiguous(), gathered, group_dst=destination, group=self.group)
        return gathered

    def scatter(self, tensors: list[Tensor] | None, *, like: Tensor, source: int) -> Tensor:
        """Sends tensor r of `tensors` on rank `source` to rank r. Returns the tensor that this rank received.

        All ranks call it.

        tensors: On rank `source`, one tensor for each rank. On other ranks, None. like: A tensor with the
        shape and dtype of the result.
        """
        if not self.is_distributed:
            return tensors[0]
        part = torch.empty_like(like)
        dist.scatter(part, tensors, group_src=source, group=self.group)
        return part

    def all_gather_ranges_(self, full: Tensor, ranges: Sequence[slice]) -> None:
        """Completes a tensor [n] on all ranks: full[ranges[r]] is sent from rank r to all other ranks.

        All ranks call it. If the ranges follow each other and have equal lengths, sends one message. The last
        range may then be shorter, if `full` has unused elements behind it. Otherwise, sends one message for
        each range.

        full: Tensor to complete in place. ranges: One range for each rank, disjoint, equal on all ranks.
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

    Rank i % size owns row i of the table, and stores it as its row i // size. `fetch` gets rows from their
    owners, and `send` sends one value for each row to its owner. All ranks build a plan together, and call
    its methods together. On CUDA, building a plan waits for the device.

    identifiers: int64 [n], the table rows that this rank needs. local_rows: int64 [m], the rows that any rank
    needs from this rank, as row numbers on this rank. The rows that rank 0 needs come first.
    """

    def __init__(self, identifiers: Tensor, ranks: Ranks):
        self.num_rows, self._ranks = len(identifiers), ranks
        owners = identifiers % ranks.size
        self._order = owners.argsort(stable=True)
        self._num_read = torch.bincount(owners, minlength=ranks.size).tolist()  # rows read from each owner
        by_rank = ranks.all_gather_counts(*self._num_read, device=identifiers.device)
        self._num_lent = by_rank[ranks.index]  # rows sent to each rank
        numbers = identifiers[self._order] // ranks.size
        self.local_rows = ranks.all_to_all_rows(numbers, sent=self._num_read, received=self._num_lent)

    def fetch(self, owned_rows: Tensor) -> Tensor:
        """Gets the table rows `identifiers` of the plan from the ranks that own them. All ranks call it.

        Returns a tensor [n, ...] with one row for each identifier, in this order.

        owned_rows: All table rows that this rank owns.
        """
        lent = owned_rows[self.local_rows]
        arrived = self._ranks.all_to_all_rows(lent, sent=self._num_lent, received=self._num_read)
        return torch.empty_like(arrived).index_copy_(0, self._order, arrived)

    def send(self, rows: Tensor) -> Tensor:
        """Sends row i of `rows` [n, ...] to the rank that owns row identifiers[i] of the table.

        All ranks call it. Returns the rows that this rank received, [m, ...]. Received row j belongs to row
        local_rows[j] on this rank.
        """
        ordered = rows[self._order]
        return self._ranks.all_to_all_rows(ordered, sent=self._num_read, received=self._num_lent)


def all_ranks() -> Ranks:
    return Ranks(rank(), world_size())


def barrier() -> None:
    all_ranks().barrier()


def gather_objects(value: Any, ranks: Ranks | None = None) -> list[Any] | None:
    """Gathers a Python object from every rank. Returns the list of objects on rank 0 of the group.

    Returns None on other ranks. All ranks call it. The objects are pickled.

    ranks: Group that takes part. If None, all ranks.
    """
    ranks = ranks or all_ranks()
    if not ranks.is_distributed:
        return [value]
    gathered = [None] * ranks.size if ranks.index == 0 else None
    dist.gather_object(value, gathered, group_dst=0, group=ranks.group)
    return gathered


def broadcast_object(value: Any) -> Any:
    """Returns rank 0's value on every rank. All ranks call it. The values of other ranks are ignored."""
    if not has_group():
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


class RankSums:
    """Running sums of named numbers (for example, metrics) on this rank. `reduce` adds them over ranks.

    Sums stay on the device, and adding never waits for it. They are float64 (float32 on mps).

    names: Names of the numbers to sum. ranks: Group of ranks over which `reduce` sums. steps: Attribute.
    Number of calls of `add` so far.
    """

    def __init__(self, names: Sequence[str], device: torch.device, ranks: Ranks):
        dtype = torch.float32 if device.type == "mps" else torch.float64
        self._names, self.ranks = tuple(names), ranks
        self._sums = torch.zeros(len(self._names), dtype=dtype, device=device)
        self._present: set[str] = set()
        self.steps = 0

    def add(self, scalars: dict[str, Tensor]) -> None:
        """Adds the numbers of one step, {name: scalar tensor}. Every rank must pass the same names.

        Names that the constructor did not get are ignored.
        """
        zero = self._sums.new_zeros(())
        self._sums += torch.stack([scalars.get(name, zero).to(self._sums.dtype) for name in self._names])
        self._present.update(scalars)
        self.steps += 1

    def reduce(self) -> dict[str, float]:
        """Returns {name: sum over all ranks} on rank 0 of the group. All ranks call it.

        On other ranks, the values are undefined. The sums are not reset. Names that were not added since the
        last reset are left out.
        """
        return self._by_name(self.ranks.reduce_sum_(self._sums.clone()))

    def reset(self) -> None:
        self._sums.zero_()
        self._present.clear()
        self.steps = 0

    def own(self) -> dict[str, float]:
        """Returns {name: sum of this rank only}. Names that `add` has not received are left out."""
        return self._by_name(self._sums)

    def fill_(self, sums: dict[str, float], *, steps: int) -> None:
        """Restores the sums of this rank when a run is resumed.

        sums: {name: sum}, as `own` returned it. steps: Number of calls of `add` that these sums contain.
        """
        self.steps, self._present = steps, sums.keys() & set(self._names)
        values = [sums.get(name, 0.0) for name in self._names]
        self._sums.copy_(torch.tensor(values, dtype=self._sums.dtype))

    def _by_name(self, sums: Tensor) -> dict[str, float]:
        named = zip(self._names, sums.tolist(), strict=True)
        return {name: value for name, value in named if name in self._present}


def checksum(tensor: Tensor) -> Tensor:
    """Reads the bits of each element as an integer, and returns their sum: int64 scalar, modulo 2^64.

    If a single bit of the tensor changes, the sum changes.
    """
    bits = tensor.detach().contiguous().reshape(-1).view(_INTEGERS[tensor.element_size()])
    return bits.sum(dtype=torch.int64)


Key = tuple[str, tuple]  # (name of a tensor, which part of the tensor)


def broadcast_difference(tensors: dict[Key, Tensor]) -> tuple[str, list[int], int] | None:
    """Checks that tensors are equal on all ranks that hold them. Compares checksums. All ranks call it.

    Returns None if all tensors are equal. Otherwise, returns (name of the first tensor that differs, ranks
    where it differs, lowest rank that has it). Example: ("lm_head.weight", [3], 0) means that the tensor on
    rank 3 differs from that on rank 0. The result is the same on all ranks.

    tensors: {(name, part of the full tensor): tensor}. Tensors of different ranks are compared if they have
    the same key. A rank may lack keys that other ranks have.
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
