"""The Sudoku builder: generating, augmenting, reading CSV files."""

import gzip
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

from dataset.build.generation import draw_distinct
from dataset.files import open_split, splits_with_several_solutions
from dataset.kinds.sudoku.generate import generate_puzzle
from dataset.kinds.sudoku.rules import (
    BOXES,
    TooHardError,
    are_solved,
    count_solutions,
    find_solutions,
)
from dataset.sets import FIELDS
from tests.ranks import REPOSITORY
from tests.sudoku_source import build, files_of, rows_of, source_rows, write_csv
from tests.waiting import wait_for


@pytest.mark.parametrize(("box", "least", "most"), [("2x2", 5, 8), ("2x3", 9, 12)])
def test_clues_are_added_to_minimal_puzzles(tmp_path, box, least, most):
    arguments = ["--generate", 60, "--box", box, "--num-test", 7]
    sets = build(tmp_path / "data", *arguments, "--clues", f"{least}-{most}")
    assert (sets["train"].num_examples, sets["test"].num_examples) == (60, 7)
    questions, answers = sets["train"].inputs, sets["train"].labels
    num_clues = (questions > 1).sum(axis=1)
    assert set(num_clues.tolist()) == set(range(least, most + 1))
    assert ((questions == 1) | (questions == answers)).all()
    assert all(count_solutions(question, box=BOXES[box]) == 1 for question in (questions - 1).tolist())
    # They are the minimal ones of the same command, but those with too many clues, with clues added.
    minimal = build(tmp_path / "minimal", *arguments)["train"].inputs
    clues = minimal[(minimal > 1).sum(axis=1) <= most][:40]
    assert len(clues) > 20
    assert all(((row == 1) | (row == questions)).all(axis=1).any() for row in clues)


@pytest.mark.slow
def test_hard_puzzles_are_generated(tmp_path, capsys, monkeypatch):
    def generate_twice(seed, *, index, **options):
        return generate_puzzle(seed, index=index // 2, **options)

    monkeypatch.setattr("dataset.kinds.sudoku.generate.generate_puzzle", generate_twice)

    def draw_for_all(draw, **options):
        sent = pickle.loads(pickle.dumps(draw))  # as to further processes, which draw in another order
        backwards = [sent("train", index) for index in (3, 2, 1, 0)]
        np.testing.assert_equal([draw("train", index) for index in range(4)], backwards[::-1])
        return draw_distinct(draw, **options)

    monkeypatch.setattr("dataset.build.generation._SECONDS_ALONE", 60.0)
    monkeypatch.setattr("dataset.kinds.sudoku.build.draw_distinct", draw_for_all)
    arguments = ["--generate", 8, "--num-test", 4, "--box", "2x3", "--min-difficulty", 2]
    sets = build(tmp_path / "data", *arguments)
    printed = capsys.readouterr().out
    both = np.concatenate([sets["train"].inputs, sets["test"].inputs]) - 1
    grids = np.concatenate([sets["train"].labels, sets["test"].labels]) - 1
    found = [find_solutions(question, box=(2, 3)) for question in both.tolist()]
    assert [solutions for solutions, _ in found] == [[grid] for grid in grids.tolist()]
    assert len(set(rows_of(grids))) == len(both) == 12
    ratings = [guesses for _, guesses in found]
    for split, part in (("train", sorted(ratings[:8])), ("test", sorted(ratings[8:]))):
        words = f"least {part[0]}, tenth {part[0]}, median {part[(len(part) - 1) // 2]}, nine tenths"
        assert f"{split}: guesses of the solver: {words}" in printed
    assert min(ratings) >= 2
    easy = build(tmp_path / "easy", *arguments[:-2])["train"].inputs - 1
    assert np.mean([find_solutions(question, box=(2, 3))[1] for question in easy.tolist()]) < 1
    monkeypatch.setattr("dataset.kinds.sudoku.build._MAX_TOO_EASY", 5)
    monkeypatch.setattr("dataset.kinds.sudoku.build._MAX_REPEATS", 5)
    for option, value, advice in (("--min-difficulty", "1", "lower"), ("--clues", "1-2", "raise")):
        advice = f"gave 0 puzzles, then no new one. Lower --generate or --num-test, or {advice} {option}.$"
        with pytest.raises(ValueError, match=advice):
            build(tmp_path / "none", "--generate", 2, "--box", "2x2", option, value)


@pytest.mark.slow
def test_puzzles_drawn_by_further_processes_are_the_same(tmp_path):
    """By a script, which its processes do not run again."""
    arguments = ["--generate", "4", "--box", "2x2", "--num-test", "2", "--clues", "4-4"]
    build(tmp_path / "alone", *arguments)
    lines = ["from dataset import build", "from dataset.build import generation", "print('once')"]
    lines += ["generation._SECONDS_ALONE = 0.0"]
    lines += [f"build.build_dataset('sudoku', [*{arguments}, '--output-dir', 'pool'])"]
    (tmp_path / "script.py").write_text("\n".join(lines))
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    options = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True}
    run = subprocess.run([sys.executable, "script.py"], **options)
    # On a busy machine, the builder prints how far it is.
    errors = [line for line in run.stderr.splitlines() if not line.startswith("generated ")]
    assert (run.returncode, run.stdout.count("once"), errors) == (0, 1, [])
    assert files_of(tmp_path / "alone") == files_of(tmp_path / "pool")


