"""Pairs as a kind of puzzle: its texts and tokens, what is shown of them, and a run that learns them."""

import json
import random
import re
from pathlib import Path

import numpy as np
import pytest

from dataset.description import DatasetInfo, Vocabulary, read_info
from dataset.files import open_dataset
from dataset.kinds.kind import kind_of
from dataset.metadata import IGNORE_LABEL_ID
from dataset.show import main as show
from evaluation.evaluators import Evaluators, build_evaluator
from solve import load
from tests.answers import answers
from tests.pairs_source import build, grid_of, random_grid, text_of, write_json
from tests.ranks import complete_program
from tests.solvers import run_solve
from tests.tiny import OVERRIDES


@pytest.mark.parametrize(
    ("symbols", "text", "grid"),
    [
        ("#.ab", "#.\nab\n", [["#", "."], ["a", "b"]]),
        ("#.ab", "#. ab", [["#", "."], ["a", "b"]]),
        ("# ab", "# \nab", [["#", " "], ["a", "b"]]),
        (["10", "2", "x"], " 10 2\n x x", [["10", "2"], ["x", "x"]]),
        ("ab", "ab", [["a", "b"]]),
    ],
)
def test_text_to_tokens_and_back(symbols, text, grid):
    vocabulary = Vocabulary(tuple(symbols), num_rows=3, num_columns=3)
    assert vocabulary.parse(text) == grid
    assert vocabulary.parse(text_of(vocabulary, grid)) == grid
    assert grid_of(vocabulary, vocabulary.tokens_of(grid)) == grid


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "the grid is empty"),
        ("ab a", "the grid is ragged: row 2 has 1 cells, row 1 has 2"),
        ("aaa", "the grid has 1x3 cells, but the dataset has at most 2x2"),
        ("ax", "'x' is not a symbol of the dataset. Use only a b."),
    ],
)
def test_text_that_does_not_fit(text, expected):
    with pytest.raises(ValueError, match=re.escape(expected) + "$"):
        Vocabulary(("a", "b"), num_rows=2, num_columns=2).parse(text)


def test_a_models_answer_may_be_no_grid():
    vocabulary = Vocabulary(("a", "b"), num_rows=2, num_columns=3)
    assert grid_of(vocabulary, np.array([2, 3, 1, 2, 1, 0])) == [["a", "b"], ["a", "?"]]
    assert grid_of(vocabulary, np.array([1, 3, 1, 2, 1, 0])) == []
    assert vocabulary.tokens_of([["a", "b"]]).tolist() == [2, 3, 1, 1, 1, 0]
    assert (vocabulary.style.gap, Vocabulary(("a", "b"), num_rows=1, num_columns=3).style.gap) == (" ", "")


# -------------------------------------------------------------------------------------- the rest of the house


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Two tasks; 16 cells and 4 symbols, as a 4x4 Sudoku has with those of its digits."""
    draw, folder = random.Random(0), tmp_path_factory.mktemp("pairs")
    grids = [random_grid(draw, "ab", 4, 4) for _ in range(100)]
    pairs = [{"input": grid, "output": grid[::-1] if n % 2 else [row[::-1] for row in grid],
              "task": ("down", "right")[n % 2]} for n, grid in enumerate(grids)]  # fmt: skip
    build(folder / "data", write_json(folder / "p.jsonl", pairs))
    return folder / "data"


def test_show_draws_with_the_datasets_own_symbols(tmp_path, capsys):
    pairs = [{"input": ["# a", "..."], "output": ["a"], "split": split} for split in ("train", "test")]
    build(tmp_path / "data", write_json(tmp_path / "p.jsonl", pairs))
    capsys.readouterr()
    show([str(tmp_path / "data")])
    assert capsys.readouterr().out.endswith("puzzle   answer\n#   a    a\n. . .\n\n")


def test_a_checkpoint_keeps_the_symbols(folder):
    facts = read_info([folder], open_dataset(folder, read_everything=False).metadata)
    assert DatasetInfo.from_json(json.loads(json.dumps(facts.to_json())), where="") == facts
    assert facts.style.symbols == ("_", "+", "a", "b")
    question = facts.vocabulary.read_puzzle("aba\nbab")
    assert question.tokens[question.cells_of(question.tokens)].tolist() == [[2, 3, 2], [3, 2, 3]]
    assert question.vocab_size == facts.metadata.vocab_size


def test_other_kinds_leave_it_alone(folder):
    metadata = open_dataset(folder, read_everything=False).metadata
    assert kind_of(metadata, builder="reasoning_gym").name == "pairs"
    with pytest.raises(
        ValueError, match="is not a dataset of kind sudoku: its dataset.json contains a list of symbols"
    ):
        build_evaluator("sudoku", folder=folder, metadata=metadata)


def test_the_evaluator_counts_each_task(folder, tmp_path):
    data = open_dataset(folder, splits=("test",), read_everything=False)
    puzzles = data.splits["test"].sets["all"]
    preds = np.array(puzzles.labels)
    preds[np.flatnonzero(puzzles.puzzle_identifiers == 2)[0], 3] ^= 1
    evaluators = Evaluators(["pairs"], data)
    labels = np.where(puzzles.labels == 0, IGNORE_LABEL_ID, puzzles.labels)
    given = answers(puzzles.inputs, labels, preds)._replace(puzzle_identifiers=puzzles.puzzle_identifiers)
    for rows in (slice(0, 3), slice(3, None)):
        evaluators.add(
            "all", type(given)(*(each[rows] if isinstance(each, np.ndarray) else each for each in given))
        )
    assert evaluators.gather_metrics()["all"] == {"pairs/exact_accuracy": 0.9, "pairs/count": 10}
    evaluators.write(tmp_path)
    tasks = {name: {"exact_accuracy": share, "count": 5} for name, share in (("down", 1.0), ("right", 0.8))}
    assert json.loads((tmp_path / "tasks.json").read_text()) == {"all": tasks}


@pytest.mark.slow
def test_a_run_learns_from_them(folder, tmp_path, monkeypatch, capsys):
    arguments = (*OVERRIDES, "evaluators=[pairs]", "wandb_mode=disabled", f"data_path={folder}")
    complete_program("pretrain", *arguments, "checkpoint_path=run", folder=tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["train/lm_loss"] < lines[0]["train/lm_loss"]
    assert lines[-1]["eval/all/pairs/exact_accuracy"] == lines[-1]["eval/all/exact_accuracy"]
    tasks = json.loads(next((tmp_path / "run" / "evaluation").rglob("tasks.json")).read_text())
    assert {name: task["count"] for name, task in tasks["all"].items()} == {"down": 5, "right": 5}
    rows = "abab bbbb aaaa baba"
    question = (f"checkpoint={tmp_path / 'run'}", "task=right", f"puzzle={rows}")
    status, solved, _ = run_solve(monkeypatch, capsys, *question)
    assert status == 0
    assert "a b a b" in solved
    model = load(tmp_path / "run", device="cpu")
    one, other = (model.solve(each, task="right") for each in (rows, [[*row] for row in rows.split()]))
    assert one.text == other.text
