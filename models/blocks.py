"""Transformer blocks, and `Level`, a stack of blocks that a network calls as one function."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from config.architecture import TokenConfig
from dataset.metadata import Metadata, columns_of
from models.layers import Attention, Convolution, SwiGLU, rms_norm


class Block(nn.Module):
    """A post-norm transformer block. Its input and output are [batch, positions, hidden].

        h = rms_norm(h + self_attn(h))
        h = rms_norm(h + mlp(h))

    mlp: MLP that is applied to each position. eps: Added to the mean square in each norm. self_attn:
    Attention over the positions. conv: Convolution over the grid of cells. If self_attn is None, conv(h)
    replaces self_attn(h). If both are passed, their results are added. mlp_t: MLP along the axis of
    positions. If it is passed, it replaces self_attn and conv, and the first norm is over the positions, for
    each feature (arXiv 2510.04871, section 4.5).
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
        self.self_attn, self.conv, self.mlp_t = self_attn, conv, mlp_t
        self.mlp, self.eps = mlp, eps

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
    """Builds the transformer block that the config of a model selects.

    Args:
        arch: Config of the model, with keys such as hidden_size and num_heads.
        metadata: Description of the dataset. It contains the number of cells and, for grids, of columns.
        mlp: Class of the MLP. It is called with the hidden size and the keyword `expansion`.

    Raises:
        ValueError: arch.conv selects a convolution, but the puzzles are not grids.
    """
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


class Level(nn.Module):
    """A stack of transformer blocks that a network calls repeatedly to update a hidden state.

    `level(z, injection, *context)` applies the blocks to z + injection, and returns the new state in the
    shape of z. The injection is a tensor in this shape, or 0. Every block gets the arguments in `context`,
    such as the rotary cosines and sines from `models.layers.rotary_table`.

    Attributes:
        layers: The blocks.
        recomputes_blocks: Whether the backward pass recomputes the activations of each block (arXiv
            1604.06174). Training then needs less memory and more time. The gradients do not change.
        is_compiled: Whether the blocks are compiled with torch.compile.
    """

    is_compiled = False

    def __init__(self, blocks: Iterable[nn.Module]):
        super().__init__()
        self.layers = nn.ModuleList(blocks)
        self.recomputes_blocks = False

    def forward(self, z: Tensor, injection: Tensor | int, *context: Any) -> Tensor:
        return self.run_blocks(z + injection, *context)

    # A method of its own, so that models/flops.py can replace it.
    def run_blocks(self, h: Tensor, *context: Any) -> Tensor:
        for layer in self.layers.children():
            if self.recomputes_blocks and torch.is_grad_enabled():
                h = checkpoint(layer, h, *context, use_reentrant=False, preserve_rng_state=False)
            else:
                h = layer(h, *context)
        return h


def levels_of(network: nn.Module) -> dict[str, Level]:
    """Returns the `Level` modules (stacks of blocks) of a network, by module name.

    Example: {"L_level": level}.
    """
    return {name: module for name, module in network.named_modules() if isinstance(module, Level)}


def block_weights(network: nn.Module) -> frozenset[str]:
    """Returns the names of the parameters that are inside the transformer blocks of a network."""
    levels = tuple(f"{name}.layers." for name in levels_of(network))
    return frozenset(name for name, _ in network.named_parameters() if name.startswith(levels))


def cast_blocks_(network: nn.Module) -> None:
    """Casts the weights of transformer blocks to the dtype of activations, in place.

    This saves time in an evaluation. Do not call it before training, which updates float32 weights.
    """
    for name in block_weights(network):
        weight = network.get_parameter(name)
        weight.data = weight.data.to(network.dtype)
