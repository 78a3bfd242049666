"""The exchanges between ranks, and what is built of them alone: sums over ranks, and the proof of equality.

All work without a process group too, as a world of one. Every function in which ranks talk must be called by
all ranks, in the same order, with tensors of equal dtype (and equal shape, but for `..._rows`).
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.errors import abort_all

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element


def has_group() -> bool:
    return dist.is_available() and dist.is_initialized()


def barrier() -> None:
    all_reduce_sum_(torch.zeros(1))


def broadcast_tensors_(tensors: list[Tensor]) -> None:
    """Overwrites the tensors with rank 0's, in one message for each dtype."""
    if not has_group():
        return
    for dtype in sorted({tensor.dtype for tensor in tensors}, key=str):
        same = [tensor for tensor in tensors if tensor.dtype == dtype]
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in same])
        dist.broadcast(flat, src=0)
        for tensor, piece in zip(same, flat.split([tensor.numel() for tensor in same]), strict=True):
            tensor.detach().copy_(piece.view_as(tensor))


def all_reduce_sum_(tensor: Tensor) -> Tensor:
    if has_group():
        dist.all_reduce(tensor)
    return tensor


def reduce_sum_(tensor: Tensor) -> Tensor:
    """Sums onto rank 0; on the other ranks the tensor is then undefined."""
    if has_group():
        dist.reduce(tensor, dst=0)
    return tensor


def all_gather_counts(*counts: int, device: torch.device) -> list[list[int]]:
    """Gathers, for each count, the values of all ranks in their order."""
    if not has_group():
        return [[count] for count in counts]
    mine = torch.tensor(counts, device=device)
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine)
    return torch.stack(parts, dim=1).tolist()


def all_gather_rows(rows: Tensor, counts: list[int] | None = None) -> Tensor:
    """Concatenates [n_r, ...] of all ranks in the order of ranks; n_r may differ, also be 0.

    counts: every n_r, where all ranks know them already.
    """
    if not has_group():
        return rows
    if counts is None:
        (counts,) = all_gather_counts(len(rows), device=rows.device)
    padded = rows
    if len(rows) < max(counts):
        padded = rows.new_zeros(max(counts), *rows.shape[1:])
        padded[: len(rows)] = rows
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded)
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])


def all_gather_numbered_rows(
    numbers: Tensor, rows: Tensor, counts: list[int] | None = None
) -> tuple[Tensor, Tensor]:
    """Concatenates numbers [n_r], integers, and rows [n_r, k] of all ranks, in one message.

    Each row travels behind its number, in the bits of an integer as wide as an element of the rows.

    counts: every n_r; None: they are equal.
    """
    if not has_group():
        return numbers, rows
    integer = _INTEGERS[rows.element_size()]
    mine = torch.cat([numbers[:, None].to(integer), rows.view(integer)], dim=1)
    gathered = all_gather_rows(mine, counts or [len(rows)] * dist.get_world_size())
    return gathered[:, 0].to(numbers.dtype), gathered[:, 1:].view(rows.dtype)


def all_to_all_rows(rows: Tensor, *, sent: list[int], received: list[int]) -> Tensor:
    """Sends the first sent[0] of the rows [n, ...] to rank 0, the next to rank 1, ...; returns what arrives.

    received: how many rows each rank sends here; they arrive in the order of ranks.
    """
    if not has_group():
        return rows
    arrived = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(arrived, rows, received, sent)
    return arrived


def all_gather_flat_(whole: Tensor, mine: Tensor) -> None:
    """Overwrites `whole` with the tensors of all ranks, [n] each, one after the other; needs a process group.

    mine: may be this rank's part of `whole`.
    """
    new_name = getattr(dist, "all_gather_single", None)  # of torch 2.13 or later
    (new_name or dist.all_gather_into_tensor)(whole, mine)


def true_on_all_ranks(value: bool, *, device: torch.device) -> bool:
    """Tells whether the value is true on every rank; all ranks call it."""
    (values,) = all_gather_counts(int(value), device=device)
    return all(values)


