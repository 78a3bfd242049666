"""Every mistake in what the maze builder is given: one line that says where, and nothing is written."""

import functools
import subprocess
import sys

import pytest

from dataset.kinds.maze.build import main
from tests.maze_source import source_rows
from tests.refusals import refusal_of
from tests.sudoku_source import HEADER, ROOT, write_csv

refusal = functools.partial(refusal_of, main)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "one of the arguments --source --generate is required"),
        (["--generate", "5", "--source", "x.csv"], "argument --source: not allowed with argument --generate"),
        (["--generate", "0"], "argument --generate: must be an integer from 1 to 2**64 - 1, not '0'"),
        (["--generate", "5", "--size", "1"], "argument --size: must be an integer from 2"),
        (["--generate", "5", "--size", "6x6"], "argument --size: must be an integer from 2"),
        (["--generate", "5", "--min-path-cells", "1"], "--min-path-cells: must be an integer from 2"),
        (["--generate", "5", "--seed", "-1"], "--seed: must be an integer from 0"),
        (["--generate", "5", "--augment"], "unrecognized arguments: --augment"),
        (
            ["--generate", "5", "--subsample-size", "1"],
            "--subsample-size is for --source, not for --generate",
        ),
        (["--source", "x.csv", "--perfect"], "--perfect is for --generate, not for --source: drop it"),
        (["--source", "x.csv", "--size", "8"], "--size is for --generate, not for --source: drop it"),
        (
            ["--source", "x.csv", "--min-path-cells", "8"],
            "--min-path-cells is for --generate, not for --source",
        ),
        (["--generate", "5", "--materialize"], "--materialize writes out the variants of --aug: drop it, or"),
        (
            ["--generate", "5", "--size", "6", "--min-path-cells", "37"],
            "--min-path-cells 37 is more than the 36 cells of a 6x6 maze: lower it",
        ),
        (["--source", "nowhere"], "--source nowhere does not exist"),
    ],
)
def test_bad_options_are_refused(tmp_path, capsys, arguments, expected):
    assert expected in refusal(tmp_path / "data", capsys, *arguments)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["5", "--size", "4", "--min-path-cells", "13"],
            "random 4x4 mazes gave 0 with a path of 13 cells or more",
        ),
        (["5000", "--size", "2"], "then no new one: lower --min-path-cells, or ask for fewer"),
    ],
)
def test_mazes_that_cannot_be_found(tmp_path, capsys, monkeypatch, arguments, expected):
    monkeypatch.setattr("dataset.kinds.maze.build._MAX_BATCHES", 5)
    assert expected in refusal(tmp_path / "data", capsys, "--generate", *arguments)


MAZE, ANSWER = "S   |"  "##  |"  "    |"  "G ##", "Soo |"  "##o |"  "ooo |"  "G ##"  # fmt: skip


@pytest.mark.parametrize(
    ("maze", "answer", "expected"),
    [
        ("S#  |##  |    |G ##", ANSWER, "the maze has no path from S to G"),
        ("    |##  |    |G ##", ANSWER, "the maze has no start S"),
        ("S   |##  |S   |G ##", ANSWER, "the maze has more than one start S"),
        ("S   |##  |    |  ##", ANSWER, "the maze has no goal G"),
        ("S  G|##  |    |G ##", ANSWER, "the maze has more than one goal G"),
        ("Soo |##  |    |G ##", ANSWER, "the question has a character that is none of '#', ' ', 'S', 'G'"),
        ("S   |##. |    |G ##", ANSWER, "the question has a character that is none of"),
        ("S   |##\u00e9 |    |G ##", ANSWER, "the question has a character that is none of"),
        (MAZE, "Soo |##x |ooo |G ##", "the answer has a character that is none of '#', ' ', 'S', 'G', 'o'"),
        (MAZE, "Soo |#oo |ooo |G ##", "the answer contradicts its maze"),
        (MAZE, "Soo |##o |ooo |o ##", "the answer contradicts its maze"),
        (MAZE, "Soo#|##o |ooo |G ##", "the answer contradicts its maze"),
        (MAZE, MAZE, "the cells marked 'o' are not exactly one path from S to G"),
        (MAZE, "Soo |##o |oooo|G ##", "the cells marked 'o' are not exactly one path from S to G"),
        (
            "S   |##  ",
            ANSWER,
            "the question does not have 16 cells like the first maze: all must be of one size",
        ),
        ("", ANSWER, "the question does not have 16 cells like the first maze"),
        (MAZE, ANSWER[1:], "the answer does not have 16 cells like the first maze"),
    ],
)
@pytest.mark.parametrize("name", ["train.csv", "test.csv.gz"])
def test_bad_rows_are_refused_with_file_and_line(tmp_path, capsys, name, maze, answer, expected):
    good = ["", MAZE.replace("|", ""), ANSWER.replace("|", ""), "9"]
    bad = ["", maze.replace("|", ""), answer.replace("|", ""), "9"]
    paths = {name: write_csv(tmp_path / "source" / name, [good]) for name in ("train.csv", "test.csv.gz")}
    write_csv(paths[name], [good, good, bad, good])
    message = refusal(tmp_path / "data", capsys, "--source", tmp_path / "source")
    assert f"{paths[name]}:4: {expected}" in message


