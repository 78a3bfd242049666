"""How ranks that each hold a share of the batch act as one: in every step, or after some steps of their own.

A step calls `all_reduce_counts`, `start_step`, then `micro_batch` around each forward and backward pass,
`reduce_gradients`, and after the update `synchronize`. `DenseWeights` and `PuzzleRows` are Protocols, because
the classes in `optimizers` import this package.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from parallel.flat import FlatParameters, Scalars
from parallel.shards import Tensors, shard_of_own
from parallel.sync import GradientSync, build_gradient_sync

# Of each rank, in the message of the gradients or of the changes of weights: the sum of its losses, its own
# gradient norm, how many distinct puzzle rows its slots read (0: not counted), whether it was asked to stop.
SCALARS = ("loss", "grad_norm", "num_distinct", "stop")


class DenseWeights(Protocol):
    """What a strategy needs of the dense weights."""

    flats: tuple[FlatParameters, ...]
    scalars: Scalars

    def gather_(self) -> None: ...
    def moments(self) -> Tensors: ...


class PuzzleRows(Protocol):
    """What a strategy needs of the puzzle table."""

    num_distinct: int

    def reduce(self, nums_distinct: Tensor, *, step: int) -> None: ...
    def keep_own(self, *, step: int) -> None: ...
    def merge(self, *, step: int) -> None: ...


class StepResult(NamedTuple):
    """What a step, or all steps since the last merge, came to: on the device, equal on all ranks.

    merged_steps: all since the last synchronisation, this step included; empty, and the other fields None,
    where this step did not synchronise. loss: mean over these steps and the global batch. grad_norm: of the
    summed gradients, or the mean of the ranks' own. stop_requests: number of ranks that were asked to stop.
    """

    merged_steps: range
    loss: Tensor | None = None
    grad_norm: Tensor | None = None
    stop_requests: Tensor | None = None


class Strategy:
    """A way for ranks to act as one; here what all ways share. All ranks call its methods together.

    model: the module to call in the forward pass. name: of the gradient sync, for records.

    syncs: one for each flat buffer of the weights. batch_size: number of slots that an update comes from, on
    all ranks or on one.
    """

    def __init__(
        self, syncs: Sequence[GradientSync], weights: DenseWeights, table: PuzzleRows, *, batch_size: int
    ):
        self._syncs, self._weights, self._table = syncs, weights, table
        self._ranks = syncs[0].flat.ranks
        self.name, self.model, self._batch_size = syncs[0].name, syncs[0].model, batch_size

    def all_reduce_counts(self, counts: dict[str, Tensor]) -> dict[str, float | Tensor]:
        """Returns what losses are divided by: `counts` and `slots`, of all ranks that add up gradients.

        No message where `counts` is empty.
        """
        return {"slots": self._batch_size, **counts}

    def start_step(self) -> None:
        """Zeroes the gradients. Scalars may be added from here to the end of the last micro-batch."""
        for sync in self._syncs:
            sync.zero()
        self._weights.scalars.add(num_distinct=self._table.num_distinct)

    def micro_batch(self, *, is_last: bool) -> contextlib.AbstractContextManager[None]:
        """Surrounds forward and backward pass of a micro-batch; messages leave in the last one.

        With several syncs they leave in `finish` alone: blocks that stages run get gradients in many parts.
        """
        if len(self._syncs) == 1:
            return self._syncs[0].micro_batch(is_last=is_last)
        stack = contextlib.ExitStack()
        for sync in self._syncs:
            stack.enter_context(sync.micro_batch(is_last=False))
        return stack

    def backward(self, loss: Tensor) -> None:
        """Runs the backward pass of a micro-batch."""
        with contextlib.ExitStack() as stack:
            for sync in self._syncs:
                stack.enter_context(sync.attached())
            loss.backward()

    def reduce_gradients(self, *, step: int) -> None:
        """Completes the gradients that the update of this rank takes, of weights and of puzzle rows."""
        raise NotImplementedError

    def synchronize(self, grad_norm: Tensor, *, step: int) -> StepResult:
        """Makes the weights of all ranks equal after the update, now or after a later step."""
        raise NotImplementedError

    def restart(self) -> None:
        """Makes the present weights, equal on all ranks, the ones of the last synchronisation."""

    def moments(self) -> Tensors:
        """Returns the moments of the weights, as <moment>.<weight>."""
        return self._weights.moments()

    def tensors(self) -> Tensors:
        """Returns what the strategy itself keeps beside weights and moments, by the weights' names."""
        return {}


class EveryStep(Strategy):
    """The sum of gradients over ranks in every step; each rank updates everything, or its share."""

    def all_reduce_counts(self, counts: dict[str, Tensor]) -> dict[str, float | Tensor]:
        if counts:
            sums = self._ranks.all_reduce_sum_(torch.stack([each.float() for each in counts.values()]))
            counts = dict(zip(counts, sums.unbind(), strict=True))
        return super().all_reduce_counts(counts)

    def reduce_gradients(self, *, step: int) -> None:
        self._scalars, *_ = [sync.finish() for sync in self._syncs]
        self._table.reduce(self._scalars["num_distinct"], step=step)

    def synchronize(self, grad_norm: Tensor, *, step: int) -> StepResult:
        self._weights.gather_()
        loss = self._scalars["loss"].sum() / self._batch_size
        return StepResult(range(step, step + 1), loss, grad_norm, self._scalars["stop"].sum())


