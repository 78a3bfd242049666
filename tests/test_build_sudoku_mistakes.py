"""Every mistake in what the Sudoku builder is given: one line that says where, and nothing is written."""

import functools
import gzip
import subprocess
import sys
from pathlib import Path

import pytest

from dataset.kinds.sudoku.build import main
from tests.refusals import refusal_of
from tests.sudoku_source import HEADER, ROOT, build, source_rows, write_csv

refusal = functools.partial(refusal_of, main)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "one of the arguments --source --generate is required"),
        (["--generate", "5", "--source", "x.csv"], "argument --source: not allowed with argument --generate"),
        (["--generate", "0"], "argument --generate: must be an integer from 1 to 2**64 - 1, not '0'"),
        (["--generate", "-3"], "--generate: must be an integer from 1"),
        (["--generate", "many"], "--generate: must be an integer from 1"),
        (["--generate", "5", "--seed", "-1"], "--seed: must be an integer from 0"),
        (["--generate", "5", "--seed", str(1 << 64)], "--seed: must be an integer from 0"),
        (["--generate", "5", "--num-aug", "-1"], "--num-aug: must be an integer from 0"),
        (["--generate", "5", "--num-aug", "1.5"], "--num-aug: must be an integer from 0"),
        (["--generate", "5", "--box", "4x4"], "argument --box: invalid choice: '4x4'"),
        (["--generate", "5", "--sed", "1"], "unrecognized arguments: --sed 1"),
        (
            ["--generate", "5", "--min-difficulty", "1"],
            "--min-difficulty is for --source, not for --generate",
        ),
        (
            ["--generate", "5", "--subsample-size", "1"],
            "--subsample-size is for --source, not for --generate",
        ),
        (["--generate", "5", "--materialize"], "--materialize writes out the variants of --num-aug: drop it"),
        (["--generate", "90000", "--box", "2x2"], "needs 99000 different puzzles"),
        (["--generate", "5", "--clues", "9-8"], "argument --clues: '9-8' is not MIN-MAX, such as 32-40"),
        (["--generate", "5", "--clues", "70-82"], "--clues: a 9x9 grid has 81 cells, not 82"),
        (["--source", "x.csv", "--easier", "70-82"], "--easier: a 9x9 grid has 81 cells, not 82"),
        (["--source", "x.csv", "--clues", "4-6"], "--clues is for --generate, not for --source"),
        (["--generate", "5", "--box", "2x2", "--num-aug", str(1 << 30)], "more than int32 can count"),
        (["--source", "nowhere"], "--source nowhere does not exist"),
    ],
)
def test_bad_options_are_refused(tmp_path, capsys, arguments, expected):
    assert expected in refusal(tmp_path / "data", capsys, *arguments)


@pytest.mark.parametrize(
    ("column", "value", "expected"),
    [
        ("question", "1" * 15, "the question does not have 16 cells; is --box 2x2 right?"),
        ("question", "." * 81, "the question does not have 16 cells; is --box 2x2 right?"),
        (
            "question",
            "5" + "." * 15,
            "the question has a character that is neither '.' or '0' (empty) nor a digit",
        ),
        ("question", "\u00e9" + "." * 15, "the question has a character that is neither"),
        ("question", "11" + "." * 14, "the answer contradicts the question"),
        ("answer", "", "the answer does not have 16 cells"),
        ("answer", "1" * 16, "the answer repeats a digit in a row, a column or a box"),
        ("answer", "123434122143432.", "the answer has an empty cell"),
        ("answer", "123434122143432x", "the answer has a character that is neither"),
        ("rating", "hard", "the rating is not an integer"),
        ("rating", "", "the rating is not an integer"),
    ],
)
@pytest.mark.parametrize("name", ["train.csv", "train.csv.gz"])
def test_bad_rows_are_refused_with_file_and_line(tmp_path, capsys, source, name, column, value, expected):
    rows = source_rows(40)
    rows[30][HEADER.index(column)] = value
    (source / "train.csv").unlink()
    path = write_csv(source / name, rows)
    message = refusal(tmp_path / "data", capsys, "--source", source, "--box", "2x2", "--min-difficulty", 0)
    assert f"{path}:32: {expected}" in message


def test_a_rating_that_nobody_asks_for_may_be_anything(tmp_path):
    rows = [[*row[:3], "hard"] for row in source_rows(20)]
    path = write_csv(tmp_path / "puzzles.csv", rows)
    assert build(tmp_path / "data", "--source", path, "--box", "2x2")["train"].num_examples == 18


