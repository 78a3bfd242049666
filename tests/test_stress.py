"""The stress programs: what is bad is found; slopes of memory, and files that are compared."""

import os
import random
import time
from pathlib import Path

import numpy as np
import pytest

from tests.stress import fuzz, processes
from tests.stress.kills import Training
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

    def judge(read, *, is_sealed: bool = False, seconds: int = 60) -> str:
        def change(folder: Path, _draw: random.Random) -> str:
            (folder / "text").write_text("b")
            return "a -> b"

        def read_file(folder: Path) -> str:
            text = (folder / "text").read_text()
            return text if text == "a" else read(folder) or text

        target = Target(tmp_path / "files", change, read_file, is_sealed)
        monkeypatch.setattr(fuzz, "make_targets", lambda _: {"text": target})
        made = fuzz.Fuzz(tmp_path / "work")  # reads the unchanged text
        monkeypatch.setattr(fuzz, "_TOTAL_SECONDS", seconds)
        return made.try_one(5).kind

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
    assert judge(lambda _: time.sleep(60), seconds=1) == "bad: too long"
    assert judge(lambda _: _touch()) == "bad: executed"
    assert judge(lambda _: str(len(bytearray(3 * 2**30)))) == "bad: memory"


@pytest.mark.parametrize(("mutate", "given"), [(mutate_bytes, b"abc" * 99), (mutate_text, "1..4")])
def test_mutations_are_functions_of_their_number(mutate, given):
    made = [[mutate(given, random.Random(number)) for number in range(50)] for _ in range(2)]
    assert made[0] == made[1]
    assert len(set(made[0])) > 25


def test_slope_is_of_each_kind_of_process_over_all_lives():
    """Two lives of rank 0 at other levels, each growing by 36 MiB an hour; the first growth is left out."""
    memory = processes.Memory(settling_seconds=10)
    for pid, level in ((1, 100.0), (2, 500.0)):
        seconds = np.arange(0.0, 60.0, 2.0)
        grown = np.where(seconds < 10, 10 * seconds, 100) + 0.01 * seconds
        memory._lives["rank 0", pid] = list(zip(1000 * pid + seconds, level + grown, strict=True))
    memory._lives["torchrun", 3] = [(0.0, 7.0), (20.0, 7.0), (40.0, 7.0), (60.0, 7.0)]
    memory._lives["rank 1", 4] = [(0.0, 1.0)]  # it did not live long enough
    assert memory.slopes() == pytest.approx({"rank 0": 36.0, "torchrun": 0.0})


def test_files_that_tell_of_the_run_alone_are_not_compared(tmp_path):
    training = Training(None, tmp_path, "run")
    for name in ("config.yaml", "step_2/weights", "logs/rank_0.log", "starts.jsonl", "wandb_step"):
        (training.run / name).parent.mkdir(parents=True, exist_ok=True)
        (training.run / name).touch()
    assert training.files() == {"config.yaml", "step_2/weights"}
