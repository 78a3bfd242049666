"""Training with few exchanges: every rank takes some steps of its own, then all bring their weights together.

LocalSGD (arXiv 1805.09767) takes the mean of the weights. DiLoCo (arXiv 2311.08105) takes the mean change of
the weights since the last exchange for a gradient, which an outer optimizer follows with Nesterov's momentum.
The moments of the inner optimizers stay each rank's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from parallel.process_group import world_size
from parallel.sync import GradientSync

if TYPE_CHECKING:
    from config.schema import PretrainConfig


def steps_joined(step: int, *, local_steps: int, total_steps: int) -> range:
    """Returns the steps that an exchange after `step` brings together; none where there is no exchange.

    There is one every `local_steps`, and after the last step of the run.
    """
    first = (step - 1) // local_steps * local_steps + 1
    is_exchange = step % local_steps == 0 or step == total_steps
    return range(first, step + 1 if is_exchange else first)


def next_exchange(step: int, *, local_steps: int, total_steps: int) -> int:
    """Returns the first step at or after `step` that an exchange follows."""
    return min(-(-step // local_steps) * local_steps, total_steps)


class OuterOptimizer:
    """The exchange of the dense weights: one message of their changes, as the gradients would be one.

    change = mean over ranks of (anchor - weights)
    momentum = outer_momentum * momentum + change
    weights = anchor - outer_lr * (change + outer_momentum * momentum)

    With outer_lr 1 and outer_momentum 0 it is the mean of the weights. anchor: the weights after the last
    exchange, [size] of `parallel.flat`. momentum: the same size, or None.
    """

    def __init__(self, gradients: GradientSync, *, lr: float, momentum: float):
        self._gradients, self._lr, self._decay = gradients, lr, momentum
        self.anchor = gradients.flat.weights.clone()
        self.momentum = torch.zeros_like(self.anchor) if momentum else None

    def restart(self) -> None:
        """Takes the weights as they are now, equal on all ranks, for those of the last exchange."""
        self.anchor.copy_(self._gradients.flat.weights)

    @torch.no_grad()
    def step(self) -> dict[str, Tensor]:
        """Makes the weights of all ranks equal; all call it. Returns by name what each has told, [ranks]."""
        flat = self._gradients.flat
        torch.sub(self.anchor, flat.weights, out=flat.gradients)
        told = self._gradients.finish()
        change = flat.gradients.div_(world_size())
        if self.momentum is not None:
            self.momentum.mul_(self._decay).add_(change)
            change.add_(self.momentum, alpha=self._decay)
        self.anchor.sub_(change.mul_(self._lr))
        flat.weights.copy_(self.anchor)
        return told

    def state(self) -> dict[str, Tensor]:
        """Returns what a checkpoint keeps beside the weights, by their names: views of the momentum."""
        return {} if self.momentum is None else self._gradients.flat.views(self.momentum)


def build_outer_optimizer(config: PretrainConfig, gradients: GradientSync) -> OuterOptimizer | None:
    """Builds what the config asks for; None where gradients are exchanged every step."""
    if config.local_steps == 1:
        return None
    return OuterOptimizer(gradients, lr=config.outer_lr, momentum=config.outer_momentum)
