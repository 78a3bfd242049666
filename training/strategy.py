"""Data-parallel strategies: sum gradients in every step, or train locally and merge the weights.

`EveryStep` sums gradients over ranks in every step. `LocalSteps` merges the weights every `local_steps`
steps. A training step calls `sum_divisors`, `start_step`, then `micro_batch` around each forward and backward
pass, `reduce_gradients`, and after the update `synchronize`.
"""

import contextlib
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from config.schema import PretrainConfig
from distributed.collectives import Ranks
from distributed.shards import Tensors
from distributed.sync import build_gradient_sync
from optimizers.puzzle_table import PuzzleTable
from optimizers.weights import Weights


class StepResult(NamedTuple):
    """Loss, gradient norm and stop requests of a training step, over all ranks.

    With `local_steps` > 1, each rank trains without the others, and all ranks merge their weights every
    `local_steps` steps. The result of a step with a merge is of all steps since the previous merge. In any
    other step, `steps` is empty, and the other fields are None. The tensors are scalars on the device, equal
    on all ranks.

    Attributes:
        steps: The training steps since the previous result. The moving averages (EMA) are now updated for
            these steps.
        loss: Mean loss over these steps and the global batch.
        grad_norm: Norm of the summed gradients before clipping. With `local_steps` > 1, the mean of the norms
            over ranks and steps.
        stop_requests: Positive if a signal has asked any rank to stop during these steps.
    """

    steps: range
    loss: Tensor | None = None
    grad_norm: Tensor | None = None
    stop_requests: Tensor | None = None


class Strategy:
    """Synchronizes the training of the ranks that divide a batch. Base class of `EveryStep` and `LocalSteps`.

    All ranks call the methods together.

    Args:
        config: Config of the run.
        model: Model of this rank.
        weights: Dense weights of `model`, which are all weights except puzzle embeddings.
        table: Puzzle embeddings of this rank.
        tensor: Ranks that process the same puzzles (tensor parallelism).
        total_steps: Number of steps of the run. If None, it is unknown.

    Attributes:
        model: Module to call in the forward pass: the model, or the DistributedDataParallel that wraps it.
        name: Name of the method of summing gradients, for logs.
    """

    def __init__(
        self,
        config: PretrainConfig,
        model: nn.Module,
        weights: Weights,
        table: PuzzleTable,
        *,
        tensor: Ranks,
        total_steps: int | None,
    ):
        options = {key: getattr(config, key) for key in ("sync", "bucket_size_mb", "sync_dtype")}
        self._syncs = [build_gradient_sync(model, flat, **options) for flat in weights.flats]
        self._weights, self._table, self._tensor = weights, table, tensor
        self._ranks = weights.flats[0].ranks
        self.name, self.model = self._syncs[0].name, self._syncs[0].model
        self._batch_size = config.global_batch_size  # the loss is divided by it
        self._interval = {"local_steps": config.local_steps, "total_steps": total_steps}

    def sum_divisors(self, divisors: dict[str, Tensor]) -> dict[str, float | Tensor]:
        """Returns the numbers by which the loss is divided, such as {"slots": 768, "digit_cells": 5000.0}.

        `EveryStep` returns the number of slots of the global batch, and sums `divisors` over ranks.
        `LocalSteps` returns the number of slots of this rank, and does not change `divisors`.

        divisors: All numbers except "slots", for this rank. If empty, nothing is sent.
        """
        return {"slots": self._batch_size, **divisors}

    def start_step(self) -> None:
        """Zeroes the gradients at the start of a training step."""
        for sync in self._syncs:
            sync.zero()

    def micro_batch(self, *, is_last: bool) -> contextlib.AbstractContextManager[None]:
        """Context manager for the forward and backward pass of a micro-batch (a part of the batch).

        With `EveryStep`, the backward pass of the last micro-batch may already send gradients. All other
        backward passes send none.
        """
        if len(self._syncs) == 1:
            return self._syncs[0].micro_batch(is_last=is_last)
        stack = contextlib.ExitStack()
        for sync in self._syncs:
            stack.enter_context(sync.micro_batch(is_last=False))
        return stack

    def backward(self, loss: Tensor) -> None:
        """Runs the backward pass of a micro-batch, which adds to the gradients of this training step."""
        with contextlib.ExitStack() as stack:
            for sync in self._syncs:
                stack.enter_context(sync.flat.gradients_attached())
            loss.backward()

    def reduce_gradients(self, *, step: int) -> None:
        """Prepares the gradients of weights and puzzle embeddings for the update.

        `EveryStep` sums the gradients over ranks. `LocalSteps` keeps this rank's gradients.

        step: Number of the training step, from 1.
        """
        raise NotImplementedError

    def synchronize(self, grad_norm: Tensor, *, step: int) -> StepResult:
        """Makes the next forward pass read the weights that the optimizer has updated.

        If ranks divide the update, `EveryStep` sends updated shards of the weights to the other ranks.
        `LocalSteps` merges the weights of all ranks every `local_steps` steps, and after the last step.

        grad_norm: Gradient norm of this step. step: Number of the training step, from 1.
        """
        raise NotImplementedError

    def reset_to_weights(self, *, step: int) -> None:
        """Makes `LocalSteps` treat the current weights as the result of a merge after step `step`.

        `EveryStep` does nothing. Call it on all ranks after weights were loaded from a checkpoint.
        """

    def tensors(self) -> Tensors:
        """Returns the outer momentum of `LocalSteps` for a checkpoint: {name of the weight: momentum}.

        Returns {} with `EveryStep`, or if the config key `outer_momentum` is 0.
        """
        return {}


