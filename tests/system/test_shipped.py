"""The models in weights/: what they show first on their page, and the hardest Sudokus."""

import json

import numpy as np
import pytest

import solve
from checkpointing.finding import find_checkpoint
from config.files import load_defaults
from config.programs import PageConfig
from config.schema import validate_config
from share.browser import prepare
from tests.ranks import complete_program
from tests.sudoku_source import REAL_DATA, build
from tests.test_shipped import QUICK, SOLVED, check_solved


@pytest.mark.skipif(not REAL_DATA.is_dir(), reason=f"no {REAL_DATA}; DATA_DIR names the folder above it")
def test_the_hardest_sudokus_are_solved(tmp_path):
    """Their search is a matter of chance: the record is 0.975."""
    data = tmp_path / "data"
    build(data, "--source", REAL_DATA, "--subsample-size", 1, "--num-test", 20)
    words = (f"data_path={data}", "samples=32", "decision_cell=fewest", "device=cpu", "output_dir=out")
    # Two ranks, because one core without bfloat16 instructions takes five minutes.
    complete_program("evaluate", "checkpoint=sudoku_extreme", *words, folder=tmp_path, world_size=2)
    metrics = json.loads((tmp_path / "out/metrics.json").read_text())["all"]
    assert metrics["wrong"] == 0
    assert metrics["exact_accuracy"] >= 0.9


@pytest.mark.parametrize("name", [name for name in SOLVED if name not in QUICK])
def test_it_solves_new_puzzles(name, tmp_path):
    check_solved(name, tmp_path)


def test_a_shipped_model_begins_with_a_puzzle_that_it_solves():
    """The first that it makes up for itself it does not."""
    config = validate_config(PageConfig, load_defaults("page") | {"output": "page", "puzzles": 3})
    facts = prepare(find_checkpoint("sudoku_9x9"), config).facts
    model, (first, second) = solve.load("sudoku_9x9"), facts["puzzles"][:2]
    assert second["inputs"] == facts["made_up"][0]["inputs"]
    texts = ["".join(map(str, np.array(each["inputs"]) - 1)) for each in (first, second)]
    assert [model.solve(text).valid for text in texts] == [True, False]
