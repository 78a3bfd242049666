"""The JavaScript of a page computes what Python computes: rules of puzzles, and guesses of a search."""

from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest

from dataset.drawing import page_style
from dataset.files import open_split
from dataset.kinds import coloring, queens
from dataset.kinds.maze import rules as maze
from dataset.kinds.sudoku import check_answers as check_sudoku
from dataset.kinds.sudoku.rules import unit_cells
from dataset.metadata import usual_metadata
from tests.ranks import REPOSITORY
from tests.system.serving import served
from tests.tiny import tiny_model


@pytest.fixture
def site(visit) -> Iterator:
    """A page of the browser that can import the modules of share/site."""
    with served(REPOSITORY / "share" / "site") as address:
        yield visit(address + "style.css").page


def test_a_search_guesses_as_the_config_says(site):
    """Cell 0 may have three values, cell 1 the first two. The model prefers the last of each."""
    digit = [0, 1, 2, 0, 1, 5]
    guesses = """async ([facts, digit]) => {
        const { CHAINS, searching } = await import("./search.js");
        const all = (values) => ({ data: Float32Array.from(Array(CHAINS).fill(values).flat()) });
        const look = () => ({ keep: all(digit.map(() => 9)), digit: all(digit), conflict: all([-9]) });
        const found = [];
        for (let run = 0; run < 1000; run++) {
            const moves = searching(look, facts, [0, 3], () => true);
            for await (const { guess, tokens } of moves) found.push([guess, tokens[guess]]);
        }
        return found;
    }"""
    for choice, fractions in (
        ({"decision_value": "best"}, {(0, 2): 0.5, (1, 1): 0.5}),
        ({"decision_value": "best", "decision_cell": "fewest"}, {(1, 1): 1}),
        ({"temperature": 0, "decision_cell": "fewest"}, {(1, 1): 1}),
        ({"temperature": 0.5, "decision_cell": "fewest"}, {(1, 0): 0.119, (1, 1): 0.881}),  # softmax of 0, 2
    ):
        search = tiny_model("ldt", **choice).network.facts()
        search |= {"values": [0, 1, 2], "candidates": [*[[1, 1, 1]] * 3, [1, 1, 0]]}
        found = Counter(map(tuple, site.evaluate(guesses, [{"search": search, "steps": 1}, digit])))
        assert {guess: num / 1000 for guess, num in found.items()} == pytest.approx(fractions, abs=0.08)


_IN_KIND = """async ([facts, grids]) => {
    const kind = (await import("./kinds.js")).kindOf(facts);
    return grids.map(([question, answer]) => kind.check(question, answer, {}).ok);
}"""


def _spoil(answers: np.ndarray, *, most: int) -> np.ndarray:
    """Changes one cell of two thirds of the answers."""
    random, spoilt = np.random.Generator(np.random.Philox(0)), answers.copy()
    rows = np.arange(len(answers))[random.random(len(answers)) < 2 / 3]
    spoilt[rows, random.integers(answers.shape[1], size=len(rows))] = random.integers(1, most, size=len(rows))
    return spoilt


def test_rules_of_the_page_are_those_of_the_kinds(site, sudoku_folder):
    questions = maze.draw_mazes(0, stream=0, index=0, size=6, min_path_cells=5)[:90]
    answers = _spoil(maze.published_answers(questions), most=maze.VOCAB_SIZE)
    facts = {"kind": "maze", "rows": 6, "columns": 6}
    is_valid = site.evaluate(_IN_KIND, [facts, np.stack([questions, answers], axis=1).tolist()])
    assert is_valid == maze.is_path(questions, answers).tolist()
    assert 10 < sum(is_valid) < 80

    test, box = open_split(sudoku_folder, "test").sets["all"], (2, 2)
    questions, answers = test.inputs[:90], _spoil(test.labels[:90], most=6)
    facts = {"kind": "sudoku", "rows": 4, "columns": 4, "plural": "Sudoku", "symbols": ["", "", *"1234"]}
    facts["groups"] = unit_cells(box).tolist()
    is_valid = site.evaluate(_IN_KIND, [facts, np.stack([questions, answers], axis=1).tolist()])
    assert is_valid == check_sudoku(questions, answers, box=box)["valid"].tolist()
    assert 10 < sum(is_valid) < 80

    graphs = coloring.make_inputs(np.random.default_rng(0).random((90, 3)) < 0.5, 3)
    for kind, questions, size in ((queens, queens.all_inputs(6)[:90], 6), (coloring, graphs, 3)):
        answers, counts = kind.find_answers(questions)
        answers = _spoil(answers[counts.cumsum() - 1], most=kind.VOCAB_SIZE)  # of each question, the last
        sizes = usual_metadata(vocab_size=kind.VOCAB_SIZE, seq_len=size**2, num_puzzle_identifiers=1)
        facts = {"kind": kind.KIND.name, "rows": size, "columns": size, **page_style(kind.KIND.style, sizes)}
        is_valid = site.evaluate(_IN_KIND, [facts, np.stack([questions, answers], axis=1).tolist()])
        assert is_valid == kind.KIND.accepts(questions, answers).tolist()
        assert 10 < sum(is_valid) < 80

    # One queen in each row and each column: only diagonals decide.
    random = np.random.default_rng(0)
    boards = np.array([np.eye(4, dtype=np.uint8)[random.permutation(4)].ravel() + 1 for _ in range(90)])
    facts |= {"kind": "queens", "rows": 4, "columns": 4}
    questions = np.ones_like(boards)
    is_valid = site.evaluate(_IN_KIND, [facts, np.stack([questions, boards], axis=1).tolist()])
    assert is_valid == queens.KIND.accepts(questions, boards).tolist()
    assert 0 < sum(is_valid) < 80


def test_without_rules_an_answer_is_compared_with_the_known_one(site):
    """A plugin's kind may have `accepts`: an answer that differs may be right, too."""
    facts = {"kind": "own", "rows": 1, "columns": 3, "vocab_size": 3, "symbols": ["", *"ab"]}
    check = """async ([facts, answers]) => {
        const kind = (await import("./kinds.js")).kindOf({ first_of_field: null, ...facts });
        return answers.map((answer) => kind.check([1, 1, 1], answer, { labels: [1, 2, -1] }).text);
    }"""
    differs = "differs from the known answer in "
    texts = ["right", differs + "1 cell", differs + "2 cells"]
    assert site.evaluate(check, [facts, [[1, 2, 1], [1, 1, 2], [2, 1, 1]]]) == texts