@pytest.mark.parametrize(
    ("first", "expected"),
    [
        ("S G", "the question has 3 cells, which make no square of at least 2x2"),
        ("", "the question has 0 cells, which make no square"),
        ("S", "the question has 1 cells, which make no square"),
    ],
)
def test_mazes_must_be_square(tmp_path, capsys, first, expected):
    path = write_csv(tmp_path / "mazes.csv", [["", first, first, ""]])
    assert f"{path}:2: {expected}" in refusal(tmp_path / "data", capsys, "--source", path)


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("train.csv", "", "train.csv:1: no column question, answer: the first line names the columns"),
        ("train.csv", "source,question\n", "train.csv:1: no column answer: the first line names the columns"),
        ("test.csv", "question,answer\n", "test.csv has no maze"),
        ("test.csv", None, "test.csv is missing, and there is no test.csv.gz either"),
    ],
)
def test_bad_files_are_refused(tmp_path, capsys, name, content, expected):
    rows = source_rows(5)
    for split in ("train.csv", "test.csv"):
        write_csv(tmp_path / "source" / split, rows)
    path = tmp_path / "source" / name
    path.unlink()
    if content is not None:
        path.write_text(content)
    assert expected in refusal(tmp_path / "data", capsys, "--source", tmp_path / "source")


def test_an_empty_folder_is_refused(tmp_path, capsys):
    (tmp_path / "source").mkdir()
    message = refusal(tmp_path / "data", capsys, "--source", tmp_path / "source")
    assert "train.csv is missing, and there is no train.csv.gz either" in message


def test_bad_choices_from_a_source_are_refused(tmp_path, capsys):
    path = write_csv(tmp_path / "mazes.csv", source_rows(10))
    message = refusal(tmp_path / "data", capsys, "--source", path, "--subsample-size", 10)
    assert "--subsample-size 10 is more than the 9 training puzzles there are" in message
    write_csv(path, source_rows(1) * 5)
    assert "too few different puzzles" in refusal(tmp_path / "data", capsys, "--source", path)


def test_a_folder_with_other_things_is_refused_before_the_work(tmp_path, capsys):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "thesis.txt").write_text("mine")
    message = refusal(tmp_path / "data", capsys, "--generate", 1 << 40)
    assert "is not empty and was not made by a builder" in message


def test_a_mistake_is_one_line_on_stderr_and_a_failing_exit(tmp_path):
    path = write_csv(tmp_path / "mazes.csv", [["", "S##G", "S##G", ""]], header=HEADER)
    command = [
        sys.executable,
        "-m",
        "dataset.build",
        "maze",
        "--output-dir",
        tmp_path / "data",
        "--source",
        path,
    ]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr == f"build maze: error: {path}:2: the maze has no path from S to G\n"
    assert sorted(tmp_path.iterdir()) == [path]
