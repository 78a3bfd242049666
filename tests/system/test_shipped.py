"""The weights that search, on real puzzles of the hardest kind."""

import json

import pytest

from tests.ranks import complete_program
from tests.sudoku_source import REAL_DATA, build


@pytest.mark.skipif(not REAL_DATA.is_dir(), reason=f"no {REAL_DATA}; DATA_DIR names the folder above it")
def test_the_hardest_sudokus_are_solved(tmp_path):
    """Their search is a matter of chance: the record is 0.975."""
    data = tmp_path / "data"
    build(data, "--source", REAL_DATA, "--subsample-size", 1, "--num-test", 20)
    words = (f"data_path={data}", "samples=32", "decision_cell=fewest", "device=cpu", "output_dir=out")
    complete_program("evaluate", "checkpoint=sudoku_extreme", *words, folder=tmp_path)
    metrics = json.loads((tmp_path / "out/metrics.json").read_text())["all"]
    assert metrics["wrong"] == 0
    assert metrics["exact_accuracy"] >= 0.9
