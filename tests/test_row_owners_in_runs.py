"""Runs of the real programs whose puzzle table is spread over ranks, against those that have it on each."""

from pathlib import Path

import pytest

from tests.puzzle_sets import write
from tests.ranks import run_program
from tests.test_pretrain import lines_of
from tests.tiny import OVERRIDES

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """A test split of several sets, the batches of which two and three ranks cannot share evenly."""
    return write(
        tmp_path_factory.mktemp("data") / "random",
        train={"all": [[2, 1]] * 60},
        test={"all": [[1], [2, 1]] * 10, "more": [[3]] * 5},
    )


def _train(folder: Path, data: Path, *overrides: str, world_size: int, **environment) -> Path:
    finished = run_program(
        "pretrain",
        f"data_path='{data}'",
        *OVERRIDES,
        "checkpoint_path=run",
        "ema=0.9",
        "gradient_accumulation_steps=2",
        "replica_check_interval=3",
        *overrides,
        folder=folder,
        world_size=world_size,
        **environment,
    )
    assert finished.statuses == [0] * world_size, finished.stderr
    return folder / "run"


@pytest.mark.parametrize("halting", ["max", "act"])
def test_a_run(data, tmp_path, halting):
    runs = []
    for way in ("replicated", "rows"):
        (tmp_path / way).mkdir()
        runs.append(
            _train(
                tmp_path / way,
                data,
                f"puzzle_emb_sharding={way}",
                f"halting={halting}",
                "raw=true",
                world_size=3,
            )
        )
    ours, theirs = map(lines_of, runs)
    assert ours == theirs
