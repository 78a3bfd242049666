"""The rules of Sudoku: solver, generator, symmetries; and answers evaluated by them."""

import functools
import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dataset.kinds.sudoku import check_answers
from dataset.kinds.sudoku.generate import generate_puzzle
from dataset.kinds.sudoku.rules import (
    are_solved,
    count_solutions,
    find_solutions,
    unit_cells,
)
from dataset.kinds.sudoku.symmetries import draw_symmetries
from dataset.metadata import IGNORE_LABEL_ID
from evaluation.evaluators import build_evaluator
from tests.answers import answers, metadata, metrics_of
from tests.sudoku_source import is_minimal

BOXES = [(2, 2), (2, 3), (3, 3)]
# A puzzle known for being hard, and its only solution.
QUESTION = "800000000003600000070090200050007000000045700000100030001000068008500010090000400"
ANSWER = "812753649943682175675491283154237896369845721287169534521974368438526917796318452"


def solve(question: list[int], *, box: tuple[int, int]) -> list[int] | None:
    return next(iter(find_solutions(question, box=box, limit=1)[0]), None)


def digits(text: str) -> list[int]:
    return [int(character) for character in text]


def generate(
    count: int, *, box: tuple[int, int], seed: int = 0, stream: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    puzzles = [generate_puzzle(seed, stream=stream, index=index, box=box) for index in range(count)]
    questions, answers = np.array(puzzles, np.uint8).swapaxes(0, 1)
    return questions, answers


@functools.cache
def every_4x4_grid() -> np.ndarray:
    rows = list(itertools.permutations(range(1, 5)))
    grids = np.array([sum(four, ()) for four in itertools.product(rows, repeat=4)], np.uint8)
    return grids[are_solved(grids, box=(2, 2))]


def _plain(left: list[set[int]], box: tuple[int, int], counts: list[int]) -> Iterator[list[int]]:
    """The solutions, in order, of a solver with sets in place of bits; counts[0] becomes the guesses."""
    units = unit_cells(box).tolist()
    placed: set[int] = set()
    while True:
        where = [(digit, [cell for cell in unit if digit in left[cell]])
                 for digit in range(1, len(units[0]) + 1) for unit in units]  # fmt: skip
        if not all(left) or not all(cells for _, cells in where):
            return
        naked = [cell for cell, held in enumerate(left) if len(held) == 1 and cell not in placed]
        hidden = [(digit, cells[0]) for digit, cells in where if len(cells) == 1 and len(left[cells[0]]) > 1]
        if naked:
            (digit,) = left[naked[0]]
            placed.add(naked[0])
            for unit in (unit for unit in units if naked[0] in unit):
                for cell in set(unit) - {naked[0]}:
                    left[cell] = left[cell] - {digit}
        elif hidden:
            left[hidden[0][1]] = {hidden[0][0]}
        else:
            break
    if all(len(held) == 1 for held in left):
        yield [min(held) for held in left]
        return
    counts[0] += 1
    doubtful = [cell for cell, held in enumerate(left) if len(held) == 2]
    pairs = [(digit, cells) for digit, cells in where if len(cells) == 2]
    if doubtful or not pairs:
        cell = min(doubtful or [cell for cell, held in enumerate(left) if len(held) > 1])
        guesses = [(digit, cell) for digit in sorted(left[cell])]
    else:
        guesses = [(pairs[0][0], cell) for cell in sorted(pairs[0][1])]
    for digit, cell in guesses:
        yield from _plain([{digit} if each == cell else held for each, held in enumerate(left)], box, counts)


def test_solutions_and_guesses_are_those_of_a_plain_solver():
    seen = set()
    for box, clues in (((2, 2), 2), ((2, 3), 36), ((2, 3), 6)):
        size = box[0] * box[1]
        for index in range(2):
            puzzle, _ = generate_puzzle(0, stream=0, index=index, box=box)
            given = [cell for cell, digit in enumerate(puzzle) if digit]
            question = [digit if cell in given[:clues] else 0 for cell, digit in enumerate(puzzle)]
            if index == 1:
                question[question.index(0)] = size  # usually a contradiction
            counts = [0]
            left = [{digit} if digit else {*range(1, size + 1)} for digit in question]
            expected = list(itertools.islice(_plain(left, box, counts), 20))
            assert find_solutions(question, box=box, limit=20) == (expected, counts[0])
            seen.add((min(len(expected), 2), min(counts[0], 5)))
    assert {number for number, _ in seen} == {0, 1, 2}
    assert {0, 5} <= {number for _, number in seen}
    assert find_solutions(digits(QUESTION), box=(3, 3)) == ([digits(ANSWER)], 160)  # of _plain, too


def test_solver_agrees_with_a_list_of_all_grids():
    grids = every_4x4_grid()
    random = np.random.Generator(np.random.Philox(0))
    for _ in range(200):
        question = grids[random.integers(288)] * (random.random(16) < 0.35)
        matching = grids[((question == 0) | (grids == question)).all(axis=1)]
        assert count_solutions(question.tolist(), box=(2, 2), limit=1000) == len(matching)
        assert solve(question.tolist(), box=(2, 2)) in matching.tolist()


@pytest.mark.slow
@pytest.mark.parametrize(("box", "count"), [((2, 2), 300), ((2, 3), 60), ((3, 3), 15)])
def test_generated_puzzles_are_minimal_with_one_solution(box, count):
    questions, answers = generate(count, box=box)
    assert are_solved(answers, box=box).all()
    for question, answer in zip(questions.tolist(), answers.tolist(), strict=True):
        assert solve(question, box=box) == answer
        assert is_minimal(question, box=box)


def test_every_4x4_symmetry_is_drawn():
    """test_symmetry checks that a draw is a symmetry (test_a_transformed_sudoku_is_found_...)."""
    transforms = draw_symmetries(0, stream=9, index=0, count=20_000, box=(2, 2))
    assert len(np.unique(transforms[:, :9], axis=0)) == 2 * 2 * 2 * 16
    assert len(np.unique(transforms[:, 9:], axis=0)) == 24


def tokens(text: str) -> list[int]:
    return [int(character) + 1 for character in text]


def changed(values: list[int], **changes: int) -> list[int]:
    """Cells by their number, as c0, c1, ..."""
    copy = list(values)
    for cell, value in changes.items():
        copy[int(cell[1:])] = value
    return copy


RIGHT = tokens(ANSWER)
RELABELLED = [(token - 1) % 9 + 2 for token in RIGHT]  # a valid grid of other digits


@pytest.mark.parametrize("dtype", [np.uint8, np.int32])
def test_answers_are_valid_by_the_rules(dtype):
    rows = [
        (QUESTION, RIGHT, True),
        (QUESTION, changed(RIGHT, c1=RIGHT[2], c2=RIGHT[1]), False),
        (QUESTION, changed(RIGHT, c80=RIGHT[79]), False),
        (QUESTION, changed(RIGHT, c40=1), False),
        (QUESTION, changed(RIGHT, c40=0), False),
        (QUESTION, tokens(QUESTION), False),
        (QUESTION, RELABELLED, False),  # the clues are gone
        ("0" * 81, RELABELLED, True),  # there are none
        ("0" * 81, changed(RELABELLED, c0=RELABELLED[0] % 9 + 2), False),
    ]
    questions, answers, expected = zip(*rows, strict=True)
    questions, answers = np.array(list(map(tokens, questions)), dtype), np.array(answers, dtype)
    assert check_answers(questions, answers, box=(3, 3))["valid"].tolist() == list(expected)


@pytest.mark.parametrize("box", BOXES)
def test_boxes_of_every_size(box):
    num_digits = box[0] * box[1]
    question, answer = np.array(generate_puzzle(0, stream=0, index=0, box=box)) + 1
    transposed = answer.reshape(num_digits, -1).T.ravel()
    questions, answers = (
        np.array([question, question, 0 * question]),
        np.array([answer, transposed, transposed]),
    )
    expected = [True, False, box[0] == box[1]]  # 2x3 boxes transposed are 3x2 ones
    assert check_answers(questions, answers, box=box)["valid"].tolist() == expected


def test_sets_are_apart_and_what_has_no_label_counts_nowhere():
    sizes = metadata(seq_len=81, vocab_size=11)
    evaluator = build_evaluator("sudoku", folder=Path("data"), metadata=sizes)
    empty, wrong, ignored = [1] * 81, changed(RIGHT, c0=1), [IGNORE_LABEL_ID] * 81
    partly = changed(RIGHT, c5=IGNORE_LABEL_ID)
    evaluator.add("easy", answers([empty] * 3, [RIGHT, RIGHT, ignored], [RIGHT, wrong, RIGHT]))
    evaluator.add("easy", answers([empty] * 2, [RIGHT, RIGHT], [RIGHT, RELABELLED]))
    evaluator.add("hard", answers([empty], [RIGHT], [wrong]))
    evaluator.add("partly", answers([empty], [partly], [changed(RIGHT, c5=2)]))
    evaluator.add("nothing", answers([empty], [ignored], [RIGHT]))
    evaluator.add("no.rows", answers(*np.empty((3, 0, 81), np.uint8)))
    assert metrics_of(evaluator) == {
        "easy": {"sudoku/exact_accuracy": 0.5, "sudoku/valid_accuracy": 0.75, "sudoku/count": 4},
        "hard": {"sudoku/exact_accuracy": 0.0, "sudoku/valid_accuracy": 0.0, "sudoku/count": 1},
        "partly": {"sudoku/exact_accuracy": 1.0, "sudoku/valid_accuracy": 0.0, "sudoku/count": 1},
    }
