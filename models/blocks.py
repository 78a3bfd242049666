"""Blocks of layers, and the levels that stack them."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from models.flops import Shape, flops
from models.layers import Attention, Convolution, Dropout, LayerNorm, Linear, Rotary, SwiGLU, rms_norm


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

    def forward(self, h: Tensor, rotary: Rotary | None) -> Tensor:
        if self.mlp_t is None:
            h = rms_norm(h + self._mix(h, rotary), eps=self.eps)
        else:
            h = h.transpose(1, 2).contiguous()
            h = rms_norm(h + self.mlp_t(h), eps=self.eps).transpose(1, 2)
        return rms_norm(h + self.mlp(h), eps=self.eps)

    def _mix(self, h: Tensor, rotary: Rotary | None) -> Tensor:
        if self.self_attn is None:
            return self.conv(h)
        attended = self.self_attn(h, rotary)
        return attended if self.conv is None else attended + self.conv(h)

    def flops(self, shape: Shape, *, trains: bool = False) -> int:
        """Counts the operations on one input of this shape (`models.flops`)."""
        shapes = {part: shape[::-1] if part is self.mlp_t else shape for part in self.children()}
        return sum(flops(part, each, trains=trains) for part, each in shapes.items())


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

    def forward(self, h: Tensor, rotary: Rotary | None, dropout: Dropout | None) -> Tensor:
        """Returns the new h. dropout: for the weights of attention, and for the output of both branches."""
        weights, first, second = (
            dropout and dropout._replace(stream=3 * self.number + use) for use in range(3)
        )
        mixed = self.attn(self.norm1(h), rotary, dropout=weights)
        h = h + (first(mixed) if first else mixed)
        out = self.down_proj(F.gelu(self.up_proj(self.norm2(h))))
        return h + (second(out) if second else out)


class Elsewhere(nn.Module):
    """A stand-in for a block that another pipeline stage runs: returns the input, and has no weights."""

    def __init__(self, block: nn.Module):
        super().__init__()
        self._block = (block.to("meta"),)  # in a tuple, so that it is not registered as a module

    def forward(self, h: Tensor, *_: Any) -> Tensor:
        return h

    def flops(self, shape: Shape, *, trains: bool = False) -> int:
        return flops(*self._block, shape, trains=trains)


# Returns what a level keeps of a block, given the block, its number, and the level's number of blocks.
Take = Callable[[nn.Module, int, int], nn.Module]


def take_all(block: nn.Module, number: int, num_blocks: int) -> nn.Module:
    """Returns the block itself: the default `take` of a level, for ranks that hold all blocks whole."""
    return block


class Level(nn.Module):
    """A stack of blocks, applied to state + injection.

    build: returns a new block for a number. take: called with each new block, before the next one is built;
    returns what this rank holds of the block (the block, a part, or `Elsewhere`). recomputes_blocks: whether
    the backward pass recomputes activations of each block.
    """

    def __init__(self, build: Callable[[int], nn.Module], num_blocks: int, *, take: Take = take_all):
        super().__init__()
        self.layers = nn.ModuleList()
        for number in range(num_blocks):
            self.layers.append(take(build(number), number, num_blocks))
        self.recomputes_blocks = False

    def forward(self, state: Tensor, injection: Tensor | int, *context: Any) -> Tensor:
        """Returns the new state, in the shape of `state`. context: further arguments of every block."""
        return self.run_blocks(state + injection, *context)

    def run_blocks(self, h: Tensor, *context: Any) -> Tensor:
        """Applies the blocks to h. A pipeline replaces this method, to send h through all stages."""
        for layer in self.layers:
            if self.recomputes_blocks and torch.is_grad_enabled():
                h = checkpoint(layer, h, *context, use_reentrant=False, preserve_rng_state=False)
            else:
                h = layer(h, *context)
        return h
