"""What all builders share: the command alone decides what is in the folder, to the byte."""

import hashlib
import re
import shlex
from pathlib import Path

import pytest

from dataset.build import build_dataset
from share.card import _build_command
from tests.arc_source import write_source
from tests.pairs_source import random_pairs, write_json
from tests.sudoku_source import files_of, source_rows, write_csv

# Of each command what it prints, and a digest: another one means that datasets of a seed change.
_COMMANDS = {
    "sudoku --generate 60 --num-test 40 --box 2x2 --num-aug 3": (
        "train: 60 puzzles of 4x4 and 3 variants of each, 240 examples\ntest: 40 puzzles\nwrote ",
        "3f757a2b3e3da475",
    ),
    "sudoku --generate 10 --num-test 5 --box 2x3": (
        "train: 10 puzzles of 6x6 and 0 variants of each, 10 examples\n",
        "8096bc283bec517a",
    ),
    "sudoku --source SOURCE/sudoku.csv --box 2x2": ("train: 18 puzzles of 4x4", "28a772abfdd1a1e8"),
    "maze --generate 30 --size 7 --aug": (
        "train: 30 mazes of 7x7 and 7 variants of each, 240 examples\ntest: 20 mazes\nwrote ",
        "40a7e2ccd81f82b1",
    ),
    "maze --generate 12 --size 8 --min-path-cells 12 --perfect --aug --materialize": (
        "train: 12 mazes of 8x8",
        "00fe30e6800acac9",
    ),
    "arc --source SOURCE/arc --num-aug 6": (
        "train: 6 tasks, 36 variants, 112 examples\ntest: 3 tasks (evaluation), 28 examples\nwrote ",
        "aab28b9e1691d855",
    ),
    "arc --source SOURCE/arc --num-aug 0": ("train: 6 tasks", "6a0978b4878c0cb7"),
    "pairs --source SOURCE/pairs.jsonl --symmetries dihedral,symbols --num-aug 3": (
        "train: 36 pairs and 3 variants of each, 144 examples\ntest: 4 pairs\nwrote ",
        "a87c42de9b5040e7",
    ),
}


@pytest.fixture
def source(tmp_path) -> Path:
    write_source(tmp_path / "arc")
    write_json(tmp_path / "pairs.jsonl", random_pairs(40, tasks=2))
    write_json(tmp_path / "dashes.jsonl", random_pairs(20, symbols="-.ab"))
    write_csv(tmp_path / "sudoku.csv", source_rows(20))
    return tmp_path


def build(command: str, source: Path, folder: Path, *, seed: int = 5) -> dict[str, bytes]:
    kind, *words = command.replace("SOURCE", str(source)).split()
    build_dataset(kind, [*words, "--output-dir", folder, "--seed", seed])
    return files_of(folder)


@pytest.mark.parametrize("command", _COMMANDS)
def test_a_command_gives_the_recorded_bytes_and_another_seed_others(source, capsys, command):
    here = build(command, source, source / "data")
    expected, digest = _COMMANDS[command]
    assert expected in capsys.readouterr().out
    assert hashlib.sha256(b"".join(each for _, each in sorted(here.items()))).hexdigest()[:16] == digest
    other = build(command, source, source / "data", seed=6)  # which replaces the folder
    assert here.keys() == other.keys()
    assert any(here[name] != other[name] for name in here if name.startswith("train/all"))


@pytest.mark.parametrize(
    "command",
    [
        "sudoku --generate 10 --box 2x2 --clues 5-9 --easier 6-9",
        "maze --generate 12 --size 6 --aug --materialize",
        "arc --generate 6 --max-size 8 --dihedral",
        "pairs --source SOURCE/pairs.jsonl --max-size 5x6 --symmetries dihedral,symbols --num-aug 3",
        "pairs --source SOURCE/dashes.jsonl --symmetries symbols --num-aug 3 --fixed-symbols=-.",
    ],
)
def test_the_command_on_a_card_gives_the_same_bytes(source, command):
    data = build(command, source, source / "data")
    shown = _build_command(source / "data", name=str(source / "again"))
    shown = shown.replace("SOURCE", command.replace("SOURCE", str(source)).split()[2])
    kind, *words = shlex.split(shown, comments=True)[3:]
    build_dataset(kind, words)
    assert files_of(source / "again") == data


def test_arguments_are_a_list():
    message = "the arguments are a text, '--seed 7'. Pass a list, such as ['--seed', '7']."
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        build_dataset("sudoku", "--seed 7")


def test_a_builder_says_how_far_it_is(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("dataset.build.generation._FIRST_LINE_SECONDS", 0)
    build_dataset("sudoku", ["--output-dir", str(tmp_path / "data"), "--generate", "3", "--box", "2x2"])
    first, *others = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"generated \d+ of \d+ test puzzles", first)
    assert not others, "then one a minute"
