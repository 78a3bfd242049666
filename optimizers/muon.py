"""Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon): momentum, made orthogonal, for matrices."""

from collections.abc import Iterable

import torch
from torch import Tensor


class Muon(torch.optim.Muon):
    """torch's, with its momentum in `state` from the start, where a checkpoint looks for it.

    Steps are scaled to the size of Adam's (arXiv 2502.16982), so that lr and weight decay mean the same.
    """

    def __init__(self, matrices: Iterable[Tensor], *, lr: float, weight_decay: float):
        super().__init__(matrices, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
        for matrix in self.param_groups[0]["params"]:
            self.state[matrix]["momentum_buffer"] = torch.zeros_like(matrix)
