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
from typing import NamedTuple

import numpy as np

from dataset.augmentations import sudoku_parts
from dataset.randomness import BitStream, random_below, random_bits, random_orders

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
# Chosen by the puzzles a second with 30 guesses: 1.1 of 9x9 on a core. With 2 in place of 6 solutions, 0.8.
_MOST_MISSES = 100  # steps that do not make a puzzle harder, before the search gives up
_MORE_CLUES = 4  # maximum of clues that the search adds
_OTHERS = 6  # solutions that it compares


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
    return find_and_count(question, box=box, limit=limit, most_guesses=most_guesses)[0]


def find_and_count(
    question: Sequence[int], *, box: Box, limit: int = 2, most_guesses: int = _MOST_GUESSES
) -> tuple[list[list[int]], int]:
    """Returns what `find_solutions` returns, and the number of guesses that it took.

    The number of guesses for all solutions of a puzzle is its rating.
    """
    guesses = iter(range(most_guesses))
    found = itertools.islice(_solutions(_candidates(question, box), box, guesses=guesses), limit)
    return [_grid(solution, box) for solution in found], next(guesses, most_guesses)


def count_solutions(question: Sequence[int], *, box: Box, limit: int = 2) -> int:
    """Returns the number of solutions of a Sudoku. Stops counting at `limit`.

    Raises TooHardError after too many guesses. question: Digits row by row, 0 for an empty cell.
    """
    return len(find_solutions(question, box=box, limit=limit))


class _Boards(NamedTuple):
    """Constants of the solver for one size of box. A board is one integer with a bit for each (digit, cell).

    The bit of a digit, from 0, and a cell is digit * cells + cell. It is set if the cell may hold the digit.

    num_digits, num_cells: Counts. every_digit: A board with cell 0 of every digit. Its product with a set of
    cells is a board with these cells for every digit. units: (firsts, offsets, spread) of the rows, the
    columns and the boxes. `firsts` is a board with the first cell of each unit, `offsets` are the distances
    of all its cells from the first one, and a product with `spread` turns first cells into units. after_clue:
    For each bit, a mask that removes its digit from the other cells of its row, column and box. only_digit:
    For each bit, a mask that removes the other digits of its cell.
    """

    num_digits: int
    num_cells: int
    every_digit: int
    units: list[tuple[int, list[int], int]]
    after_clue: list[int]
    only_digit: list[int]


@functools.cache
def _boards(box: Box) -> _Boards:
    units = unit_cells(box).tolist()
    size, num_cells = len(units[0]), len(units[0]) ** 2
    peers = [0] * num_cells
    for unit in units:
        for cell in unit:
            peers[cell] |= sum(1 << other for other in unit if other != cell)
    every_digit = sum(1 << digit * num_cells for digit in range(size))
    kinds = []
    for of_kind in (units[:size], units[size : 2 * size], units[2 * size :]):
        offsets = [cell - of_kind[0][0] for cell in of_kind[0]]
        firsts = sum(1 << unit[0] for unit in of_kind) * every_digit
        kinds.append((firsts, offsets, sum(1 << offset for offset in offsets)))
    bits = [(digit * num_cells, cell) for digit in range(size) for cell in range(num_cells)]
    return _Boards(
        num_digits=size,
        num_cells=num_cells,
        every_digit=every_digit,
        units=kinds,
        after_clue=[~(peers[cell] << start) for start, cell in bits],
        only_digit=[~((every_digit << cell) ^ (1 << start + cell)) for start, cell in bits],
    )


def _candidates(question: Sequence[int], box: Box) -> int:
    """Returns the board (`_Boards`) of a question: each clue in its cell, all digits in an empty cell.

    question: Digits row by row, 0 for an empty cell.
    """
    boards = _boards(box)
    empty = sum(1 << cell for cell, digit in enumerate(question) if not digit)
    clues = sum(1 << (digit - 1) * boards.num_cells + cell for cell, digit in enumerate(question) if digit)
    return empty * boards.every_digit | clues


def _grid(solution: int, box: Box) -> list[int]:
    size, num_cells = _boards(box)[:2]
    grid = [0] * num_cells
    for digit in range(size):
        for bit in _bits(solution >> digit * num_cells & (1 << num_cells) - 1):
            grid[bit] = digit + 1
    return grid


def _bits(board: int) -> Iterator[int]:
    """Yields the positions of the bits that are set, in ascending order."""
    while board:
        lowest = board & -board
        board ^= lowest
        yield lowest.bit_length() - 1


