"""The Universal Reasoning Model (URM, arXiv 2512.14693): one state, updated repeatedly by the same blocks."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from config.architecture import URMConfig
from dataset.format import Metadata
from models.layers import Cuttable, Linear, cuts_of_gated, gated, inner_width
from models.recursion import OneState
from models.tokens import TokenNetwork


class ConvSwiGLU(Cuttable, nn.Module):
    """A SwiGLU with a depthwise convolution over the positions: down(silu(conv(silu(gate) * up))).

    conv turns u into v[p] = w0 u[p - 1] + w1 u[p] + bias, u[-1] = 0, over puzzle embedding and cells.
    """

    def __init__(self, width: int, *, expansion: float):
        super().__init__()
        inner = inner_width(width, expansion)
        self.gate_up_proj = Linear(width, 2 * inner)
        self.dwconv = nn.Conv1d(inner, inner, kernel_size=2, groups=inner)
        self.down_proj = Linear(inner, width)

    def cuts(self) -> dict[str, tuple[int, int]]:
        inner = len(self.dwconv.bias)
        return {**cuts_of_gated(self), "dwconv.weight": (1, inner), "dwconv.bias": (1, inner)}

    def forward(self, x: Tensor) -> Tensor:
        u = gated(x, self.gate_up_proj)
        (before, here), bias = self.dwconv.weight.to(x.dtype).unbind(-1), self.dwconv.bias.to(x.dtype)
        shifted = F.pad(u, (0, 0, 1, -1))
        return self.down_proj(F.silu(shifted * before.squeeze(1) + u * here.squeeze(1) + bias))


class URM(OneState, TokenNetwork):
    """The network of URM: embedding and heads as in HRM, and one level."""

    def __init__(self, arch: URMConfig, metadata: Metadata, **options: Any):
        super().__init__(arch, metadata, levels={"L_level": arch.L_layers}, mlp=ConvSwiGLU, **options)


NETWORK = URM
