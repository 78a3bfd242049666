"""How ranks that divide the batch train one model: by summing gradients in every step, or by local steps.

A step calls `sum_divisors`, `start_step`, then `micro_batch` around each forward and backward pass,
`reduce_gradients`, and after the update `synchronize`.
"""

import contextlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from config.schema import PretrainConfig
from distributed.shards import Tensors, shard_of_own
from distributed.sync import GradientSync, build_gradient_sync
from optimizers.puzzle_table import PuzzleTable
from optimizers.weights import Weights


class StepResult(NamedTuple):
    """The result of the steps since the last synchronisation: scalars on the device, equal on all ranks.

    averaged_steps: these steps, up to this one, for the EMA to take in. With local steps, a step that
    does not synchronise has an empty range, and None in the other fields. loss: mean over these steps and the
    global batch. grad_norm: of the summed gradients, or with local steps the mean of norms. stop_requests:
    number of ranks asked to stop.
    """

    averaged_steps: range
    loss: Tensor | None = None
    grad_norm: Tensor | None = None
    stop_requests: Tensor | None = None


class Strategy:
    """The base of `EveryStep` and `LocalSteps`. All ranks call the methods together.

    model: the module to call in the forward pass. name: of the gradient sync, for records. syncs: one for
    each of `weights.flats`. batch_size: number of slots in the loss of one update: of all ranks, or with
    local steps of this rank.
    """

    def __init__(
        self, syncs: Sequence[GradientSync], weights: Weights, table: PuzzleTable, *, batch_size: int
    ):
        self._syncs, self._weights, self._table = syncs, weights, table
        self._ranks = syncs[0].flat.ranks
        self.name, self.model, self._batch_size = syncs[0].name, syncs[0].model, batch_size

    def sum_divisors(self, divisors: dict[str, Tensor]) -> dict[str, float | Tensor]:
        """Returns the divisors of losses (summed over ranks unless steps are local), with "slots".

        divisors: Result of `Objective.divisors` on this rank. If it is empty, no message is sent.
        """
        return {"slots": self._batch_size, **divisors}

    def start_step(self) -> None:
        """Zeroes the gradients. From now until the last backward pass, `scalars` may be added to."""
        for sync in self._syncs:
            sync.zero()

    def micro_batch(self, *, is_last: bool) -> contextlib.AbstractContextManager[None]:
        """Surrounds forward and backward pass of a micro-batch; only the last one may send messages.

        With several syncs (a mesh), only `finish` sends: a pipeline adds to gradients of blocks many times.
        """
        if len(self._syncs) == 1:
            return self._syncs[0].micro_batch(is_last=is_last)
        stack = contextlib.ExitStack()
        for sync in self._syncs:
            stack.enter_context(sync.micro_batch(is_last=False))
        return stack

    def backward(self, loss: Tensor) -> None:
        """Runs the backward pass of a micro-batch, which adds to the flat gradients."""
        with contextlib.ExitStack() as stack:
            for sync in self._syncs:
                stack.enter_context(sync.attached())
            loss.backward()

    def reduce_gradients(self, *, step: int) -> None:
        """Sums gradients of weights and puzzle rows over ranks; with local steps, each rank keeps its own."""
        raise NotImplementedError

    def synchronize(self, grad_norm: Tensor, *, step: int) -> StepResult:
        """Makes the weights of all ranks equal, after an update; local steps do so in some steps only.

        grad_norm: of this step, to return.
        """
        raise NotImplementedError

    def reset_to_weights(self) -> None:
        """Takes weights that were just loaded, equal on all ranks, as the result of a synchronisation."""

    def moments(self) -> Tensors:
        """Returns the optimizers' moments, named <moment>.<weight>, for a checkpoint."""
        return self._weights.moments()

    def tensors(self) -> Tensors:
        """Returns the strategy's own state for a checkpoint: outer momentum, by the names of the weights."""
        return {}


