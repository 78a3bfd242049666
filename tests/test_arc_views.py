"""The way from what a model sees and says back to grids of the task; datasets that cannot be evaluated."""

import json

import numpy as np
import pytest

from dataset.kinds.arc.evaluator import corner_grids
from tests.arc_set import (
    ONE_TASK,
    SIZE,
    TURNED,
    VIEWS,
    A,
    B,
    E,
    Prediction,
    arc_answers,
    arc_evaluator,
    arc_evaluators,
    write_arc,
)


def largest_corner(tokens: np.ndarray) -> tuple[int, int]:
    """By trying all: of the largest area the fewest rows."""
    best = (0, 0)
    grid = tokens.reshape(SIZE, SIZE).tolist()
    for rows in range(1, SIZE + 1):
        for columns in range(1, SIZE + 1):
            if all(2 <= grid[row][column] <= 11 for row in range(rows) for column in range(columns)):
                if rows * columns > best[0] * best[1]:
                    best = (rows, columns)
            else:
                break
    return best


@pytest.mark.slow
def test_largest_corner_against_plain_loops():
    draw = np.random.default_rng(0)
    cases = [np.full(900, 11), np.zeros(900, int), np.where(np.arange(900) == 899, 1, 2)]
    for density in (0.003, 0.01, 0.05, 0.2, 0.6):
        for _ in range(20):
            colors = draw.integers(2, 12, 900)
            cases.append(np.where(draw.random(900) < density, draw.choice([0, 1], 900), colors))
    staircase = np.add.outer(np.arange(SIZE), np.arange(SIZE))
    cases += [np.where(staircase < number, 5, 1).ravel() for number in range(1, 40, 3)]  # equal areas
    for dtype in (np.uint8, np.int32):
        tokens = np.array(cases, dtype)
        for row, grid in zip(tokens, corner_grids(tokens), strict=True):
            rows, columns = largest_corner(row)
            assert np.array_equal(grid, row.reshape(SIZE, SIZE)[:rows, :columns])


def test_rows_of_no_test_input_end_the_evaluation(tmp_path, capsys):
    folder = write_arc(tmp_path / "data", ONE_TASK, sets={"all": VIEWS})
    evaluators = arc_evaluators(folder)
    evaluators.add("all", arc_answers(folder, {"a": [(E, B)]}, [Prediction(TURNED, 0, B)] * 2))
    with pytest.raises(SystemExit):
        evaluators.gather_metrics()
    (line,) = capsys.readouterr().err.splitlines()
    assert "2 test examples match no test input of their task in test_puzzles.json" in line


def _task(**changes) -> str:
    pair = {"input": A, "output": B}
    return json.dumps({"a": {"train": [pair], "test": [pair], **changes}})


BAD_NAMES = ("", "b", "<blank>", "a|||t8|||0123456789", "a|||t0|||0123456788", "a|||t0|||012345678",
             "a|||t0", "a|||t0|||0123456789\n")  # fmt: skip
BAD_FILES = [
    ("test_puzzles.json", "{", "is not valid JSON"),
    ("test_puzzles.json", "[]", "is not a JSON object of tasks"),
    ("test_puzzles.json", "{}", "is not a JSON object of tasks"),
    ("test_puzzles.json", '{"a": []}', "task a: not a task.*Build the dataset again"),
    ("test_puzzles.json", _task(test=[{"output": A}]), "test pair 1 has no input. Build"),
    ("test_puzzles.json", _task().replace('"a"', '"b"'), "'a', identifier 1, is in the test split"),
    ("identifiers.json", None, "does not contain the names of 4 identifiers"),
    ("identifiers.json", '{"a": 1}', "does not contain the names of 4 identifiers"),
    ("identifiers.json", "[0, 1, 2, 3]", "identifier 1, is in the test split"),
    ("identifiers.json", '["<blank>", "a"]', "does not contain the names of 4 identifiers"),
    *(
        ("identifiers.json", json.dumps(["<blank>", "a", name, "a"]), "identifier 2, is in the test split")
        for name in BAD_NAMES
    ),
]


def test_bad_datasets(tmp_path):
    folder = write_arc(tmp_path / "data", ONE_TASK, sets={"all": VIEWS})
    for file, content, message in BAD_FILES:
        whole = (folder / file).read_text()
        (folder / file).unlink()
        if content is not None:
            (folder / file).write_text(content)
        with pytest.raises(ValueError, match=message) as error:
            arc_evaluator(folder)
        assert "\n" not in str(error.value)
        assert file in str(error.value)
        (folder / file).write_text(whole)
