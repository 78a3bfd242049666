"""Puzzles that people write for solve.py, and one line for each mistake in one."""

import io
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from dataset.kinds.kind import find_kind, read_symbols
from solve import Solver, load
from tests.solvers import CLUES, PUZZLE, run_solve, save_arc_run, save_maze_run, save_run
from tests.test_show import MAZE


@pytest.fixture(scope="module")
def solvers(tmp_path_factory, sudoku_folder) -> dict[str, Solver]:
    folder = tmp_path_factory.mktemp("solve")
    runs = (save_run(folder / "sudoku", sudoku_folder), save_maze_run(folder), save_arc_run(folder))
    return {run.name: load(run, device="cpu") for run in runs}


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


def _task(**changes) -> str:
    pair = {"input": [[1, 2]], "output": [[2, 1]]}
    return json.dumps({"train": [pair], "test": [{"input": [[3]]}], **changes})


@pytest.mark.parametrize(
    ("run", "puzzle", "keys", "message"),
    [
        ("sudoku", "1..4 .... .... 4..", {}, "15 cells make no Sudoku, which has one of 16 (4x4)"),
        ("sudoku", "1..4 ..?. .... 4..1", {}, "'?' is no cell of a Sudoku: give digits, and '.'"),
        ("sudoku", "1..4 ..5. .... 4..1", {}, "row 2 has the digit 5, but 4x4 cells take 1 to 4"),
        ("sudoku", "1.14 .... .... 4...", {}, "contradict each other: row 1 has the digit 1 twice"),
        ("sudoku", "3... .... 3... ....", {}, "column 1 has the digit 3 twice"),
        ("sudoku", "3... .3.. .... ....", {}, "box 1 has the digit 3 twice"),
        ("sudoku", "." * 81, {}, "the puzzle has 81 cells of 11 tokens, but"),
        ("sudoku", PUZZLE, {"test": 1}, "test=1 is out of range: puzzle has only test=0"),
        ("sudoku", PUZZLE, {"adapt": True}, "adapt=true is for puzzles with demonstrations"),
        ("sudoku", PUZZLE, {"task": "x"}, "task=x is no puzzle identifier in"),
        ("sudoku", PUZZLE, {"samples": 2, "noise": 0}, "samples=2 would all be the same run"),
        ("maze", "S#\n##G", {}, "the maze has 2 rows, the longest of 3 cells: it must be a square"),
        ("maze", "S..x\n....\n....\n...G", {}, "row 1 of the maze has 'x': its cells are '#', ' '"),
        ("maze", "....\n....\n....\n...G", {}, "the maze has no start S"),
        ("maze", "S...\n....\n..G.\n...G", {}, "the maze has more than one goal G"),
        ("maze", "S#..\n##..\n....\n...G", {}, "the maze has no path from S to G"),
        ("maze", "S.\n.G", {}, "the puzzle has 4 cells of 6 tokens, but"),
        ("arc", '{"train": [', {}, "it is not valid JSON"),
        ("arc", _task(train=[]), {}, "it is no ARC task: it has no demonstration pair"),
        ("arc", _task(test=[{"input": [[10]]}]), {}, "has the cell 10, not a colour from 0 to 9"),
        ("arc", _task(test=[1]), {}, "it is no ARC task: test pair 1 is not"),
        ("arc", _task(test=[{"input": [[1]], "output": [[]]}]), {}, "the output of test pair 1 is empty"),
        ("arc", [[1, 2]], {}, "it is not valid JSON"),
        ("arc", _task(test=[{"input": [[1] * 9]}]), {}, "grid of 9 rows or columns, more than the 8x8 cells"),
        ("arc", _task(), {"test": 1}, "test=1 is out of range: puzzle has only test=0"),
        ("arc", _task(), {}, "the model has no embedding for this task"),
        ("arc", _task(), {"task": "00000001x"}, "did you mean '00000001'?"),
        ("arc", _task(), {"task": "00000001", "select": "rules"}, "rules of this puzzle cannot tell"),
    ],
)
def test_a_bad_puzzle_is_one_line(solvers, run, puzzle, keys, message):
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        solvers[run].solve(puzzle, **keys)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "puzzle=... is needed"),
        ([f"puzzle={PUZZLE}", f"puzzle={PUZZLE}"], "puzzle is given twice: drop one"),
        (["puzzle="], "puzzle is empty"),
        (["puzzle=EMPTY.txt"], "EMPTY.txt is empty"),
        (["puzzle=BINARY.txt"], "is no text (UTF-8)"),
        (["puzzle=nowhere.txt"], "puzzle=nowhere.txt is no file"),
        (["puzzle=-"], "standard input is empty"),
        (["puzzle=1..4 .... .... 4.."], "puzzle: 15 cells make no Sudoku"),
        ([f"puzzle={PUZZLE}", "step=4"], "unknown key 'step', did you mean 'steps'?"),
        ([f"puzzle={PUZZLE}", "steps=0"], "steps=0 should be"),
        ([f"puzzle={PUZZLE}", "data_path=nowhere"], "data folder nowhere does not exist"),
        ([f"puzzle={PUZZLE}", "checkpoint=nowhere"], "nowhere does not exist: give a run folder"),
        ([f"puzzle={PUZZLE}", "checkpoint=nowhere"], "`make demo` trains a small one"),
    ],
)
def test_the_program_refuses_in_one_line(solvers, tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO(" \n"))
    Path("EMPTY.txt").write_text("\n")
    Path("BINARY.txt").write_bytes(b"\xff\xfe1")
    has_own = any(argument.startswith("checkpoint=") for argument in arguments)
    own = [] if has_own else [f"checkpoint={solvers['sudoku'].checkpoint.run_folder}"]
    status, out, errors = run_solve(monkeypatch, capsys, *own, *arguments)
    assert (status, out) == (1, "")
    assert errors.startswith("error: ")
    assert errors.count("\n") == 1, errors
    assert message in errors
