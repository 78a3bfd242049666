"""`python -m benchmarks`: every benchmark is in it, a failure stops no other, rows replace their own kind."""

import sys
import time
from pathlib import Path

import pytest

from benchmarks import __main__ as bench
from tests.ranks import REPOSITORY

_LINE = {
    "benchmark": "optimizers",
    "speedup": 2.0,
    "bytes": 12,
    "over": {"loop": 0.51234, "rows": 3},
    "rate": 43512.3,
    "missing": None,
    "device_name": "Some CPU",
    "cores": 2,
    "torch": "2.0",
    "commit": "abc1234-dirty",
    "seconds": {"a": {"median": 1.5}},
}


def test_every_benchmark_is_in_it():
    folder = REPOSITORY / "benchmarks"
    files = {path.stem for path in folder.glob("*.py") if '__name__ == "__main__"' in path.read_text()}
    folders = {path.parent.name for path in folder.glob("*/__main__.py")}
    assert (files | folders) - {"__main__"} == bench.BENCHMARKS.keys() | bench.LEFT_OUT


@pytest.mark.slow
def test_a_failure_is_named_and_stops_no_other(monkeypatch, capfd):
    monkeypatch.setattr(bench, "BENCHMARKS", {"absent": "", "collectives": "--processes 1 --threads 1"})
    assert bench.main(["--quick"]) == 1
    said = capfd.readouterr()
    assert said.err.splitlines()[-1] == "failed: benchmarks.absent ends with status 1"
    *_, head, _, row = said.out.splitlines()
    assert head.startswith("| command | date |")
    assert row.startswith("| `collectives --processes 1 --threads 1 --quick` | 20")
    assert "`share_of_step its gradients` " in row


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("raise SystemExit(3)", "status 3"),
        ("print('no JSON')", "line of JSON"),
        ("", "line of JSON"),
    ],
)
def test_what_is_no_result_is_a_failure(code, message):
    with pytest.raises(RuntimeError, match=message):
        bench.run_benchmark([sys.executable, "-c", code], timeout_seconds=60)


@pytest.mark.slow
def test_what_takes_too_long_ends_with_all_that_it_started_and_wrote(tmp_path):
    beats = tmp_path / "beats"
    endless = f"cd $TMPDIR; pwd > {tmp_path}/folder; (while :; do echo >> {beats}; sleep 0.02; done) & wait"
    with pytest.raises(RuntimeError, match=r"longer than 2 s"):
        bench.run_benchmark(["sh", "-c", endless], timeout_seconds=2)
    num_bytes = beats.stat().st_size
    time.sleep(0.2)
    assert beats.stat().st_size == num_bytes > 0
    assert not Path((tmp_path / "folder").read_text().strip()).exists()


def test_a_row_has_what_was_measured_and_where():
    row = bench.table_row(_LINE, "--rounds 3")
    _, command, _, *others, _ = (cell.strip() for cell in row.split("|"))
    assert command == "`optimizers --rounds 3`"
    measured = "`speedup` 2, `over loop` 0.512, `rate` 43,512"
    assert others == ["abc1234-dirty", "Some CPU, 2 cores", "2.0", measured]
    assert bench.table_row(_LINE | {"uneven": ["a"]}, "").endswith(
        f"{measured}; too uneven to tell, estimates |"
    )


def test_a_recorded_row_replaces_its_own_kind_only():
    text = bench.RESULTS.read_text()
    assert bench.with_rows(text, {}) == text
    old = {"dataset": "| `dataset --rounds 2` | old |", "scaling": "| `scaling` | old |"}
    first, new = bench.with_rows(text, old), "| `dataset --rounds 3` | new |"
    assert bench.with_rows(first, {"dataset": new}) == first.replace(old["dataset"], new) != first
    with pytest.raises(ValueError, match="lacks the lines"):
        bench.with_rows("# Measured\n", {})


def test_quick_times_are_not_recorded(capsys):
    with pytest.raises(SystemExit) as ended:
        bench.main(["--quick", "--record"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("error: --record and --quick do not go together")


def test_results_without_a_place_for_rows_are_an_error_at_once(monkeypatch, tmp_path, capsys):
    results = tmp_path / "RESULTS.md"
    results.write_text("# Measured\n")
    monkeypatch.setattr(bench, "RESULTS", results)
    with pytest.raises(SystemExit):
        bench.main(["--record", "--only", "collectives"])
    assert "RESULTS.md lacks the lines" in capsys.readouterr().err
