"""The puzzle embeddings: one learned row per puzzle identifier, trained by an optimizer of its own.

A table may have a million rows, of which a step touches a few hundred. So the table is no parameter of
autograd: each use hands out the rows as a leaf of their own and remembers them, and `SparseSignSGD` collects
what the backward pass left there.
"""

import torch
from torch import Tensor, nn


class PuzzleEmbedding(nn.Module):
    """A table of rows outside of autograd. weights: float32 [num_puzzle_identifiers, ndim], initially 0."""

    def __init__(self, num_puzzle_identifiers: int, ndim: int):
        super().__init__()
        self.register_buffer("weights", torch.zeros(num_puzzle_identifiers, ndim))
        self._used: list[tuple[Tensor, Tensor]] = []

    def forward(self, identifiers: Tensor) -> Tensor:
        """Returns the rows of `identifiers` [batch]: float32 [batch, ndim].

        In training with gradient they are remembered until collected.
        """
        rows = self.weights[identifiers]
        if self.training and torch.is_grad_enabled():
            rows.requires_grad_()
            self._used.append((identifiers, rows))
        return rows

    def collect_gradients(self) -> tuple[Tensor, Tensor]:
        """Returns and forgets (identifiers [n], gradients [n, ndim]) of all uses; identifiers repeat."""
        used = [(identifiers, rows.grad) for identifiers, rows in self._used if rows.grad is not None]
        self._used.clear()
        if not used:
            nothing = torch.zeros(0, dtype=torch.int64, device=self.weights.device)
            return nothing, self.weights.new_zeros(0, self.weights.shape[1])
        identifiers, gradients = zip(*used, strict=True)
        return torch.cat(identifiers), torch.cat(gradients)