def test_the_line_is_right_after_empty_lines_and_in_later_chunks(tmp_path, capsys, source, monkeypatch):
    for module in ("splits", "sources"):
        monkeypatch.setattr(f"dataset.build.{module}._CHUNK_ROWS", 3)
    path = source / "train.csv"
    path.write_text(path.read_text().replace("\nmade here", "\n\nmade here", 1) + "made here,1,2,3\n")
    message = refusal(tmp_path / "data", capsys, "--source", source, "--box", "2x2")
    assert f"{path}:43: the question does not have 16 cells" in message


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("train.csv", b"", "train.csv:1: no column question, answer, rating: the first line names"),
        ("train.csv", b"question,solution,rating\n", "train.csv:1: no column answer:"),
        ("train.csv", b"question,answer\n", "train.csv:1: no column rating:"),
        ("train.csv", b"question,answer,rating\n", "train.csv has no puzzle with a rating of at least 0"),
        ("train.csv", b"question,answer,rating\n1,2\n", "train.csv:2: 2 columns, but 3 in the first line"),
        ("test.csv.gz", b"question,answer,rating\n", "test.csv.gz is no gzip file, or not a whole one"),
        (
            "test.csv.gz",
            gzip.compress(b"question,answer,rating\n", mtime=0)[:-9],
            "is no gzip file, or not a whole one",
        ),
        ("train.csv.gz", b"", "has both train.csv and train.csv.gz: remove one of them"),
    ],
)
def test_bad_files_are_refused(tmp_path, capsys, source, name, content, expected):
    (source / name).write_bytes(content)
    message = refusal(tmp_path / "data", capsys, "--source", source, "--box", "2x2", "--min-difficulty", 0)
    assert expected in message


def test_a_missing_file_is_refused(tmp_path, capsys, source):
    (source / "test.csv.gz").unlink()
    message = refusal(tmp_path / "data", capsys, "--source", source)
    assert "test.csv is missing, and there is no test.csv.gz either" in message


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--subsample-size", "41"], "--subsample-size 41 is more than the 40 training puzzles there are"),
        (["--subsample-size", "0"], "--subsample-size: must be an integer from 1"),
        (
            ["--subsample-size", "31", "--min-difficulty", "10"],
            "test.csv.gz has no puzzle with a rating of at least 10",
        ),
        (["--subsample-size", "36", "--min-difficulty", "5"], "is more than the 35 training puzzles"),
        (["--min-difficulty", "-1"], "--min-difficulty: must be an integer from 0"),
        (["--box", "3x3"], "the question does not have 81 cells; is --box 3x3 right?"),
    ],
)
def test_bad_choices_from_a_source_are_refused(tmp_path, capsys, source, arguments, expected):
    assert expected in refusal(tmp_path / "data", capsys, "--source", source, "--box", "2x2", *arguments)


def test_one_puzzle_cannot_be_split_in_two(tmp_path, capsys):
    path = write_csv(tmp_path / "puzzles.csv", source_rows(1) * 5)
    message = refusal(tmp_path / "data", capsys, "--source", path, "--box", "2x2")
    assert "too few different puzzles to hold out a test split" in message


def test_a_folder_with_other_things_is_refused_before_the_work(tmp_path, capsys):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "thesis.txt").write_text("mine")
    message = refusal(tmp_path / "data", capsys, "--generate", 1 << 40)
    assert "is not empty and was not made by a builder" in message


def test_the_source_is_never_replaced(tmp_path, capsys):
    build(tmp_path / "data", "--generate", 5, "--box", "2x2")
    capsys.readouterr()
    path = write_csv(tmp_path / "data" / "mine" / "puzzles.csv", source_rows(20))
    message = refusal(tmp_path / "data", capsys, "--source", path, "--box", "2x2")
    assert "holds the source and would be replaced" in message
    (tmp_path / "link.csv").symlink_to(path)
    message = refusal(tmp_path / "data", capsys, "--source", tmp_path / "link.csv", "--box", "2x2")
    assert "holds the source and would be replaced" in message


def test_the_working_directory_is_refused_before_the_work(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert ". is replaced as a whole, but we are in it" in refusal(Path("."), capsys, "--generate", 1 << 40)


@pytest.mark.parametrize(
    ("error", "expected"), [(ValueError("one\nand two"), "one and two"), (MemoryError(), "out of memory")]
)
def test_every_mistake_is_one_line(tmp_path, capsys, monkeypatch, error, expected):
    def fail(*arguments, **options) -> None:
        raise error

    monkeypatch.setattr("dataset.build.splits.write_dataset", fail)
    assert refusal(tmp_path / "data", capsys, "--generate", 1, "--box", "2x2") == expected


def test_a_mistake_is_one_line_on_stderr_and_a_failing_exit(tmp_path):
    command = [
        sys.executable,
        "-m",
        "dataset.build",
        "sudoku",
        "--output-dir",
        tmp_path / "data",
        "--generate",
        "-1",
    ]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr.startswith("build sudoku: error: argument --generate: must be an integer")
    assert run.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())
