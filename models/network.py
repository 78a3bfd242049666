"""What all networks share: the embedded input in front, the two heads behind, and what is kept between steps.

A network is this plus `reason`, the recurrence of its own file; the halting wrapper sees only what is here.
"""

import math
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from models.initialization import truncated_normal
from models.layers import Embedding, Level, Linear, rotary_table
from models.puzzle_embedding import PuzzleEmbedding

Q_HEAD_BIAS = -5.0  # halting starts out improbable


class Architecture(Protocol):
    """What every network reads of its config (config/schema.py has the types and limits)."""

    hidden_size: int
    num_heads: int
    expansion: float
    mlp_t: bool
    pos_encodings: str
    puzzle_emb_ndim: int
    puzzle_emb_positions: int
    forward_dtype: str
    rope_theta: float
    rms_norm_eps: float


class State(NamedTuple):
    """What the network keeps between steps.

    Each [batch, puzzle_emb_len + seq_len, hidden], in the forward dtype.
    """

    z_H: Tensor
    z_L: Tensor


class Prediction(NamedTuple):
    """logits [batch, seq_len, vocab] in the forward dtype; q_halt and q_continue, float32 [batch]."""

    logits: Tensor
    q_halt: Tensor
    q_continue: Tensor


class Network(nn.Module):
    """One step of a model, from tokens to logits and halting values.

    Subclasses name their levels and build `reason`. Modules are registered in the order in which they are
    used: gradients are complete in about the reverse one, in which they travel between ranks.

    levels: number of blocks of each level, in the order of their use; each becomes an attribute.
    H_init, L_init: [hidden], what z_H and z_L start from; buffers, never trained.
    """

    def __init__(
        self,
        arch: Architecture,
        *,
        levels: dict[str, int],
        vocab_size: int,
        seq_len: int,
        num_puzzle_identifiers: int,
    ):
        super().__init__()
        self.hidden_size, self.puzzle_emb_len = arch.hidden_size, arch.puzzle_emb_positions
        self.dtype = getattr(torch, arch.forward_dtype)
        length = self.puzzle_emb_len + seq_len

        std = arch.hidden_size**-0.5
        self.embed_tokens = Embedding(vocab_size, arch.hidden_size, std=std, dtype=self.dtype)
        self.puzzle_emb = self.embed_pos = None
        if arch.puzzle_emb_ndim:
            self.puzzle_emb = PuzzleEmbedding(num_puzzle_identifiers, arch.puzzle_emb_ndim)
        self.has_rotary = arch.pos_encodings == "rope"
        if self.has_rotary:
            cos, sin = rotary_table(length, arch.hidden_size // arch.num_heads, base=arch.rope_theta)
            self.register_buffer("rotary_cos", cos, persistent=False)
            self.register_buffer("rotary_sin", sin, persistent=False)
        elif arch.pos_encodings == "learned":
            self.embed_pos = Embedding(length, arch.hidden_size, std=std, dtype=self.dtype)

        self.register_buffer("H_init", truncated_normal(arch.hidden_size, std=1).to(self.dtype))
        self.register_buffer("L_init", truncated_normal(arch.hidden_size, std=1).to(self.dtype))

        # Drawn in one order, which figures measured with a seed depend on, and registered in that of use.
        lm_head = Linear(arch.hidden_size, vocab_size)
        q_head = Linear(arch.hidden_size, 2, bias=True)
        block = {"num_heads": arch.num_heads, "expansion": arch.expansion, "eps": arch.rms_norm_eps}
        block["mixed_length"] = length if arch.mlp_t else None
        drawn = {name: Level(levels[name], arch.hidden_size, **block) for name in sorted(levels)}
        for name in levels:
            self.add_module(name, drawn[name])

        self.lm_head, self.q_head = lm_head, q_head
        with torch.no_grad():
            self.q_head.weight.zero_()
            self.q_head.bias.fill_(Q_HEAD_BIAS)

    def block_weights(self) -> frozenset[str]:
        """The names of the matrices inside the blocks: all dense weights but the embeddings and the heads."""
        levels = [(name, module) for name, module in self.named_modules() if isinstance(module, Level)]
        return frozenset(f"{name}.{inner}" for name, level in levels for inner, _ in level.named_parameters())

    def initial_state(self, batch_size: int, *, seq_len: int) -> State:
        """H_init and L_init at every position of every slot."""
        shape = (batch_size, self.puzzle_emb_len + seq_len, self.hidden_size)
        return State(self.H_init.expand(shape), self.L_init.expand(shape))

    def embed(self, inputs: Tensor, puzzle_identifiers: Tensor) -> Tensor:
        """The input e of every call in the step: sqrt(hidden) * [puzzle embedding, tokens].

        Learned positions are added before the scaling.
        """
        e = self.embed_tokens(inputs)
        if self.puzzle_emb is not None:
            rows = self.puzzle_emb(puzzle_identifiers).to(self.dtype)
            rows = nn.functional.pad(rows, (0, self.puzzle_emb_len * self.hidden_size - rows.shape[1]))
            e = torch.cat((rows.view(len(rows), self.puzzle_emb_len, self.hidden_size), e), dim=1)
        if self.embed_pos is not None:
            e = math.sqrt(0.5) * (e + self.embed_pos(torch.arange(e.shape[1], device=e.device)))
        return math.sqrt(self.hidden_size) * e

    def reason(self, state: State, e: Tensor, rotary: tuple[Tensor, Tensor] | None) -> State:
        """The recurrence of one step; the new state still carries gradient."""
        raise NotImplementedError

    def forward(self, state: State, inputs: Tensor, puzzle_identifiers: Tensor) -> tuple[State, Prediction]:
        """inputs int32 [batch, seq_len], puzzle_identifiers int32 [batch]; the new state is detached."""
        rotary = (self.rotary_cos, self.rotary_sin) if self.has_rotary else None
        z_H, z_L = self.reason(state, self.embed(inputs, puzzle_identifiers), rotary)
        logits = self.lm_head(z_H)[:, self.puzzle_emb_len :]
        q = self.q_values(z_H)
        return State(z_H.detach(), z_L.detach()), Prediction(logits, q[:, 0], q[:, 1])

    def q_values(self, z_H: Tensor) -> Tensor:
        """q_halt and q_continue of a state: float32 [batch, 2]."""
        return self.q_head(z_H[:, 0]).float()