def _start_builder(folder: Path, **options) -> subprocess.Popen:
    """Starts a builder that draws puzzles for hours. Returns it while its further processes start."""
    code = f"""
        import sys
        from dataset.build import __main__ as program, generation
        __file__ = program.__file__  # of a program of the repository
        generation._SECONDS_ALONE = 0.0
        program.main(["sudoku", "--generate", "100000", "--output-dir", {str(folder)!r}])
    """
    builder = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], cwd=REPOSITORY, **options)
    children = Path(f"/proc/{builder.pid}/task/{builder.pid}/children")
    wait_for(lambda: len(children.read_text().split()) > 1, "it draws alone")
    return builder


@pytest.mark.slow
@pytest.mark.usefixtures("heeds_interrupts")
def test_ctrl_c_is_one_line_also_while_further_processes_start(tmp_path):
    options = {"stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    with _start_builder(tmp_path / "data", **options) as builder:
        time.sleep(0.2)  # the processes import NumPy
        os.killpg(builder.pid, signal.SIGINT)  # as a terminal does
        _, errors = builder.communicate(timeout=60)
    assert (builder.returncode, errors, [*tmp_path.iterdir()]) == (-signal.SIGINT, "interrupted\n", [])


@pytest.mark.slow
def test_a_killed_builder_leaves_no_process(tmp_path):
    """Each process that it starts to draw puzzles has its stdout, which ends with the last of them."""
    with _start_builder(tmp_path / "data", stdout=subprocess.PIPE) as builder:
        builder.kill()
        builder.communicate(timeout=60)


@pytest.mark.parametrize(("box", "count", "num_aug"), [("2x2", 60, 40), ("2x3", 10, 5)])
def test_variants_are_the_same_as_transforms_and_written_out(tmp_path, box, count, num_aug):
    arguments = ["--generate", count, "--num-test", 5, "--box", box, "--num-aug", num_aug]
    made = build(tmp_path / "transforms", *arguments)["train"]
    build(tmp_path / "full", *arguments, "--materialize")
    written = open_split(tmp_path / "full", "train")
    assert written.metadata.augmentation is None
    names = sorted(path.stem for path in (tmp_path / "full" / "train").iterdir())
    assert names == [*(f"all__{field}" for field in sorted(FIELDS)), "dataset"]
    for field in FIELDS:
        assert np.array_equal(getattr(written.sets["all"], field), getattr(made, field)), field
    compact = open_split(tmp_path / "transforms", "train").sets["all"]
    assert len(compact.inputs) == len(compact.labels) == count
    assert compact.transforms.shape == (count * (1 + num_aug), 1 + 3 * (BOXES[box][0] * BOXES[box][1]))


def test_every_puzzle_has_an_easier_example(tmp_path):
    arguments = ["--generate", 100, "--box", "2x2", "--num-aug", 3]
    plain = build(tmp_path / "plain", *arguments)
    sets = build(tmp_path / "data", *arguments, "--easier", "7-9")
    train = sets["train"]
    assert np.array_equal(sets["test"].inputs, plain["test"].inputs)
    assert np.array_equal(train.puzzle_indices, 2 * plain["train"].puzzle_indices)
    assert np.array_equal(train.group_indices, plain["train"].group_indices)
    questions, easier = train.inputs[::2], train.inputs[1::2]
    assert np.array_equal(questions, plain["train"].inputs)
    assert np.array_equal(train.labels, plain["train"].labels.repeat(2, axis=0))
    assert ((questions == 1) | (questions == easier)).all()
    assert ((easier == 1) | (easier == train.labels[1::2])).all()
    num_clues = (easier > 1).sum(axis=1).reshape(100, 4)
    assert set(num_clues.ravel().tolist()) == {7, 8, 9}
    assert (num_clues == num_clues[:, :1]).all()  # those of the variants are variants of the original's


def test_easier_examples_are_no_test_puzzles(tmp_path):
    arguments = ["--generate", 150, "--num-test", 300, "--box", "2x2", "--clues", "14-15", "--num-aug", 3]
    sets = build(tmp_path / "data", *arguments, "--easier", "15-15")
    held_out, train = set(rows_of(sets["test"].inputs)), sets["train"].inputs
    assert not held_out & set(rows_of(train))
    num_clues = (train > 1).sum(axis=1).reshape(150, 4, 2)
    assert (num_clues[:, 0, 1] == 14).any()  # here an easier one was, and the puzzle stands in its place
    assert (num_clues[:, :, 1] == 15).mean() > 0.9


def test_chunks_do_not_change_the_variants(tmp_path, source, monkeypatch):
    arguments = ["--source", source, "--box", "2x2", "--num-aug", 3, "--easier", "6-9"]
    build(tmp_path / "one", *arguments)
    for module in ("build.sources", "sets"):
        monkeypatch.setattr(f"dataset.{module}._CHUNK_ROWS", 7)
    build(tmp_path / "many", *arguments)
    assert files_of(tmp_path / "one") == files_of(tmp_path / "many")


def test_columns_are_found_by_name_and_others_ignored(tmp_path):
    rows = [[row[3], row[2], 'any, "thing"\nat all', row[1]] for row in source_rows(20)]
    path = write_csv(tmp_path / "puzzles.csv", rows, header=["rating", "answer", "remark", "question"])
    path.write_text("\ufeff" + path.read_text() + "\n\n")
    sets = build(tmp_path / "data", "--source", path, "--box", "2x2", "--min-difficulty", 5)
    assert sets["train"].num_examples + sets["test"].num_examples == 15


@pytest.mark.parametrize(
    ("header", "separator", "order", "options"),
    [
        ("quizzes,solutions", ",", "qa", ()),
        ("id,puzzle,solution,clues,difficulty", ",", "iqair", ("--min-difficulty", "0.5")),
        ("Puzzle;Solution", ";", "qa", ()),
        ("question\tanswer", "\t", "qa", ()),
        (None, ",", "qa", ()),
        ("left,right,x", ",", "aqi", ("--columns", "right,left")),
        ("puzzle", ",", "q", ()),
        ("left,hard", ",", "qr", ("--columns", "left,,hard", "--min-difficulty", "0.5")),
    ],
)
def test_tables_of_the_public_sets(tmp_path, header, separator, order, options):
    """In a folder, as the only file; an answer that is not there is found."""
    rows = source_rows(12)
    fields = [{"q": row[1], "a": row[2], "i": str(n), "r": f"{n % 2}.0"} for n, row in enumerate(rows)]
    lines = ([header] if header else []) + [separator.join(row[each] for each in order) for row in fields]
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "sudoku.csv").write_text("\n".join(lines))
    sets = build(tmp_path / "data", "--source", tmp_path / "source", "--box", "2x2", *options)
    built = {row.tobytes(): label.tobytes() for each in sets.values()
             for row, label in zip(each.inputs - 1, each.labels - 1, strict=True)}  # fmt: skip
    expected = [row for row in fields if not options or order == "aqi" or row["r"] == "1.0"]
    grids = ((row["q"].replace(".", "0"), row["a"]) for row in expected)
    assert built == {bytes(map(int, question)): bytes(map(int, answer)) for question, answer in grids}


