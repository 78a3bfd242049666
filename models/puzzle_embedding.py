"""The table of puzzle embeddings: a learned vector for each puzzle identifier."""

from typing import ClassVar

import torch
from torch import Tensor, nn


class PuzzleEmbedding(nn.Module):
    """A table with one learned row for each puzzle identifier.

    The table may have a million rows, and a step uses a few hundred. So `weights` is a buffer, not a
    parameter. A call copies the used rows. In training, the copy requires a gradient, so that the backward
    pass stores the gradient of these rows in it. The table has a separate optimizer: sign SGD on these
    gradients, with learning rate puzzle_emb_lr (`optimizers.puzzle_table`).

    weights: The rows, float32 [num_puzzle_identifiers, ndim], initially 0. If the table is sharded, calls
    read fetched rows instead (`read_from`).
    """

    weights_name: ClassVar[str] = "puzzle_emb.weights"  # name in the state dict of a network

    def __init__(self, num_puzzle_identifiers: int, ndim: int):
        super().__init__()
        self.register_buffer("weights", torch.zeros(num_puzzle_identifiers, ndim))
        self._used: list[tuple[Tensor, Tensor]] = []
        self._fetched: tuple[Tensor, Tensor] | None = None

    def read_from(self, identifiers: Tensor, rows: Tensor) -> None:
        """Makes later calls read only these fetched rows [n, ndim].

        identifiers: Puzzle identifiers of the rows, int64 [n], ascending.
        """
        self._fetched = identifiers, rows

    def forward(self, identifiers: Tensor) -> Tensor:
        """Returns the rows of `identifiers` [batch]: float32 [batch, ndim].

        In training mode with gradient, remembers the rows until `pop_gradients`.
        """
        rows = self._look_up(identifiers)
        if self.training and torch.is_grad_enabled():
            rows.requires_grad_()  # a leaf, because `weights` is a buffer
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
        """Returns the identifiers [n] and gradients [n, ndim] of all calls since the last pop.

        An identifier may occur several times.
        """
        used = [(identifiers, rows.grad) for identifiers, rows in self._used if rows.grad is not None]
        self._used.clear()
        if not used:
            nothing = torch.zeros(0, dtype=torch.int64, device=self.weights.device)
            return nothing, self.weights.new_zeros(0, self.weights.shape[1])
        identifiers, gradients = zip(*used, strict=True)
        return torch.cat(identifiers), torch.cat(gradients)
