"""Puzzles in the terminal: the drawing of each kind, and the message where something is missing."""

import dataclasses
import functools
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from dataset.augmentations import END
from dataset.build import build_dataset
from dataset.build.splits import make_split
from dataset.build.writing import write_dataset
from dataset.drawing import draw
from dataset.files import open_split
from dataset.kinds.arc.tasks import COLOR_0, SIZE
from dataset.kinds.kind import Style
from dataset.metadata import IGNORE_LABEL_ID, SPLITS, Metadata, Split
from dataset.sets import PuzzleSet
from dataset.show import main
from tests import refusals
from tests.puzzle_sets import TEST, TRAIN, write
from tests.sudoku_source import write_csv

ANSI = re.compile(r"\x1b\[[0-9;]*m")
QUESTION, ANSWER = "1..4..1..1....2.", "1234341221434321"
MAZE, PATH = "S# " "   " "G##", "S# " "o  " "G##"  # fmt: skip


def shown(capsys, *arguments) -> str:
    main([str(argument) for argument in arguments])
    return capsys.readouterr().out


refusal = functools.partial(refusals.refusal, main, "show")


@pytest.fixture(scope="module")
def sudoku(tmp_path_factory) -> Path:
    """Two puzzles with 5 variants each for training, one for testing."""
    folder = tmp_path_factory.mktemp("show")
    others = [text.translate(str.maketrans("1234", "2143")) for text in (QUESTION, ANSWER)]
    write_csv(folder / "source" / "train.csv", [["", QUESTION, ANSWER, ""], ["", *others, ""]])
    write_csv(
        folder / "source" / "test.csv", [["", f".{ANSWER[1:-n]}{'.' * n}", ANSWER, ""] for n in (1, 2, 3)]
    )
    arguments = ["--source", folder / "source", "--box", "2x2", "--num-aug", 5]
    build_dataset("sudoku", list(map(str, ["--output-dir", folder / "data", *arguments])))
    return folder / "data"


