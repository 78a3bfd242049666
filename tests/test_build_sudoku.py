import csv
import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dataset.build_sudoku import main
from dataset.format import PuzzleSet, check_tokens, open_split
from dataset.sudoku import are_solved, count_solutions, generate_puzzle, is_minimal

ROOT = Path(__file__).resolve().parent.parent
REAL_DATA = Path(os.environ.get("DATA_DIR", ROOT.parent / "shared" / "data")) / "sudoku-extreme-like"
HEADER = ["source", "question", "answer", "rating"]


def build(folder: Path, *arguments) -> dict[str, PuzzleSet]:
    """Runs the builder in this process; the set `all` of both splits, through every check of the format."""
    main(["--output-dir", str(folder), *map(str, arguments)])
    splits = {split: open_split(folder, split) for split in ("train", "test")}
    for split, data in splits.items():
        check_tokens(folder, split, data)
    return {split: data.sets["all"] for split, data in splits.items()}


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def rows_of(array: np.ndarray) -> list[bytes]:
    return [row.tobytes() for row in array]


def source_rows(count: int, *, stream: int = 0) -> list[list[str]]:
    """Rows of a 2x2 source: '.' and '0' both stand for empty cells, and row i has rating i."""
    rows = []
    for index in range(count):
        grids = generate_puzzle(0, stream=stream, index=index, box=(2, 2))
        question, answer = ("".join(map(str, grid)) for grid in grids)
        rows.append(["made here", question.replace("0", ".0"[index % 2]), answer, str(index)])
    return rows


