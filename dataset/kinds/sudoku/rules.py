"""The rules of Sudoku: boxes, solved grids, a solver, puzzles with exactly one solution, symmetries.

A box is `(rows, columns)`; a grid has n = rows * columns digits, n rows, n columns and n boxes: 2x2 boxes
make a 4x4 grid, 3x3 a 9x9 and 5x5 a 25x25. A grid is a flat array of n * n digits, row by row, 0 = empty. The
solver works on bitboards: an integer with one bit for each cell, cell 0 the lowest.

Invariant: random values are a function of (seed, stream, index) (`randomness`). The order of the work does
not matter.
"""

import contextlib
import functools
import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from dataset.augmentations import sudoku_parts
from dataset.randomness import random_below, random_bits, random_orders

Box = tuple[int, int]

# The number of different minimal puzzles, counted over all clue sets of all 4x4 grids. Up to symmetry, there
# are 36. Larger boxes have more puzzles than anyone can ask for.
NUM_MINIMAL_PUZZLES = {(2, 2): 85_632}

_SIDES = range(2, 6)
BOXES: dict[str, Box] = {
    f"{rows}x{columns}": (rows, columns) for rows in _SIDES for columns in _SIDES[rows - 2 :]
}

_MOST_GUESSES = 10_000  # limit of one search: some seconds
_LARGEST_MINIMAL = 9  # digits; puzzles of larger grids may have spare clues
_GUESSES_A_CLUE = 10


class TooHardError(ValueError):
    """Raised if the solver needs too many guesses for a Sudoku."""


@functools.cache
def unit_cells(box: Box) -> np.ndarray:
    """Returns the indices of the cells of each row, then each column, then each box: [3 * n, n].

    n is the number of digits. box: (rows, columns) of a box.
    """
    rows, columns = box
    size = rows * columns
    cells = np.arange(size * size)
    boxes = cells.reshape(columns, rows, rows, columns).transpose(0, 2, 1, 3)
    return np.concatenate([cells.reshape(size, size), cells.reshape(size, size).T, boxes.reshape(size, size)])


def are_solved(grids: np.ndarray, *, box: Box) -> np.ndarray:
    """Returns for each grid whether every row, column and box contains each digit once: bool [count].

    grids: Digits, [count, n * n].
    """
    units = unit_cells(box)
    digit_bits = np.left_shift(1, grids, dtype=np.uint32)
    held = np.zeros((len(grids), len(units)), np.uint32)
    for position in range(units.shape[1]):
        held |= digit_bits[:, units[:, position]]
    every_digit = (1 << (units.shape[1] + 1)) - 2
    return (held == every_digit).all(axis=1)


def find_solutions(
    question: Sequence[int], *, box: Box, limit: int = 2, most_guesses: int = _MOST_GUESSES
) -> list[list[int]]:
    """Returns up to `limit` solutions of a Sudoku, each a list of digits.

    Raises TooHardError after `most_guesses` guesses. question: Digits row by row, 0 for an empty cell.
    """
    found = _solutions(_candidates(question, box), box, guesses=iter(range(most_guesses)))
    return [_grid(solution) for solution in itertools.islice(found, limit)]


def count_solutions(question: Sequence[int], *, box: Box, limit: int = 2) -> int:
    """Returns the number of solutions of a Sudoku. Stops counting at `limit`.

    Raises TooHardError after too many guesses. question: Digits row by row, 0 for an empty cell.
    """
    return len(find_solutions(question, box=box, limit=limit))


@functools.cache
def _bitboards(box: Box) -> tuple[int, list[int], list[int]]:
    """Returns bitboards (integers with one bit for each cell) that the solver needs.

    They are: all cells, the cells of each row, column and box, and for each cell the other cells of its row,
    column and box.
    """
    units = unit_cells(box).tolist()
    peers = [0] * len(units[0]) ** 2
    for unit in units:
        for cell in unit:
            peers[cell] |= sum(1 << other for other in unit if other != cell)
    return (1 << len(peers)) - 1, [sum(1 << cell for cell in unit) for unit in units], peers


def _candidates(question: Sequence[int], box: Box) -> list[int]:
    """Returns, for each digit, the cells that may hold it, as a bitboard.

    A bitboard is an integer with one bit for each cell. The cells are the clues with this digit, and all
    empty cells.

    question: Digits row by row, 0 for an empty cell.
    """
    clues = [0] * (box[0] * box[1] + 1)
    for cell, digit in enumerate(question):
        clues[digit] |= 1 << cell
    empty, *clues = clues
    return [empty | cells for cells in clues]