class EveryStep(Strategy):
    """A strategy that sums gradients over ranks in every step; each rank updates all weights or a shard."""

    def sum_divisors(self, divisors: dict[str, Tensor]) -> dict[str, float | Tensor]:
        if divisors:
            sums = self._ranks.all_reduce_sum_(torch.stack([each.float() for each in divisors.values()]))
            divisors = dict(zip(divisors, sums.unbind(), strict=True))
        return super().sum_divisors(divisors)

    def reduce_gradients(self, *, step: int) -> None:
        self._scalars, *_ = [sync.finish() for sync in self._syncs]
        self._table.reduce(step=step)

    def synchronize(self, grad_norm: Tensor, *, step: int) -> StepResult:
        self._weights.gather_()
        loss = self._scalars["loss"].sum() / self._batch_size
        return StepResult(range(step, step + 1), loss, grad_norm, self._scalars["stop"].sum())


class LocalSteps(Strategy):
    """A strategy in which each rank updates alone, and every `local_steps` steps the ranks merge the weights.

    change = mean over ranks of (anchor - weights), where anchor = weights after the last merge
    momentum = outer_momentum * momentum + change
    weights = anchor - outer_lr * (change + outer_momentum * momentum)

    outer_lr 1 and outer_momentum 0 give the mean of the weights (LocalSGD, arXiv 1805.09767); DiLoCo (arXiv
    2311.08105) uses 0.7 and 0.9. A merge leaves the moments of the inner optimizers as they are.

    batch_size: number of this rank's slots. total_steps: of the run, whose last step merges; None: unknown.
    """

    def __init__(
        self,
        syncs: Sequence[GradientSync],
        weights: Weights,
        table: PuzzleTable,
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
        self._anchor = self._master_weights.clone()
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
        torch.sub(self._anchor, self._master_weights, out=flat.gradients)
        known = self._sync.finish()
        change = flat.gradients.div_(self._ranks.size)
        if self._momentum is not None:
            self._momentum.mul_(self._decay).add_(change)
            change.add_(self._momentum, alpha=self._decay)
        self._anchor.sub_(change.mul_(self._lr))
        self._master_weights.copy_(self._anchor)
        self._weights.gather_()
        self._table.merge(step=steps.start)
        num_norms = self._ranks.size * len(steps)
        loss = known["loss"].sum() / (self._batch_size * num_norms)
        return StepResult(steps, loss, known["grad_norm"].sum() / num_norms, known["stop"].sum())

    def reset_to_weights(self) -> None:
        self._anchor.copy_(self._master_weights)

    @property
    def _master_weights(self) -> Tensor:
        """Returns the flat weights that the optimizer updates, [size]: each rank updates all of them."""
        (weights,) = self._sync.flat.master_weights.buffers
        return weights

    def moments(self) -> Tensors:
        return {name: shard_of_own(each, self._ranks) for name, each in self._weights.moments().items()}

    def tensors(self) -> Tensors:
        return {} if self._momentum is None else dict(self._sync.flat.views(self._momentum))


def build_strategy(
    config: PretrainConfig, model: nn.Module, weights: Weights, table: PuzzleTable, *, total_steps: int | None
) -> Strategy:
    """Builds the strategy that the config asks for. All ranks call it."""
    options = {key: getattr(config, key) for key in ("sync", "bucket_size_mb", "sync_dtype")}
    syncs = [build_gradient_sync(model, flat, **options) for flat in weights.flats]
    if config.local_steps == 1:
        return EveryStep(syncs, weights, table, batch_size=config.global_batch_size)
    own_size, rest = divmod(config.global_batch_size, weights.flats[0].ranks.size)
    assert not rest, "the mean of all weights counts every rank alike"
    interval = {"local_steps": config.local_steps, "total_steps": total_steps}
    outer = {"lr": config.outer_lr, "momentum": config.outer_momentum}
    return LocalSteps(syncs, weights, table, batch_size=own_size, **interval, **outer)


def synced_steps(step: int, *, local_steps: int, total_steps: int | None) -> range:
    """Returns the steps that the synchronisation after `step` merges; an empty range where none is due.

    A synchronisation is due every `local_steps` steps, and after the last step of the run.
    """
    first = (step - 1) // local_steps * local_steps + 1
    is_synced = step % local_steps == 0 or step == total_steps
    return range(first, step + 1 if is_synced else first)


def next_sync(step: int, *, local_steps: int, total_steps: int) -> int:
    """Returns the first step, at or after `step`, with a synchronisation."""
    return min(-(-step // local_steps) * local_steps, total_steps)