def write_csv(path: Path, rows: list[list[str]], *, header: list[str] = HEADER) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with (gzip.open if path.suffix == ".gz" else open)(path, "wt", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    return path


@pytest.fixture
def source(tmp_path) -> Path:
    write_csv(tmp_path / "source" / "train.csv", source_rows(40))
    write_csv(tmp_path / "source" / "test.csv.gz", source_rows(10, stream=1))
    return tmp_path / "source"


# ------------------------------------------------------------------------------------------------- generating


def test_generated_dataset(tmp_path):
    sets = build(tmp_path / "data", "--generate", 1200, "--box", "2x2")
    assert (sets["train"].num_examples, sets["test"].num_examples) == (1200, 120)
    questions = np.concatenate([sets["train"].inputs, sets["test"].inputs])
    answers = np.concatenate([sets["train"].labels, sets["test"].labels])
    assert len(set(rows_of(questions))) == 1320  # no repeats within a split, nor between the splits
    assert are_solved(answers - 1, box=(2, 2)).all()
    assert ((questions == 1) | (questions == answers)).all()
    assert all(is_minimal(question, box=(2, 2)) for question in (questions - 1).tolist())


@pytest.mark.parametrize(("box", "size", "count"), [("2x2", 4, 50), ("2x3", 6, 10), ("3x3", 9, 1)])
def test_facts_of_a_generated_dataset(tmp_path, box, size, count):
    sets = build(tmp_path / "data", "--generate", count, "--box", box, "--num-aug", 2)
    metadata = {split: open_split(tmp_path / "data", split).metadata for split in ("train", "test")}
    for split, groups, group_size in (("train", count, 3), ("test", 100, 1)):
        puzzles = groups * group_size
        facts = json.loads((tmp_path / "data" / split / "dataset.json").read_text())
        assert facts == {
            "pad_id": 0,
            "ignore_label_id": 0,
            "blank_identifier_id": 0,
            "vocab_size": size + 2,
            "seq_len": size**2,
            "num_puzzle_identifiers": 1,
            "total_groups": groups,
            "mean_puzzle_examples": 1.0,
            "sets": ["all"],
            "total_puzzles": puzzles,
        }
        assert metadata[split].total_puzzles == puzzles
        assert sets[split].puzzle_indices.tolist() == list(range(puzzles + 1))
        assert sets[split].group_indices.tolist() == list(range(0, puzzles + 1, group_size))
        assert sets[split].inputs.dtype == sets[split].labels.dtype == np.uint8
        assert sets[split].inputs.min() == 1
        assert (sets[split].labels.min(), sets[split].labels.max()) == (2, size + 1)
        for field in ("puzzle_identifiers", "puzzle_indices", "group_indices"):
            assert getattr(sets[split], field).dtype == np.int32
        assert not sets[split].puzzle_identifiers.any()
    assert json.loads((tmp_path / "data" / "identifiers.json").read_text()) == ["<blank>"]


def test_same_command_same_bytes_in_another_process(tmp_path):
    arguments = ["--generate", "150", "--box", "2x2", "--num-aug", "3", "--seed", "5"]
    build(tmp_path / "here", *arguments)
    command = [sys.executable, "-m", "dataset.build_sudoku", "--output-dir", tmp_path / "there", *arguments]
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    output = subprocess.run(
        command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True
    ).stdout
    assert files_of(tmp_path / "here") == files_of(tmp_path / "there")
    assert output.startswith(
        "train: 150 puzzles and 3 variants of each, 600 examples\ntest: 100 puzzles\nwrote "
    )


def test_seed_changes_the_puzzles(tmp_path):
    first = build(tmp_path / "0", "--generate", 20, "--box", "2x3")
    second = build(tmp_path / "1", "--generate", 20, "--box", "2x3", "--seed", 1)
    assert not set(rows_of(first["train"].inputs)) & set(rows_of(second["train"].inputs))


def test_more_puzzles_begin_with_the_same(tmp_path):
    few = build(tmp_path / "few", "--generate", 50, "--box", "2x3")["train"]
    many = build(tmp_path / "many", "--generate", 80, "--box", "2x3")["train"]
    assert np.array_equal(few.inputs, many.inputs[:50])


def test_a_folder_built_before_is_replaced(tmp_path):
    build(tmp_path / "data", "--generate", 30, "--box", "2x2")
    sets = build(tmp_path / "data", "--generate", 20, "--box", "2x2")
    assert sets["train"].num_examples == 20
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


# ------------------------------------------------------------------------------------------------- augmenting


def test_variants_are_of_their_original_and_never_test_puzzles(tmp_path):
    sets = build(tmp_path / "data", "--generate", 300, "--box", "2x2", "--num-aug", 40)
    train = sets["train"]
    assert not set(rows_of(train.inputs)) & set(rows_of(sets["test"].inputs))
    assert are_solved(train.labels - 1, box=(2, 2)).all()
    assert ((train.inputs == 1) | (train.inputs == train.labels)).all()
    num_clues = (train.inputs > 1).sum(axis=1).reshape(300, 41)
    assert (num_clues == num_clues[:, :1]).all()
    assert all(count_solutions(question, box=(2, 2)) == 1 for question in (train.inputs[:500] - 1).tolist())
    assert len(set(rows_of(train.inputs[:41]))) > 30  # a puzzle's variants differ
    originals = build(tmp_path / "originals", "--generate", 300, "--box", "2x2")["train"]
    assert np.array_equal(train.inputs[::41], originals.inputs)


def test_more_variants_begin_with_the_same(tmp_path):
    few = build(tmp_path / "few", "--generate", 5, "--box", "2x3", "--num-aug", 3)["train"]
    many = build(tmp_path / "many", "--generate", 5, "--box", "2x3", "--num-aug", 7)["train"]
    assert np.array_equal(few.labels.reshape(5, 4, 36), many.labels.reshape(5, 8, 36)[:, :4])


def test_chunks_do_not_change_the_variants(tmp_path, source, monkeypatch):
    arguments = ["--source", source, "--box", "2x2", "--num-aug", 3]
    build(tmp_path / "one", *arguments)
    monkeypatch.setattr("dataset.build_sudoku._CHUNK_ROWS", 7)
    monkeypatch.setattr("dataset.sudoku_csv._CHUNK_ROWS", 7)
    build(tmp_path / "many", *arguments)
    assert files_of(tmp_path / "one") == files_of(tmp_path / "many")


# ---------------------------------------------------------------------------------------------------- reading


def test_source_folder(tmp_path, source):
    sets = build(tmp_path / "data", "--source", source, "--box", "2x2")
    for split, rows in (("train", source_rows(40)), ("test", source_rows(10, stream=1))):
        questions = [[int(cell) + 1 for cell in row[1].replace(".", "0")] for row in rows]
        answers = [[int(cell) + 1 for cell in row[2]] for row in rows]
        assert sets[split].inputs.tolist() == questions
        assert sets[split].labels.tolist() == answers


def test_source_is_recorded_by_name_and_content(tmp_path, source):
    build(tmp_path / "data", "--source", source, "--box", "2x2")
    text = (tmp_path / "data" / "manifest.json").read_text()
    builder = json.loads(text)["builder"]
    assert builder["module"] == "dataset.build_sudoku"
    assert list(builder["arguments"]["source"]) == ["train.csv", "test.csv.gz"]
    assert builder["arguments"]["box"] == "2x2"
    assert str(tmp_path) not in text


def test_columns_are_found_by_name_and_others_ignored(tmp_path):
    rows = [[row[3], row[2], 'any, "thing"\nat all', row[1]] for row in source_rows(20)]
    path = write_csv(tmp_path / "puzzles.csv", rows, header=["rating", "answer", "remark", "question"])
    path.write_text("\ufeff" + path.read_text() + "\n\n")
    sets = build(tmp_path / "data", "--source", path, "--box", "2x2", "--min-difficulty", 5)
    assert sets["train"].num_examples + sets["test"].num_examples == 15


def test_one_file_gives_both_splits(tmp_path):
    rows = source_rows(50)
    path = write_csv(tmp_path / "puzzles.csv.gz", rows + rows[:25])
    sets = build(tmp_path / "data", "--source", path, "--box", "2x2")
    train, test = (set(rows_of(sets[split].inputs)) for split in ("train", "test"))
    assert sets["test"].num_examples == 7
    assert not train & test
    assert len(train | test) == len({row[1].replace(".", "0") for row in rows})


def test_filter_is_for_both_splits_and_subsample_for_training(tmp_path, source):
    arguments = ["--source", source, "--box", "2x2", "--min-difficulty", 4]
    everything = build(tmp_path / "all", *arguments)
    assert (everything["train"].num_examples, everything["test"].num_examples) == (36, 6)
    some = build(tmp_path / "some", *arguments, "--subsample-size", 10, "--num-aug", 2)
    assert (some["train"].num_examples, some["test"].num_examples) == (30, 6)
    chosen = rows_of(some["train"].inputs[::3])
    assert [row for row in rows_of(everything["train"].inputs) if row in chosen] == chosen
    other = build(tmp_path / "other", *arguments, "--subsample-size", 10, "--num-aug", 2, "--seed", 1)
    assert rows_of(other["train"].inputs[::3]) != chosen


def test_puzzles_in_both_splits_are_reported(tmp_path, source, capsys):
    write_csv(source / "train.csv", source_rows(40) + source_rows(3, stream=1))
    build(tmp_path / "data", "--source", source, "--box", "2x2")
    assert "warning: 3 puzzles of the training split are in the test split too" in capsys.readouterr().err


@pytest.mark.skipif(not REAL_DATA.is_dir(), reason=f"no {REAL_DATA}; DATA_DIR names the folder above it")
def test_real_puzzles(tmp_path):
    sets = build(tmp_path / "data", "--source", REAL_DATA, "--subsample-size", 200, "--num-aug", 20)
    assert (sets["train"].num_examples, sets["test"].num_examples) == (4200, 6783)
    assert are_solved(sets["train"].labels - 1, box=(3, 3)).all()
    assert not set(rows_of(sets["train"].inputs)) & set(rows_of(sets["test"].inputs))
    for question in (sets["train"].inputs[::100] - 1).tolist():
        assert count_solutions(question, box=(3, 3)) == 1


# --------------------------------------------------------------------------------------------------- mistakes


def refusal(folder: Path, capsys, *arguments) -> str:
    """The one line that the builder says when it refuses; checks that it left nothing behind."""
    before = sorted(folder.parent.rglob("*"))
    with pytest.raises(SystemExit) as exit_of:
        main(["--output-dir", str(folder), *map(str, arguments)])
    assert sorted(folder.parent.rglob("*")) == before
    message = exit_of.value.code  # a text: the interpreter prints it on stderr and exits with 1
    assert message.startswith("build_sudoku: error: ")
    assert "\n" not in message
    assert capsys.readouterr().out == ""
    return message


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
        (["--generate", "90000", "--box", "2x2"], "needs 99000 different puzzles"),
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
    monkeypatch.setattr("dataset.sudoku_csv._CHUNK_ROWS", 3)
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

    monkeypatch.setattr("dataset.build_sudoku.write_dataset", fail)
    assert (
        refusal(tmp_path / "data", capsys, "--generate", 1, "--box", "2x2")
        == f"build_sudoku: error: {expected}"
    )


def test_a_mistake_is_one_line_on_stderr_and_a_failing_exit(tmp_path):
    command = [
        sys.executable,
        "-m",
        "dataset.build_sudoku",
        "--output-dir",
        tmp_path / "data",
        "--generate",
        "-1",
    ]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr.startswith("build_sudoku: error: argument --generate: must be an integer")
    assert run.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())
