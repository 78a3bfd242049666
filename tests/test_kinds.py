"""Puzzles that people write for solve.py, and how kinds and their evaluators are found."""

import math
import shutil
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from dataset.description import read_info
from dataset.files import open_dataset
from dataset.kinds.kind import find_kind, read_symbols
from dataset.kinds.sudoku.generate import generate_puzzle
from dataset.kinds.sudoku.rules import BOXES
from dataset.kinds.sudoku.texts import SYMBOLS
from dataset.metadata import usual_metadata
from dataset.mixture import open_datasets
from evaluation.evaluators import Evaluators
from runtime.reading import read_json
from runtime.writing import write_json
from tests import sudoku_source
from tests.maze_source import to_tokens
from tests.ranks import REPOSITORY
from tests.solvers import CLUES, PUZZLE
from tests.test_show import MAZE

_SIZES = {"sudoku": ("--box", "2x2"), "maze": ("--size", 4)}  # options of builders, for grids of 4x4 cells


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


LINE = "1..4.......34..1"
NINE = "53..7....6..195....98....6.8...6...34..8.3..17...2...6.6....28....419..5....8..79"
SOLVED = "534678912672195348198342567859761423426853791713924856961537284287419635345286179"


def _rows(text: str) -> str:
    size = math.isqrt(len(text))
    return "\n".join(text[first : first + size] for first in range(0, len(text), size))


@pytest.mark.parametrize(
    ("text", "count", "has_answer"),
    [
        (f"# boardsize 3 x 3\n#Aexample\n{_rows(NINE)}", 1, False),
        (f"[Puzzle]\n{_rows(NINE)}\n[State]\n{_rows(SOLVED)}", 1, True),
        (f"[Puzzle]\n{_rows(NINE)}\n[State]\n{_rows(NINE)}", 1, False),
        (_rows(NINE.replace(".", "-")), 1, False),
        (_rows(NINE).replace("\n", "|\n|").join("||").join(["*---------*\n", "\n*---------*\n"]), 1, False),
        (f" {' '.join(NINE)}\n\n {' '.join(SOLVED)}\n", 1, True),
        (f"{_rows(NINE)}\n\n{_rows(SOLVED)}", 1, True),
        (f"{NINE}\n{SOLVED}\n{NINE}\n", 2, True),
        (f"\ufeff0000183b305c {NINE.replace('.', '0')} 1.2\n0000183b305d {NINE} 6.6\n", 2, False),
        (f"{NINE}  # easy\n{NINE},{SOLVED}\n", 2, False),
        (f"{NINE}:10:1\n{NINE}:11:2\n", 2, False),
        (f"Grid 01\n{_rows(NINE)}\nGrid 02\n{_rows(NINE)}", 2, False),
        (str([[int(cell) for cell in row] for row in _rows(NINE.replace(".", "0")).split()]), 1, False),
        ("\n".join(",".join(row).replace(".", "") for row in _rows(NINE).split()), 1, False),
        (f"{LINE}\n{LINE}\n{LINE}", 3, False),
    ],
)
def test_files_of_sudokus(text, count, has_answer):
    puzzles = find_kind("sudoku").read_puzzles(text)
    assert len(puzzles) == count
    expected = [0 if cell == "." else int(cell) for cell in (LINE if LINE in text else NINE)]
    for puzzle in puzzles:
        assert (puzzle.tokens.astype(int) - 1).tolist() == expected
        assert puzzle.remark is None
    assert (puzzles[0].solution is not None) == has_answer
    assert not has_answer or (puzzles[0].solution - 1).tolist() == list(map(int, SOLVED))


