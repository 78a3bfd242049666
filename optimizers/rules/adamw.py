"""AdamW (arXiv 1711.05101): Adam with a weight decay that is independent of the gradient."""

from collections.abc import Iterable

import torch
from torch import Tensor


class AdamW(torch.optim.AdamW):
    """The fused AdamW of torch. The constructor creates all of `state`, so a checkpoint can be loaded."""

    def __init__(
        self, parameters: Iterable[Tensor], *, lr: float, beta1: float, beta2: float, weight_decay: float
    ):
        super().__init__(parameters, lr=lr, betas=(beta1, beta2), weight_decay=weight_decay, fused=True)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter] = {
                "step": torch.zeros((), device=parameter.device),
                "exp_avg": torch.zeros_like(parameter.detach()),
                "exp_avg_sq": torch.zeros_like(parameter.detach()),
            }


OPTIMIZER = AdamW
