"""Random symmetries of boards (LDT): the grid is rotated or reflected, and the values are permuted.

With random numbers, `LDT.look` transforms each board by a random symmetry before the network reads it, and
transforms the outputs back.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from models.random import SlotRng

_HALF_TURNS = (0, 1, 4, 5)  # numbers of the symmetries that map rows to rows (`turned_cells`)


class BoardSymmetry(nn.Module):
    """Rotates or reflects the grids of puzzles at random, and permutes the values of cells.

    A board, [cells, values], contains a number for each value that a cell may have, in each cell of the grid.
    A symmetry first moves cells: it rotates or reflects the grid. Then it permutes the values, in the same
    way in all cells. Example: each 3 becomes a 7.

    The module has no weights. `sample` samples a symmetry for each board of a batch, `transform` applies it,
    and `transform_back` reverses it.

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
        """Samples a rotation or reflection, and a permutation of the values, for each board.

        Returns int64 [batch, cells * values], the argument `sources` of `transform`. If a board and its
        transformed copy are flattened to [cells * values], entry i of the copy is entry sources[i] of the
        board.

        rng: Random numbers, different for each board of the batch.
        """
        symmetry = rng.integers((), below=len(self.turned_cells), use="look symmetry")
        values = torch.arange(self.num_values, device=symmetry.device).expand(len(symmetry), -1)
        if self.may_permute:
            values = rng.uniform((self.num_values,), use="look values").argsort(dim=-1, stable=True)
        cells = self.turned_cells[symmetry]
        return (cells[:, :, None] * self.num_values + values[:, None]).flatten(1)

    @staticmethod
    def transform(boards: Tensor, sources: Tensor) -> Tensor:
        """Rotates or reflects the grid of each board, and permutes the values of its cells.

        The cells of a board move to other places of the grid. The numbers of a cell move along the axis of
        values, in the same way in all cells of a board. The order of the boards in the batch does not change.
        The result has the shape of `boards`.

        boards: A number for each value of each cell, [batch, cells, values]. sources: For each entry of the
        result, the index of the entry of the board that moves there, int64 [batch, cells * values], from
        `sample`.
        """
        return boards.flatten(1).gather(1, sources).view(boards.shape)

    @staticmethod
    def transform_back(outputs: Tensor, sources: Tensor) -> Tensor:
        """Reverses `transform`, for tensors that a network computed from transformed boards.

        The cells move back to their places, and the values to their old order. The result has the shape of
        `outputs`.

        outputs: A number for each value of each cell, [batch, loops, cells, values]. sources: The tensor that
        was passed to `transform`, int64 [batch, cells * values].
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
    turned = (np.rot90(grid, symmetry // 2) for symmetry in symmetries)
    turned = [
        np.fliplr(cells) if symmetry % 2 else cells
        for symmetry, cells in zip(symmetries, turned, strict=True)
    ]
    return torch.from_numpy(np.stack(turned).reshape(len(turned), -1).astype(np.int64))
