"""Runs of the real programs with the puzzle table spread over ranks, and with it on each rank."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from checkpointing.tensors import load_joined
from tests.checkpoints import assert_equal
from tests.puzzle_sets import NUM_IDENTIFIERS, write
from tests.ranks import Finished, complete_program
from tests.tiny import OVERRIDES, logged_rows

pytestmark = [pytest.mark.slow, pytest.mark.long]

_WAYS = ("replicated", "rows")
_RANKS = {6: 2, 10: 3, 14: 1}  # at the end of the run; it is stopped, and goes on with another number
_OPTIONS = ("ema=0.9", "raw=true", "gradient_accumulation_steps=2", "replica_check_interval=3", "halting=act")


def _write(folder: Path, **changes) -> Path:
    """Puzzles that repeat over the ranks; the batches of the test sets are none that 3 ranks share evenly."""
    test = {"all": [[1], [2, 1]] * 10, "more": [[3]] * 5}
    return write(folder, train={"all": [[2, 1]] * 60}, test=test, **changes)


def _train(data: Path, run: Path, *overrides: str, world_size: int) -> Finished:
    words = (f"data_path='{data}'", *OVERRIDES, f"checkpoint_path='{run}'", *overrides)
    return complete_program("pretrain", *words, folder=run.parent, world_size=world_size)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    """One run each way, and its data."""
    folder = tmp_path_factory.mktemp("runs")
    data = _write(folder / "data")
    for way in _WAYS:
        for step, world_size in _RANKS.items():
            words = (f"puzzle_emb_sharding={way}", f"max_steps={step}", "keep_checkpoints=null", *_OPTIONS)
            _train(data, folder / way, *words, world_size=world_size)
    return {"data": data, **{way: folder / way for way in _WAYS}}


def test_a_run_is_the_same_whatever_the_number_of_ranks(runs):
    ours, theirs = logged_rows(runs["rows"]), logged_rows(runs["replicated"])
    assert ours == theirs
    assert any("eval/more/lm_loss" in line and "eval_raw/all/accuracy" in line for line in ours)
    for step, world_size in _RANKS.items():
        ours, theirs = (runs[way] / f"step_{step}" for way in reversed(_WAYS))
        parts = {path.name for path in ours.glob("weights_*")}
        names = {f"weights_{rank}_of_{world_size}.safetensors" for rank in range(world_size)}
        assert parts == (names if world_size > 1 else set())
        assert not list(theirs.glob("weights_*"))
        for name in ("weights", "ema_weights", "ema_state", "optimizer"):
            assert_equal(*(load_joined(each, name) for each in (ours, theirs)))
        for path in theirs.glob("carry_*"):
            assert_equal(load_file(ours / path.name), load_file(path))
    table = load_joined(ours, "weights")["puzzle_emb.weights"]
    assert (table != 0).any(dim=1).sum() > NUM_IDENTIFIERS / 2


def test_its_checkpoint_is_evaluated_as_any_other(runs, tmp_path):
    metrics = []
    for way in _WAYS:
        words = (f"checkpoint='{runs[way] / 'step_10'}'", f"data_path='{runs['data']}'", "device=cpu")
        words += ("halting=act",)
        complete_program("evaluate", *words, f"output_dir={way}", folder=tmp_path, world_size=2)
        metrics.append(json.loads((tmp_path / way / "metrics.json").read_text()))
    assert metrics[0] == metrics[1]
    logged = next(line for line in logged_rows(runs["rows"]) if line["step"] == 10)
    assert metrics[0]["all"]["lm_loss"] == pytest.approx(logged["eval/all/lm_loss"], rel=1e-5)


def test_it_begins_with_the_weights_of_another_run(runs, tmp_path):
    """The tables are of the same size, and of another."""
    for number in (NUM_IDENTIFIERS, NUM_IDENTIFIERS + 3):
        data = _write(tmp_path / f"{number}", num_puzzle_identifiers=number)
        found = []
        for way in _WAYS:
            run = tmp_path / f"{way}_{number}"
            words = (f"puzzle_emb_sharding={way}", f"init_from='{runs['rows'] / 'step_6'}'", "max_steps=2")
            _train(data, run, *words, "ema=0.9", world_size=2)
            found.append(load_joined(run / "step_2", "ema_weights"))
        assert_equal(*found)
        table = found[0]["puzzle_emb.weights"]
        assert (table != 0).any(dim=1).sum() == number if number > NUM_IDENTIFIERS else len(table) == number
