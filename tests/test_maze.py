"""The rules of mazes, on mazes small enough to see; random mazes, by plain loops; the published labels."""

import collections
import math
from pathlib import Path

import numpy as np
import pytest

from dataset.kinds.kind import find_kind
from dataset.kinds.maze import check_answers
from dataset.kinds.maze.rules import (
    GOAL,
    START,
    WALL,
    draw_mazes,
    is_path,
    published_answers,
    shortest_path_cells,
)
from tests.answers import answers, metadata, metrics_of
from tests.golden import GOLDEN
from tests.maze_source import to_tokens

MAZE = "S   |"  "##  |"  "    |"  "G ##"  # fmt: skip

ANSWERS = {
    "Soo |##o |ooo |G ##": True,
    "Sooo|## o|oooo|G ##": True,  # longer, and it does not touch itself
    "Soo |##o | oo |Go##": True,
    "S   |##  |    |G ##": False,  # no path
    "Soo |## o|ooo |G ##": False,  # a gap, bridged only diagonally
    "Soo |##  |ooo |G ##": False,
    "Soo |##o |ooo |  ##": False,  # the goal is gone
    "Soo |##o |ooo |Go##": False,  # a branch that leads back: two ways
    "Sooo|##oo|ooo |G ##": False,  # a block of four: two ways
    "Soo |##o |oooo|G ##": False,  # a dead end
    "Soo |##o |ooo |o ##": False,
    "Soo |#oo |ooo |G ##": False,  # through a wall
    "Soo | #o |ooo |G ##": False,  # a wall is gone
    "Soo |##o |oSo |G ##": False,
    "ooo |##o |ooo |G ##": False,
}


def distances(maze: np.ndarray) -> dict[tuple[int, int], int]:
    """Steps from the start to every cell that can be reached, by the book."""
    grid = maze.reshape(math.isqrt(len(maze)), -1).tolist()
    start = next((r, c) for r, row in enumerate(grid) for c, token in enumerate(row) if token == START)
    steps, queue = {start: 0}, collections.deque([start])
    while queue:
        row, column = queue.popleft()
        for cell in ((row + 1, column), (row - 1, column), (row, column + 1), (row, column - 1)):
            is_inside = min(cell) >= 0 and max(cell) < len(grid)
            if is_inside and grid[cell[0]][cell[1]] != WALL and cell not in steps:
                steps[cell] = steps[row, column] + 1
                queue.append(cell)
    return steps


def test_verdicts_on_the_cases_of_public_judges():
    """Ours is the strict one: public judges accept paths through walls, detached cells, a second start."""
    cases = np.load(GOLDEN / "maze_judge" / "cases.npz")
    verdicts = check_answers(cases["inputs"], cases["predictions"])
    assert np.array_equal(verdicts["shortest"], cases["strict"])


def test_what_is_a_path():
    answers = to_tokens(list(ANSWERS))
    mazes = np.repeat(to_tokens([MAZE]), len(answers), axis=0)
    assert is_path(mazes, answers).tolist() == list(ANSWERS.values())
    assert is_path(mazes, answers.astype(np.int64)).tolist() == list(ANSWERS.values())


def test_a_ring_apart_from_the_path_is_no_path():
    maze, answer = "SG####|######|######|###   |### # |###   ", "SG####|######|######|###ooo|###o#o|###ooo"
    assert not is_path(to_tokens([maze]), to_tokens([answer])).any()
    assert is_path(to_tokens([maze]), to_tokens([maze])).all(), "start and goal side by side are a path"


@pytest.mark.parametrize(("size", "min_path_cells"), [(2, 2), (3, 5), (7, 12), (12, 25), (70, 30)])
def test_random_mazes(size, min_path_cells):
    mazes = draw_mazes(3, stream=4, index=5, size=size, min_path_cells=min_path_cells)
    assert mazes.dtype == np.uint8
    assert mazes.shape[1:] == (size * size,)
    lengths = shortest_path_cells(mazes)
    assert len(mazes) > 3
    assert lengths.min() >= min_path_cells
    assert ((mazes == START).sum(axis=1) == 1).all()
    assert ((mazes == GOAL).sum(axis=1) == 1).all()
    assert ((mazes >= WALL) & (mazes <= GOAL)).all()
    for maze, length in zip(mazes[:10], lengths, strict=False):
        goal = divmod(int(np.flatnonzero(maze == GOAL)[0]), size)
        assert distances(maze)[goal] + 1 == length
    answers = published_answers(mazes)
    assert is_path(mazes, answers).all()
    assert ((answers > GOAL).sum(axis=1) + 2 == lengths).all()