@pytest.mark.parametrize("name", ["hardest.txt", "easy.sdm.gz"])
def test_a_list_of_puzzles_is_solved(tmp_path, name, capsys):
    rows = source_rows(20)
    lines = [row[1] for row in rows]
    with (gzip.open if name.endswith(".gz") else open)(tmp_path / name, "wt") as file:
        file.write("# mine\n" + "\n".join(lines))
    sets = build(tmp_path / "data", "--source", tmp_path / name, "--box", "2x2")
    assert are_solved(np.concatenate([each.labels for each in sets.values()]) - 1, box=(2, 2)).all()
    assert f"{len(rows)} puzzles without an answer were solved" in capsys.readouterr().out
    for puzzle, words in (("1..4........4..1", "several solutions"), ("12....3........4", "no solution")):
        (tmp_path / "bad.txt").write_text("\n".join([lines[0], puzzle]))
        with pytest.raises(ValueError, match=f"bad.txt:2: the puzzle has {words}"):
            build(tmp_path / "bad", "--source", tmp_path / "bad.txt", "--box", "2x2")


def test_columns_have_no_effect_on_puzzles_without_names(tmp_path):
    lines = [f"{row[1]},{row[2]}" for row in source_rows(12)]
    for name, text, reason in (
        ("a.csv", lines, r"a.csv:1: the first line has a puzzle, not names\."),
        (
            "a.sdm",
            [line.partition(",")[0] for line in lines],
            r"a.sdm is a list of puzzles without columns\.",
        ),
    ):
        (tmp_path / name).write_text("\n".join(text))
        with pytest.raises(ValueError, match=f"{reason} Remove --columns"):
            build(tmp_path / "data", "--source", tmp_path / name, "--box", "2x2", "--columns", "right,left")