def _solutions(
    board: int,
    box: Box,
    *,
    digit_orders: list[list[int]] | None = None,
    unplaced: int | None = None,
    guesses: Iterator[int] | None = None,
) -> Iterator[int]:
    """Yields every solution that a board (`_Boards`) allows, as a board with one digit in each cell.

    The solver fills in cells with one possible digit (naked singles), then digits with one possible cell
    (hidden singles). Then it guesses the digit of a cell with two possible digits. If there is no such cell,
    it guesses the cell of a digit that has two possible cells in a row, column or box. It works on all digits
    at once, because one operation on a long integer takes little more time than one on a short integer.

    digit_orders: Order in which each cell tries digits. If given, it guesses only digits of cells. unplaced:
    Cells with a known digit that is not yet removed from their row, column and box, one bit each. guesses:
    Iterator that limits the guesses. Each guess takes one item. If no item is left, raises TooHardError.
    """
    num_digits, num_cells, every_digit, units, after_clue, only_digit = _boards(box)
    all_cells = (1 << num_cells) - 1
    unplaced = all_cells if unplaced is None else unplaced
    while True:
        once = twice = 0  # cells with at least so many digits left
        rest = board
        for _ in range(num_digits):
            cells = rest & all_cells
            rest >>= num_cells
            twice |= once & cells
            once |= cells
        if once != all_cells:
            return
        if not unplaced:
            yield board
            return
        if singles := unplaced & ~twice:
            for bit in _bits(board & singles * every_digit):
                board &= after_clue[bit]
            unplaced ^= singles
            continue
        open_bits = board & unplaced * every_digit
        for firsts, offsets, spread in units:
            once = twice = 0  # first cells of the units with at least so many cells left for a digit
            for offset in offsets:
                cells = board >> offset & firsts
                twice |= once & cells
                once |= cells
            if once != firsts:
                return
            if singles := (once ^ twice) * spread & open_bits:
                for bit in _bits(singles):
                    board &= only_digit[bit]
                break
        else:
            break
    if guesses is not None and next(guesses, None) is None:
        raise TooHardError("the puzzle is too hard for the solver. The number of its solutions is not known")
    doubtful = _exactly_two([board >> digit * num_cells & all_cells for digit in range(num_digits)])
    pairs = []
    if not doubtful and digit_orders is None:
        for firsts, offsets, spread in units:
            if first := _exactly_two([board >> offset & firsts for offset in offsets]):
                pairs.append((next(_bits(first)), spread))
    if pairs:  # the first pair of the lowest digit: of its rows, columns or boxes
        first, spread = min(pairs, key=lambda pair: pair[0] // num_cells)
        places = _bits((spread << first) & board)
    else:
        cell = next(_bits(doubtful or unplaced))
        order = range(num_digits) if digit_orders is None else digit_orders[cell]
        places = [digit * num_cells + cell for digit in order]
    for bit in places:
        if board >> bit & 1:
            guess = board & only_digit[bit]
            yield from _solutions(guess, box, digit_orders=digit_orders, unplaced=unplaced, guesses=guesses)


def _exactly_two(sets: Sequence[int]) -> int:
    """Returns the bits that are set in exactly two of the integers."""
    once = twice = thrice = 0
    for bits in sets:
        thrice |= twice & bits
        twice |= once & bits
        once |= bits
    return twice ^ thrice


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
    size, num_cells, every_digit = _boards(box)[:3]
    bits = random_bits(seed, stream=stream, index=index, count=num_cells * (size + 2) + 1)
    bits, clue_bits = np.split(bits, [num_cells * (size + 1)])
    digit_orders = random_orders(bits[num_cells:].reshape(num_cells, size)).tolist()
    answer = next(_solutions((1 << size * num_cells) - 1, box, digit_orders=digit_orders))
    given, empty = answer, 0
    is_large = size > _LARGEST_MINIMAL
    most_empty = num_cells - clues[0] if is_large and clues is not None else num_cells
    for cell in random_orders(bits[:num_cells]).tolist():
        if empty.bit_count() >= most_empty:
            break
        cell_bit = 1 << cell
        clue = answer & cell_bit * every_digit
        others = (given | (empty | cell_bit) * every_digit) ^ clue
        guesses = iter(range(_GUESSES_A_CLUE)) if is_large else None
        with contextlib.suppress(TooHardError):
            if next(_solutions(others, box, guesses=guesses), None) is None:
                given ^= clue
                empty |= cell_bit
    grid = _grid(answer, box)
    question = [0 if empty >> cell & 1 else grid[cell] for cell in range(num_cells)]
    if clues is not None:
        question = with_more_clues(question, grid, clues=clues, bits=clue_bits)
    return None if question is None else (question, grid)


def make_harder(
    question: Sequence[int], grid: Sequence[int], *, box: Box, least: float, bits: BitStream
) -> list[int] | None:
    """Exchanges clues of a Sudoku until the solver needs at least `least` guesses. Returns the new puzzle.

    This is a local search. A step removes a random clue and adds up to two others, until the puzzle has one
    solution again. A step is kept if the puzzle needs at least as many guesses as before. Returns None if
    many steps in a row do not raise the number of guesses.

    grid: The only solution. bits: Random integers.
    """

    def draw(cells: list[int]) -> int:
        return cells[random_below(bits.read(1), len(cells)).item()]

    try:
        rating, misses = find_and_count(question, box=box)[1], 0
    except TooHardError:
        return None
    most_clues = sum(digit > 0 for digit in question) + _MORE_CLUES
    while rating < least:
        if (misses := misses + 1) > _MOST_MISSES:
            return None
        clues = [cell for cell, digit in enumerate(question) if digit]
        changed, removed = list(question), draw(clues)
        changed[removed] = 0
        for _ in range(3 if len(clues) < most_clues else 2):
            try:
                found, guesses = find_and_count(changed, box=box, limit=_OTHERS)
            except TooHardError:
                break
            if len(found) == 1:
                if guesses >= rating:
                    misses = 0 if guesses > rating else misses
                    question, rating = changed, guesses
                break
            # A clue rules out all other solutions found if each of them differs from the grid in its cell.
            others = [solution for solution in found if solution != grid]
            cells = [
                cell
                for cell, digit in enumerate(grid)
                if cell != removed and all(other[cell] != digit for other in others)
            ]
            if not cells:
                break
            added = draw(cells)
            changed[added] = grid[added]
    return list(question)


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
    """Makes random transforms of Sudokus from random integers. Returns uint8 [count, 1 + 3 n], for n digits.

    A transform exchanges rows, columns and digits so that the Sudoku stays valid. `sudoku_parts` describes
    its bytes.

    bits: Random 64-bit integers, uint64 [count, bits_per_symmetry(box)]. box: (rows, columns) of a box.
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
