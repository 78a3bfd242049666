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
    """A post-norm transformer block on h, [batch, positions, hidden].

        h = rms_norm(h + self_attn(h))
        h = rms_norm(h + mlp(h))

    Two config keys change what mixes the positions:

    arch.conv=instead  a convolution over the grid of cells
    arch.conv=beside   the sum of the attention and this convolution
    arch.mlp_t=true    a SwiGLU over the axis of positions. The norm after it is over the same axis
                       (arXiv 2510.04871, section 4.5)
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
        mixes_otherwise = self_attn is not None or conv is not None
        assert (mlp_t is not None) != mixes_otherwise, (
            "pass only mlp_t, or at least one of self_attn and conv"
        )
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
    """Builds one transformer block for the config section `arch` and a dataset.

    Raises ValueError if arch.conv is not "none" but the puzzles are not grids.

    mlp: Class of the MLP.
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
    """A stack of blocks that a network calls again and again to change a state.

    level(z, injection) adds the injection to the state z, and applies the blocks one after the other.

    Attributes:
        layers: The blocks.
        recomputes_blocks: Whether the backward pass computes the activations of each block again.
        is_compiled: Whether torch compiles the blocks.
    """

    is_compiled = False

    def __init__(self, blocks: Iterable[nn.Module]):
        super().__init__()
        self.layers = nn.ModuleList(blocks)
        self.recomputes_blocks = False

    def forward(self, z: Tensor, injection: Tensor | int, *context: Any) -> Tensor:
        """Returns the new state, in the shape of z.

        z: State. injection: Tensor in the shape of z, or 0. It is added to z. context: Arguments that every
        block gets after h, such as the rotary table.
        """
        return self.run_blocks(z + injection, *context)

    def run_blocks(self, h: Tensor, *context: Any) -> Tensor:
        """Applies the blocks to h, one after the other, and returns the result.

        context: Arguments that every block gets after h, such as the rotary table.
        """
        for layer in self.layers.children():
            if self.recomputes_blocks and torch.is_grad_enabled():
                h = checkpoint(layer, h, *context, use_reentrant=False, preserve_rng_state=False)
            else:
                h = layer(h, *context)
        return h


def levels_of(network: nn.Module) -> dict[str, Level]:
    """Returns the levels (stacks of blocks) of a network: {name of the module: level}, such as "L_level"."""
    return {name: module for name, module in network.named_modules() if isinstance(module, Level)}


def block_weights(network: nn.Module) -> frozenset[str]:
    """Returns the names of the weights in transformer blocks. They are used in the dtype of the network."""
    levels = tuple(f"{name}.layers." for name in levels_of(network))
    return frozenset(name for name, _ in network.named_parameters() if name.startswith(levels))


def cast_blocks_(network: nn.Module) -> None:
    """Casts the weights in transformer blocks to the dtype of the network, in place. Not for training.

    Otherwise, every call of a layer would cast them.
    """
    for name in block_weights(network):
        weight = network.get_parameter(name)
        weight.data = weight.data.to(network.dtype)
