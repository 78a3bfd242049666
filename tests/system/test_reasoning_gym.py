"""Datasets from the package reasoning-gym, which `make setup` does not install."""

import json
import re
import subprocess
import sys

import numpy as np
import pytest

from dataset.build import build_dataset
from dataset.description import Vocabulary
from dataset.files import open_dataset
from dataset.kinds.pairs.reasoning_gym import TASKS
from dataset.kinds.sudoku.rules import are_solved
from tests.pairs_source import grid_of
from tests.ranks import REPOSITORY
from tests.sudoku_source import files_of

pytest.importorskip("reasoning_gym.factory", reason="reasoning-gym is not installed (make test-system does)")

SMALL = {
    "arc_1d": ["min_size=10", "max_size=12"],
    "game_of_life": ["grid_size_x=6", "grid_size_y=5", "filled_cells=12"],
    "largest_island": ["rows=5", "cols=6", "max_num_islands=3", "max_island_size=5"],
    "maze": ["min_grid_size=5", "max_grid_size=7", "min_dist=3", "max_dist=6"],
    "mini_sudoku": ["min_empty=4", "max_empty=9"],
    "n_queens": ["n=6", "min_remove=1", "max_remove=4"],
    "sudoku": ["min_empty=20", "max_empty=40"],
}


def build(folder, *arguments):
    build_dataset("reasoning_gym", ["--output-dir", str(folder), *map(str, arguments)])
    data = open_dataset(folder, read_everything=True)
    vocabulary, grids = Vocabulary.of(data.metadata), []
    for split in data.splits.values():
        arrays = (split.sets["all"].inputs, split.sets["all"].labels)
        grids += [[grid_of(vocabulary, tokens) for tokens in pair] for pair in zip(*arrays, strict=True)]
    return data, grids


def _is_solution(question, answer, box):
    digits = np.array([[int(cell) for row in answer for cell in row]], np.uint8)
    rows = zip(question, answer, strict=True)
    keeps = all(given in (".", cell) for pair in rows for given, cell in zip(*pair, strict=True))
    return keeps and bool(are_solved(digits, box=box)[0])


@pytest.mark.parametrize("task", TASKS)
def test_each_task(tmp_path, task):
    data, grids = build(tmp_path / "data", "--task", task, "--size", 40, "--options", *SMALL[task])
    assert len(grids) == 40
    if box := {"mini_sudoku": (2, 2), "sudoku": (3, 3)}.get(task):
        assert all(_is_solution(*pair, box) for pair in grids)
    if task != "arc_1d":
        assert len({str(question) for question, _ in grids}) == 40
        assert data.metadata.num_puzzle_identifiers == 1
    else:
        assert data.metadata.num_puzzle_identifiers > 5


def test_same_command_same_bytes_and_another_seed_others(tmp_path):
    arguments = ("--task", "game_of_life", "--size", 20, "--options", *SMALL["game_of_life"])
    _, grids = build(tmp_path / "here", *arguments)
    build(tmp_path / "there", *arguments)
    assert files_of(tmp_path / "here") == files_of(tmp_path / "there")
    _, others = build(tmp_path / "other", *arguments, "--seed", 1)
    assert not {str(pair) for pair in grids} & {str(pair) for pair in others}
    builder = json.loads((tmp_path / "here" / "manifest.json").read_text())["builder"]
    assert builder["name"] == "reasoning_gym"
    assert builder["arguments"]["options"] == {"grid_size_x": 6, "grid_size_y": 5, "filled_cells": 12}


def test_list_names_each_task_and_its_options(capsys):
    with pytest.raises(SystemExit) as exit_of:
        build_dataset("reasoning_gym", ["--list"])
    assert not exit_of.value.code
    printed = capsys.readouterr().out
    assert all(f"\n{name} " in f"\n{printed}" for name in TASKS)
    assert "n=8 min_remove=1 max_remove=7" in printed


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["size=9"], "--options: n_queens has no size, only n, min_remove, max_remove"),
        (["n=99"], "--options: n_queens refuses them: n must be between 4 and 12"),
        (["n=0.5"], "--options: n_queens refuses them"),
        (["n=4", "max_remove=1"], "n_queens gave 8 different puzzles with one answer, then no new one"),
    ],
)
def test_options_that_cannot_be(tmp_path, monkeypatch, options, expected):
    monkeypatch.setattr("dataset.kinds.pairs.reasoning_gym._MAX_MISSES", 200)
    arguments = ["--output-dir", str(tmp_path / "data"), "--task", "n_queens", "--size", "40", "--options"]
    with pytest.raises(ValueError, match=re.escape(expected)) as refused:
        build_dataset("reasoning_gym", [*arguments, *options])
    assert "\n" not in str(refused.value)
    assert not list(tmp_path.iterdir())


def test_a_sudoku_run_composes(tmp_path):
    options = ["--task", "mini_sudoku", "--size", "20", "--symmetries", "symbols", "--fixed-symbols", "."]
    build(tmp_path / "data", *options)
    command = [sys.executable, "-m", "dataset.show", str(tmp_path / "data"), "--index", "0"]
    shown = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert "puzzle 0 of 101 in group 0" in shown.stdout
