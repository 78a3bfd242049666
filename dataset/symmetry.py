"""Puzzles that are equal up to symmetry: a transform, such as a rotation, maps one to the other.

The transforms are those of the puzzles' family in `AUGMENTATIONS`. For datasets of pairs, they are only those
that the option --symmetries of the builder selects. In ARC, the same transform must map the input and the
answer. Graphs are equal if they differ only in the order of their nodes.

A hash that no transform changes finds candidates. A search then confirms or refutes each candidate. Each
class has one method for each of these steps. A puzzle is a row of tokens: its input and, in ARC, also its
answer.

- hash_rows(tokens [n, length]) returns a hash of each puzzle, uint64 [n]. No transform changes it.
- maps(first, second) returns whether a transform maps one puzzle [length] to the other. If the search of
  SudokuSymmetry or GraphSymmetry takes more than 20,000 steps, it returns None.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from dataset.augmentations import FIRST_SYMBOL, NUM_DIHEDRAL, find_augmentation, rename_by_first_use
from dataset.description import DatasetInfo
from dataset.equal import hash_rows, mix
from dataset.files import read_builder
from dataset.kinds.pairs.build import free_symbols
from dataset.kinds.sudoku.rules import Box
from dataset.kinds.sudoku.texts import BOX_OF

_ROUNDS = 4  # of refinements. The 36 classes of minimal 4x4 Sudokus then have different hashes
_MOST_STEPS = 20_000  # of the search for one pair of puzzles: less than 1 s
_CHUNK_ROWS = 1 << 11


def find_symmetry(folder: Path, info: DatasetInfo) -> "Symmetry | None":
    """Returns an object that compares puzzles of a dataset up to transforms, such as rotations.

    Returns None if the transforms of this kind of puzzle are not known, or if a plugin defines them.
    """
    name, metadata = info.kind and info.kind.augmentation, info.metadata
    if name == "sudoku" and metadata.seq_len in BOX_OF:
        return SudokuSymmetry(BOX_OF[metadata.seq_len])
    num_symbols = metadata.vocab_size - FIRST_SYMBOL
    if name == "square":
        return ImageSymmetry(name, NUM_DIHEDRAL)
    if name == "arc":
        return ImageSymmetry(name, NUM_DIHEDRAL, num_symbols, tuple(range(num_symbols)), num_grids=2)
    if info.kind is not None and info.kind.name == "coloring":
        return GraphSymmetry()
    if name == "pairs" and info.vocabulary is not None:
        arguments = (read_builder(folder) or {}).get("arguments", {})
        symmetries, fixed, free = str(arguments.get("symmetries")), arguments.get("fixed_symbols"), ()
        if "symbols" in symmetries:
            free = tuple(free_symbols(info.vocabulary, fixed and str(fixed)).tolist())
        return ImageSymmetry(name, NUM_DIHEDRAL if "dihedral" in symmetries else 1, num_symbols, free)
    return None


@dataclasses.dataclass(frozen=True)
class ImageSymmetry:
    """Compares puzzles up to rotations, reflections and permutations of their symbols.

    A puzzle is a row of tokens: its input or, in ARC, its input and its answer, one after the other. Symbol s
    is the token s + 2.

    Attributes:
        family: Name of the transforms in `AUGMENTATIONS`.
        num_images: Number of rotations and reflections to try: 8 or, if a grid may not turn, 1.
        num_symbols: Number of symbols that a transform of the family may rename. 0 if it renames none.
        free: The symbols s that may be exchanged with each other. The other symbols must be equal.
        num_grids: Number of grids in one puzzle: 2 in ARC (input and answer), otherwise 1. All grids of a
            puzzle get the same transform.
    """

    family: str
    num_images: int
    num_symbols: int = 0
    free: tuple[int, ...] = ()
    num_grids: int = 1

    def hash_rows(self, tokens: np.ndarray) -> np.ndarray:
        parts = np.array_split(tokens, -(-len(tokens) // _CHUNK_ROWS))
        return np.concatenate([np.min([*map(hash_rows, self._images(part))], axis=0) for part in parts])

    def maps(self, first: np.ndarray, second: np.ndarray) -> bool:
        target = next(self._images(second[None]))
        return any(np.array_equal(image, target) for image in self._images(first[None]))

    def _images(self, tokens: np.ndarray) -> Iterator[np.ndarray]:
        grids = tokens.reshape(len(tokens) * self.num_grids, -1)
        corner = np.zeros((len(grids), 2), np.uint8)
        for index in range(self.num_images):
            transform = np.array([index, *range(self.num_symbols)], np.uint8)
            image = find_augmentation(self.family).apply(grids, np.tile(transform, (len(grids), 1)), corner)
            # Two images that differ only in a permutation of the free symbols become equal.
            yield rename_by_first_use(
                image.reshape(tokens.shape), [FIRST_SYMBOL + symbol for symbol in self.free]
            )


class _TooLongError(Exception):
    """Raised if a search takes too many steps."""


@dataclasses.dataclass(frozen=True)
class SudokuSymmetry:
    """Compares Sudokus up to permutations of rows, columns, bands, stacks and digits.

    A band is a row of boxes. A stack is a column of boxes. If the boxes are square, a transposed Sudoku is
    equal, too.

    Attributes:
        box: (rows, columns) of a box.
    """

    box: Box

    def hash_rows(self, tokens: np.ndarray) -> np.ndarray:
        rows, columns = self._color_lines(tokens)
        return mix(mix(rows).sum(axis=1) + mix(columns).sum(axis=1))

    def _color_lines(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns a hash of each row and of each column of Sudokus, uint64 [n, size] each.

        A transform may move rows and columns, but it does not change their hashes.
        """
        # A color refinement. Cells, rows, columns, bands, stacks, boxes and digits have colors, hashes that
        # no transform changes. At first, the color of a cell says whether the cell is a clue. Each round
        # mixes the colors of the cells into those of the lines, boxes and digits, and then mixes these into
        # those of the cells.
        (height, width), size = self.box, self.box[0] * self.box[1]
        grids = tokens.reshape(-1, size, size)
        cells = mix((grids >= FIRST_SYMBOL).astype(np.uint64))
        digits = range(FIRST_SYMBOL, FIRST_SYMBOL + size)
        for _ in range(_ROUNDS):
            rows, columns = _color(cells.sum(axis=2), height), _color(cells.sum(axis=1), width)
            columns = columns if height == width else mix(columns)  # no transposition
            boxes = mix(cells.reshape(-1, width, height, height, width).sum(axis=(2, 4)))
            boxes = boxes.repeat(height, axis=1).repeat(width, axis=2)
            lines = rows[:, :, None] + columns[:, None, :]
            of_digit = np.zeros_like(cells)
            for digit in digits:
                is_digit = grids == digit
                total = np.where(is_digit, cells, np.uint64(0)).sum(axis=(1, 2))
                np.copyto(of_digit, mix(total)[:, None, None], where=is_digit)
            cells = mix(mix(mix(cells ^ of_digit) + lines) + boxes)
        return rows, columns

    def maps(self, first: np.ndarray, second: np.ndarray) -> bool | None:
        size = self.box[0] * self.box[1]
        rows, columns = (colors.tolist() for colors in self._color_lines(np.stack([first, second])))
        grid, target = (tokens.reshape(size, size) for tokens in (first, second))
        turned = [(grid, rows[0], columns[0])]
        if self.box[0] == self.box[1]:
            turned.append((grid.T, columns[0], rows[0]))
        steps = iter(range(_MOST_STEPS))
        try:
            for source, row_colors, column_colors in turned:
                for order in _orders(row_colors, rows[1], self.box[0], lambda _order: True, steps):
                    fits = _renames_columns(source[order], target)
                    if any(_orders(column_colors, columns[1], self.box[1], fits, steps)):
                        return True
        except _TooLongError:
            return None
        return False