def gather_objects(value: Any) -> list[Any] | None:
    """Gathers the values of all ranks on rank 0, in the order of ranks; None elsewhere.

    For small or rare things: it pickles.
    """
    if not has_group():
        return [value]
    is_root = dist.get_rank() == 0
    gathered = [None] * dist.get_world_size() if is_root else None
    dist.gather_object(value, gathered, dst=0)
    return gathered


def broadcast_object(value: Any) -> Any:
    """Returns rank 0's value on every rank."""
    if not has_group():
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


class RankSums:
    """The running sums of named scalars of this rank: divided once, by whoever has those of all ranks.

    Adding never waits for the device.

    names: of all scalars that may come; float64 sums (float32 on mps, which has no other).
    steps: how many times something was added.
    """

    def __init__(self, names: Sequence[str], device: torch.device):
        dtype = torch.float32 if device.type == "mps" else torch.float64
        self._names = tuple(names)
        self._sums = torch.zeros(len(self._names), dtype=dtype, device=device)
        self._present: set[str] = set()
        self.steps = 0

    def add(self, scalars: dict[str, Tensor]) -> None:
        """Adds the scalars of a step; every rank has the same names, perhaps not all of them."""
        zero = self._sums.new_zeros(())
        self._sums += torch.stack([scalars.get(name, zero).to(self._sums.dtype) for name in self._names])
        self._present.update(scalars)
        self.steps += 1

    def reduce(self) -> dict[str, float]:
        """Returns the sums over all ranks on rank 0, on the others only their own; all ranks call it.

        Names that never came are left out. Changes nothing.
        """
        return self._by_name(reduce_sum_(self._sums.clone()))

    def reset(self) -> None:
        self._sums.zero_()
        self._present.clear()
        self.steps = 0

    def state(self) -> dict[str, float]:
        """Returns the sums of this rank and the number of steps, for a checkpoint."""
        return {**self._by_name(self._sums), "steps_summed": self.steps}

    def load_state(self, saved: Sequence[dict[str, float]], *, rank: int, world_size: int) -> None:
        """Takes over what the ranks of a checkpoint had, in their order.

        As many ranks as then take each its own, so that all is added up in the same order as without the
        checkpoint, to the last bit; else rank 0 takes everything.
        """
        takes_own = len(saved) == world_size
        mine = [part for number, part in enumerate(saved) if rank == (number if takes_own else 0)]
        self.steps = int(saved[0]["steps_summed"])
        self._present = set(saved[0]) & set(self._names)
        values = [math.fsum(part.get(name, 0.0) for part in mine) for name in self._names]
        self._sums.copy_(torch.tensor(values, dtype=self._sums.dtype))

    def _by_name(self, sums: Tensor) -> dict[str, float]:
        named = zip(self._names, sums.tolist(), strict=True)
        return {name: value for name, value in named if name in self._present}


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first tensor that is not equal on all ranks, and the ranks that do not hold rank 0's."""

    name: str
    ranks: list[int]


def checksum(tensor: Tensor) -> Tensor:
    """Sums the tensor's bits read as integers: int64 scalar, modulo 2^64.

    One read of the tensor; any single changed bit changes it.
    """
    bits = tensor.detach().contiguous().reshape(-1).view(_INTEGERS[tensor.element_size()])
    return bits.sum(dtype=torch.int64)


def all_gather_difference(tensors: dict[str, Tensor]) -> Difference | None:
    """Compares the tensors of all ranks by checksum; None where they are equal.

    All ranks call it, with the same names; all get the same answer.
    """
    sums = torch.stack([checksum(tensor) for tensor in tensors.values()])
    by_rank = all_gather_rows(sums[None]).cpu()  # [ranks, tensors]
    differs = by_rank != by_rank[:1]
    if not differs.any():
        return None
    first = int(differs.any(dim=0).nonzero()[0])
    return Difference(list(tensors)[first], differs[:, first].nonzero().flatten().tolist())


def check_replicas(tensors: dict[str, Tensor], *, step: int) -> None:
    """Ends all ranks, with one line, unless all hold equal tensors. All ranks call it."""
    difference = all_gather_difference(tensors)
    if difference is not None:
        abort_all(
            f"the ranks have drifted apart at step {step}: {difference.name} of ranks {difference.ranks} "
            "is not rank 0's: start again from the newest checkpoint"
        )
