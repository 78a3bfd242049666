"""The fused AdamW of torch (arXiv 1711.05101)."""

from collections.abc import Iterable

import torch
from torch import Tensor


class AdamW(torch.optim.AdamW):
    """torch's AdamW, all of whose `state` exists from the start, because checkpoints are loaded into it."""

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
