"""The Symbol-Equivariant Recurrent Reasoning Model (SE-RRM, arXiv 2603.02193).

The state has a vector for every symbol (token) in every cell. By default (equivariant_symbols=true), all
ordinary symbols share their weights. So if the symbols of a puzzle are permuted, the answer has the same
permutation. The same weights also work with another number of symbols. Without learned positions, they also
work with another size of the grid. Tokens 0 and 1 (padding, and the empty cell or the end of a grid) have
separate weights.

models/objective.py computes the loss. There is no Q head. q_halt is computed from the logits without
gradient, so q_halt_loss changes no weight. In training, a slot halts at random (table in models/halting.py).
"""

import math

import numpy as np
import torch
from torch import Tensor, nn

from config.architecture import SERRMConfig
from dataset.metadata import Metadata, columns_of
from models.blocks import Level
from models.carry import Prediction, Reasoning, State
from models.layers import (
    Attention,
    Dropout,
    Linear,
    SwiGLU,
    grid_angles,
    rms_norm,
    rotary_angles,
    rotary_table,
    truncated_normal,
)
from models.network import Network, gradient_if
from models.noise import perturb
from models.puzzle_embedding import PuzzleEmbedding
from models.random import SlotRng, sample_keys, sample_uniform

_NUM_SPECIAL = 2


class AxialBlock(nn.Module):
    """A post-norm transformer block on h, [batch, symbols, positions, hidden].

        h = rms_norm(h + attn(h))    attention over the positions, for each symbol
        h = rms_norm(h + attn_t(h))  attention over the symbols, at each position
        h = rms_norm(h + mlp(h))

    `forward` takes h, the table of rotary position embeddings (None: no rotary position embeddings), and a
    random key of each slot for the dropout, int64 [batch] (None: no dropout).

    number: Index of this block in the network. The random bits of the dropout depend on it, so that each
        block sets other elements to 0.
    """

    def __init__(self, arch: SERRMConfig, *, number: int):
        super().__init__()
        self.attn = Attention(arch.hidden_size, num_heads=arch.num_heads, head_dim=arch.head_dim)
        self.attn_t = Attention(arch.hidden_size, num_heads=arch.num_heads_t, head_dim=arch.head_dim_t)
        self.mlp = SwiGLU(arch.hidden_size, expansion=arch.expansion)
        self.eps, self.dropout, self.number = arch.rms_norm_eps, arch.dropout, number

    def forward(self, h: Tensor, rotary: Tensor | None, keys: Tensor | None) -> Tensor:
        along_cells, along_symbols = (
            None if keys is None else Dropout(keys, 2 * self.number + axis, self.dropout) for axis in (0, 1)
        )
        mixed = self.attn(h.flatten(0, 1), rotary, dropout=along_cells).view(h.shape)
        h = rms_norm(h + mixed, eps=self.eps).transpose(1, 2)
        mixed = self.attn_t(h.flatten(0, 1), None, dropout=along_symbols).view(h.shape)
        h = rms_norm(h + mixed, eps=self.eps).transpose(1, 2)
        return rms_norm(h + self.mlp(h), eps=self.eps)


