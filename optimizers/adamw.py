"""AdamW (arXiv 1711.05101): Adam with decoupled weight decay, as several recipes of the field have it."""

from collections.abc import Iterable

import torch
from torch import Tensor


class AdamW(torch.optim.AdamW):
    """torch's fused kernels, with moments and count of updates in `state` from the start.

    There a checkpoint looks for them. Weight decay is on all parameters; those without a gradient stand
    still.
    """

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
