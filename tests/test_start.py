"""Ranks that were not started alike end together, with one line of rank 0 that says what differs."""

import pytest

from tests.ranks import run_ranks


def _start(change: dict[int, tuple[str, object]], missing: int | None, timeout: float) -> tuple[str, str]:
    import contextlib
    import io

    from parallel import start
    from parallel.process_group import rank

    facts = start._facts()
    if rank() in change:
        name, value = change[rank()]
        facts[name] = {**facts[name], **value} if name == "files" else value
    start._facts = lambda: facts
    stderr = io.StringIO()
    outcome = "went on"
    with contextlib.redirect_stderr(stderr):
        try:
            if rank() != missing:
                start.check_same_start(timeout_seconds=timeout)
        except SystemExit as ended:
            outcome = f"ended with {ended.code}"
    return outcome, stderr.getvalue()


def test_equal_ranks_go_on():
    assert run_ranks(_start, 3, {}, None, 30.0) == [("went on", "")] * 3


@pytest.mark.parametrize(
    ("name", "value", "parts"),
    [
        ("arguments", ["lr=1"], ["rank 2 on host", "arguments (lr=1)"]),
        ("torch", "1.0", ["torch (1.0)"]),
        ("world_size", 7, ["ranks (7) than rank 0 (3)"]),
        ("files", {"models/hrm.py": "x"}, ["other code", "models/hrm.py differ", "one commit"]),
        ("files", {"models/a.py": "x", "models/b.py": "y"}, ["models/a.py and 1 more files"]),
    ],
)
def test_what_differs_is_told_once_and_ends_all(name, value, parts):
    (first, line), *others = run_ranks(_start, 3, {2: (name, value)}, None, 30.0)
    assert first == "ended with 1"
    assert line.startswith("error: ")
    assert line.count("\n") == 1
    for part in parts:
        assert part in line
    assert others == [("ended with 1", "")] * 2


def test_a_rank_that_does_not_come_is_named():
    (first, line), (second, _), (missing, _) = run_ranks(_start, 3, {}, 2, 0.5)
    assert (first, second, missing) == ("ended with 1", "ended with 1", "went on")
    assert "rank 2 of 3 has not started within 0.5 seconds" in line
