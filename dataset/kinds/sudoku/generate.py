"""Generates Sudokus with exactly one solution, makes them harder, and adds clues.

Invariant: the random numbers of a puzzle depend only on (seed, stream, index). So puzzles may be generated in
any order.
"""

import contextlib
from collections.abc import Sequence

import numpy as np

from dataset.kinds.sudoku.rules import Box, TooHardError, boards_of, digits_of, find_solutions, search_boards
from dataset.randomness import BitStream, random_below, random_bits, random_orders

# The number of different minimal puzzles, counted over all clue sets of all 4x4 grids. Up to symmetry, there
# are 36. Larger boxes have more puzzles than anyone can ask for.
NUM_MINIMAL_PUZZLES = {(2, 2): 85_632}

_LARGEST_MINIMAL = 9  # digits; puzzles of larger grids may have spare clues
_GUESSES_A_CLUE = 10
# Chosen by the puzzles a second with 30 guesses: 1.1 of 9x9 on a core. With 2 in place of 6 solutions, 0.8.
_MOST_MISSES = 100  # steps that do not make a puzzle harder, before the search gives up
_MORE_CLUES = 4  # maximum of clues that the search adds
_OTHERS = 6  # solutions that it compares


def generate_puzzle(
    seed: int, *, stream: int, index: int, box: Box, clues: range | None = None
) -> tuple[list[int], list[int]] | None:
    """Generates a Sudoku with one solution. Returns (puzzle, solution) as digits, 0 for an empty cell.

    If `clues` is None, a puzzle of up to 9x9 cells is minimal: without any one of its clues, it has several
    solutions. A larger puzzle may have clues that are not needed.

    seed, stream, index: Together, they determine the random numbers. clues: Allowed numbers of clues, such as
    range(32, 41). Random clues are added until the puzzle has one of these numbers of clues, selected at
    random. If the puzzle already has more clues than all of these numbers, returns None.
    """
    size, num_cells, every_digit = boards_of(box)[:3]
    bits = random_bits(seed, stream=stream, index=index, count=num_cells * (size + 2) + 1)
    bits, clue_bits = np.split(bits, [num_cells * (size + 1)])
    # Clues of a random full grid are removed in random order. A clue stays if the puzzle without it has a
    # solution with another digit in the cell. The solver decides this exactly. One pass is enough, because a
    # clue that is needed among many clues is also needed among fewer. In a grid larger than 9x9, a clue also
    # stays if a few guesses cannot decide, and no clue is removed below the minimum of `clues`.
    digit_orders = random_orders(bits[num_cells:].reshape(num_cells, size)).tolist()
    answer = next(search_boards((1 << size * num_cells) - 1, box, digit_orders=digit_orders))
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
            if next(search_boards(others, box, guesses=guesses), None) is None:
                given ^= clue
                empty |= cell_bit
    grid = digits_of(answer, box)
    question = [0 if empty >> cell & 1 else grid[cell] for cell in range(num_cells)]
    if clues is not None:
        question = with_more_clues(question, grid, clues=clues, bits=clue_bits)
    return None if question is None else (question, grid)


def make_harder(
    question: Sequence[int], grid: Sequence[int], *, box: Box, least: float, bits: BitStream
) -> list[int] | None:
    """Exchanges random clues of a Sudoku until the solver needs at least `least` guesses.

    Returns the digits of the new puzzle, which still has exactly one solution, `grid`. Returns None if 100
    exchanges in a row do not make the puzzle harder, or if the given puzzle is too hard for the solver.

    question: Digits of the puzzle. grid: Digits of its solution. bits: Source of random numbers.
    """

    def draw(cells: list[int]) -> int:
        return cells[random_below(bits.read(1), len(cells)).item()]

    try:
        rating, misses = find_solutions(question, box=box)[1], 0
    except TooHardError:
        return None
    most_clues = sum(digit > 0 for digit in question) + _MORE_CLUES
    # A step removes a random clue and adds up to two others, until the puzzle has one solution again. A step
    # is kept if the puzzle needs at least as many guesses as before.
    while rating < least:
        if (misses := misses + 1) > _MOST_MISSES:
            return None
        clues = [cell for cell, digit in enumerate(question) if digit]
        changed, removed = list(question), draw(clues)
        changed[removed] = 0
        for _ in range(3 if len(clues) < most_clues else 2):
            try:
                found, guesses = find_solutions(changed, box=box, limit=_OTHERS)
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
    """Adds random clues to a Sudoku. Returns the digits of the new puzzle.

    Returns None if the puzzle has more clues than the largest number in `clues`.

    question: Digits of the puzzle. grid: Digits of its solution. clues: Allowed numbers of clues, such as
    range(32, 41). One of these numbers is selected at random, but none below the present number of clues.
    bits: Random integers, uint64 [1 + cells].
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