class GraphSymmetry:
    """Compares graphs up to the order of their nodes. Cell (i, j) of the grid belongs to the nodes i and j.

    If two graphs of up to 9 nodes differ in more than the order of their nodes, their hashes differ, too. All
    such graphs were hashed: the numbers of different hashes are those of OEIS A000088.
    """

    def hash_rows(self, tokens: np.ndarray) -> np.ndarray:
        return mix(mix(self._color_nodes(tokens)).sum(axis=1))

    def _color_nodes(self, tokens: np.ndarray) -> np.ndarray:
        """Returns a hash of each node, uint64 [n, nodes]. It does not depend on the order of the nodes."""
        # A color refinement of pairs of nodes (2-dimensional Weisfeiler-Leman). A refinement of single nodes
        # would not tell a hexagon from two triangles.
        size = math.isqrt(tokens.shape[1])
        pairs = mix(tokens.reshape(-1, size, size).astype(np.uint64))
        for _ in range(_ROUNDS):
            mixed = mix(pairs)
            pairs = mix(pairs + sum(mix(pairs[:, :, [via]] + mixed[:, [via]]) for via in range(size)))
        return pairs.diagonal(axis1=1, axis2=2)

    def maps(self, first: np.ndarray, second: np.ndarray) -> bool | None:
        size = math.isqrt(len(first))
        grid, target = (tokens.reshape(size, size) for tokens in (first, second))
        colors, target_colors = self._color_nodes(np.stack([first, second])).tolist()

        def fits(order: list[int]) -> bool:
            return np.array_equal(grid[np.ix_(order, order)], target[: len(order), : len(order)])

        try:
            return any(_orders(colors, target_colors, 1, fits, iter(range(_MOST_STEPS))))
        except _TooLongError:
            return None


