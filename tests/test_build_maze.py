"""The maze builder: generating, augmenting, reading CSV files."""

import json

import numpy as np
import pytest

from dataset.augmentations import NUM_DIHEDRAL, dihedral
from dataset.files import open_split
from dataset.kinds.maze.rules import is_path, published_answers, shortest_path_cells
from tests.maze_source import REAL_MAZES, build, source_rows, to_tokens
from tests.sudoku_source import rows_of, write_csv

SMALL = ["--size", 8, "--min-path-cells", 12]


def variants(maze: np.ndarray) -> list[bytes]:
    size = int(len(maze) ** 0.5)
    return [dihedral(maze.reshape(size, size), number).tobytes() for number in range(NUM_DIHEDRAL)]


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


def test_variants_are_the_eight_of_the_square(tmp_path):
    plain = build(tmp_path / "plain", "--generate", 30, *SMALL)["train"]
    compact = build(tmp_path / "compact", "--generate", 30, *SMALL, "--aug")["train"]
    assert compact.augmentation == "square"
    full = compact.materialize()
    for field in ("inputs", "labels"):
        groups = getattr(full, field).reshape(30, 8, 64)
        for original, group in zip(getattr(plain, field), groups, strict=True):
            assert rows_of(group) == variants(original)
    assert is_path(full.inputs, full.labels).all()


def test_source_folder(tmp_path, capsys):
    rows = source_rows(25)
    parts = {"train": rows[:20], "test": rows[20:]}
    for name, split in (("train.csv", "train"), ("test.csv.gz", "test")):
        write_csv(tmp_path / "source" / name, parts[split])
    sets = build(tmp_path / "data", "--source", tmp_path / "source")
    for split, part in parts.items():
        assert sets[split].inputs.tolist() == to_tokens([row[1] for row in part]).tolist()
        assert sets[split].labels.tolist() == to_tokens([row[2] for row in part]).tolist()
    assert capsys.readouterr().err == ""


def test_answers_of_another_rule_are_kept_and_counted(tmp_path, capsys):
    rows = [["", "S  | # |  G", "Soo| #o|  G", ""], ["", "S  | # | G#", "S  |o# |oG#", ""]]
    rows += [["", "S  |## |G  ", "Soo|##o|Goo", ""]]
    rows = [[cell.replace("|", "") for cell in row] for row in rows]
    write_csv(tmp_path / "source" / "train.csv", rows)
    write_csv(tmp_path / "source" / "test.csv", rows[1:2])
    train = build(tmp_path / "data", "--source", tmp_path / "source")["train"]
    assert train.labels.tolist() == to_tokens([row[2] for row in rows]).tolist()
    assert "warning: 1 of 4 answers are not the path that the published mazes have" in capsys.readouterr().err


def test_other_marks_columns_and_rectangles(tmp_path):
    """+-| are walls, E the goal, X the path; a drawing in lines may be a rectangle."""
    mazes = [("+---+\n|S E|\n+---+", "+---+\n|SXE|\n+---+")]
    mazes += [("#####\n#E..#\n##S.#", "#####\n#EX.#\n##S.#")]
    write_csv(tmp_path / "mazes.csv", [list(maze) for maze in mazes * 2], header=["in", "out"])
    sets = build(tmp_path / "data", "--source", tmp_path / "mazes.csv", "--columns", "in,out")
    found = np.concatenate([each.labels for each in sets.values()])
    expected = to_tokens(["#####|#SoG#|#####|#####|#####", "#####|#Go #|##S #|#####|#####"])
    assert {row.tobytes() for row in found} == {row.tobytes() for row in expected}


@pytest.mark.slow
@pytest.mark.skipif(not REAL_MAZES.is_dir(), reason=f"no {REAL_MAZES}; DATA_DIR names the folder above it")
def test_published_mazes(tmp_path, capsys):
    sets = build(tmp_path / "data", "--source", REAL_MAZES, "--aug")
    assert sets["train"].num_examples == 8000
    assert sets["train"].inputs.shape == sets["test"].inputs.shape == (1000, 900)
    assert capsys.readouterr().err == ""
