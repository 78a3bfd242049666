"""Programs without torchrun, and ranks that fail. A real torchrun: system/."""

import json
from pathlib import Path

import pytest

from distributed.world import rank
from tests.ranks import complete_program, run_program, run_ranks
from tests.tiny import OVERRIDES, run_of, tiny_config

pytestmark = pytest.mark.slow


def test_one_process_without_torchrun(tmp_path, sudoku_folder):
    """There is no store, no group, and nothing that says how many processes share the cores."""
    words = (f"data_path={sudoku_folder}", *OVERRIDES, "checkpoint_path=run", "max_steps=1")
    own = ("checkpoint=run", "device=cpu")
    asked = (*own, "puzzle=1..4 .... .... 4..1")
    for program, arguments in (("pretrain", words), ("evaluate", own), ("solve", asked)):
        finished = complete_program(program, *arguments, folder=tmp_path, world_size=None)
    assert finished.stderr == ""
    facts = json.loads((tmp_path / "run" / "step_1" / "state.json").read_text())["dataset"]
    assert facts["builder"] == "sudoku", "a puzzle can be read where the dataset is gone"
    refused = run_program("solve", *asked, folder=tmp_path, world_size=2)
    assert refused.statuses == [1, 1]
    assert "solve.py is one process" in refused.stderr
    metrics = json.loads((tmp_path / "run" / "evaluation" / "step_1" / "metrics.json").read_text())["all"]
    logged = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert metrics["lm_loss"] == pytest.approx(logged["eval/all/lm_loss"], rel=1e-5)


def test_help_is_printed_once_and_starts_nothing(tmp_path):
    finished = complete_program("pretrain", "--help", "all", folder=tmp_path, world_size=2)
    assert finished.stdout.count("cpu_threads") == 1
    assert {path.name for path in tmp_path.iterdir()} <= {".output_pretrain"}


def _train_until_rank_1_fails(folder: Path, data: Path) -> None:
    import pretrain

    train_step = pretrain.train_step

    def fail(state, *arguments, **options):
        if rank() == 1 and state.step == 3:
            raise RuntimeError("rank 1 is broken")
        return train_step(state, *arguments, **options)

    pretrain.train_step = fail
    pretrain.train(run_of(tiny_config(data_path=str(data), checkpoint_path=str(folder / "run"))))


def test_a_rank_that_fails_alone_does_not_leave_the_others_hanging(tmp_path, sudoku_folder):
    """It ends, which torchrun waits for, and so do those that wait for it in a collective."""
    with pytest.raises(AssertionError, match=r"(?s)rank 0: .*RuntimeError.*rank 1: .*rank 1 is broken"):
        run_ranks(_train_until_rank_1_fails, 2, tmp_path, sudoku_folder)
    assert json.loads((tmp_path / "run" / "status").read_text()) == {"status": "failed", "step": 3}


def _train_where_rank_1_cannot_build(folder: Path, data: Path) -> None:
    import pretrain
    from training import model

    def fail(*_):
        raise ValueError("no memory for the table")

    if rank() == 1:
        model.build_model = fail
    with pytest.raises(SystemExit, match="1"):
        pretrain.train(run_of(tiny_config(data_path=str(data), checkpoint_path=str(folder / "run"))))


def test_a_model_that_one_rank_cannot_build_ends_all(tmp_path, sudoku_folder):
    run_ranks(_train_where_rank_1_cannot_build, 2, tmp_path, sudoku_folder)
