"""Proof that all ranks hold equal replicas, and the name of the first tensor that is not one."""

import dataclasses

import torch
from torch import Tensor

from parallel.collectives import all_gather_rows
from parallel.errors import abort_all

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element


@dataclasses.dataclass(frozen=True)
class Difference:
    """name: the first tensor that is not equal everywhere; ranks: those that do not hold rank 0's."""

    name: str
    ranks: list[int]


def checksum(tensor: Tensor) -> Tensor:
    """The sum of the tensor's bits read as integers, int64 scalar, modulo 2^64.

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
