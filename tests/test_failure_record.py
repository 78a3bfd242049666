"""The record from which the next launch computes its recovery. tests/test_watchdog.py has it in real runs."""

import resource

import pytest

from distributed.failure_record import FailureRecord


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"time": null, "step": 1}', '{"time": 1, "step": 1e999}', None]
)
def test_a_file_that_is_no_record_is_not_in_the_way(tmp_path, text, capsys):
    path = tmp_path / "heartbeat"
    if text is None:  # it cannot be written or removed either
        (path / "something").mkdir(parents=True)
    else:
        path.write_text(text)
    record = FailureRecord(path)
    record.write(1, silent_seconds=0)
    record.record_recovery(2)
    record.remove()
    assert path.exists() == (text is None)
    assert record.pop_recovery() == {}
    assert capsys.readouterr().out == ""


def test_a_full_disk_leaves_no_old_record(tmp_path, capsys):
    """The next launch would print how many steps were done again since that record."""
    path = tmp_path / "heartbeat"
    record = FailureRecord(path)
    record.write(8, silent_seconds=0)
    assert path.exists()
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        record.write(24, silent_seconds=0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert not list(tmp_path.iterdir())
    FailureRecord(path).record_recovery(7)
    assert capsys.readouterr().out == ""
