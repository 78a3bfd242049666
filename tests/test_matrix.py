"""The matrix of versions: what it installs and what it says of pytest's output; installing takes minutes."""

import subprocess

import pytest

from tests import matrix


@pytest.fixture
def commands(monkeypatch) -> list[list[str]]:
    """What was started; torch's own registry cannot be reached, and one test fails."""
    started = []

    def run(command, **options):
        started.append(list(command))
        if "--torch-backend=cpu" in command:
            raise subprocess.CalledProcessError(2, command, output="", stderr="no route")
        said = "2.11.0+cpu\n"
        if "pytest" in command:
            said = (
                "FAILED tests/test_x.py::test_y - x\n= 1 failed, 3 passed, 2 skipped in 61.20s (0:01:01) =\n"
            )
        return subprocess.CompletedProcess(command, int("pytest" in command), said, "")

    monkeypatch.setattr(matrix.subprocess, "run", run)
    return started


def test_a_failure_is_named_in_the_row(commands, capsys):
    words = ["--only", "py3.12-torch2.11.0", "--tests", "tests/test_x.py"]
    assert matrix.main(words) == 1
    row = capsys.readouterr().out.splitlines()[-1]
    expected = (
        "| 3.12 | 2.11.0 | 2.11.0+cpu | these | 1 failed, 3 passed, 2 skipped; tests/test_x.py::test_y | "
    )
    assert row.startswith(expected)
    (install,) = [each for each in commands if "install" in each and "--torch-backend=cpu" not in each]
    assert install[-1] == "torch==2.11.0"


def test_every_combination_is_resolved_without_tests(commands, capsys):
    assert matrix.main(["--resolve"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if "can be installed" in line]
    assert len(rows) == 2 * len(matrix.PYTHONS) * len(matrix.TORCHES)
    assert not any("pytest" in each for each in commands)


def test_rows_are_recorded_in_the_order_of_the_combinations(commands, monkeypatch, tmp_path):
    monkeypatch.setattr(matrix, "RESULTS", tmp_path / "RESULTS.md")
    matrix.RESULTS.write_text("Before\n<!-- versions -->\n<!-- end of versions -->\nAfter\n")
    names = ["py3.13-torchnewest", "py3.10-torchnewest", "py3.13-torchnewest"]
    for name in names:
        assert matrix.main(["--record", "--fast", "--only", name]) == 1
    lines = matrix.RESULTS.read_text().splitlines()
    assert (lines[0], lines[-1]) == ("Before", "After")
    rows = [line for line in lines if line.startswith("| 3.")]
    assert [row.split(" | ")[:2] for row in rows] == [["| 3.10", "newest"], ["| 3.13", "newest"]]
    assert all(each[-2:] == ["-m", "not slow"] for each in commands if "pytest" in each)


def test_what_is_recorded_is_all_or_all_fast_tests(commands, capsys):
    for words in (["--tests", "tests/test_x.py"], ["--resolve"]):
        with pytest.raises(SystemExit) as ended:
            matrix.main(["--record", *words])
        assert ended.value.code == 2