Symmetry = ImageSymmetry | SudokuSymmetry | GraphSymmetry


def _color(sums: np.ndarray, width: int) -> np.ndarray:
    # The color of a line depends on its own sum, and on the sums of the lines in its band: [n, size].
    colors = mix(sums)
    bands = mix(colors.reshape(len(sums), -1, width).sum(axis=2))
    return mix(colors + bands.repeat(width, axis=1))


def _orders(
    colors: Sequence[int],
    target_colors: Sequence[int],
    width: int,
    fits: Callable[[list[int]], bool],
    steps: Iterator[int],
    order: Sequence[int] = (),
) -> Iterator[list[int]]:
    """Yields all orders of the rows of a grid that match the rows of a target grid in color.

    An order is a list of row indices. Row order[i] must have the color target_colors[i]. Rows of the same
    band (a row of boxes) stay together. Columns, and the nodes of graphs, are ordered in the same way.

    colors, target_colors: Color (a hash) of each row of the grid and of the target. width: Number of rows in
    a band. fits: Function (start of an order) -> whether to continue with it. steps: Iterator that limits the
    search. It advances for each row that is tried. At its end, _TooLongError is raised. order: Start of the
    orders to yield.
    """
    place = len(order)
    if place == len(target_colors):
        yield [*order]
        return
    bands = [line // width for line in order]
    for line, color in enumerate(colors):
        band = line // width
        is_allowed = band == bands[-1] if place % width else band not in bands
        if color != target_colors[place] or line in order or not is_allowed:
            continue
        if next(steps, None) is None:
            raise _TooLongError
        if fits([*order, line]):
            yield from _orders(colors, target_colors, width, fits, steps, [*order, line])


def _renames_columns(grid: np.ndarray, target: np.ndarray) -> Callable[[list[int]], bool]:
    """Returns a function that compares some columns of `grid` with the first columns of `target`.

    The function takes the indices of k columns of `grid`, as a list. It returns True if a one-to-one renaming
    of the digits makes these columns, in this order, the first k columns of `target`.
    """
    columns, target_columns = grid.T.tolist(), target.T.tolist()
    fixed = {(token, token) for token in range(FIRST_SYMBOL)}

    def fits(order: list[int]) -> bool:
        moved = [columns[line] for line in order]
        pairs = fixed.union(*(zip(*pair, strict=True) for pair in zip(moved, target_columns, strict=False)))
        return len(pairs) == len({old for old, _ in pairs}) == len({new for _, new in pairs})

    return fits
