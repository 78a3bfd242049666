"""The table of puzzle embeddings: a learned vector for each puzzle identifier.

A dataset gives each puzzle an identifier. In Sudoku, all puzzles have the same one. In ARC, all examples of a
task have the same one, so that the vector can describe the rule of the task.

The table may have a million rows, and a training step uses a few hundred. A call copies the rows of the
batch into a new tensor, and the backward pass stores the gradient in the field `grad` of this tensor.
`optimizers.puzzle_table` then sums the gradients of each identifier over slots and, with local_steps=1, over
ranks. It updates only the rows that were used, by sign SGD with weight decay:

    row = (1 - puzzle_emb_lr * puzzle_emb_weight_decay) * row - puzzle_emb_lr * sign(gradient)
"""

from typing import ClassVar

import torch
from torch import Tensor, nn


class PuzzleEmbedding(nn.Module):
    """A table with a learned vector for each puzzle identifier.

    A dataset gives each puzzle an identifier, which several puzzles may share. A call takes identifiers and
    returns their vectors. In training mode, the result requires a gradient. After the backward pass,
    `pop_gradients` returns the gradients of these results, and `optimizers.puzzle_table` uses them to update
    the vectors.
    `weights` is a buffer, not a parameter, because a training step uses only a few of its rows.

    Attributes:
        weights: The vectors, float32 [num_puzzle_identifiers, ndim], initially 0. If ranks divide the table
            (puzzle_emb_sharding=rows), `weights` contains only the rows of this rank.
    """

    weights_name: ClassVar[str] = "puzzle_emb.weights"  # name in the state dict of a network

    def __init__(self, num_puzzle_identifiers: int, ndim: int):
        super().__init__()
        self.register_buffer("weights", torch.zeros(num_puzzle_identifiers, ndim))
        self._used: list[tuple[Tensor, Tensor]] = []
        self._fetched: tuple[Tensor, Tensor] | None = None

    def read_from(self, identifiers: Tensor, rows: Tensor) -> None:
        """Makes the next calls read their vectors from `rows`, instead of from `weights`.

        Only needed if ranks divide the table. Until the next `read_from`, calls may only get identifiers that
        `identifiers` contains.

        identifiers: Puzzle identifiers, int64 [n], ascending. rows: Vectors of these identifiers, [n, ndim].
        """
        self._fetched = identifiers, rows

    def forward(self, identifiers: Tensor) -> Tensor:
        """Returns the vectors of a batch of puzzle identifiers, float32 [batch, ndim].

        In training mode, if gradients are enabled, the result requires a gradient. The module then stores a
        reference to the result until the next `pop_gradients`.
        """
        rows = self._look_up(identifiers)
        if self.training and torch.is_grad_enabled():
            rows.requires_grad_()  # `weights` requires no gradient, so `rows` is a leaf and gets the gradient
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
        """Returns the gradients of the calls since the last `pop_gradients`, and forgets them.

        The result is (identifiers [n], gradients [n, ndim]). An identifier may occur several times. If no
        call got a gradient, both tensors are empty.
        """
        used = [(identifiers, rows.grad) for identifiers, rows in self._used if rows.grad is not None]
        self._used.clear()
        if not used:
            nothing = torch.zeros(0, dtype=torch.int64, device=self.weights.device)
            return nothing, self.weights.new_zeros(0, self.weights.shape[1])
        identifiers, gradients = zip(*used, strict=True)
        return torch.cat(identifiers), torch.cat(gradients)
