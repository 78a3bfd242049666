"""What all builders share: what is in the folder, and that the command alone decides it."""

import hashlib
import json
import os
import subprocess
import sys

import numpy as np
import pytest

from dataset.build import build_dataset
from dataset.format import open_split
from tests.arc_source import write_source
from tests.pairs_source import random_pairs, write_json
from tests.ranks import REPOSITORY
from tests.sudoku_source import files_of

MAZES = "maze --generate 12 --size 8 --min-path-cells 12"


@pytest.mark.parametrize(
    ("command", "vocab_size", "seq_len", "num_train", "group_size", "num_test", "augmentation"),
    [
        ("sudoku --generate 50 --box 2x2 --num-aug 2", 6, 16, 50, 3, 100, "sudoku"),
        ("sudoku --generate 10 --box 2x3", 8, 36, 10, 1, 100, None),
        (MAZES, 6, 64, 12, 1, 20, None),
        (f"{MAZES} --aug", 6, 64, 12, 8, 20, "square"),
        (f"{MAZES} --aug --materialize", 6, 64, 12, 8, 20, None),
    ],
)
def test_a_generated_dataset(
    tmp_path, command, vocab_size, seq_len, num_train, group_size, num_test, augmentation
):
    kind, *arguments = command.split()
    for _ in range(2):  # a folder built before is replaced
        build_dataset(kind, ["--output-dir", str(tmp_path / "data"), *arguments])
    assert [path.name for path in tmp_path.iterdir()] == ["data"]
    for split, groups, size, family in (
        ("train", num_train, group_size, augmentation),
        ("test", num_test, 1, None),
    ):
        puzzles = groups * size
        assert json.loads((tmp_path / "data" / split / "dataset.json").read_text()) == {
            "pad_id": 0,
            "ignore_label_id": 0,
            "blank_identifier_id": 0,
            "vocab_size": vocab_size,
            "seq_len": seq_len,
            "num_puzzle_identifiers": 1,
            "total_groups": groups,
            "mean_puzzle_examples": 1.0,
            "sets": ["all"],
            "total_puzzles": puzzles,
            **({"augmentation": family} if family else {}),
        }
        data = open_split(tmp_path / "data", split).sets["all"]
        assert data.puzzle_indices.tolist() == list(range(puzzles + 1))
        assert data.group_indices.tolist() == list(range(0, puzzles + 1, size))
        assert not data.puzzle_identifiers.any()
        assert len(data.inputs) == len(data.labels) == (groups if family else puzzles)
        assert data.inputs.dtype == data.labels.dtype == np.uint8
        for field in ("puzzle_identifiers", "puzzle_indices", "group_indices"):
            assert getattr(data, field).dtype == np.int32
    assert json.loads((tmp_path / "data" / "identifiers.json").read_text()) == ["<blank>"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "expected", "digest"),
    [
        (
            "sudoku --generate 150 --box 2x2 --num-aug 3",
            "train: 150 puzzles of 4x4 and 3 variants of each, 600 examples\ntest: 100 puzzles\nwrote ",
            "d6547b5d89a2c68d",
        ),
        (
            "maze --generate 30 --size 7 --aug",
            "train: 30 mazes of 7x7 and 7 variants of each, 240 examples\ntest: 20 mazes\nwrote ",
            "40a7e2ccd81f82b1",
        ),
        (
            "arc --source SOURCE/arc --num-aug 6",
            "train: 6 tasks, 36 variants, 112 examples\ntest: 3 tasks (evaluation), 28 examples\nwrote ",
            "133700796053995b",
        ),
        (
            "pairs --source SOURCE/pairs.jsonl --symmetries dihedral,symbols --num-aug 3",
            "train: 36 pairs and 3 variants of each, 144 examples\ntest: 4 pairs\nwrote ",
            "a87c42de9b5040e7",
        ),
    ],
)
def test_same_command_same_bytes_in_another_process(tmp_path, capsys, command, expected, digest):
    write_source(tmp_path / "arc")
    write_json(tmp_path / "pairs.jsonl", random_pairs(40, tasks=2))
    kind, *arguments = command.replace("SOURCE", str(tmp_path)).split()
    build_dataset(kind, ["--output-dir", str(tmp_path / "here"), *arguments, "--seed", "5"])
    run = subprocess.run(
        [*(sys.executable, "-m", "dataset.build", kind), "--output-dir", tmp_path / "there"]
        + [*arguments, "--seed", "5"],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONHASHSEED": "1"},
        check=True,
        capture_output=True,
        text=True,
    )
    assert files_of(tmp_path / "here") == files_of(tmp_path / "there")
    # Recorded once: a difference means that datasets of a seed change.
    content = b"".join(content for _, content in sorted(files_of(tmp_path / "here").items()))
    assert hashlib.sha256(content).hexdigest()[:16] == digest
    assert run.stderr == capsys.readouterr().err
    assert expected in run.stdout
    build_dataset(kind, ["--output-dir", str(tmp_path / "other"), *arguments, "--seed", "6"])
    assert files_of(tmp_path / "here" / "train") != files_of(tmp_path / "other" / "train")
