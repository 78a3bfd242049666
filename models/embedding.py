"""What a network reads: tokens, positions, and puzzle embeddings."""

import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from config.architecture import ArchConfig, TokenConfig
from dataset.format import Metadata
from models.layers import Embedding, rotary_angles, rotary_table


class PuzzleEmbedding(nn.Module):
    """A table with one learned row for each puzzle identifier.

    The table may have a million rows, and a step uses a few hundred. So `weights` is a buffer, not a
    parameter: in training each call returns the used rows as an autograd leaf, and remembers them. An
    optimizer of the table (`optimizers.puzzle_table`) then takes the gradients of these leaves.

    weights: float32 [num_puzzle_identifiers, ndim], initially 0. If ranks divide the table, calls read
    fetched rows instead (`read_from`).
    """

    weights_name: ClassVar[str] = "puzzle_emb.weights"  # name in the state dict of a network

    def __init__(self, num_puzzle_identifiers: int, ndim: int):
        super().__init__()
        self.register_buffer("weights", torch.zeros(num_puzzle_identifiers, ndim))
        self._used: list[tuple[Tensor, Tensor]] = []
        self._fetched: tuple[Tensor, Tensor] | None = None

    def read_from(self, identifiers: Tensor, rows: Tensor) -> None:
        """Makes later calls read fetched rows [n, ndim] only. identifiers: of the rows, int64 [n], rising."""
        self._fetched = identifiers, rows

    def forward(self, identifiers: Tensor) -> Tensor:
        """Returns the rows of `identifiers` [batch]: float32 [batch, ndim].

        In training mode with gradient, remembers the rows until `pop_gradients`.
        """
        rows = self._look_up(identifiers)
        if self.training and torch.is_grad_enabled():
            rows.requires_grad_()
            self._used.append((identifiers, rows))
        return rows

    def _look_up(self, identifiers: Tensor) -> Tensor:
        if self._fetched is None:
            return self.weights[identifiers]
        known, rows = self._fetched
        positions = torch.searchsorted(known, identifiers.long())
        assert identifiers.is_cuda or torch.equal(known[positions], identifiers.long()), "fetched beforehand"
        return rows[positions]

    def pop_gradients(self) -> tuple[Tensor, Tensor]:
        """Returns (identifiers [n], with repeats; gradients [n, ndim]) of all calls since the last pop."""
        used = [(identifiers, rows.grad) for identifiers, rows in self._used if rows.grad is not None]
        self._used.clear()
        if not used:
            nothing = torch.zeros(0, dtype=torch.int64, device=self.weights.device)
            return nothing, self.weights.new_zeros(0, self.weights.shape[1])
        identifiers, gradients = zip(*used, strict=True)
        return torch.cat(identifiers), torch.cat(gradients)


def build_puzzle_table(arch: ArchConfig, metadata: Metadata, *, width: int) -> PuzzleEmbedding | None:
    """Builds the puzzle embeddings, rows of this width; None where the architecture has none."""
    if not arch.has_puzzle_embeddings:
        return None
    return PuzzleEmbedding(metadata.num_puzzle_identifiers, width)


def build_positions(
    arch: TokenConfig, metadata: Metadata, *, dtype: torch.dtype
) -> tuple[Embedding | None, Tensor | None]:
    """Builds (learned positions to add, rotary table for attention): one of them, or none."""
    width, length = arch.hidden_size, arch.num_puzzle_positions + metadata.seq_len
    if arch.pos_encodings == "learned":
        return Embedding(length, width, std=width**-0.5, dtype=dtype), None
    if arch.pos_encodings == "rope":
        angles = rotary_angles(torch.arange(length), width // arch.num_heads, base=arch.rope_theta)
        return None, rotary_table(angles)
    return None, None


def embed_puzzle(
    inputs: Tensor,
    puzzle_identifiers: Tensor,
    *,
    tokens: Embedding,
    puzzles: PuzzleEmbedding | None,
    positions: Embedding | None,
    num_puzzle_positions: int,
) -> Tensor:
    """Returns e, [batch, num_puzzle_positions + seq_len, hidden]: the puzzle embedding, then the cells.

    sqrt(hidden) * [puzzle, tokens]; with learned positions sqrt(hidden / 2) * ([puzzle, tokens] + positions).
    """
    e = tokens(inputs)
    width = e.shape[-1]
    if puzzles is not None:
        rows = puzzles(puzzle_identifiers).to(e.dtype)
        rows = nn.functional.pad(rows, (0, num_puzzle_positions * width - rows.shape[1]))
        e = torch.cat((rows.view(rows.shape[0], num_puzzle_positions, width), e), dim=1)
    if positions is not None:
        e = math.sqrt(0.5) * (e + positions(torch.arange(e.shape[1], device=e.device)))
    return math.sqrt(width) * e
