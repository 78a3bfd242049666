"""The rules of Sudoku: boxes, solved grids, and a solver that counts its guesses.

A box is `(rows, columns)`. A grid of such boxes has n = rows * columns digits, n rows, n columns and n boxes.
Example: boxes of 3x3 cells make a 9x9 grid. A grid is a flat array of n * n digits, row by row. 0 is an empty
cell. The solver works on boards. A board is an integer with one bit for each digit in each cell. Bit
`digit * n * n + cell`, with digits from 0, is set if the cell may hold the digit.
"""

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

Box = tuple[int, int]

_SIDES = range(2, 6)
BOXES: dict[str, Box] = {
    f"{rows}x{columns}": (rows, columns) for rows in _SIDES for columns in _SIDES[rows - 2 :]
}

_MOST_GUESSES = 10_000  # limit of one search: some seconds


class TooHardError(ValueError):
    """Raised if the solver needs too many guesses for a Sudoku."""


@functools.cache
def unit_cells(box: Box) -> np.ndarray:
    """Returns the indices of the cells of each row, then of each column, then of each box: int64 [3 n, n]."""
    rows, columns = box
    size = rows * columns
    cells = np.arange(size * size)
    boxes = cells.reshape(columns, rows, rows, columns).transpose(0, 2, 1, 3)
    return np.concatenate([cells.reshape(size, size), cells.reshape(size, size).T, boxes.reshape(size, size)])


def are_solved(grids: np.ndarray, *, box: Box) -> np.ndarray:
    """Returns for each grid whether every row, column and box contains each digit once: bool [count].

    grids: Digits, [count, cells].
    """
    units = unit_cells(box)
    digit_bits = np.left_shift(1, grids, dtype=np.uint32)
    held = np.zeros((len(grids), len(units)), np.uint32)
    for position in range(units.shape[1]):
        held |= digit_bits[:, units[:, position]]
    every_digit = (1 << (units.shape[1] + 1)) - 2
    return (held == every_digit).all(axis=1)


def find_solutions(question: Sequence[int], *, box: Box, limit: int = 2) -> tuple[list[list[int]], int]:
    """Returns up to `limit` solutions of a Sudoku, and the number of guesses that the solver needed.

    For a Sudoku with one solution, the number of guesses is its difficulty rating. Raises TooHardError after
    10,000 guesses.
    """
    boards, guesses = boards_of(box), iter(range(_MOST_GUESSES))
    empty = sum(1 << cell for cell, digit in enumerate(question) if not digit)
    clues = sum(1 << (digit - 1) * boards.num_cells + cell for cell, digit in enumerate(question) if digit)
    board = empty * boards.every_digit | clues
    found = [*itertools.islice(search_boards(board, box, guesses=guesses), limit)]
    return [digits_of(solution, box) for solution in found], next(guesses, _MOST_GUESSES)


def count_solutions(question: Sequence[int], *, box: Box, limit: int = 2) -> int:
    """Returns the number of solutions of a Sudoku. Stops counting at `limit`.

    Raises TooHardError after 10,000 guesses.
    """
    return len(find_solutions(question, box=box, limit=limit)[0])


class _Boards(NamedTuple):
    """Constants of the solver for one size of box, for n x n grids.

    A board is an integer with one bit for each digit in each cell. Bit `digit * num_cells + cell`, with
    digits from 0, is set if the cell may hold the digit. A unit is a row, a column or a box.

    Attributes:
        num_digits: n.
        num_cells: n * n.
        every_digit: Board with cell 0 of every digit. If bit c of an integer is set for each cell c of a set,
            its product with `every_digit` is the board with these cells for every digit.
        units: [(firsts, offsets, spread) of the rows, of the columns, of the boxes]. `firsts` is the board
            with the first cell of each unit, for every digit. `offsets` are the indices of the cells of a
            unit, minus the index of its first cell. If a board contains only some bits of `firsts`, its
            product with `spread` is the board with all cells of these units, for the same digits.
        after_clue: One mask for each bit. `board & after_clue[bit]` removes the digit of the bit from the
            other cells of its row, column and box.
        only_digit: One mask for each bit. `board & only_digit[bit]` removes all other digits from the cell of
            the bit.
    """

    num_digits: int
    num_cells: int
    every_digit: int
    units: list[tuple[int, list[int], int]]
    after_clue: list[int]
    only_digit: list[int]


@functools.cache
def boards_of(box: Box) -> _Boards:
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


def digits_of(solution: int, box: Box) -> list[int]:
    """Converts a solved board to digits from 1 to n, row by row.

    solution: Integer in which bit `(digit - 1) * num_cells + cell` is set if the cell has the digit.
    """
    size, num_cells = boards_of(box)[:2]
    grid = [0] * num_cells
    for digit in range(size):
        for bit in _bits(solution >> digit * num_cells & (1 << num_cells) - 1):
            grid[bit] = digit + 1
    return grid


def _bits(board: int) -> Iterator[int]:
    while board:
        lowest = board & -board
        board ^= lowest
        yield lowest.bit_length() - 1


def search_boards(
    board: int,
    box: Box,
    *,
    digit_orders: list[list[int]] | None = None,
    unplaced: int | None = None,
    guesses: Iterator[int] | None = None,
) -> Iterator[int]:
    """Yields all solutions of a Sudoku as boards.

    A board is an integer. Bit `digit * num_cells + cell`, with digits from 0, is set if the cell may hold the
    digit. In a solution, each cell has one digit.

    Args:
        board: Board with the digits that each cell may hold.
        digit_orders: For each cell, the digits from 0 in the order in which the solver guesses them. If None,
            the solver guesses in a fixed order, and may also guess the cell of a digit.
        unplaced: Cells to solve, as an integer with one bit for each cell. Every other cell has one digit,
            and the board has this digit in no other cell of its row, column and box. If None, all cells.
        guesses: Iterator with one item for each allowed guess. If a guess finds no item left, raises
            TooHardError. If None, the number of guesses is not limited.
    """
    # The solver fills in cells with one possible digit (naked singles), then digits with one possible cell
    # (hidden singles). Then it guesses the digit of a cell with two possible digits. If there is no such
    # cell, it guesses the cell of a digit that has two possible cells in a row, column or box. It works on
    # all digits at once, because one operation on a long integer takes little more time than on a short
    # one.
    num_digits, num_cells, every_digit, units, after_clue, only_digit = boards_of(box)
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
            yield from search_boards(
                guess, box, digit_orders=digit_orders, unplaced=unplaced, guesses=guesses
            )


def _exactly_two(sets: Sequence[int]) -> int:
    """Returns the bits that are set in exactly two of the integers."""
    once = twice = thrice = 0
    for bits in sets:
        thrice |= twice & bits
        twice |= once & bits
        once |= bits
    return twice ^ thrice
