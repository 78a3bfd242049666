"""The Symbol-Equivariant Recurrent Reasoning Model (SE-RRM, arXiv 2603.02193).

The state has a vector for every symbol (token) in every cell. All ordinary symbols share weights, so that
relabelling a puzzle relabels the answer, and the weights fit other grid sizes and numbers of symbols. Tokens
0 and 1 (padding, and the empty cell or the end of a grid) have separate weights.
"""

import math

import numpy as np
import torch
from torch import Tensor, nn

from config.architecture import SERRMConfig
from dataset.format import Metadata, columns_of
from models.blocks import Level, Take, take_all
from models.carry import Carry, Prediction, Reasoning, State
from models.flops import Shape, flops
from models.layers import (
    Attention,
    Dropout,
    Linear,
    Rotary,
    SwiGLU,
    grid_angles,
    rms_norm,
    rotary_angles,
    truncated_normal,
)
from models.losses import TokenLosses
from models.network import Network
from models.random import Draws, draw_keys, draw_uniform
from models.recursion import OneState

_NUM_SPECIAL = 2


class AxialBlock(nn.Module):
    """A post-norm block on [batch, symbols, positions, hidden], with attention along positions, then symbols.

    h = rms(h + attn(h)); h = rms(h + attn_t(h)); h = rms(h + mlp(h)). number: of this block in the level, to
    give each block its own random numbers of dropout.
    """

    def __init__(self, arch: SERRMConfig, *, number: int):
        super().__init__()
        self.attn = Attention(arch.hidden_size, num_heads=arch.num_heads, head_dim=arch.head_dim)
        self.attn_t = Attention(arch.hidden_size, num_heads=arch.num_heads_t, head_dim=arch.head_dim_t)
        self.mlp = SwiGLU(arch.hidden_size, expansion=arch.expansion)
        self.eps, self.dropout, self.number = arch.rms_norm_eps, arch.dropout, number

    def forward(self, h: Tensor, rotary: Rotary | None, keys: Tensor | None) -> Tensor:
        """Returns the new h. keys: int64 [batch], random keys for dropout; None: no dropout."""
        along_cells, along_symbols = (
            None if keys is None else Dropout(keys, 2 * self.number + axis, self.dropout) for axis in (0, 1)
        )
        mixed = self.attn(h.flatten(0, 1), rotary, dropout=along_cells).view(h.shape)
        h = rms_norm(h + mixed, eps=self.eps).transpose(1, 2)
        mixed = self.attn_t(h.flatten(0, 1), None, dropout=along_symbols).view(h.shape)
        h = rms_norm(h + mixed, eps=self.eps).transpose(1, 2)
        return rms_norm(h + self.mlp(h), eps=self.eps)

    def flops(self, shape: Shape, *, trains: bool = False) -> int:
        """Counts the operations on one input [symbols, positions, hidden] (`models.flops`)."""
        symbols, positions, width = shape
        parts = ((self.attn, shape), (self.attn_t, (positions, symbols, width)), (self.mlp, shape))
        return sum(flops(part, each, trains=trains) for part, each in parts)


