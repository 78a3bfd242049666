"""The layers of blocks: projections, norms, attention, convolution, dropout, SwiGLU.

In each call, a layer casts its weights to the dtype of its input. torch's autocast is not used. The
parameters have the names of the published checkpoints.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.random import CUT, STD_AFTER_CUT, random_bits

# SwiGLU's inner width is a multiple of this.
_WIDTH_MULTIPLE = 256
# Rows and columns of a convolution's kernel.
_KERNEL = 3
# Number of positions up to which plain products are faster than fused attention on a CPU.
_SHORT_LENGTH = 256


def truncated_normal(*shape: int, std: float) -> Tensor:
    """Returns a float32 tensor of normal random numbers without large values.

    The normal distribution is cut at 2 of its standard deviations, then scaled. The result has the standard
    deviation `std`. Its largest possible value is 2.27 std.
    """
    sigma = std / STD_AFTER_CUT
    return nn.init.trunc_normal_(torch.empty(shape), std=sigma, a=-CUT * sigma, b=CUT * sigma)


class Linear(nn.Module):
    """A linear layer, x @ weight.T + bias. It computes in the dtype of x.

    The weight is initialized with standard deviation 1 / sqrt(in_features), and the bias with 0.
    """

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False):
        super().__init__()
        self.weight = nn.Parameter(truncated_normal(out_features, in_features, std=in_features**-0.5))
        self.bias = nn.Parameter(torch.zeros(out_features)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


class Embedding(nn.Module):
    """An embedding table with float32 weights that returns vectors in `dtype`.

    The weights are initialized with standard deviation 1 / sqrt(size).
    """

    def __init__(self, num_embeddings: int, size: int, *, dtype: torch.dtype):
        super().__init__()
        self.embedding_weight = nn.Parameter(truncated_normal(num_embeddings, size, std=size**-0.5))
        self.dtype = dtype

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.embedding_weight.to(self.dtype))


def rms_norm(x: Tensor, *, eps: float) -> Tensor:
    """Returns x / sqrt(mean(x^2) + eps), with the mean over the last axis.

    Computes in float32. The result has the dtype of x.
    """
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def rotary_table(angles: Tensor) -> Tensor:
    """Returns the cosines and sines of rotary angles: float32 [2, *angles.shape].

    Attention layers take this tensor as their argument `rotary`.
    """
    return torch.stack((angles.cos(), angles.sin()))


def rotary_angles(positions: Tensor | int, dim: int, *, base: float) -> Tensor:
    """Returns the angles of rotary position embeddings: float32 [length, dim / 2], on the CPU.

    The angle of position p with index i is p * base^(-2i / dim).

    positions: The positions p, [length], on the CPU. An integer n stands for the positions 0 to n - 1. dim:
    Width of an attention head. base: Usually 10000.
    """
    # On the CPU, also if torch's default device is "meta". There, the first product would make torch import
    # its compiler.
    if isinstance(positions, int):
        positions = torch.arange(positions, device="cpu")
    frequencies = base ** (-torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim)
    return torch.outer(positions.to(torch.float32), frequencies)


def grid_angles(num_cells: int, num_columns: int, head_dim: int, *, base: float) -> Tensor:
    """Returns rotary angles of grid cells, row by row: float32 [num_cells, head_dim / 2].

    The first half of the angles of a cell encodes its row, and the second half its column.
    """
    positions = torch.arange(num_cells, device="cpu")
    rows, columns = positions // num_columns, positions % num_columns
    angles = [rotary_angles(lines, head_dim // 2, base=base) for lines in (rows, columns)]
    return torch.cat(angles, dim=1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Applies rotary position embeddings to x, [n, length, heads, head_dim].

    If x1 and x2 are the two halves of a head, the halves of the result are x1 cos - x2 sin and x2 cos + x1
    sin. The computation is in float32.

    cos, sin: Cosines and sines of the angles, float32. If the angles are the same for all sequences and
    heads, [length, head_dim / 2]. Otherwise [batch, length, heads, head_dim / 2]. Each example of the batch
    then has n / batch consecutive sequences of x.
    """
    rows = x if cos.ndim == 2 else x.unflatten(0, (len(cos), -1))
    x1, x2 = rows.float().chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    turned = x1 * cos - x2 * sin, x2 * cos + x1 * sin
    # Cast each half separately, to avoid a float32 copy of both.
    return torch.cat([half.to(x.dtype) for half in turned], dim=-1).view(x.shape)


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Applies rotary position embeddings to x, [n, length, heads, head_dim], with interleaved halves.

    The features of a head are a1, b1, a2, b2, and so on. Each pair (a, b) becomes (a cos - b sin, b cos + a
    sin), in the same place. This is faster than `rotate` on a CPU, but torch.compile does not support it.

    cos, sin: Cosines and sines of the angles, float32 [length, head_dim / 2], one for each pair.
    """
    # Complex numbers save 6 % of a forward and backward pass on a CPU.
    turns = torch.complex(cos, sin).repeat(1, x.shape[-2])
    pairs = torch.view_as_complex(x.float().flatten(-2).unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns).view(x.shape).to(x.dtype)


def order_pairs(weight: Tensor, num_heads: int) -> Tensor:
    """Reorders the rows of a fused query, key and value weight for `rotate_pairs`.

    In each head of the queries and keys, rows 0, 1, 2, 3, ... of the result are rows 0, n, 1, n + 1, ... of
    `weight`, with n = head_dim / 2. The rows of the values keep their order. Returns a copy.

    weight: The rows of the queries, then of the keys, then of the values, [3 * num_heads * head_dim, hidden].
    """
    width, hidden = len(weight) // 3, weight.shape[1]
    qk, v = weight.split((2 * width, width))
    qk = qk.view(2 * num_heads, 2, -1, hidden).transpose(1, 2)
    return torch.cat((qk.reshape(-1, hidden), v))


def attend(q: Tensor, k: Tensor, v: Tensor, *, dropout: Dropout | None = None) -> Tensor:
    """Returns softmax(q k^T / sqrt(head_dim)) v. All tensors are [batch, heads, length, head_dim].

    dropout: Dropout of the softmax weights. If None, there is no dropout.
    """
    # With dropout, torch's fused kernel would use torch's random numbers. For short sequences on a CPU, plain
    # products are faster, except in float32 without gradient. Measured (AVX2), time of the kernel divided by
    # time of plain products: in the backward pass in bfloat16, 11 for 17 positions, 6 for 81, and 1 for 900.
    # In float32 without gradient, 0.4 to 0.5 for 82 and 97 positions.
    is_long = q.device.type != "cpu" or q.shape[-2] > _SHORT_LENGTH
    is_fast = q.dtype == torch.float32 and not torch.is_grad_enabled() and not torch.compiler.is_exporting()
    if dropout is None and (is_long or is_fast):
        return F.scaled_dot_product_attention(q, k, v)
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
    weights = torch.softmax(scores, dim=-1)
    return (weights if dropout is None else dropout(weights)) @ v


class Dropout(NamedTuple):
    """A dropout (arXiv 1207.0580) that takes its random bits from given keys.

    The positions of the zeros therefore do not depend on the number of ranks and micro-batches. A call takes
    a tensor [rows, ...], in which each slot (position of the batch) has rows / batch consecutive rows.

    Attributes:
        keys: A random key for each slot, int64 [batch], for example from `models.random.sample_keys`.
        stream: Index of this dropout in the network. It gives each dropout different zeros.
        probability: Probability that an element becomes 0. Other elements are divided by 1 - probability.
    """

    keys: Tensor
    stream: int
    probability: float

    def __call__(self, x: Tensor) -> Tensor:
        bits = random_bits(self.keys, x.numel() // max(len(self.keys), 1), stream=self.stream)
        mask = (bits >= round(self.probability * 2**32)).view(x.shape)
        return x * mask.to(x.dtype) * (1 / (1 - self.probability))


class Attention(nn.Module):
    """A multi-head self-attention without a causal mask.

    `forward` takes x, [batch, positions, hidden], and `rotary`, the cosines and sines of the rotary angles
    from `rotary_table`. If `rotary` is None, there are no rotary position embeddings.

    head_dim: Width of a head. If None, hidden_size / num_heads. bias: Whether the projections have biases.
    has_rotary: Whether `forward` will get a rotary table. If False, the keys have no bias, because it would
    not change the attention weights.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        num_heads: int,
        head_dim: int | None = None,
        bias: bool = False,
        has_rotary: bool = True,
    ):
        super().__init__()
        self.head_dim = hidden_size // num_heads if head_dim is None else head_dim
        width = num_heads * self.head_dim
        self.qkv_proj = Linear(hidden_size, 3 * width)
        self.q_bias, self.k_bias, self.v_bias = (
            nn.Parameter(torch.zeros(width)) if is_there else None
            for is_there in (bias, bias and has_rotary, bias)
        )
        self.o_proj = Linear(width, hidden_size, bias=bias)

    def forward(self, x: Tensor, rotary: Tensor | None, *, dropout: Dropout | None = None) -> Tensor:
        weight, bias = self.qkv_proj.weight.to(x.dtype), None
        if self.q_bias is not None:
            k_bias = torch.zeros_like(self.q_bias) if self.k_bias is None else self.k_bias
            bias = torch.cat((self.q_bias, k_bias, self.v_bias)).to(x.dtype)
        # On a CPU, `rotate_pairs` is faster. It needs one table for all examples, and no compilation.
        in_pairs = rotary is not None and rotary.ndim == 3 and x.device.type == "cpu"
        in_pairs = in_pairs and not torch.compiler.is_compiling()
        num_heads = len(weight) // (3 * self.head_dim)
        if in_pairs:
            weight = order_pairs(weight, num_heads)
            bias = None if bias is None else order_pairs(bias[:, None], num_heads)[:, 0]
        heads = F.linear(x, weight, bias).unflatten(-1, (3 * num_heads, self.head_dim))
        qk, v = heads.split((2 * num_heads, num_heads), dim=2)
        if rotary is not None:
            qk = (rotate_pairs if in_pairs else rotate)(qk, *rotary)
        q, k = qk.chunk(2, dim=2)
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))  # [batch, heads, positions, head_dim]
        mixed = attend(q, k, v, dropout=dropout)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