@pytest.fixture(scope="module")
def maze(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("show")
    for name in ("train.csv", "test.csv"):
        write_csv(folder / "source" / name, [["", MAZE, PATH, ""]])
    build_dataset("maze", ["--output-dir", str(folder / "data"), "--source", str(folder / "source"), "--aug"])
    return folder / "data"


def test_a_sudoku(sudoku, capsys):
    assert shown(capsys, sudoku, "--index", 6) == (
        "train/all, example 6\n"
        "example 0 of 1 in puzzle 6, identifier 0: <blank>\n"
        "puzzle 0 of 6 in group 1\n"
        "puzzle    answer\n"
        "2 . . 3   2 1 4 3\n"
        ". . 2 .   4 3 2 1\n"
        ". 2 . .   1 2 3 4\n"
        ". . 1 .   3 4 1 2\n"
        "\n"
    )
    text = shown(capsys, sudoku, "--index", 10, "--count", 5)
    assert re.findall(r"train/all, example (\d+)", text) == ["10", "11"], "to the end of the set"
    text = shown(capsys, sudoku, "--count", 5)
    assert re.findall(r"train/all, example (\d+)\npuzzle +answer", text) == ["0", "6"], "no variants"


def test_larger_sudokus_line_up(tmp_path, capsys):
    size = 16
    answer = (np.arange(size)[:, None] * 4 + np.arange(size)[:, None] // 4 + np.arange(size)) % size + 2
    tokens = answer.astype(np.uint8).reshape(1, -1)
    split = make_split(np.stack([tokens, tokens], axis=1), vocab_size=18)
    folder = tmp_path / "data"
    write_dataset(folder, splits={"train": split, "test": split}, identifiers=["<blank>"], builder={})
    lines = shown(capsys, folder).splitlines()[2 : 2 + size]
    assert lines[0].split() == [*"123456789ABCDEFG"] * 2
    assert len({len(line) for line in lines}) == 1


def test_a_kind_is_shown_only_if_the_data_or_the_user_say_which(tmp_path, capsys):
    """A 4x4 Sudoku of the public tools may be a maze too."""
    tokens = np.array([[5, 1, 1, 2, 1, 1, 5, 1, 1, 5, 1, 1, 1, 1, 4, 1]], np.uint8)
    split = make_split(np.stack([tokens, tokens], axis=1), vocab_size=6)
    folder = tmp_path / "data"
    write_dataset(folder, splits={"train": split, "test": split}, identifiers=["<blank>"], builder={})
    assert shown(capsys, folder).splitlines()[2].split() == ["5", "1", "1", "2"] * 2
    assert shown(capsys, folder, "--kind", "sudoku").splitlines()[2].split() == ["4", ".", ".", "1"] * 2
    for kind, message in (("chess", "is not a kind of puzzle"), ("arc", "does not have the kind arc: its ")):
        with pytest.raises(SystemExit, match=message):
            shown(capsys, folder, "--kind", kind)


def test_puzzles_of_a_builder_without_a_kind_are_numbers(tmp_path, capsys):
    """Such as those of a plugin that is not given. 5x5 cells and 7 tokens also fit a Sudoku."""
    tokens = np.full((1, 2, 25), 3, np.uint8)
    split = make_split(tokens, vocab_size=7)
    for name, symbol in (("latin", "3"), ("sudoku", "2")):
        builder = {"name": name, "arguments": {}}
        write_dataset(tmp_path / name, splits=dict.fromkeys(SPLITS, split), identifiers=[], builder=builder)
        assert shown(capsys, tmp_path / name).splitlines()[2].split() == [symbol] * 10


def test_a_maze(maze, capsys):
    assert shown(capsys, maze, "--index", 3) == (
        "train/all, example 3\n"
        "example 0 of 1 in puzzle 3, identifier 0: <blank>\n"
        "puzzle 3 of 8 in group 0\n"
        "puzzle   answer\n"
        "G S      GoS\n"
        "# #      # #\n"
        "#        #\n"
        "\n"
    )


@pytest.fixture
def arc(tmp_path) -> Path:
    """A puzzle of two examples and a variant of it: 2x3 grids, the second one moved."""
    laid = np.zeros((4, SIZE, SIZE), np.uint8)
    grids = [np.array([[0, 1, 2], [3, 4, 5]]), np.array([[6, 7]]), np.array([[9]]), np.array([[8], [8]])]
    for field, grid in zip(laid, grids, strict=True):
        rows, columns = grid.shape
        field[: rows + 1, : columns + 1] = END
        field[rows, columns] = 0
        field[:rows, :columns] = grid + COLOR_0
    laid = laid.reshape(4, -1)
    identifiers, puzzles, groups = (np.array(each, np.int32) for each in ([1, 2], [0, 2, 4], [0, 2]))
    everything = PuzzleSet(
        *(laid[:2], laid[2:], identifiers, puzzles, groups),
        augmentation="arc",
        transforms=np.array([[0, *range(10)], [6, 0, 1, 2, 3, 4, 5, 6, 7, 9, 8]], np.uint8),
        translations=np.array([[0, 0], [0, 0], [0, 0], [4, 7]], np.uint8),
    )
    metadata = Metadata(0, 0, 0, 12, 900, 3, 1, 2.0, ("all",), 2, "arc")
    names = ["<blank>", "task", "task|||t6|||0123456798"]
    split = Split(metadata, {"all": everything})
    write_dataset(tmp_path / "arc", splits={"train": split, "test": split}, identifiers=names, builder={})
    return tmp_path / "arc"


def test_arc_grids_are_cropped(arc, capsys):
    text = shown(capsys, arc)
    assert text.endswith("puzzle   answer\n012      9\n345\n\n")
    assert "identifier 1: task\n" in text
    colored = shown(capsys, arc, "--color", "always")
    assert len(re.findall(r"48;5;\d+m\d", colored)) == len({*re.findall(r"48;5;(\d+)m", colored)}) == 7
    assert ANSI.sub("", colored) == text


def test_an_arc_variant(arc, capsys):
    first, second = (shown(capsys, arc, "--index", row) for row in (2, 3))
    assert first.endswith("\npuzzle   answer\n03       8\n14\n25\n\n")
    assert second.endswith("\npuzzle   answer\n6        99\n7\n\n")
    assert "example 1 of 2 in puzzle 1, identifier 2: task|||" in second


def test_regions_that_are_no_rectangles_have_lines():
    regions = [0, 1, 1, 1, 0, 0, 1, 2, 0, 3, 2, 2, 3, 3, 3, 2]
    style, tokens = Style(symbols="_.1234", regions={16: regions}), np.array([2, 3, 4, 5] * 4)
    expected = ["jigsaw", "1|2 3 4", " +-+ +-", "1 2|3|4", " +-+-+ ", "1|2|3 4", "-+ +-+ ", "1 2 3|4"]
    assert draw("jigsaw", style, tokens, color=False) == expected
    marked = draw("jigsaw", style, tokens, color=False, is_wrong=tokens == 2)
    assert marked[1:4] == ["1x|2  3  4 ", "  +--+  +--", "1x 2 |3 |4 "]
    boxes = dataclasses.replace(style, regions={16: [0, 0, 1, 1, 0, 0, 1, 1, 2, 2, 3, 3, 2, 2, 3, 3]})
    assert draw("Sudoku", boxes, tokens, color=False) == ["Sudoku", *["1 2 3 4"] * 4]


def test_unknown_kinds_are_numbers(tmp_path, capsys):
    folder = write(tmp_path / "data", train=TRAIN, test=TEST)
    puzzle_set = open_split(folder, "test").sets["more.hard"]
    text = shown(capsys, folder, "--split", "test", "--set", "more.hard", "--index", 2)
    assert text.startswith("test/more.hard, example 2\nexample 0 of 1 in puzzle 1, ")
    assert "\npuzzle 1 of 2 in group 0\n" in text
    numbers = [[int(number) for number in line.split()] for line in text.splitlines()[4:] if line]
    both = [of[2].reshape(2, 2) for of in (puzzle_set.inputs, puzzle_set.labels)]
    assert numbers == np.hstack(both).tolist()
    (folder / "identifiers.json").unlink()
    assert "without a name" in shown(capsys, folder)


def test_colors_on_a_terminal(maze, monkeypatch, capsys):
    plain = shown(capsys, maze)
    assert not ANSI.search(plain)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    cases = (("auto", "", True), ("auto", "1", False), ("never", "", False), ("always", "1", True))
    for option, no_color, is_colored in cases:
        monkeypatch.setenv("NO_COLOR", no_color)
        text = shown(capsys, maze, "--color", option)
        assert bool(ANSI.search(text)) == is_colored
        assert ANSI.sub("", text) == plain


def save_outputs(folder: Path, data: Path, preds: np.ndarray, **changes) -> Path:
    puzzle_set = open_split(data, "test").sets["all"].materialize()
    folder.mkdir(exist_ok=True)
    labels = np.where(puzzle_set.labels == 0, IGNORE_LABEL_ID, puzzle_set.labels.astype(np.int32))
    arrays = {"inputs": puzzle_set.inputs.astype(np.int32), "labels": labels, "preds": preds, **changes}
    given = {name: value for name, value in arrays.items() if value is not None}
    np.savez(folder / "all__outputs.npz", **given)
    (folder / "metrics.json").write_text(json.dumps({"all": {"exact_accuracy": 0.25, "count": 3}}))
    return folder


def test_answers_of_a_model(sudoku, tmp_path, capsys):
    preds = open_split(sudoku, "test").sets["all"].labels.copy()
    preds[1, :3] = 5, 1, 0
    outputs = save_outputs(tmp_path / "outputs", sudoku, preds)
    text = shown(capsys, sudoku, "--outputs", outputs, "--count", 2)
    first, second, last = text.split("\n\n")
    assert first.startswith("test/all, example 0\n")
    assert first.splitlines()[1:3] == ["puzzle    model         answer", ". 2 3 4   1  2  3  4    1 2 3 4"]
    assert second.splitlines()[2] == ". 2 3 4   4x .x _x 4    1 2 3 4"
    assert last == "exact accuracy 0.2500 on 3 held-out puzzles\n"
    colored = shown(capsys, sudoku, "--outputs", outputs, "--count", 2, "--color", "always")
    assert colored.count("\x1b[41;97m") == 3
    assert ANSI.sub("", colored) == text
    (outputs / "all__outputs.npz").rename(outputs / f"{sudoku.name}.all__outputs.npz")  # of several folders
    path = outputs / "metrics.json"
    path.write_text(path.read_text().replace("all", f"{sudoku.name}.all"))
    assert shown(capsys, sudoku, "--outputs", outputs, "--count", 2) == text


def test_answers_of_a_model_for_arc(arc, tmp_path, capsys):
    # The end of the grid counts, and so the wrong size shows; what lies beyond has no label.
    preds = open_split(arc, "test").sets["all"].materialize().labels.copy()
    preds[0, [1, SIZE, 100]] = COLOR_0 + 9, COLOR_0, COLOR_0
    text = shown(capsys, arc, "--outputs", save_outputs(tmp_path / "outputs", arc, preds))
    assert text.splitlines()[3:6] == ["puzzle   model   answer", "012      9 9x    9", "345      0x_"]


def test_what_is_not_there(sudoku, tmp_path):
    assert "has no set 'hard'. Choose --set from all" in refusal(sudoku, "--set", "hard")
    for option, value in (("--index", 12), ("--index", -1), ("--count", 0), ("--split", "dev")):
        assert option in refusal(sudoku, option, value)
    assert "nowhere" in refusal("nowhere")
    assert "dataset.json is missing" in refusal(tmp_path)


def test_outputs_that_cannot_be_used(sudoku, maze, tmp_path, capsys):
    preds = open_split(sudoku, "test").sets["all"].labels
    needed = "Run evaluate.py with output_dir="
    assert needed in refusal(sudoku, "--outputs", tmp_path / "nowhere")
    folder = save_outputs(tmp_path / "outputs", sudoku, preds)
    path = folder / "all__outputs.npz"
    assert "has outputs for another dataset" in refusal(maze, "--outputs", folder)
    assert "has outputs for another dataset" in refusal(sudoku, "--outputs", folder, "--split", "train")
    save_outputs(folder, sudoku, preds, inputs=preds)
    assert "has outputs for other puzzles" in refusal(sudoku, "--outputs", folder)
    assert capsys.readouterr().out == ""
    save_outputs(folder, sudoku, None)
    assert "preds" in refusal(sudoku, "--outputs", folder)
    save_outputs(folder, sudoku, preds[:, :3])
    assert "the arrays differ in shape" in refusal(sudoku, "--outputs", folder)
    save_outputs(folder, sudoku, preds.astype(np.float32))
    assert "the arrays do not contain integers" in refusal(sudoku, "--outputs", folder)
    for content in (b"", b"nothing", path.read_bytes()[:300]):
        path.write_bytes(content)
        assert f"cannot use the outputs in {folder}" in refusal(sudoku, "--outputs", folder)
    save_outputs(folder, sudoku, preds)
    for content in ("{", "{}", '{"all": 3}', "[]"):
        (folder / "metrics.json").write_text(content)
        assert f"cannot use the outputs in {folder}" in refusal(sudoku, "--outputs", folder)
    (folder / "metrics.json").write_text('{"all": {"count": 0}}')
    assert shown(capsys, sudoku, "--outputs", folder).endswith("\n\nno labels, so no accuracy\n")
