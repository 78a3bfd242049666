"""tests.stress.fuzz finds what is bad."""

import os
import random
import time
from pathlib import Path

import pytest

from tests.stress import fuzz
from tests.stress.mutations import MARKER, mutate_bytes, mutate_text
from tests.stress.targets import Target


def _touch() -> None:
    os.system(f'touch "${MARKER}"')


def _raise(error: BaseException) -> None:
    raise error


@pytest.fixture
def judge(tmp_path, monkeypatch):
    """Judges a reader of a text that changes by another letter; `read` may do anything."""
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "text").write_text("a")
    monkeypatch.setattr(fuzz, "_SECONDS", 1)

    def judge(read, *, is_sealed: bool = False) -> str:
        def change(folder: Path, _draw: random.Random) -> str:
            (folder / "text").write_text("b")
            return "a -> b"

        def read_file(folder: Path) -> str:
            text = (folder / "text").read_text()
            return text if text == "a" else read(folder) or text

        target = Target(tmp_path / "files", change, read_file, is_sealed)
        monkeypatch.setattr(fuzz, "make_targets", lambda _: {"text": target})
        return fuzz.Fuzz(tmp_path / "work").try_one(5).kind

    return judge


@pytest.mark.slow
def test_what_is_bad_is_found(judge):
    assert judge(lambda _: None) == "other"
    assert judge(lambda _: "a") == "same"
    assert judge(lambda _: None, is_sealed=True) == "bad meaning"
    assert judge(lambda folder: _raise(ValueError(f"{folder} is bad"))) == "refused"
    assert judge(lambda folder: _raise(SystemExit(f"x: error: {folder} is bad"))) == "refused"
    assert judge(lambda folder: _raise(ValueError(f"{folder} is bad\nand long"))) == "bad: not one line"
    assert judge(lambda folder: _raise(SystemExit(f"{folder} \x1b[2J"))) == "bad: codes of a terminal"
    assert judge(lambda _: _raise(ValueError("bad literal"))) == "bad: not said where"
    assert judge(lambda _: _raise(KeyError("x"))) == "bad: traceback"
    assert judge(lambda _: _raise(SystemExit(0))) == "bad: ended"
    assert judge(lambda _: os._exit(3)) == "bad: status 3"
    assert judge(lambda _: time.sleep(60)) == "bad: too long"
    assert judge(lambda _: _touch()) == "bad: executed"
    assert judge(lambda _: str(len(bytearray(3 * 2**30)))) == "bad: memory"


@pytest.mark.parametrize(("mutate", "given"), [(mutate_bytes, b"abc" * 99), (mutate_text, "1..4")])
def test_mutations_are_functions_of_their_number(mutate, given):
    made = [[mutate(given, random.Random(number)) for number in range(50)] for _ in range(2)]
    assert made[0] == made[1]
    assert len(set(made[0])) > 25
