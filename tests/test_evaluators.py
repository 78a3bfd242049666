"""How evaluators are found. Their sums on several ranks: test_test_time.py and test_arc_evaluator.py."""

import shutil
import subprocess
import sys

from dataset.files import open_dataset
from evaluation.evaluators import Evaluators
from tests import sudoku_source
from tests.ranks import REPOSITORY


def test_a_new_kind_is_one_file(tmp_path):
    """In a copy of the tree with one more module in dataset/kinds."""
    for package in ("dataset", "runtime"):
        shutil.copytree(REPOSITORY / package, tmp_path / package)
    (tmp_path / "dataset" / "kinds" / "colours.py").write_text(_NEW_KIND)
    run = subprocess.run(
        [sys.executable, "-c", _USE_NEW_KIND], cwd=tmp_path, capture_output=True, text=True, check=True
    )
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


_NEW_KIND = """
from dataset.kinds.evaluator import RowEvaluator
from dataset.kinds.kind import Kind, Style

KIND = Kind(
    name="colours",
    mismatch=lambda metadata: None if metadata.vocab_size == 3 else "vocab_size is not 3",
    build_evaluator=lambda folder, metadata: RowEvaluator("colours", lambda inputs, preds: {}),
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
