"""Blocks of layers, and the levels that stack them."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from config.architecture import TokenConfig
from dataset.format import Metadata, columns_of
from models.layers import Attention, Convolution, Dropout, LayerNorm, Linear, SwiGLU, rms_norm


class Block(nn.Module):
    """A post-norm transformer block: h = rms(h + mix(h)); h = rms(h + mlp(h)), on [batch, positions, hidden].

    mix is self-attention, a convolution over the grid of cells, the sum of both, or `mlp_t`: a SwiGLU over
    the axis of positions, with the norm over the same axis (TRM, arXiv 2510.04871, section 4.5).
    """

    def __init__(
        self,
        *,
        mlp: nn.Module,
        eps: float,
        self_attn: Attention | None = None,
        conv: Convolution | None = None,
        mlp_t: SwiGLU | None = None,
    ):
        super().__init__()
        assert (mlp_t is None) != (self_attn is None and conv is None), "the positions are mixed in one way"
        self.self_attn, self.conv, self.mlp_t = self_attn, conv, mlp_t
        self.mlp = mlp
        self.eps = eps

    def forward(self, h: Tensor, rotary: Tensor | None) -> Tensor:
        if self.mlp_t is None:
            h = rms_norm(h + self._mix(h, rotary), eps=self.eps)
        else:
            h = h.transpose(1, 2).contiguous()
            h = rms_norm(h + self.mlp_t(h), eps=self.eps).transpose(1, 2)
        return rms_norm(h + self.mlp(h), eps=self.eps)

    def _mix(self, h: Tensor, rotary: Tensor | None) -> Tensor:
        if self.self_attn is None:
            return self.conv(h)
        attended = self.self_attn(h, rotary)
        return attended if self.conv is None else attended + self.conv(h)


def build_block(arch: TokenConfig, metadata: Metadata, *, mlp: type[nn.Module] = SwiGLU) -> Block:
    """Builds a block that mixes positions as the architecture says. ValueError: no grid for a convolution."""
    width, mixing = arch.hidden_size, {}
    if arch.mlp_t:
        length = arch.num_puzzle_positions + metadata.seq_len
        mixing["mlp_t"] = SwiGLU(length, expansion=arch.expansion)
    elif arch.conv != "instead":
        mixing["self_attn"] = Attention(width, num_heads=arch.num_heads)
    if arch.conv != "none":
        num_columns = columns_of(metadata, needed_by=f"arch.conv={arch.conv}")
        mixing["conv"] = Convolution(width, num_columns=num_columns, num_before=arch.num_puzzle_positions)
    return Block(mlp=mlp(width, expansion=arch.expansion), eps=arch.rms_norm_eps, **mixing)


class PreNormBlock(nn.Module):
    """A pre-norm transformer block: h += attn(norm(h)); h += down(gelu(up(norm(h)))), all with biases.

    number: of this block in the level, to give each block its own random numbers of dropout.
    """

    def __init__(self, width: int, *, num_heads: int, expansion: float, has_rotary: bool, number: int):
        super().__init__()
        inner, options = round(expansion * width), {"bias": True, "has_rotary": has_rotary}
        self.norm1, self.attn = LayerNorm(width), Attention(width, num_heads=num_heads, **options)
        self.norm2, self.up_proj = LayerNorm(width), Linear(width, inner, bias=True)
        self.down_proj = Linear(inner, width, bias=True)
        self.number = number

    def forward(self, h: Tensor, rotary: Tensor | None, dropout: Dropout | None) -> Tensor:
        """Returns the new h. dropout: for the weights of attention, and for the output of both branches."""
        weights, first, second = (
            dropout and dropout._replace(stream=3 * self.number + use) for use in range(3)
        )
        mixed = self.attn(self.norm1(h), rotary, dropout=weights)
        h = h + (first(mixed) if first else mixed)
        out = self.down_proj(F.gelu(self.up_proj(self.norm2(h))))
        return h + (second(out) if second else out)


class Level(nn.Module):
    """A stack of blocks, applied to state + injection.

    recomputes_blocks: whether the backward pass recomputes activations of each block.
    """

    def __init__(self, blocks: Iterable[nn.Module]):
        super().__init__()
        self.layers = nn.ModuleList(blocks)
        self.recomputes_blocks = False

    def forward(self, state: Tensor, injection: Tensor | int, *context: Any) -> Tensor:
        """Returns the new state, in the shape of `state`. context: further arguments of every block."""
        return self.run_blocks(state + injection, *context)

    def run_blocks(self, h: Tensor, *context: Any) -> Tensor:
        """Applies the blocks to h."""
        for layer in self.layers.children():
            if self.recomputes_blocks and torch.is_grad_enabled():
                h = checkpoint(layer, h, *context, use_reentrant=False, preserve_rng_state=False)
            else:
                h = layer(h, *context)
        return h


def levels_of(network: nn.Module) -> dict[str, Level]:
    """Returns the levels of a network by the names of their modules."""
    return {name: each for name, each in network.named_modules() if isinstance(each, Level)}


def block_weights(network: nn.Module) -> frozenset[str]:
    """Returns the names of the weights inside blocks; these are only used in the forward dtype."""
    levels = tuple(f"{name}.layers." for name in levels_of(network))
    return frozenset(name for name, _ in network.named_parameters() if name.startswith(levels))


def cast_blocks_(network: nn.Module) -> None:
    """Casts the weights inside blocks to the forward dtype, to save later casts. Not for training."""
    for name in block_weights(network):
        weight = network.get_parameter(name)
        weight.data = weight.data.to(network.dtype)
