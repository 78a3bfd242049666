"""What is said of a child process that has failed."""

import pytest

from distributed.child import why_it_failed


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("step 1\nerror: lr is too high\nerror (rank 1): another rank has ended\n", "lr is too high"),
        ("error (rank 3 (shard 1)): no data\n======\nRoot cause\n======\n", "no data"),
        ("python -m dataset.build sudoku: error: no such file\n", "no such file"),
        ("error_file: <none>\nstep 12\n------\n\n", "ended with status -9: step 12"),
        ("", "ended with status -9: no output"),
    ],
)
def test_the_first_error_or_how_it_ended_is_told(said, expected):
    assert why_it_failed(said, -9) == expected
