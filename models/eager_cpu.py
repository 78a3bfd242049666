"""Rotary positions on a CPU without the compiler: those of `models.layers` in fewer passes over memory.

Each pair of the rotation is one complex number, whose two parts lie side by side: the rows of the weight that
makes q and k are put in that order first, of both alike, so that the products of q and k stay.

This may go where it saves less than 2 % of a step: the ratio of `python -m benchmarks.train_step` as it is,
and with an `is_used` that is False, on an idle machine.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def is_used(x: Tensor) -> bool:
    """Whether the detour pays: on a CPU, and not in a compiled graph; the compiler has no complex numbers."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def project_and_rotate(
    x: Tensor, weight: Tensor, rotary: tuple[Tensor, Tensor], *, num_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes q, k (both rotated) and v, [batch, length, heads, head_dim] each.

    x: [batch, length, hidden]. weight: [3 * hidden, hidden], in the dtype of x.
    """
    batch, length, hidden = x.shape
    heads = F.linear(x, _with_pairs(weight, num_heads)).view(batch, length, 3 * num_heads, -1)
    qk, v = heads.split((2 * num_heads, num_heads), dim=2)
    q, k = rotate_pairs(qk, *rotary).chunk(2, dim=2)
    return q, k, v


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates as `models.layers.rotate`, where pairs lie side by side: x1[0], x2[0], x1[1], x2[1], ..."""
    turns = torch.complex(cos, sin).repeat(1, x.shape[-2])
    pairs = torch.view_as_complex(x.float().flatten(-2).unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns).view(x.shape).to(x.dtype)


def _with_pairs(weight: Tensor, num_heads: int) -> Tensor:
    """Puts the rows of q and k in the order of `rotate_pairs`."""
    hidden = weight.shape[1]
    qk, v = weight.split((2 * hidden, hidden))
    qk = qk.view(2 * num_heads, 2, -1, hidden).transpose(1, 2)
    return torch.cat((qk.reshape(-1, hidden), v))
