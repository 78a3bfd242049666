"""The exchanges between ranks. Each works without a process group too, as a world of one.

Every function here must be called by all ranks, in the same order, with tensors of equal dtype (and equal
shape, but for `all_gather_rows`).
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


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
    """For each count the values of all ranks, in the order of ranks."""
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


def true_on_all_ranks(value: bool, *, device: torch.device) -> bool:
    """Whether it is true on every rank; all ranks call it."""
    (values,) = all_gather_counts(int(value), device=device)
    return all(values)


def gather_objects(value: Any) -> list[Any] | None:
    """The values of all ranks on rank 0, in the order of ranks; None elsewhere.

    For small or rare things: it pickles.
    """
    if not has_group():
        return [value]
    is_root = dist.get_rank() == 0
    gathered = [None] * dist.get_world_size() if is_root else None
    dist.gather_object(value, gathered, dst=0)
    return gathered


def broadcast_object(value: Any) -> Any:
    """Rank 0's value, on every rank."""
    if not has_group():
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]