def test_large_sudokus_in_the_symbols_of_public_collections():
    """Digits and letters, letters alone, numbers, and 0 to F; 16 rows of 16 cells are no 4x4 grids."""
    for name, letters in (("4x4", "ABCDEFGHIJKLMNOP"), ("5x5", "ABCDEFGHIJKLMNOPQRSTUVWXY")):
        box, size = BOXES[name], len(letters)
        clues = range(size * size // 2, size * size // 2 + 9)
        question, answer = generate_puzzle(0, stream=0, index=0, box=box, clues=clues)
        text = "".join((f".{SYMBOLS}")[digit] for digit in question)
        forms = [text, text.lower(), _rows(text), " ".join(map(str, question))]
        forms.append("".join(f".{letters}"[digit] for digit in question))
        if size == 16:
            forms.append("".join(".0123456789ABCDEF"[digit] for digit in question))
            solved = "".join("0123456789ABCDEF"[digit - 1] for digit in answer)
            (puzzle,) = find_kind("sudoku").read_puzzles(f"{forms[-1]},{solved}")
            assert (puzzle.solution - 1).tolist() == answer
        for form in forms:
            (puzzle,) = find_kind("sudoku").read_puzzles(form)
            assert (puzzle.tokens.astype(int) - 1).tolist() == question, form
        assert puzzle.remark is None
        found = [answer, [digit % size + 1 for digit in answer]]
        answers = np.array(found, np.uint8) + np.uint8(1)
        assert puzzle.rules(puzzle.tokens[None].repeat(2, 0), answers).tolist() == [True, False]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1..4 .... .... 4..1", "this puzzle has 2 solutions"),
        ("." * 16, "this puzzle has 288 solutions"),
        ("." * 81, "this puzzle has at least 1000 solutions"),
        ("1" + "." * 255, "at least 1000 solutions"),
    ],
)
def test_a_puzzle_with_several_solutions_says_so(text, words):
    (puzzle,) = find_kind("sudoku").read_puzzles(text)
    assert words in puzzle.remark


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("+--+\n|S |\n| E|\n+--+", "####|#S #|# G#|####"),
        ("#####\n#S E#\n#####", "#####|#S G#|#####|#####|#####"),
        ("S.\n..\n.E", "S #|  #| G#"),
        ("S# \n G \n\n", "S# | G |   "),
        (MAZE, "S# |   |G##"),
        ("S# \n   \nG##", "S# |   |G##"),
        ("S#\n\nG##\n", "S# |   |G##"),
        ("\r\nS#.\r\n...\r\nG##\r\n\r\n", "S# |   |G##"),
        ("S#....G##\r\n", "S# |   |G##"),
    ],
)
def test_the_usual_forms_of_a_maze(text, expected):
    """Other marks too, and mazes that are no squares."""
    (puzzle,) = find_kind("maze").read_puzzles(text)
    assert puzzle.tokens.tolist() == to_tokens([expected])[0].tolist()


def test_symbols_of_other_datasets():
    def tokens(text: str, symbols=(), size: int = 12) -> list[int]:
        return read_symbols(text, symbols, vocab_size=size)[0].tokens.tolist()

    assert tokens("10 2\n 0 11") == [10, 2, 0, 11]
    assert tokens("ab\nba", "ab") == tokens("a b b a", "ab") == [0, 1, 1, 0]
    assert tokens("red blue", ["red", "blue"]) == [0, 1]


def test_a_new_kind_is_one_file(tmp_path):
    """In a copy of the tree with one more module in dataset/kinds."""
    for package in ("dataset", "runtime"):
        shutil.copytree(REPOSITORY / package, tmp_path / package)
    (tmp_path / "dataset" / "kinds" / "colours.py").write_text(_NEW_KIND)
    options = {"cwd": tmp_path, "capture_output": True, "text": True, "check": True}
    run = subprocess.run([sys.executable, "-c", _USE_NEW_KIND], **options)
    assert run.stdout.split() == ["arc,coloring,colours,maze,pairs,queens,sudoku", "colours", "r"]


def test_puzzles_with_several_solutions_have_their_evaluator_by_default(tmp_path, capsys):
    sudoku_source.write_csv(tmp_path / "train.csv", sudoku_source.source_rows(20))
    rows = sudoku_source.source_rows(5, stream=1)
    sudoku_source.write_csv(tmp_path / "test.csv", [*rows, [rows[0][0], "." * 16, *rows[0][2:]]])
    folders = []
    for name, words in (("several", ("--source", tmp_path)), ("one", ("--generate", 10, "--num-test", 10))):
        folders.append(tmp_path / name)
        sudoku_source.build(folders[-1], *words, "--box", "2x2")
    several, one = (open_dataset(folder, splits=("test",), read_everything=False) for folder in folders)
    assert (bool(Evaluators(None, several)), bool(Evaluators(None, one))) == (True, False)
    assert not Evaluators([], several)
    shown = "".join(capsys.readouterr())
    assert "several solutions, so valid answers count as wrong. Add sudoku to evaluators." in shown
    manifest = read_json(folders[0] / "manifest.json")
    write_json(folders[0] / "manifest.json", manifest | {"builder": {"name": "mine", "arguments": {}}})
    assert not Evaluators(None, several)  # of a builder without a kind
    assert "Add mine to evaluators." in "".join(capsys.readouterr())
    with pytest.raises(ValueError, match="'mine' is not a kind of puzzle.* kind of yours, add plugins"):
        Evaluators(["mine"], several)


