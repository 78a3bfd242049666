"""Puzzles that people write for solve.py."""

import numpy as np
import pytest

from dataset.kinds.kind import find_kind, read_symbols
from tests.solvers import CLUES, PUZZLE
from tests.test_show import MAZE


@pytest.mark.parametrize(
    "text",
    [
        PUZZLE,
        "1004000000004001",
        "1__4\n____\n____\n4__1\n",
        "1 . | . 4\n. . | . .\n----+----\n. . | . .\n4 . | . 1\n",
        "1,0,0,4\n0,0,0,0\n0,0,0,0\n4,0,0,1",
    ],
)
def test_the_usual_forms_of_a_sudoku(text):
    (puzzle,) = find_kind("sudoku").read_puzzles(text)
    assert puzzle.tokens.tolist() == CLUES
    assert puzzle.vocab_size == 6
    answers = np.array([[2, 4, 3, 5, 3, 5, 2, 4, 4, 2, 5, 3, 5, 3, 4, 2], CLUES])
    assert puzzle.rules(puzzle.tokens[None].repeat(2, 0), answers).tolist() == [True, False]


@pytest.mark.parametrize("text", [MAZE, "S# \n   \nG##", "S#\n\nG##\n", "S#.\r\n...\r\nG##\r\n"])
def test_the_usual_forms_of_a_maze(text):
    (puzzle,) = find_kind("maze").read_puzzles(text)
    assert puzzle.tokens.tolist() == [3, 1, 2, 2, 2, 2, 4, 1, 1]


def test_symbols_of_other_datasets():
    def tokens(text: str, symbols=(), size: int = 12) -> list[int]:
        return read_symbols(text, symbols, vocab_size=size)[0].tokens.tolist()

    assert tokens("10 2\n 0 11") == [10, 2, 0, 11]
    assert tokens("ab\nba", "ab") == tokens("a b b a", "ab") == [0, 1, 1, 0]
    assert tokens("red blue", ["red", "blue"]) == [0, 1]