class SERRM(Network):
    """The network of SE-RRM (arXiv 2603.02193), with a hidden vector for each symbol and cell.

    A symbol is a token that a cell may contain. One call of the network, with the embedded puzzle e and a
    stack L of `AxialBlock` modules:

        H_cycles x L_cycles times:  z_H = L(z_H + e)
        logits = lm_head(z_H at the cells)
        q_halt = minimum over the cells of log(p / (1 - p)), with the probability p of the most likely symbol

    The hidden state z_H and e are [batch, symbols, positions, hidden] in the dtype of the activations. The
    positions are the cells, then `add_tokens` learned positions. By default, H_cycles is 3, L_cycles is 6,
    and the stack has 2 blocks.

    All calls of L in the last `gradient_cycles` H cycles have gradient, by default in the last one. If
    gradient_cycles is 0, only the last call has gradient. q_halt and the returned state are detached.
    """

    def __init__(self, arch: SERRMConfig, metadata: Metadata):
        super().__init__(arch)
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
        if arch.puzzle_emb_ndim:
            self.puzzle_emb = PuzzleEmbedding(metadata.num_puzzle_identifiers, width + self.num_symbols)
        if self.num_added and self.is_equivariant:
            self.add_tokens_special = draw(_NUM_SPECIAL, self.num_added)
        if self.num_added:
            self.add_tokens = draw(1 if self.is_equivariant else self.num_symbols, self.num_added)
        # The state of a slot that starts: a random vector, equal at all symbols and positions, never trained.
        self.register_buffer("H_init", truncated_normal(width, std=1).to(self.dtype))
        self.L_level = Level(AxialBlock(arch, number=number) for number in range(arch.L_layers))
        self.lm_head = (
            Linear(width, 1) if self.is_equivariant else Linear(self.num_symbols * width, self.num_symbols)
        )
        rotary = None
        if arch.pos_encodings != "learned":  # angle 0 for added tokens
            rotary = rotary_table(nn.functional.pad(_angles(arch, metadata), (0, 0, 0, self.num_added)))
        self.register_buffer("rotary", rotary, persistent=False)

    def initial_state(self, batch_size: int, *, seq_len: int) -> State:
        width = self.arch.hidden_size
        return {"z_H": self.H_init.expand(batch_size, self.num_symbols, seq_len + self.num_added, width)}

    def forward(
        self,
        state: State,
        inputs: Tensor,
        puzzle_identifiers: Tensor,
        *,
        reasoning: Reasoning,
        rng: SlotRng | None = None,
    ) -> tuple[State, Prediction]:
        z_H, e = state["z_H"], self.embed(inputs, puzzle_identifiers)
        drops, num_calls = self.training and self.arch.dropout > 0, reasoning.H_cycles * reasoning.L_cycles
        num_with_gradient = max(self.arch.gradient_cycles * reasoning.L_cycles, 1)
        for call in range(num_calls):
            with gradient_if(call >= num_calls - num_with_gradient):
                keys = rng.arrays["keys"] + call if drops else None
                new = self.L_level(z_H, e, self.rotary, keys)
                z_H = perturb(z_H, new, reasoning, rng, use=f"z_H {call}")

        cells = z_H[:, :, : self.seq_len]
        if self.is_equivariant:
            logits = self.lm_head(cells).squeeze(-1).transpose(1, 2)
        else:
            logits = self.lm_head(cells.transpose(1, 2).flatten(2))
        with torch.no_grad():
            q_halt = _least_confidence(logits.float())
        return {"z_H": z_H.detach()}, Prediction(logits, q_halt, None)

    def wants_to_halt(self, state: State, prediction: Prediction, rng: SlotRng | None = None) -> Tensor:
        # In training, `sample_randomness` has chosen the slots that halt. In evaluation, a slot halts if all
        # cells have p > 1/2.
        if not self.training:
            return prediction.q_halt > 0
        never = torch.zeros_like(prediction.q_halt, dtype=torch.bool)
        return never if rng is None else rng.arrays.get("stops", never)

    def sample_randomness(
        self, *, seed: int, step: int, batch_size: int, reasoning: Reasoning
    ) -> dict[str, np.ndarray]:
        arrays = {}
        if self.arch.halt_exploration_prob and reasoning.max_steps > 1:
            uniform = sample_uniform(seed=seed, step=step, count=batch_size)
            arrays["stops"] = uniform < self.arch.halt_exploration_prob  # which slots halt
        if self.arch.dropout:
            arrays["keys"] = sample_keys(seed=seed, step=step, batch_size=batch_size)  # for dropout
        return arrays

    def embed(self, inputs: Tensor, puzzle_identifiers: Tensor) -> Tensor:
        """Returns the embedded puzzle, [batch, symbols, positions, hidden].

        The positions are the cells, then `add_tokens` learned positions. If a cell contains symbol s, its
        vector for s is sqrt(number of symbols) * (learned vector of s), and its vectors for all other symbols
        are 0. Then embeddings of the cell's position and of the puzzle are added, if the config has them.

        The puzzle embedding has hidden + symbols numbers. The first part is a vector that is added for every
        symbol and cell. The second part has a number for each symbol, which is added to all features of its
        vectors.

        inputs: Tokens, int32 [batch, seq_len]. puzzle_identifiers: For each puzzle, the row of its
        puzzle embedding in the table, int32 [batch].
        """
        if self.is_equivariant:
            symbols = self._of_symbols(self.embed_special_tokens, self.embed_symbol_tokens)
        else:
            symbols = self.embed_symbols
        is_there = inputs.unsqueeze(1) == torch.arange(self.num_symbols, device=inputs.device).unsqueeze(1)
        e = is_there.unsqueeze(-1) * (math.sqrt(self.num_symbols) * symbols).to(self.dtype)
        if self.pos_embedding is not None:
            e = e + self.pos_embedding.to(self.dtype)
        if self.puzzle_emb is not None:
            rows = self.puzzle_emb(puzzle_identifiers).to(self.dtype)
            of_all, of_symbol = rows.split((self.arch.hidden_size, self.num_symbols), dim=1)
            e = e + of_symbol[:, :, None, None] + of_all[:, None, None]
        if self.num_added:
            added = self.add_tokens
            if self.is_equivariant:
                added = self._of_symbols(self.add_tokens_special, added)
            e = torch.cat((e, added.to(self.dtype).expand(e.shape[0], -1, -1, -1)), dim=2)
        return e

    # special: Vectors of symbols 0 and 1, [1, 2, ...]. ordinary: That of all other symbols, [1, 1, ...].
    def _of_symbols(self, special: Tensor, ordinary: Tensor) -> Tensor:
        return torch.cat((special, ordinary.expand(-1, self.num_symbols - _NUM_SPECIAL, -1, -1)), dim=1)


def _angles(arch: SERRMConfig, metadata: Metadata) -> Tensor:  # [seq_len, head_dim / 2]
    if arch.pos_encodings == "rope":
        return rotary_angles(metadata.seq_len, arch.head_dim, base=arch.rope_theta)
    num_columns = columns_of(metadata, needed_by="arch.pos_encodings=rope2d")
    return grid_angles(metadata.seq_len, num_columns, arch.head_dim, base=arch.rope_theta)


# log(p / (1 - p)) of the least certain cell, [batch]. p is the probability of the cell's most likely symbol.
def _least_confidence(logits: Tensor) -> Tensor:
    largest, best = logits.max(dim=-1, keepdim=True)
    others = logits.scatter(-1, best, -torch.inf).logsumexp(dim=-1)
    return (largest.squeeze(-1) - others).amin(dim=-1)


NETWORK = SERRM
