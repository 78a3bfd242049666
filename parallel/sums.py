"""Sums that are kept on the device, over steps and ranks, and divided once, by whoever has all of them."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from parallel.collectives import reduce_sum_


class RankSums:
    """The running sums of named scalars on this rank. Adding never waits for the device.

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
