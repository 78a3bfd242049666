"""Random symmetries of boards (LDT): the grid is rotated or reflected, and the values are permuted.

If `LDT.look` gets random numbers, it transforms each board by a random symmetry before the network reads the
board. Then it transforms the outputs of the network back.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from models.random import SlotRng

_HALF_TURNS = (0, 1, 4, 5)  # numbers of the symmetries that map rows to rows (`turned_cells`)


class BoardSymmetry(nn.Module):
    """Rotates or reflects boards, [cells, values], at random, and permutes the values of their cells.

    A symmetry first moves the cells of the grid. Then it permutes the values, in the same way in all cells.
    Example: each 3 becomes a 7. The module has no weights.

    Args:
        grid: Indices of the cells, [rows, columns].
        num_values: Number of values that a cell may have.
        may_turn: Whether the grid may be rotated and reflected.
        may_permute: Whether the values may be permuted. The puzzles must then be Sudokus.
    """

    def __init__(self, grid: np.ndarray, *, num_values: int, may_turn: bool, may_permute: bool):
        super().__init__()
        self.num_values, self.may_permute = num_values, may_permute
        # Source cell of each cell in each symmetry of the grid, int64 [symmetries, cells].
        cells = turned_cells(grid, may_turn=may_turn, has_boxes=may_permute)
        self.register_buffer("turned_cells", cells, persistent=False)

    def sample(self, rng: SlotRng) -> Tensor:
        """Samples a symmetry for each board. Returns `sources`, int64 [batch, cells * values].

        If a board and its transformed copy are flattened to [cells * values], entry i of the copy is entry
        sources[i] of the board.
        """
        symmetry = rng.integers((), below=len(self.turned_cells), use="look symmetry")
        values = torch.arange(self.num_values, device=symmetry.device).expand(len(symmetry), -1)
        if self.may_permute:
            values = rng.uniform((self.num_values,), use="look values").argsort(dim=-1, stable=True)
        cells = self.turned_cells[symmetry]
        return (cells[:, :, None] * self.num_values + values[:, None]).flatten(1)

    @staticmethod
    def transform(boards: Tensor, sources: Tensor) -> Tensor:
        """Applies a symmetry to each board, [batch, cells, values]. Returns the transformed boards.

        sources: The symmetries, int64 [batch, cells * values], from `sample`. If board i is flattened, entry
        j of the transformed board is entry sources[i, j] of board i.
        """
        return boards.flatten(1).gather(1, sources).view(boards.shape)

    @staticmethod
    def transform_back(outputs: Tensor, sources: Tensor) -> Tensor:
        """Reverses the symmetry of each board in outputs of the network, [batch, loops, cells, values].

        sources: The symmetries that `transform` got for these boards, int64 [batch, cells * values].
        """
        targets = sources[:, None].expand(-1, outputs.shape[1], -1)
        zeros = torch.zeros_like(targets, dtype=outputs.dtype)
        return zeros.scatter(2, targets, outputs.flatten(2)).view(outputs.shape)


def turned_cells(grid: np.ndarray, *, may_turn: bool, has_boxes: bool) -> Tensor:
    """Returns the symmetries of a grid as int64 [symmetries, cells].

    Entry (s, i) is the cell that symmetry s moves to the place of cell i. A square grid has 8 rotations and
    reflections. If the grid or its Sudoku boxes are not square, the 4 of them that map rows to rows are used.

    grid: Indices of the cells, [rows, columns]. may_turn: If False, only the identity is returned. has_boxes:
    Whether the puzzle is a Sudoku.
    """
    rows, columns = grid.shape
    is_square = rows == columns and (not has_boxes or np.isclose(rows**0.5 % 1, 0))
    symmetries = [0] if not may_turn else range(8) if is_square else _HALF_TURNS
    # Symmetry 2 k + f is k quarter turns to the left, then a left-right reflection if f = 1.
    turned = [np.rot90(grid, symmetry // 2)[:, :: -1 if symmetry % 2 else 1] for symmetry in symmetries]
    return torch.from_numpy(np.stack(turned).reshape(len(turned), -1).astype(np.int64))
