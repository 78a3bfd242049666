"""Evaluators in the real programs: what they add to the log, to metrics.json, and the files they leave."""

import json
from pathlib import Path

import pytest

from tests.arc_source import build as build_arc
from tests.arc_source import make_tasks, write_folder
from tests.ranks import run_program
from tests.tiny import OVERRIDES

pytestmark = pytest.mark.slow

_SHORT = (*OVERRIDES, "eval_interval=null", "epochs=2", "arch.halt_max_steps=2")
_FEW_CYCLES = ("arch.H_cycles=1", "arch.L_cycles=1")  # grids have 900 cells
_PASSES = {f"arc/pass@{number}" for number in (1, 2, 5, 10, 100, 1000)}


def _run(folder: Path, program: str, *overrides: str, world_size: int = 1, is_float64: bool = False):
    finished = run_program(program, *overrides, folder=folder, world_size=world_size, is_float64=is_float64)
    assert finished.statuses == [0] * world_size, finished.stderr
    return finished


def _last_line(run: Path) -> dict:
    return json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])


@pytest.fixture(scope="module")
def arc_run(tmp_path_factory) -> Path:
    """A run on two processes on tiny ARC tasks, with what its evaluation left.

    In float64: rounding changes with the batch, and may not decide a vote.
    """
    folder = tmp_path_factory.mktemp("arc")
    for subset, seed in (("training", 0), ("evaluation", 1)):
        write_folder(folder / "tasks" / subset, make_tasks(4, seed=seed))
    build_arc(folder / "data", "--source", folder / "tasks", "--num-aug", 2)
    options = ("data_path=data", *_SHORT, "checkpoint_path=run", "evaluators=[arc]", *_FEW_CYCLES)
    _run(folder, "pretrain", *options, world_size=2, is_float64=True)
    return folder


def test_arc_votes_are_logged_and_submitted(arc_run):
    line = _last_line(arc_run / "run")
    assert {f"eval/all/{name}" for name in (*_PASSES, "arc/count")} <= line.keys()
    assert line["eval/all/arc/count"] == 4
    left = arc_run / "run" / "evaluation" / f"step_{line['step']}"
    submission = json.loads((left / "submission.json").read_text())
    assert len(submission) == 4
    assert all({"attempt_1", "attempt_2"} == set(attempt) for task in submission.values() for attempt in task)

    options = ("checkpoint=run", "evaluators=[arc]", "device=cpu")
    _run(arc_run, "evaluate", *options, "output_dir=alone", is_float64=True)
    evaluated = json.loads((arc_run / "alone" / "metrics.json").read_text())["all"]
    for name in _PASSES:
        assert evaluated[name] == pytest.approx(line[f"eval/all/{name}"])
        assert evaluated[f"{name}_low"] <= evaluated[name] <= evaluated[f"{name}_high"]
    assert (arc_run / "alone" / "submission.json").read_bytes() == (left / "submission.json").read_bytes()

    votes = f"arc_votes=[{left / 'votes.npz'}]"
    options = (*options, "raw=true", "halting=act")
    _run(arc_run, "evaluate", *options, votes, "output_dir=twice", world_size=2, is_float64=True)
    together = json.loads((arc_run / "twice" / "metrics.json").read_text())["all"]
    assert together["arc/votes"] == 2 * evaluated["arc/votes"]


def test_sudoku_over_several_checkpoints_gives_mean_and_deviation(tmp_path, sudoku_folder):
    options = (f"data_path={sudoku_folder}", *_SHORT, "evaluators=[sudoku]", "keep_checkpoints=null")
    for seed in (0, 1):
        _run(tmp_path, "pretrain", *options, f"checkpoint_path=run{seed}", f"seed={seed}", is_float64=True)
    lines = [_last_line(tmp_path / f"run{seed}") for seed in (0, 1)]
    assert {"eval/all/sudoku/valid_accuracy", "eval/all/sudoku/exact_accuracy"} <= lines[0].keys()
    shared = ("evaluators=[sudoku]", "device=cpu")
    both = ("checkpoint=[run0,run1]", *shared, "output_dir=both")
    finished = _run(tmp_path, "evaluate", *both, world_size=2, is_float64=True)
    assert "mean and standard deviation of 2 checkpoints" in finished.stdout
    summary = json.loads((tmp_path / "both" / "summary.json").read_text())["sets"]["all"]
    values = [line["eval/all/accuracy"] for line in lines]
    assert summary["accuracy"] == pytest.approx(sum(values) / 2)
    assert summary["accuracy_deviation"] == pytest.approx(abs(values[0] - values[1]) / 2**0.5)
    assert summary["count"] == 100
    for seed, line in enumerate(lines):
        one = tmp_path / "both" / f"run{seed}_step_{line['step']}" / "metrics.json"
        assert json.loads(one.read_text())["all"]["accuracy"] == pytest.approx(line["eval/all/accuracy"])


def test_an_evaluator_of_other_puzzles_is_refused_before_the_first_step(tmp_path, sudoku_folder):
    options = (f"data_path={sudoku_folder}", *_SHORT, "checkpoint_path=run", "evaluators=[arc]")
    finished = run_program("pretrain", *options, folder=tmp_path, world_size=2)
    assert finished.statuses == [1, 1]
    assert len(finished.error_lines) == 1
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