@pytest.mark.parametrize(("size", "min_path_cells"), [(2, 2), (5, 8), (10, 30), (13, 20)])
def test_perfect_mazes_have_one_path_between_any_two_cells(size, min_path_cells):
    mazes = draw_mazes(3, stream=4, index=5, size=size, min_path_cells=min_path_cells, is_perfect=True)
    assert len(mazes) > 20
    assert shortest_path_cells(mazes).min() >= min_path_cells
    for maze in mazes[:20]:
        is_open = np.pad((maze != WALL).reshape(size, size), 1)
        num_cells = is_open.sum()
        assert len(distances(maze)) == num_cells, "all of them are reached"
        beside = [is_open & np.roll(is_open, 1, axis) for axis in (0, 1)]
        assert sum(each.sum() for each in beside) == num_cells - 1, "without a loop"
        num_beside = sum(np.roll(is_open, step, axis) for step in (1, -1) for axis in (0, 1))
        inside = np.pad(np.ones((size, size), bool), 1)
        assert not (inside & ~is_open & (num_beside == 1)).any(), "nothing more can be dug"


def test_the_order_of_the_published_answers():
    # Of the two ways around a wall the first found wins: down, then left, then right, then up.
    mazes = [" S | # | G ", "S  | # |  G", "G  | # |  S", "  S| # |G  ", "  G| # |S  "]
    expected = ["oS |o# |oG ", "S  |o# |ooG", "G  |o# |ooS", "  S| #o|Goo", "  G| #o|Soo"]
    assert published_answers(to_tokens(mazes)).tolist() == to_tokens(expected).tolist()


@pytest.mark.parametrize("dtype", [np.uint8, np.int32])
@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("S   #|oooo#|#  o#|   o#|## oG", "exact valid shortest"),
        ("Sooo#|   o#|#  o#|   o#|## oG", "valid shortest"),
        ("Sooo#|  oo#|#ooo#|   o#|## oG", ""),
        ("Sooo#|   o#|#ooo#|oo  #|## oG", ""),  # the path is broken
        ("S   #|oooo#|#? o#|   o#|## oG", ""),
        ("S   #|    #|#   #|    #|##  G", ""),
    ],
)
def test_answers_are_evaluated(answer, expected, dtype):
    def tokens(text: str) -> np.ndarray:
        return np.array([["?# SGo".index(cell) for cell in text.replace("|", "")]], dtype)

    maze, label = tokens("S   #|    #|#   #|    #|##  G"), tokens("S   #|oooo#|#  o#|   o#|## oG")
    evaluator = find_kind("maze").build_evaluator(Path("data"), metadata(seq_len=25, vocab_size=6))
    evaluator.add("all", answers(maze, label, tokens(answer)))
    assert metrics_of(evaluator)["all"] == {
        **{f"maze/{share}_accuracy": share in expected.split() for share in ("exact", "valid", "shortest")},
        "maze/count": 1,
    }


def test_longer_ways_are_valid():
    ways = to_tokens(["S   |o   |o   |G   ", "Soo |  o |  o |Goo ", "Sooo|   o|   o|Gooo"])
    evaluator = find_kind("maze").build_evaluator(Path("data"), metadata(seq_len=16, vocab_size=6))
    mazes = to_tokens(["S   |    |    |G   "])
    evaluator.add("all", answers(np.repeat(mazes, 3, axis=0), np.repeat(ways[:1], 3, axis=0), ways))
    assert metrics_of(evaluator)["all"] == {
        "maze/exact_accuracy": 1 / 3,
        "maze/valid_accuracy": 1.0,
        "maze/shortest_accuracy": 1 / 3,
        "maze/count": 3,
    }


def test_an_undecided_answer_passes_no_check():
    way = to_tokens(["Soo |  o |  o |  oG"])
    evaluator = find_kind("maze").build_evaluator(Path("data"), metadata(seq_len=16, vocab_size=6))
    mazes, ways = np.repeat(to_tokens(["S   |    |    |   G"]), 2, axis=0), np.repeat(way, 2, axis=0)
    evaluator.add("all", answers(mazes, ways, ways)._replace(is_decided=np.array([True, False])))
    checks = ("exact", "valid", "shortest")
    assert metrics_of(evaluator)["all"] == {
        **{f"maze/{check}_accuracy": 0.5 for check in checks},
        "maze/count": 2,
    }