def _grid(candidates: list[int]) -> list[int]:
    cells = range(sum(candidates).bit_length())
    return [next(digit for digit, held in enumerate(candidates, 1) if held >> cell & 1) for cell in cells]


def _solutions(
    candidates: list[int],
    box: Box,
    *,
    digit_orders: list[list[int]] | None = None,
    unplaced: int | None = None,
    guesses: Iterator[int] | None = None,
) -> Iterator[list[int]]:
    """Yields every solution that `candidates` allow. A solution is a list with the cells of each digit.

    Cells are bitboards (integers with one bit for each cell). The solver fills in cells with one possible
    digit (naked singles), then digits with one possible cell (hidden singles). Then it guesses the digit of a
    cell with two possible digits. If there is no such cell, it guesses the cell of a digit that has two
    possible cells in a row, column or box.

    candidates: For each digit, the cells that may hold it. It is modified. digit_orders: Order in which each
    cell tries digits. If given, it guesses only digits of cells. unplaced: Cells with a known digit that is
    not yet removed from their row, column and box. guesses: Iterator that limits the guesses. Each guess
    takes one item. If no item is left, raises TooHardError.
    """
    all_cells, units, peers = _bitboards(box)
    unplaced = all_cells if unplaced is None else unplaced
    while True:
        once = twice = thrice = 0  # cells with at least so many digits left
        for cells in candidates:
            thrice |= twice & cells
            twice |= once & cells
            once |= cells
        if once != all_cells:
            return
        if not unplaced:
            yield candidates
            return
        if singles := unplaced & ~twice:
            for digit, cells in enumerate(candidates):
                fresh = cells & singles
                while fresh:
                    cell_bit = fresh & -fresh
                    fresh ^= cell_bit
                    cells &= ~peers[cell_bit.bit_length() - 1]
                candidates[digit] = cells
            unplaced &= ~singles
            continue
        found, pair = False, 0
        for digit, cells in enumerate(candidates):
            for unit in units:
                cell_bit = cells & unit
                if not cell_bit:
                    return
                if not (others := cell_bit & (cell_bit - 1)):
                    if cell_bit & unplaced:
                        found = True
                        candidates[:] = [held & ~cell_bit for held in candidates]
                        candidates[digit] = cells
                elif not pair and not others & (others - 1):
                    pair, digit_of_pair = cell_bit, digit
        if not found:
            break
    if guesses is not None and next(guesses, None) is None:
        raise TooHardError("the puzzle is too hard for the solver. The number of its solutions is not known")
    doubtful = twice & ~thrice
    if doubtful or not pair or digit_orders is not None:
        cell_bit = (doubtful or unplaced) & -(doubtful or unplaced)
        order = range(len(candidates)) if digit_orders is None else digit_orders[cell_bit.bit_length() - 1]
        places = [(digit, cell_bit) for digit in order if candidates[digit] & cell_bit]
    else:
        places = [(digit_of_pair, cell_bit) for cell_bit in (pair & -pair, pair & (pair - 1))]
    for digit, cell_bit in places:
        guess = [cells & ~cell_bit for cells in candidates]
        guess[digit] = candidates[digit]
        yield from _solutions(guess, box, digit_orders=digit_orders, unplaced=unplaced, guesses=guesses)


