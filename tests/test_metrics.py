"""A step that is not finite ends all ranks, with its number, and nothing of it is saved."""

import math

import pytest
import torch

from models.hrm import HRM
from tests.ranks import run_program
from tests.tiny import OVERRIDES
from training.metrics import FiniteCheck, training_metrics


def test_each_metric_is_divided_by_what_it_is_over():
    sums = {"lm_loss": 6.0, "grad_norm": 4.0, "count": 5, "first_step_count": 4}
    sums |= {"accuracy": 4.0, "exact_accuracy": 3, "q_halt_accuracy": 5, "steps": 20}
    sums |= {"exact_accuracy_after_step_1": 1, "loss": 12.0}
    divided = {"lm_loss": 0.25, "grad_norm": 2.0, "count": 5, "accuracy": 0.8, "exact_accuracy": 0.6}
    divided |= {"loss": 0.5, "q_halt_accuracy": 1, "steps": 4, "exact_accuracy_after_step_1": 0.25}
    options = {"steps": 2, "global_batch_size": 12}
    assert training_metrics(HRM, sums, **options) == divided
    assert training_metrics(HRM, dict.fromkeys(sums, 0.0), **options) == dict.fromkeys(
        ("lm_loss", "grad_norm", "loss"), 0
    )
    for name in ("first_step_count", "accuracy", "loss"):  # a checkpoint from before there was such a metric
        del sums[name]
    del divided["exact_accuracy_after_step_1"], divided["accuracy"], divided["loss"]
    assert training_metrics(HRM, sums, **options) == divided


def _note(finite: FiniteCheck, step: int, loss: float, grad_norm: float) -> None:
    finite.add(step, set_name=f"set_{step}", loss=torch.tensor(loss), grad_norm=torch.tensor(grad_norm))


@pytest.mark.parametrize(("loss", "grad_norm"), [(math.nan, 1.0), (math.inf, 1.0), (1.0, math.nan)])
def test_the_step_is_named(capsys, loss, grad_norm):
    finite = FiniteCheck(torch.device("cpu"))
    finite.check()
    _note(finite, 2, 1.0, 1.0)
    with pytest.raises(SystemExit) as ended:
        _note(finite, 3, loss, grad_norm)
    assert ended.value.code == 1
    line = capsys.readouterr().err
    for part in ("error: ", "step 3", "'set_3'", "This step is not saved"):
        assert part in line


def test_where_reading_costs_it_waits_and_names_the_first_bad_step(capsys):
    finite = FiniteCheck(torch.device("cpu"))
    finite._reads_every_step = False  # as on CUDA
    for step, loss in ((5, 1.0), (6, math.nan), (7, 1.0), (8, math.nan)):
        _note(finite, step, loss, 1.0)
    with pytest.raises(SystemExit):
        finite.check()
    assert "step 6, on a batch of set 'set_6'" in capsys.readouterr().err


@pytest.mark.slow
def test_training_that_diverges_ends_all_ranks_before_it_saves(tmp_path, sudoku_folder):
    words = (f"data_path={sudoku_folder}", *OVERRIDES, "lr=1e30", "lr_warmup_steps=0", "checkpoint_path=run")
    finished = run_program("pretrain", *words, folder=tmp_path, world_size=2)
    assert finished.statuses == [1, 1]
    (line,) = [line for line in finished.error_lines if line.startswith("error")]
    assert "at step 2, on a batch of set 'all'" in line
    assert not list((tmp_path / "run").glob("step_*"))