# Each call moves information by one cell, so with more calls the same weights solve larger mazes
# (Schwarzschild et al., arXiv 2106.04537; Bansal et al., arXiv 2202.05826).
class Convolution(Linear):
    """A 3x3 convolution over the grid of cells, with zero padding.

    The input is [batch, positions, hidden]. In the output, the positions before the grid are 0.

    Args:
        num_columns: Number of columns of the grid. The positions fill the grid row by row.
        num_before: Number of positions before the grid, which contain the puzzle embedding.
    Attributes:
        weight: Kernels, [hidden, hidden * 9]. weight[o, 9 * i : 9 * i + 9] is the 3x3 kernel from input
            feature i to output feature o, row by row.
    """

    def __init__(self, hidden_size: int, *, num_columns: int, num_before: int = 0):
        super().__init__(hidden_size * _KERNEL**2, hidden_size)
        self.num_columns, self.num_before = num_columns, num_before

    def forward(self, x: Tensor) -> Tensor:
        # The permuted tensors have torch's channels_last memory format, so conv2d does not copy them.
        cells = x[:, self.num_before :].unflatten(1, (-1, self.num_columns)).permute(0, 3, 1, 2)
        weight = self.weight.to(x.dtype).unflatten(1, (-1, _KERNEL, _KERNEL))
        mixed = F.conv2d(cells, weight, padding=_KERNEL // 2).permute(0, 2, 3, 1).flatten(1, 2)
        return F.pad(mixed, (0, 0, self.num_before, 0)) if self.num_before else mixed


class SwiGLU(nn.Module):
    """A gated MLP without biases (arXiv 2002.05202): down_proj(silu(gate) * up).

    gate and up are the two halves of gate_up_proj(x). Input and output have `width` features on the last
    axis. gate and up have 2/3 * expansion * width features, rounded up to a multiple of 256.
    """

    def __init__(self, width: int, *, expansion: float):
        super().__init__()
        inner = inner_width(width, expansion)
        self.gate_up_proj = Linear(width, 2 * inner)
        self.down_proj = Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(gated(x, self.gate_up_proj))


def inner_width(width: int, expansion: float) -> int:
    """Returns the inner width of a `SwiGLU`: 2/3 * expansion * width, rounded up to a multiple of 256."""
    return -(-round(expansion * width * 2 / 3) // _WIDTH_MULTIPLE) * _WIDTH_MULTIPLE


def gated(x: Tensor, gate_up: Linear) -> Tensor:
    """Returns silu(gate) * up, where gate and up are the two halves of gate_up(x)."""
    gate, up = (F.linear(x, half) for half in gate_up.weight.to(x.dtype).chunk(2))
    # Multiply in place. This saves memory in calls without gradient.
    return F.silu(gate).mul_(up)


class LayerNorm(nn.Module):
    """A layer norm over the last axis (arXiv 1607.06450), in the dtype of its input."""

    def __init__(self, width: int):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.weight.to(x.dtype), self.bias.to(x.dtype))
