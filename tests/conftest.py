"""What many tests need: a small generated dataset, and the golden numbers where they are there."""

import os
from pathlib import Path

import pytest
import torch

from dataset.build_sudoku import main as build_sudoku
from tests.ranks import REPOSITORY

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def sudoku_folder(tmp_path_factory) -> Path:
    """200 generated 4x4 puzzles for training and 100 for testing."""
    folder = tmp_path_factory.mktemp("data") / "sudoku"
    build_sudoku(["--output-dir", str(folder), "--generate", "200", "--box", "2x2"])
    return folder


@pytest.fixture(scope="session")
def golden_folder() -> Path:
    """The numbers of the public implementations; set GOLDEN_DIR where they are elsewhere."""
    folder = Path(os.environ.get("GOLDEN_DIR", REPOSITORY.parent / "shared" / "golden"))
    if not folder.is_dir():
        pytest.skip(f"{folder} is not there: no golden vectors (GOLDEN_DIR)")
    return folder


@pytest.fixture(autouse=True)
def _nothing_was_shown(monkeypatch) -> None:
    """Warnings are shown once for each text and process: every test begins as a process does."""
    monkeypatch.setattr("parallel.messages._messages.shown", set())
