"""The file by which a start knows of the failure before it; with real ranks: test_watchdog.py."""

import json
from pathlib import Path

import pytest

from parallel.failure_record import FailureRecord

_SLACK = 20.0  # seconds, for a busy machine


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "heartbeat"


def test_the_next_start_tells_how_long_ago_the_last_sign_of_life_was(path, capsys):
    FailureRecord(path).write(9, silent_seconds=60)
    record = FailureRecord(path)
    assert record.pop_recovery() == {}
    record.tell_recovery(7)
    assert "recovered: step 7 is done " in (told := capsys.readouterr().out)
    assert "3 steps done again" in told
    assert not path.exists()
    assert record.pop_recovery()["recovery_seconds"] == pytest.approx(60, abs=_SLACK)
    assert record.pop_recovery() == {}
    record.write(8, silent_seconds=0)
    record.tell_recovery(8)  # its own file is no failure before it
    assert json.loads(path.read_text())["step"] == 8
    assert record.pop_recovery() == {}


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"time": "noon", "step": 1}', '{"time": null, "step": 1}']
)
def test_a_file_that_is_no_record_tells_nothing(path, text, capsys):
    path.write_text(text)
    record = FailureRecord(path)
    record.tell_recovery(1)
    assert record.pop_recovery() == {}
    assert capsys.readouterr().out == ""


def test_a_file_that_cannot_be_written_is_not_in_the_way(path):
    path.mkdir()
    (path / "something").touch()
    record = FailureRecord(path)
    record.write(1, silent_seconds=0)
    record.tell_recovery(2)
    record.remove()
    assert path.is_dir()
    assert not any(each.is_file() and each.read_text() for each in path.iterdir())
