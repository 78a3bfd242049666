"""N-Queens completion: place n queens on an n x n board with some queens given, so that none attacks another.

Tokens: 0 = pad, 1 = empty, 2 = queen. Most inputs have several right answers, and the label is one of them.
"""

import functools
import itertools
import math

import numpy as np

from dataset.kinds.kind import FAINT, Kind, Puzzle, Style
from dataset.many_answers import (
    AnswerRules,
    ManyAnswersEvaluator,
    count_consistent,
    find_consistent,
    read_square,
)
from dataset.metadata import Metadata

SIZES = range(4, 11)  # 10x10 boards have 126,700 pairs of an input and an answer
EMPTY, QUEEN = 1, 2  # tokens
VOCAB_SIZE = 3
_SYMBOLS = "_.Q"
_GIVEN = (1, 2, 3)  # numbers of queens that are left on the board


def _mismatch(metadata: Metadata) -> str | None:
    if metadata.vocab_size != VOCAB_SIZE:
        return f"vocab_size is {metadata.vocab_size}, not {VOCAB_SIZE}"
    size = math.isqrt(metadata.seq_len)
    if size**2 != metadata.seq_len or size not in SIZES:
        return f"seq_len, {metadata.seq_len}, is not that of a board of {SIZES[0]} to {SIZES[-1]} rows"
    return None


@functools.cache
def all_solutions(size: int) -> np.ndarray:
    """Returns all ways to place `size` queens so that none attacks another: tokens, uint8 [n, cells]."""
    solutions: list[list[int]] = [[]]  # the column of the queen of each row
    for row in range(size):
        solutions = [
            [*columns, column]
            for columns in solutions
            for column in range(size)
            if all(abs(column - other) not in (0, row - above) for above, other in enumerate(columns))
        ]
    boards = np.full((len(solutions), size, size), EMPTY, np.uint8)
    np.put_along_axis(boards, np.array(solutions)[:, :, None], QUEEN, axis=2)
    return boards.reshape(len(boards), -1)


def all_inputs(size: int) -> np.ndarray:
    """Returns all boards with 1 to 3 queens that have at least one right answer: tokens, uint8 [n, cells]."""
    solutions = all_solutions(size)
    cells = (solutions == QUEEN).nonzero()[1].reshape(-1, size)
    parts = []
    for count in _GIVEN:
        for chosen in itertools.combinations(range(size), count):
            boards = np.full_like(solutions, EMPTY)
            np.put_along_axis(boards, cells[:, chosen], QUEEN, axis=1)
            parts.append(np.unique(boards, axis=0))
    return np.unique(np.concatenate(parts), axis=0)


def are_valid(inputs: np.ndarray, answers: np.ndarray) -> np.ndarray:
    size = math.isqrt(inputs.shape[1])
    is_queen = (answers == QUEEN).reshape(-1, size, size)
    ones = (is_queen.sum(axis=1) == 1).all(axis=1) & (is_queen.sum(axis=2) == 1).all(axis=1)
    for boards in (is_queen, is_queen[:, :, ::-1]):
        for offset in range(1 - size, size):
            ones &= boards.diagonal(offset, axis1=1, axis2=2).sum(axis=1) <= 1
    keeps_queens = ((inputs != QUEEN) | (answers == QUEEN)).all(axis=1)
    return ones & keeps_queens & np.isin(answers, (EMPTY, QUEEN)).all(axis=1)


def find_answers(inputs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    solutions = all_solutions(math.isqrt(inputs.shape[1]))
    indices, counts = find_consistent(inputs == QUEEN, solutions != QUEEN)
    return solutions[indices], counts


def count_answers(inputs: np.ndarray) -> np.ndarray:
    return count_consistent(inputs == QUEEN, all_solutions(math.isqrt(inputs.shape[1])) != QUEEN)


RULES = AnswerRules(are_valid, lambda _inputs, answers: answers.astype(np.uint8), count_answers)


def read_puzzles(text: str) -> list[Puzzle]:
    return read_square(text, _SYMBOLS, sizes=SIZES, answer_rules=RULES)


KIND = Kind(
    name="queens",
    mismatch=_mismatch,
    build_evaluator=lambda _folder, _metadata: ManyAnswersEvaluator("queens", RULES),
    augmentation="square",
    style=Style(symbols=_SYMBOLS, ansi={0: FAINT, EMPTY: FAINT}, marks_new=True),
    read_puzzles=read_puzzles,
    accepts=are_valid,
    plural="boards",
)