class SERRM(OneState, TokenLosses, Network):
    """The network of SE-RRM: a level of axial blocks on [batch, symbols, seq_len + add_tokens, hidden].

    No Q head: q_halt is the logit of the least certain cell's probability. In training slots halt at random.
    """

    def __init__(self, arch: SERRMConfig, metadata: Metadata, *, take: Take = take_all):
        super().__init__(arch)
        self.dropout = arch.dropout
        self.seq_len, self.num_symbols = metadata.seq_len, metadata.vocab_size
        self.num_added, self.is_equivariant = arch.add_tokens, arch.equivariant_symbols
        width = arch.hidden_size

        def draw(*shape: int) -> nn.Parameter:
            return nn.Parameter(truncated_normal(1, *shape, width, std=1))

        if self.is_equivariant:
            self.embed_special_tokens, self.embed_symbol_tokens = draw(_NUM_SPECIAL, 1), draw(1, 1)
        else:
            self.embed_symbols = draw(self.num_symbols, 1)
        self.pos_embedding = draw(1, self.seq_len) if arch.pos_encodings == "learned" else None
        self.register_puzzle_rows(arch, metadata, width=width + self.num_symbols)
        if self.num_added and self.is_equivariant:
            self.add_tokens_special = draw(_NUM_SPECIAL, self.num_added)
        if self.num_added:
            self.add_tokens = draw(1 if self.is_equivariant else self.num_symbols, self.num_added)
        self.register_initial_values()
        self.L_level = Level(lambda number: AxialBlock(arch, number=number), arch.L_layers, take=take)
        self.lm_head = (
            Linear(width, 1) if self.is_equivariant else Linear(self.num_symbols * width, self.num_symbols)
        )
        if arch.pos_encodings != "learned":
            angles = _angles(arch, metadata)
            self.register_rotary(nn.functional.pad(angles, (0, 0, 0, self.num_added)))  # angle 0 for added

    def draw(self, *, seed: int, step: int, batch_size: int, reasoning: Reasoning) -> dict[str, np.ndarray]:
        """Draws `stops`, bool [batch_size] (slots that halt), and dropout `keys`, int64 [batch_size]."""
        at, drawn = {"seed": seed, "step": step}, {}
        if self.halt_exploration_prob and reasoning.max_steps > 1:
            drawn["stops"] = draw_uniform(**at, count=batch_size) < self.halt_exploration_prob
        if self.dropout:
            drawn["keys"] = draw_keys(**at, batch_size=batch_size)
        return drawn

    def halts(
        self, carry: Carry, prediction: Prediction, reasoning: Reasoning, draws: Draws | None
    ) -> Tensor:
        if not self.training:
            return super().halts(carry, prediction, reasoning, draws)
        is_last = carry.steps >= reasoning.max_steps
        return is_last if draws is None or "stops" not in draws.arrays else is_last | draws.arrays["stops"]

    @staticmethod
    def sizes_in(weights: State, arch: SERRMConfig) -> dict[str, int]:
        sizes = {}
        if (table := Network.table_in(weights, arch)) is not None:
            rows, width = table.shape
            sizes = {"num_puzzle_identifiers": rows, "vocab_size": width - arch.hidden_size}
        if not arch.equivariant_symbols:
            sizes["vocab_size"] = weights["embed_symbols"].shape[1]
        if arch.pos_encodings == "learned":
            sizes["seq_len"] = weights["pos_embedding"].shape[2]
        return sizes

    def state_shape(self, seq_len: int) -> tuple[int, ...]:
        return self.num_symbols, seq_len + self.num_added, self.hidden_size

    def embed(self, inputs: Tensor, puzzle_identifiers: Tensor) -> Tensor:
        """Returns e, [batch, symbols, positions, hidden].

        For the symbol in a cell, e is sqrt(symbols) * (vector of the symbol); for other symbols 0. Positions
        and puzzle embedding are added to all: hidden_size entries of the embedding to all symbols, and each
        remaining entry to all features of one symbol.
        """
        if self.is_equivariant:
            symbols = self._of_symbols(self.embed_special_tokens, self.embed_symbol_tokens)
        else:
            symbols = self.embed_symbols
        is_there = inputs.unsqueeze(1) == torch.arange(self.num_symbols, device=inputs.device).unsqueeze(1)
        e = is_there.unsqueeze(-1) * (math.sqrt(self.num_symbols) * symbols).to(self.dtype)
        if self.pos_embedding is not None:
            e = e + self.pos_embedding.to(self.dtype)
        if (rows := self.puzzle_rows(puzzle_identifiers)) is not None:
            of_all, of_symbol = rows.split((self.hidden_size, self.num_symbols), dim=1)
            e = e + of_symbol[:, :, None, None] + of_all[:, None, None]
        if self.num_added:
            added = self.add_tokens
            if self.is_equivariant:
                added = self._of_symbols(self.add_tokens_special, added)
            e = torch.cat((e, added.to(self.dtype).expand(e.shape[0], -1, -1, -1)), dim=2)
        return e

    def _of_symbols(self, special: Tensor, ordinary: Tensor) -> Tensor:
        """Returns a vector for each symbol: `special` for symbols 0 and 1, `ordinary` for all others."""
        return torch.cat((special, ordinary.expand(-1, self.num_symbols - _NUM_SPECIAL, -1, -1)), dim=1)

    def refine(self, z_H: Tensor, e: Tensor, *, call: int, draws: Draws | None) -> Tensor:
        drops = self.training and self.dropout > 0
        return self.L_level(z_H, e, self.rotary, draws.arrays["keys"] + call if drops else None)

    def predict(self, z_H: Tensor) -> Prediction:
        cells = z_H[:, :, : self.seq_len]
        if self.is_equivariant:
            logits = self.lm_head(cells).squeeze(-1).transpose(1, 2)
        else:
            logits = self.lm_head(cells.transpose(1, 2).flatten(2))
        with torch.no_grad():
            return Prediction(logits, _least_confidence(logits.float()), None)

    def head_flops(self, seq_len: int, *, trains: bool = False) -> int:
        rows = seq_len * self.num_symbols if self.is_equivariant else seq_len
        return flops(self.lm_head, (rows, self.hidden_size), trains=trains)


def _angles(arch: SERRMConfig, metadata: Metadata) -> Tensor:
    """Returns rotary angles, [seq_len, head_dim / 2]. ValueError for rope2d if the puzzles are no grids."""
    if arch.pos_encodings == "rope":
        return rotary_angles(torch.arange(metadata.seq_len), arch.head_dim, base=arch.rope_theta)
    num_columns = columns_of(metadata, needed_by="arch.pos_encodings=rope2d")
    return grid_angles(metadata.seq_len, num_columns, arch.head_dim, base=arch.rope_theta)


def _least_confidence(logits: Tensor) -> Tensor:
    """Returns log(p / (1 - p)) of the least certain cell, p of its best symbol: [batch], used as q_halt."""
    largest, best = logits.max(dim=-1, keepdim=True)
    others = logits.scatter(-1, best, -torch.inf).logsumexp(dim=-1)
    return (largest.squeeze(-1) - others).amin(dim=-1)


NETWORK = SERRM
