"""AdamATan2 (arXiv 2407.05872): Adam with an arctan2 in place of the division with epsilon."""

from collections.abc import Iterable

import torch
from torch import Tensor


def adam_atan2_(
    parameters: list[Tensor],
    gradients: list[Tensor],
    first_moments: list[Tensor],
    second_moments: list[Tensor],
    *,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
) -> None:
    """One update in place; `step` counts from 1. All lists are parallel, all tensors of one dtype and device.

    p *= 1 - lr wd;  m = lerp(m, g, 1 - b1);  v = lerp(v, g^2, 1 - b2)
    p -= lr / (1 - b1^t) * atan2(m, sqrt(v) / sqrt(1 - b2^t))
    """
    torch._foreach_mul_(parameters, 1 - lr * weight_decay)
    torch._foreach_lerp_(first_moments, gradients, 1 - beta1)
    torch._foreach_mul_(second_moments, beta2)
    torch._foreach_addcmul_(second_moments, gradients, gradients, 1 - beta2)
    updates = torch._foreach_sqrt(second_moments)
    torch._foreach_div_(updates, (1 - beta2**step) ** 0.5)
    for update, moment in zip(updates, first_moments, strict=True):  # atan2 has no foreach form
        torch.atan2(moment, update, out=update)
    torch._foreach_add_(parameters, updates, alpha=-lr / (1 - beta1**step))


class AdamATan2(torch.optim.Optimizer):
    """AdamATan2 with decoupled weight decay on every parameter. Without a gradient one stands still."""

    def __init__(
        self, parameters: Iterable[Tensor], *, lr: float, beta1: float, beta2: float, weight_decay: float
    ):
        super().__init__(parameters, {"lr": lr, "beta1": beta1, "beta2": beta2, "weight_decay": weight_decay})
        for group in self.param_groups:
            group["step"] = 0
            for parameter in group["params"]:
                self.state[parameter] = {
                    "first_moment": torch.zeros_like(parameter),
                    "second_moment": torch.zeros_like(parameter),
                }

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            group["step"] += 1
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if parameters:
                adam_atan2_(
                    parameters,
                    [parameter.grad for parameter in parameters],
                    [self.state[parameter]["first_moment"] for parameter in parameters],
                    [self.state[parameter]["second_moment"] for parameter in parameters],
                    **{key: group[key] for key in ("step", "lr", "beta1", "beta2", "weight_decay")},
                )