def test_an_evaluator_is_for_the_folders_of_its_builder(tmp_path):
    """4x4 Sudokus and 4x4 mazes have the same sizes."""
    folders = [tmp_path / kind for kind in ("sudoku", "maze")]
    for folder in folders:
        sudoku_source.build_sets(folder.name, folder, "--generate", 2, "--num-test", 1, *_SIZES[folder.name])
    data = open_datasets(folders, splits=("test",), read_everything=False)
    found = Evaluators(["maze", "sudoku"], data)._of_folder
    assert {folder.name: len(evaluators) for folder, evaluators in found.items()} == {"sudoku": 1, "maze": 1}
    with pytest.raises(ValueError, match="maze is not a dataset of kind sudoku: its builder is maze. Choose"):
        Evaluators(["sudoku"], open_dataset(folders[1], splits=("test",), read_everything=False))
    for folder, name in zip(folders, ("sudoku", "mine"), strict=True):
        manifest = {
            "builder": {"name": name, "arguments": {}},
            "several_solutions": ["test"][name == "mine" :],
        }
        write_json(folder / "manifest.json", manifest)
    for names, numbers in ((None, [1, 0]), (["sudoku"], [1, 1])):  # `mine` may make Sudokus
        assert [*map(len, Evaluators(names, data)._of_folder.values())] == numbers


def test_each_kind_with_several_solutions_is_named_with_its_folder(tmp_path, capsys):
    folders = [tmp_path / name for name in ("no_builder", "queens", "coloring")]
    for folder in folders:
        builder = {"builder": {"name": folder.name, "arguments": {}}} if folder != folders[0] else {}
        folder.mkdir()
        write_json(folder / "manifest.json", builder | {"several_solutions": {"test": 1}})
    Evaluators([], SimpleNamespace(folders=folders))
    shown = " ".join("".join(capsys.readouterr()).split())
    for folder in folders[1:]:
        expected = f"test puzzles of {folder} have several solutions, so valid answers count as wrong"
        assert f"{expected}. Add {folder.name} to evaluators." in shown


@pytest.mark.parametrize(
    ("builders", "kind"),
    [
        (["sudoku", "sudoku"], "sudoku"),
        ([None, None], "sudoku"),  # by their sizes
        ([None, "sudoku"], "sudoku"),
        (["mine", "yours"], None),
        (["mine", "sudoku"], None),
        (["mine", None], None),
    ],
)
def test_folders_of_different_builders_have_a_kind_only_in_common(tmp_path, builders, kind):
    folders = [tmp_path / str(number) for number in range(len(builders))]
    for folder, name in zip(folders, builders, strict=True):
        folder.mkdir()
        write_json(folder / "manifest.json", {"builder": {"name": name, "arguments": {}}} if name else {})
    info = read_info(folders, usual_metadata(vocab_size=11, seq_len=81, num_puzzle_identifiers=1))
    assert (info.kind and info.kind.name) == kind


_NEW_KIND = """
from dataset.kinds.kind import Kind, Style

KIND = Kind(
    name="colours",
    mismatch=lambda metadata: None if metadata.vocab_size == 3 else "vocab_size is not 3",
    augmentation="square",
    style=Style(symbols="_rb"),
)
"""
_USE_NEW_KIND = """
from dataset.metadata import Metadata
from dataset.kinds.kind import kind_names, kind_of
kind = kind_of(Metadata(0, 0, 0, 3, 5, 1, 1, 1.0, ("all",)))
print(",".join(kind_names()), kind.name, kind.style.symbols[1])
"""
