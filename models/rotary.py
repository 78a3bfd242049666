"""Rotary positions (arXiv 2104.09864): the angles, and how queries and keys are turned by them."""

import torch
import torch.nn.functional as F
from torch import Tensor

# cos and sin of the positions' angles, float32 [length, head_dim / 2] each.
Rotary = tuple[Tensor, Tensor]


def rotary_table(length: int, head_dim: int, *, base: float) -> Rotary:
    """Computes cos and sin of the angles p * base^(-2i / head_dim)."""
    angles = rotary_angles(torch.arange(length), head_dim, base=base)
    return angles.cos(), angles.sin()


def rotary_angles(places: Tensor, dim: int, *, base: float) -> Tensor:
    """Computes the angles p * base^(-2i / dim), float32 [length, dim / 2]. places: p, [length]."""
    frequencies = base ** (-torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    return torch.outer(places.to(torch.float32), frequencies)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Applies rotary positions to [batch, length, heads, head_dim], in float32.

    The pair is (x1, x2), the two halves of the head: x1 cos - x2 sin and x2 cos + x1 sin.
    """
    x1, x2 = x.float().chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    turned = x1 * cos - x2 * sin, x2 * cos + x1 * sin
    # Each half is cast alone: no wide copy of both.
    return torch.cat([half.to(x.dtype) for half in turned], dim=-1)


def project_and_rotate(
    x: Tensor, weight: Tensor, rotary: Rotary, *, num_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes q, k (both rotated) and v, [batch, length, heads, head_dim] each, in fewer passes over memory.

    For a CPU without the compiler, which has no complex numbers. Each pair of the rotation is one complex
    number, whose two parts lie side by side: the rows of the weight that makes q and k are put in that order
    first, of both alike, so that the products of q and k stay. This may go where it saves less than 2 % of a
    step of `python -m benchmarks.step` on an idle machine.

    x: [batch, length, hidden]. weight: [3 * num_heads * head_dim, hidden], in the dtype of x.
    """
    heads = F.linear(x, _with_pairs(weight, num_heads)).unflatten(-1, (3 * num_heads, -1))
    qk, v = heads.split((2 * num_heads, num_heads), dim=2)
    q, k = rotate_pairs(qk, *rotary).chunk(2, dim=2)
    return q, k, v


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates as `rotate`, where pairs lie side by side: x1[0], x2[0], x1[1], x2[1], ..."""
    turns = torch.complex(cos, sin).repeat(1, x.shape[-2])
    pairs = torch.view_as_complex(x.float().flatten(-2).unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns).view(x.shape).to(x.dtype)


def _with_pairs(weight: Tensor, num_heads: int) -> Tensor:
    """Puts the rows of q and k in the order of `rotate_pairs`."""
    width, hidden = len(weight) // 3, weight.shape[1]
    qk, v = weight.split((2 * width, width))
    qk = qk.view(2 * num_heads, 2, -1, hidden).transpose(1, 2)
    return torch.cat((qk.reshape(-1, hidden), v))