def generate_puzzle(
    seed: int, *, stream: int, index: int, box: Box, clues: range | None = None
) -> tuple[list[int], list[int]] | None:
    """Generates a Sudoku with one solution. Returns (puzzle, solution) as digits, or None.

    The puzzle is minimal: without any of its clues, it has several solutions.

    Clues of a random full grid are removed in random order. A clue stays if the puzzle without it has a
    solution with another digit in the cell. The solver decides this exactly. One pass is enough, because a
    clue that is needed among many clues is also needed among fewer. A grid larger than 9x9 may have spare
    clues. There, a clue also stays if a few guesses cannot decide, and no clue is removed below the minimum
    of `clues`.

    stream, index: Select the random numbers (`dataset.randomness`). clues: Range of the number of clues. If
    the puzzle has fewer, clues are added (`with_more_clues`). If it has more, returns None.
    """
    all_cells, _, _ = _bitboards(box)
    num_cells, size = all_cells.bit_length(), box[0] * box[1]
    bits = random_bits(seed, stream=stream, index=index, count=num_cells * (size + 2) + 1)
    bits, clue_bits = np.split(bits, [num_cells * (size + 1)])
    digit_orders = random_orders(bits[num_cells:].reshape(num_cells, size)).tolist()
    answer = next(_solutions([all_cells] * size, box, digit_orders=digit_orders))
    candidates, empty = list(answer), 0
    is_large = size > _LARGEST_MINIMAL
    most_empty = num_cells - clues[0] if is_large and clues is not None else num_cells
    for cell in random_orders(bits[:num_cells]).tolist():
        if empty.bit_count() >= most_empty:
            break
        cell_bit = 1 << cell
        digit = next(digit for digit, cells in enumerate(candidates) if cells & cell_bit)
        others = [cells | empty | cell_bit for cells in candidates]
        others[digit] ^= cell_bit
        guesses = iter(range(_GUESSES_A_CLUE)) if is_large else None
        with contextlib.suppress(TooHardError):
            if next(_solutions(others, box, guesses=guesses), None) is None:
                candidates[digit] ^= cell_bit
                empty |= cell_bit
    grid = _grid(answer)
    question = [0 if empty >> cell & 1 else grid[cell] for cell in range(num_cells)]
    if clues is not None:
        question = with_more_clues(question, grid, clues=clues, bits=clue_bits)
    return None if question is None else (question, grid)


def with_more_clues(
    question: Sequence[int], grid: Sequence[int], *, clues: range, bits: np.ndarray
) -> list[int] | None:
    """Adds random clues to a Sudoku. Returns the digits of the new puzzle, row by row, 0 for an empty cell.

    The new number of clues is a random one of the numbers in `clues` that the puzzle does not exceed. Returns
    None if the puzzle has more clues than all of them.

    question: Digits of the puzzle. grid: Digits of its solution. bits: Random uint64 [1 + cells].
    """
    num_clues = sum(digit > 0 for digit in question)
    fitting = [count for count in clues if count >= num_clues]
    if not fitting:
        return None
    drawn, result = fitting[random_below(bits[:1], len(fitting)).item()], list(question)
    order = random_orders(bits[1:]).tolist()
    for cell in [cell for cell in order if not result[cell]][: drawn - num_clues]:
        result[cell] = grid[cell]
    return result


def draw_symmetries(bits: np.ndarray, *, box: Box) -> np.ndarray:
    """Converts random bits to random transforms of Sudokus, uint8 [count, 1 + 3 n], for n digits.

    A transform exchanges rows, columns and digits so that the Sudoku stays valid. `sudoku_parts` describes
    its bytes.

    bits: uint64 [count, bits_per_symmetry(box)].
    """
    rows, columns = box
    count, size = len(bits), rows * columns
    ends = np.cumsum([1, columns, rows, size, size])
    coin, bands, stacks, in_bands, in_stacks, relabel = np.split(bits, ends, axis=1)
    transforms = np.zeros((count, 1 + 3 * size), np.uint8)
    transposes, row_order, column_order, digits = sudoku_parts(transforms)
    if rows == columns:
        transposes[:] = coin >> np.uint64(63)
    row_order[:] = _line_order(bands, in_bands.reshape(count, columns, rows))
    column_order[:] = _line_order(stacks, in_stacks.reshape(count, rows, columns))
    digits[:] = random_orders(relabel) + 1
    return transforms


def no_symmetry(box: Box) -> np.ndarray:
    """Returns the transform that leaves a Sudoku unchanged: uint8 [1 + 3 n], for n digits."""
    lines = range(box[0] * box[1])
    return np.array([0, *lines, *lines, *(line + 1 for line in lines)], np.uint8)


def bits_per_symmetry(box: Box) -> int:
    rows, columns = box
    return 1 + rows + columns + 3 * rows * columns


def _line_order(blocks: np.ndarray, in_blocks: np.ndarray) -> np.ndarray:
    """Returns random orders of the n rows, int64 [count, n], that keep the rows of a box together.

    Works for columns too. blocks: Random bits for the order of the boxes, [count, boxes]. in_blocks: Random
    bits for the order inside each box, [count, boxes, rows].
    """
    count, num_blocks, num_lines = in_blocks.shape
    order = random_orders(blocks)[:, :, None] * num_lines + random_orders(in_blocks)
    return order.reshape(count, num_blocks * num_lines)
