"""Ranks wait for each other at the start: one that does not come is named, other code is a warning."""

import contextlib
import io

import pytest

from parallel import launch
from parallel.process_group import rank
from tests.ranks import run_ranks


def _start(others_code: dict[str, str], missing: int | None, timeout: float) -> tuple[str, str]:
    """Starts; the ranks from 2 on have other code, and one may not come. Returns the outcome and stderr."""
    code = launch._code()
    launch._code = lambda: code | (others_code if rank() >= 2 else {})
    outcome = "went on"
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        try:
            if rank() != missing:
                launch.wait_for_all_ranks(timeout_seconds=timeout)
        except SystemExit as ended:
            outcome = f"ended with {ended.code}"
    return outcome, stderr.getvalue()


def test_what_is_compared():
    code = launch._code()
    assert {"pretrain.py", "models/hrm.py", "dataset/format.py"} <= code.keys()
    assert not any(name.startswith(("tests", "benchmarks", ".venv")) for name in code)
    assert sum(name.startswith("torch ") for name in code) == 1


@pytest.mark.parametrize(
    ("others_code", "named"),
    [
        ({}, None),
        ({"models/hrm.py": "x"}, "models/hrm.py: bring all"),
        ({"torch 1.0": ""}, "torch 1.0: bring all"),
        ({f"models/{name}.py": "x" for name in "abcde"}, "models/a.py, models/b.py, models/c.py and 2 more"),
    ],
)
def test_other_code_is_one_warning(others_code, named):
    (first, line), *others = run_ranks(_start, 4, others_code, None, 30.0)
    assert [first, *others] == ["went on", *[("went on", "")] * 3]
    assert line.count("\n") == (named is not None)
    if named:
        assert line.startswith("warning (rank 0): ranks 2, 3 on ")
        assert named in line


def test_a_rank_that_does_not_come_is_named():
    (first, line), (second, _), (missing, _) = run_ranks(_start, 3, {}, 2, 0.5)
    assert (first, second, missing) == ("ended with 1", "ended with 1", "went on")
    assert "rank 2 of 3 did not start within 0.5 seconds" in line
