"""The maze builder: generating, augmenting, reading CSV files."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from dataset.format import open_split
from dataset.kinds.maze.rules import is_path, published_answers, shortest_path_cells
from dataset.symmetries import NUM_DIHEDRAL, dihedral
from tests.maze_source import REAL_MAZES, build, source_rows, to_tokens
from tests.sudoku_source import ROOT, files_of, rows_of, write_csv

SMALL = ["--size", 8, "--min-path-cells", 12]


def variants(maze: np.ndarray) -> list[bytes]:
    size = int(len(maze) ** 0.5)
    return [dihedral(maze.reshape(size, size), number).tobytes() for number in range(NUM_DIHEDRAL)]


# ------------------------------------------------------------------------------------------------- generating


@pytest.mark.parametrize(
    ("count", "num_test", "words"), [(15, 20, ()), (250, 25, ()), (15, 3, ("--num-test", 3))]
)
def test_generated_dataset(tmp_path, count, num_test, words):
    sets = build(tmp_path / "data", "--generate", count, *words, *SMALL)
    assert (sets["train"].num_examples, sets["test"].num_examples) == (count, num_test)
    mazes = np.concatenate([sets["train"].inputs, sets["test"].inputs])
    answers = np.concatenate([sets["train"].labels, sets["test"].labels])
    assert len(set(rows_of(mazes))) == count + num_test
    assert is_path(mazes, answers).all()
    assert np.array_equal(published_answers(mazes), answers)
    assert shortest_path_cells(mazes).min() == 12


@pytest.mark.parametrize(("aug", "group_size"), [([], 1), (["--aug"], 8), (["--aug", "--materialize"], 8)])
def test_facts_of_a_generated_dataset(tmp_path, aug, group_size):
    sets = build(tmp_path / "data", "--generate", 12, *SMALL, *aug)
    for split, groups, size in (("train", 12, group_size), ("test", 20, 1)):
        puzzles = groups * size
        is_compact = size > 1 and "--materialize" not in aug
        assert json.loads((tmp_path / "data" / split / "dataset.json").read_text()) == {
            "pad_id": 0,
            "ignore_label_id": 0,
            "blank_identifier_id": 0,
            "vocab_size": 6,
            "seq_len": 64,
            "num_puzzle_identifiers": 1,
            "total_groups": groups,
            "mean_puzzle_examples": 1.0,
            "sets": ["all"],
            "total_puzzles": puzzles,
            **({"augmentation": "square"} if is_compact else {}),
        }
        puzzle_set = sets[split]
        assert puzzle_set.puzzle_indices.tolist() == list(range(puzzles + 1))
        assert puzzle_set.group_indices.tolist() == list(range(0, puzzles + 1, size))
        assert not puzzle_set.puzzle_identifiers.any()
        assert puzzle_set.inputs.dtype == puzzle_set.labels.dtype == np.uint8
        assert len(puzzle_set.inputs) == (groups if is_compact else puzzles)
    assert json.loads((tmp_path / "data" / "identifiers.json").read_text()) == ["<blank>"]


def test_path_lengths_grow_with_the_size_unless_given(tmp_path):
    for size, expected in ((2, 2), (6, 14), (9, 26)):
        build(tmp_path / "data", "--generate", 1, "--size", size)
        arguments = json.loads((tmp_path / "data" / "manifest.json").read_text())["builder"]["arguments"]
        assert (arguments["size"], arguments["min_path_cells"]) == (size, expected)
        assert shortest_path_cells(open_split(tmp_path / "data", "test").sets["all"].inputs).min() >= expected


def test_perfect_mazes_and_their_variants_have_one_answer(tmp_path):
    sets = build(tmp_path / "data", "--generate", 12, "--perfect", "--aug", "--materialize", *SMALL)
    for each in sets.values():
        assert np.array_equal(published_answers(each.inputs), each.labels), "the rule has nothing to choose"


@pytest.mark.slow
def test_mazes_as_published_are_found_in_time(tmp_path):
    sets = build(tmp_path / "data", "--generate", 20)
    assert sets["train"].inputs.shape == sets["test"].inputs.shape == (20, 900)
    assert shortest_path_cells(sets["train"].inputs).min() >= 110


def test_same_command_same_bytes_in_another_process(tmp_path):
    arguments = ["--generate", "30", "--size", "7", "--aug", "--seed", "5"]
    build(tmp_path / "here", *arguments)
    command = [sys.executable, "-m", "dataset.build", "maze", "--output-dir", tmp_path / "there", *arguments]
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    output = subprocess.run(
        command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True
    ).stdout
    assert files_of(tmp_path / "here") == files_of(tmp_path / "there")
    assert output.startswith(
        "train: 30 mazes of 7x7 and 7 variants of each, 240 examples\ntest: 20 mazes\nwrote "
    )


def test_seed_changes_the_mazes_and_more_begin_with_the_same(tmp_path):
    few = build(tmp_path / "few", "--generate", 40, *SMALL)["train"].inputs
    many = build(tmp_path / "many", "--generate", 60, *SMALL)["train"].inputs
    assert np.array_equal(few, many[:40])
    other = build(tmp_path / "other", "--generate", 40, *SMALL, "--seed", 1)["train"].inputs
    assert not set(rows_of(few)) & set(rows_of(other))


# ------------------------------------------------------------------------------------------------- augmenting


def test_variants_are_the_eight_of_the_square(tmp_path):
    plain = build(tmp_path / "plain", "--generate", 30, *SMALL)["train"]
    compact = build(tmp_path / "compact", "--generate", 30, *SMALL, "--aug")["train"]
    full = build(tmp_path / "full", "--generate", 30, *SMALL, "--aug", "--materialize")["train"]
    assert compact.augmentation == "square"
    assert full.augmentation is None
    assert np.array_equal(compact.materialize().inputs, full.inputs)
    assert np.array_equal(compact.materialize().labels, full.labels)
    for field in ("inputs", "labels"):
        groups = getattr(full, field).reshape(30, 8, 64)
        for original, group in zip(getattr(plain, field), groups, strict=True):
            assert rows_of(group) == variants(original)
    assert is_path(full.inputs, full.labels).all()


@pytest.mark.parametrize("materialize", [[], ["--materialize"]])
def test_no_variant_is_a_test_maze(tmp_path, capsys, materialize):
    rows = source_rows(3)
    twin = [row[:] for row in rows[:1]]
    for column in (1, 2):
        grid = np.array(list(twin[0][column])).reshape(6, 6)
        twin[0][column] = "".join(dihedral(grid, 3).ravel())
    write_csv(tmp_path / "source" / "train.csv", rows)
    write_csv(tmp_path / "source" / "test.csv", twin)
    train = build(tmp_path / "data", "--source", tmp_path / "source", "--aug", *materialize)[
        "train"
    ].materialize()
    originals = to_tokens([row[1] for row in rows])
    expected = [variants(maze) for maze in originals]
    held_out = to_tokens([twin[0][1]])[0].tobytes()
    assert expected[0].index(held_out) == 3
    expected[0] = [originals[0].tobytes() if maze == held_out else maze for maze in expected[0]]
    assert rows_of(train.inputs) == sum(expected, [])
    assert np.array_equal(train.labels[3], train.labels[0])


# ---------------------------------------------------------------------------------------------------- reading


@pytest.fixture
def maze_source(tmp_path):
    """A folder of CSV files: 20 mazes of 6x6 for training and 5 for testing."""
    rows = source_rows(25)
    write_csv(tmp_path / "source" / "train.csv", rows[:20])
    write_csv(tmp_path / "source" / "test.csv.gz", rows[20:])
    return tmp_path / "source"


def test_source_folder(tmp_path, maze_source, capsys):
    sets = build(tmp_path / "data", "--source", maze_source)
    rows = source_rows(25)
    for split, part in (("train", rows[:20]), ("test", rows[20:])):
        assert sets[split].inputs.tolist() == to_tokens([row[1] for row in part]).tolist()
        assert sets[split].labels.tolist() == to_tokens([row[2] for row in part]).tolist()
    text = (tmp_path / "data" / "manifest.json").read_text()
    assert list(json.loads(text)["builder"]["arguments"]["source"]) == ["train.csv", "test.csv.gz"]
    assert str(tmp_path) not in text
    assert capsys.readouterr().err == ""


def test_one_file_gives_both_splits(tmp_path):
    rows = source_rows(40)
    path = write_csv(tmp_path / "mazes.csv.gz", rows + rows[:20])
    sets = build(tmp_path / "data", "--source", path)
    train, test = (set(rows_of(sets[split].inputs)) for split in ("train", "test"))
    assert sets["test"].num_examples == 6
    assert not train & test
    assert len(train | test) == 40


def test_subsample_is_for_training(tmp_path, maze_source):
    everything = build(tmp_path / "all", "--source", maze_source)
    some = build(tmp_path / "some", "--source", maze_source, "--subsample-size", 7)
    assert (some["train"].num_examples, some["test"].num_examples) == (7, 5)
    chosen = rows_of(some["train"].inputs)
    assert [row for row in rows_of(everything["train"].inputs) if row in chosen] == chosen
    other = build(tmp_path / "other", "--source", maze_source, "--subsample-size", 7, "--seed", 1)
    assert rows_of(other["train"].inputs) != chosen


def test_chunks_do_not_change_what_is_read(tmp_path, maze_source, monkeypatch):
    build(tmp_path / "one", "--source", maze_source, "--aug")
    for module in ("splits", "sources"):
        monkeypatch.setattr(f"dataset.build.{module}._CHUNK_ROWS", 3)
    build(tmp_path / "many", "--source", maze_source, "--aug")
    assert files_of(tmp_path / "one") == files_of(tmp_path / "many")


def test_mazes_in_both_splits_are_reported(tmp_path, maze_source, capsys):
    rows = source_rows(25)
    write_csv(maze_source / "train.csv", rows[:22])
    build(tmp_path / "data", "--source", maze_source)
    assert "warning: 2 puzzles of the training split are in the test split too" in capsys.readouterr().err


def test_answers_of_another_rule_are_kept_and_counted(tmp_path, maze_source, capsys):
    rows = [["", "S  | # |  G", "Soo| #o|  G", ""], ["", "S  | # | G#", "S  |o# |oG#", ""]]
    rows += [["", "S  |## |G  ", "Soo|##o|Goo", ""]]
    rows = [[cell.replace("|", "") for cell in row] for row in rows]
    write_csv(maze_source / "train.csv", rows)
    (maze_source / "test.csv.gz").unlink()
    write_csv(maze_source / "test.csv", rows[1:2])
    train = build(tmp_path / "data", "--source", maze_source)["train"]
    assert train.labels.tolist() == to_tokens([row[2] for row in rows]).tolist()
    assert "warning: 1 of 4 answers are not the published shortest path" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(not REAL_MAZES.is_dir(), reason=f"no {REAL_MAZES}; DATA_DIR names the folder above it")
def test_published_mazes(tmp_path, capsys):
    sets = build(tmp_path / "data", "--source", REAL_MAZES, "--aug")
    assert sets["train"].num_examples == 8000
    assert sets["train"].inputs.shape == sets["test"].inputs.shape == (1000, 900)
    assert capsys.readouterr().err == ""
