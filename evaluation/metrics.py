"""Metric sums: kept on the device, summed over steps and ranks, divided once, when they are read."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from models.losses import LOSSES, METRICS
from parallel.collectives import reduce_sum_

_NAMES = ("count", *METRICS, *LOSSES, "grad_norm")


class MetricSums:
    """The running sums of `sum_metrics` over the slots of this rank. Adding never waits."""

    def __init__(self, device: torch.device):
        dtype = torch.float32 if device.type == "mps" else torch.float64
        self._sums = torch.zeros(len(_NAMES), dtype=dtype, device=device)
        self._present: set[str] = set()
        self.steps = 0

    def add(self, sums: dict[str, Tensor]) -> None:
        """sums: scalars of the step; the same names on every rank."""
        zero = self._sums.new_zeros(())
        self._sums += torch.stack([sums.get(name, zero).to(self._sums.dtype) for name in _NAMES])
        self._present.update(sums)
        self.steps += 1

    def reduced(self) -> dict[str, float]:
        """The sums over all ranks, on rank 0; on the others only their own.

        All ranks call it. Changes nothing.
        """
        return self._by_name(reduce_sum_(self._sums.clone()))

    def reset(self) -> None:
        self._sums.zero_()
        self._present.clear()
        self.steps = 0

    def state(self) -> dict[str, float]:
        """For a checkpoint: the sums of this rank and the number of steps."""
        return {**self._by_name(self._sums), "steps_summed": self.steps}

    def load_state(self, saved: Sequence[dict[str, float]], *, rank: int, world_size: int) -> None:
        """Takes over what the ranks of a checkpoint had, in their order.

        As many ranks as then take each its own, so that all is added up in the same order as without the
        checkpoint, to the last bit; else rank 0 takes everything.
        """
        takes_own = len(saved) == world_size
        mine = [part for number, part in enumerate(saved) if rank == (number if takes_own else 0)]
        self.steps = int(saved[0]["steps_summed"])
        self._present = set(saved[0]) & set(_NAMES)
        values = [math.fsum(part.get(name, 0.0) for part in mine) for name in _NAMES]
        self._sums.copy_(torch.tensor(values, dtype=self._sums.dtype))

    def _by_name(self, sums: Tensor) -> dict[str, float]:
        named = zip(_NAMES, sums.tolist(), strict=True)
        return {name: value for name, value in named if name in self._present}


def training_metrics(sums: dict[str, float], *, steps: int, global_batch_size: int) -> dict[str, float]:
    """Losses over all slots of all steps, the gradient norm over steps, the rest over the slots that halted.

    What has no data is left out.
    """
    metrics = {name: sums[name] / (steps * global_batch_size) for name in LOSSES if name in sums}
    if "grad_norm" in sums:
        metrics["grad_norm"] = sums["grad_norm"] / steps
    if sums["count"] > 0:
        metrics.update({name: sums[name] / sums["count"] for name in METRICS})
        metrics["count"] = sums["count"]
    return metrics


def evaluation_metrics(sums: dict[str, float]) -> dict[str, float]:
    """Everything over the number of rows with a label, and that as `count`; empty where there is none."""
    if not sums or sums["count"] == 0:
        return {}
    return {
        **{name: sums[name] / sums["count"] for name in (*METRICS, *LOSSES) if name in sums},
        "count": sums["count"],
    }