class LocalSteps(Strategy):
    """Local steps: every rank updates alone, and every `local_steps` all merge weights and puzzle rows.

    change = mean over ranks of (anchor - weights)
    momentum = outer_momentum * momentum + change
    weights = anchor - outer_lr * (change + outer_momentum * momentum)

    With outer_lr 1 and outer_momentum 0 it is the mean of the weights (LocalSGD, arXiv 1805.09767); DiLoCo
    (arXiv 2311.08105) has 0.7 and 0.9. The moments of the inner optimizers stay each rank's own.

    batch_size: of this rank's slots. total_steps: of the run, which ends with a synchronisation; None: not
    known.
    """

    def __init__(
        self,
        syncs: Sequence[GradientSync],
        weights: DenseWeights,
        table: PuzzleRows,
        *,
        batch_size: int,
        local_steps: int,
        total_steps: int | None,
        lr: float,
        momentum: float,
    ):
        super().__init__(syncs, weights, table, batch_size=batch_size)
        (self._sync,) = syncs
        self._lr, self._decay = lr, momentum
        self._interval = {"local_steps": local_steps, "total_steps": total_steps}
        self._anchor = self._masters.clone()
        self._momentum = torch.zeros_like(self._anchor) if momentum else None

    def micro_batch(self, *, is_last: bool) -> contextlib.AbstractContextManager[None]:
        return self._sync.micro_batch(is_last=False)

    def reduce_gradients(self, *, step: int) -> None:
        self._table.keep_own(step=synced_steps(step, **self._interval).start)

    @torch.no_grad()
    def synchronize(self, grad_norm: Tensor, *, step: int) -> StepResult:
        steps, flat = synced_steps(step, **self._interval), self._sync.flat
        self._weights.scalars.add(grad_norm=grad_norm)
        if not steps:
            self._weights.gather_()
            return StepResult(steps)
        torch.sub(self._anchor, self._masters, out=flat.gradients)
        known = self._sync.finish()
        change = flat.gradients.div_(self._ranks.size)
        if self._momentum is not None:
            self._momentum.mul_(self._decay).add_(change)
            change.add_(self._momentum, alpha=self._decay)
        self._anchor.sub_(change.mul_(self._lr))
        self._masters.copy_(self._anchor)
        self._weights.gather_()
        self._table.merge(step=steps.start)
        num_norms = self._ranks.size * len(steps)
        loss = known["loss"].sum() / (self._batch_size * num_norms)
        return StepResult(steps, loss, known["grad_norm"].sum() / num_norms, known["stop"].sum())

    def restart(self) -> None:
        self._anchor.copy_(self._masters)

    @property
    def _masters(self) -> Tensor:
        """Returns the weights, [size] as they are updated: here every rank updates all."""
        (weights,) = self._sync.flat.masters.buffers
        return weights

    def moments(self) -> Tensors:
        return {name: shard_of_own(each, self._ranks) for name, each in self._weights.moments().items()}

    def tensors(self) -> Tensors:
        return {} if self._momentum is None else dict(self._sync.flat.views(self._momentum))


def build_strategy(
    model: nn.Module,
    weights: DenseWeights,
    table: PuzzleRows,
    *,
    batch_size: int,
    local_steps: int,
    total_steps: int | None,
    outer_lr: float,
    outer_momentum: float,
    **options: Any,
) -> Strategy:
    """Builds the strategy of the config's keys. batch_size: global. options: of `build_gradient_sync`."""
    syncs = [build_gradient_sync(model, flat, **options) for flat in weights.flats]
    if local_steps == 1:
        return EveryStep(syncs, weights, table, batch_size=batch_size)
    own_size, rest = divmod(batch_size, weights.flats[0].ranks.size)
    assert not rest, "the mean of all weights counts every rank alike"
    interval = {"local_steps": local_steps, "total_steps": total_steps}
    outer = {"lr": outer_lr, "momentum": outer_momentum}
    return LocalSteps(syncs, weights, table, batch_size=own_size, **interval, **outer)


def synced_steps(step: int, *, local_steps: int, total_steps: int | None) -> range:
    """Returns the steps that a synchronisation after `step` brings together; none where there is none.

    There is one every `local_steps`, and after the last step of the run.
    """
    first = (step - 1) // local_steps * local_steps + 1
    is_synced = step % local_steps == 0 or step == total_steps
    return range(first, step + 1 if is_synced else first)


def next_sync(step: int, *, local_steps: int, total_steps: int) -> int:
    """Returns the first step at or after `step` that a synchronisation follows."""
    return min(-(-step // local_steps) * local_steps, total_steps)