class EveryStep(Strategy):
    """Sums gradients over ranks in every step. Each rank then updates all weights, or its shard of them."""

    def sum_divisors(self, divisors: dict[str, Tensor]) -> dict[str, float | Tensor]:
        if divisors:
            sums = self._ranks.all_reduce_sum_(
                torch.stack([divisor.float() for divisor in divisors.values()])
            )
            divisors = dict(zip(divisors, sums.unbind(), strict=True))
        return super().sum_divisors(divisors)

    def reduce_gradients(self, *, step: int) -> None:
        self._scalars, *_ = [sync.finish() for sync in self._syncs]
        self._table.reduce(step=step)

    def synchronize(self, grad_norm: Tensor, *, step: int) -> StepResult:
        self._weights.gather_()
        loss = self._scalars["loss"].sum() / self._batch_size
        # Tensor-parallel ranks sum their gradients separately, so they must also exchange the stop requests.
        stop_requests = self._tensor.all_reduce_sum_(self._scalars["stop"].sum().long())
        return StepResult(range(step, step + 1), loss, grad_norm, stop_requests)


class LocalSteps(Strategy):
    """Each rank trains with only its own gradients. Every `local_steps` steps, all ranks get common weights:

        change = mean over ranks of (anchor - weights), where anchor = the previous common weights
        momentum = outer_momentum * momentum + change
        weights = anchor - outer_lr * (change + outer_momentum * momentum)

    With outer_lr=1 and outer_momentum=0, the result is the mean of the weights (LocalSGD, arXiv 1805.09767).
    DiLoCo (arXiv 2311.08105) uses outer_lr=0.7 and outer_momentum=0.9. A puzzle embedding becomes the mean
    over the ranks that have changed it since the previous merge. A merge does not change the optimizer
    states. The last step of the run also ends with a merge.
    """

    def __init__(self, config: PretrainConfig, *arguments: Any, **options: Any):
        super().__init__(config, *arguments, **options)
        (self._sync,) = self._syncs
        self._batch_size, rest = divmod(config.global_batch_size, self._ranks.size)
        assert not rest, "the mean of all weights counts every rank alike"
        self._lr, self._decay = config.outer_lr, config.outer_momentum
        self._anchor, self._anchor_step = self._master_weights.clone(), 0
        self._momentum = torch.zeros_like(self._anchor) if self._decay else None

    def micro_batch(self, *, is_last: bool) -> contextlib.AbstractContextManager[None]:
        return self._sync.micro_batch(is_last=False)

    def reduce_gradients(self, *, step: int) -> None:
        self._table.keep_own(step=self._synced_steps(step).start)

    @torch.no_grad()
    def synchronize(self, grad_norm: Tensor, *, step: int) -> StepResult:
        steps, flat = self._synced_steps(step), self._sync.flat
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

    def reset_to_weights(self, *, step: int) -> None:
        self._anchor.copy_(self._master_weights)
        self._anchor_step = step

    def _synced_steps(self, step: int) -> range:
        """Returns the steps since the previous merge, if the ranks merge their weights after `step`.

        Otherwise, returns an empty range that starts at the first step since the previous merge. Steps up to
        the step of the loaded checkpoint are left out. Example: with resume=PATH, the other run had
        local_steps=1. Its checkpoint may lie between two merges of this run.
        """
        steps = synced_steps(step, **self._interval)
        return range(max(steps.start, self._anchor_step + 1), steps.stop)

    @property
    def _master_weights(self) -> Tensor:
        # Every rank updates all weights, so there is only one buffer.
        (weights,) = self._sync.flat.master_weights.buffers
        return weights

    def tensors(self) -> Tensors:
        return {} if self._momentum is None else dict(self._sync.flat.views(self._momentum))


def synced_steps(step: int, *, local_steps: int, total_steps: int | None) -> range:
    """Returns the steps since the previous merge, if the ranks merge their weights after `step`.

    Otherwise, returns an empty range. Ranks merge their weights after every `local_steps` steps, and after
    step `total_steps`. Example: With local_steps=4, they merge after the steps 4 and 8. The result is
    range(5, 9) for step 8, and range(5, 5) for step 7. With local_steps=1, it is range(7, 8) for step 7.
    """
    first = (step - 1) // local_steps * local_steps + 1
    is_synced = step % local_steps == 0 or step == total_steps
    return range(first, step + 1 if is_synced else first)


def next_sync(step: int, *, local_steps: int, total_steps: int) -> int:
    """Returns the first step, at or after `step`, after which the ranks merge their weights.

    Ranks merge their weights after every `local_steps` steps, and after step `total_steps`. Example: 8 for
    step 5 and local_steps 4.
    """
    return min(-(-step // local_steps) * local_steps, total_steps)