def test_large_grids_are_generated_and_read_again(tmp_path, monkeypatch):
    """With as many clues as asked and one solution; a search is bounded where a puzzle is too hard."""
    made = build(tmp_path / "made", "--generate", 2, "--num-test", 1, "--box", "4x4", "--clues", "130-140")
    questions, answers = made["train"].inputs, made["train"].labels
    assert are_solved(answers - 1, box=(4, 4)).all()
    assert set((questions > 1).sum(axis=1)) <= set(range(130, 141))
    assert all(count_solutions(question, box=(4, 4)) == 1 for question in (questions - 1).tolist())
    letters = ".0123456789ABCDEF"
    texts = ["".join(letters[token - 1] for token in row) for row in [*questions, *made["test"].inputs]]
    (tmp_path / "list.txt").write_text("\n".join(texts))
    read = build(tmp_path / "read", "--source", tmp_path / "list.txt", "--box", "4x4", "--num-aug", 2)
    assert set(rows_of(read["test"].labels)) <= set(rows_of(np.concatenate([answers, made["test"].labels])))
    assert are_solved(read["train"].labels - 1, box=(4, 4)).all()
    monkeypatch.setattr("dataset.kinds.sudoku.rules._MOST_GUESSES", 1)
    with pytest.raises(TooHardError, match="too hard for the solver"):
        find_solutions((answers[0] - 1).tolist()[:40] + [0] * 216, box=(4, 4))


def test_one_file_gives_both_splits(tmp_path):
    rows = source_rows(50)
    path = write_csv(tmp_path / "puzzles.csv.gz", rows + rows[:25])
    sets = build(tmp_path / "data", "--source", path, "--box", "2x2")
    train, test = (set(rows_of(sets[split].inputs)) for split in ("train", "test"))
    assert (sets["train"].num_examples, sets["test"].num_examples) == (45, 5)
    assert not train & test
    assert len(train | test) == len({row[1].replace(".", "0") for row in rows})


def test_filter_is_for_both_splits_and_subsamples_for_one(tmp_path, source):
    arguments = ["--source", source, "--box", "2x2", "--min-difficulty", 4]
    everything = build(tmp_path / "all", *arguments)
    assert (everything["train"].num_examples, everything["test"].num_examples) == (36, 6)
    some = build(tmp_path / "some", *arguments, "--subsample-size", 10, "--num-aug", 2)
    assert (some["train"].num_examples, some["test"].num_examples) == (30, 6)
    chosen = rows_of(some["train"].inputs[::3])
    assert [row for row in rows_of(everything["train"].inputs) if row in chosen] == chosen
    other = build(tmp_path / "other", *arguments, "--subsample-size", 10, "--num-aug", 2, "--seed", 1)
    assert rows_of(other["train"].inputs[::3]) != chosen
    few, more = (build(tmp_path / f"{n}", *arguments, "--num-test", n)["test"].inputs for n in (2, 4))
    assert set(rows_of(few)) < set(rows_of(more)) < set(rows_of(everything["test"].inputs))
    with pytest.raises(ValueError, match="--num-test 7 is too large. The source has only 6 test puzzles."):
        build(tmp_path / "none", *arguments, "--num-test", 7)


def test_odd_puzzles_of_a_source_are_reported(tmp_path, capsys):
    """Repeats are left out. Other answers, solved inputs and puzzles with several solutions are warned of."""
    rows = source_rows(20)
    source, _, answer, *rest = rows[0]
    empty = "." * len(answer)
    two = [[source, empty, text, *rest] for text in (answer, answer.translate(str.maketrans("1234", "2341")))]
    write_csv(tmp_path / "train.csv", [*rows, *rows[:3], *two, [source, rows[1][2], rows[1][2], *rest]])
    write_csv(tmp_path / "test.csv", source_rows(5, stream=1))
    sets = build(tmp_path / "data", "--source", tmp_path, "--box", "2x2")
    assert sets["train"].num_examples == 23
    out, err = capsys.readouterr()
    assert "train.csv: 3 of 26 puzzles repeat another one, left out" in out
    assert "train.csv: 1 of 23 puzzles have the input of another one, but another answer." in err
    assert "train.csv: 1 of 23 puzzles have an answer equal to their input." in err
    assert "2 of 23 puzzles of the train split have several solutions." in err
    assert "test split have" not in err
    assert splits_with_several_solutions(tmp_path / "data") == ["train"]


def test_puzzles_in_both_splits_are_reported(tmp_path, source, capsys):
    write_csv(source / "train.csv", source_rows(40) + source_rows(3, stream=1))
    build(tmp_path / "data", "--source", source, "--box", "2x2")
    assert "warning: 3 puzzles of the training split are also in the test split" in capsys.readouterr().err
