"""The examples of tasks of one's own: their answers hold, by checks that know the rules alone."""

import itertools
import random
import re

from tests.own_tasks import PUZZLES


def _is_lit(question: list[str], board: list[list[str]]) -> bool:
    """Whether lamps light all free cells, see no other lamp and are as many beside each wall as it says."""
    cells = [*itertools.product(range(len(board)), repeat=2)]
    for row, column in cells:
        if question[row][column].isdigit():
            beside = [(i, j) for i, j in cells if abs(i - row) + abs(j - column) == 1]
            if sum(board[i][j] == "*" for i, j in beside) != int(question[row][column]):
                return False
        if question[row][column] == ".":
            lines = (("".join(board[row]), column), ("".join(line[column] for line in board), row))
            parts = [line[:at].rpartition("#")[2] + line[at + 1 :].partition("#")[0] for line, at in lines]
            if ("*" in "".join(parts)) == (board[row][column] == "*"):
                return False
    return True


def test_lamps_have_one_answer():
    generator = random.Random(1)
    for _ in range(3):
        question, answer = PUZZLES["light_up"](generator, 4)
        free = [(i, j) for i, j in itertools.product(range(4), repeat=2) if question[i][j] == "."]
        boards = []
        for letters in itertools.product(".*", repeat=len(free)):
            chosen = dict(zip(free, letters, strict=True))
            boards.append([[chosen.get((i, j), "#") for j in range(4)] for i in range(4)])
        expected = [[letter if letter in ".*" else "#" for letter in line] for line in answer]
        assert [board for board in boards if _is_lit(question, board)] == [expected]


def test_runs_are_those_of_the_picture():
    question, answer = PUZZLES["nonogram"](random.Random(1))
    for lines in (answer, ["".join(column) for column in zip(*answer, strict=True)]):
        for line in lines[3:]:
            runs = "".join(str(len(run)) for run in re.findall("#+", line[3:]))
            assert line[:3] == runs.rjust(3, "-")
    assert [line.replace("#", ".") for line in answer] == question


def test_stones_slide_as_far_as_they_can():
    generator = random.Random(1)
    for _ in range(20):
        question, answer = PUZZLES["slide"](generator)
        (arrow,) = {*"".join(question)} & {*"<>^v"}
        down, right = {">": (0, 1), "<": (0, -1), "v": (1, 0), "^": (-1, 0)}[arrow]
        board = {(i, j): letter for i, line in enumerate(question) for j, letter in enumerate(line)}
        while moving := [
            c for c in board if board[c] == "o" and board.get((c[0] + down, c[1] + right)) == arrow
        ]:
            for row, column in moving:
                board[row, column], board[row + down, column + right] = arrow, "o"
        assert ["".join(board[i, j] for j in range(8)) for i in range(8)] == answer
