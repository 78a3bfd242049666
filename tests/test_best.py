"""Which checkpoint is the best of a run: by which metric, on which puzzles."""

import json

import pytest

from checkpointing.finding import find_checkpoint
from tests.checkpoints import blank_state, open_checkpoints, save
from tests.tiny import tiny_config
from training.best import BestStep, Selection, goal_of

_ROW = {
    "train/exact_accuracy": 0.9,
    "eval/a/exact_accuracy": 0.5,
    "eval/a/count": 100,
    "eval/a/arc/pass@2": 0.25,
    "eval/a/arc/count": 3,
    "eval/a/mine/valid_accuracy": 0.4,
    "eval/a/rare/accuracy": 0.25,
    "eval/a/rare/count": 0,
    "eval/b.all/exact_accuracy": 0.8,
    "eval/b.all/count": 300,
    "eval/b.all/arc/pass@2": 0.5,
    "eval/b.all/arc/count": 1,
    "eval/b.all/mine/valid_accuracy": 0.6,
    "eval/b.all/rare/accuracy": 0.75,
    "eval/b.all/rare/count": 0,
    "eval_raw/a/exact_accuracy": 0.1,
    "eval_raw/a/count": 100,
    "validation/all/exact_accuracy": 0.3,
    "validation/all/count": 7,
}


@pytest.mark.parametrize(
    ("keep_best", "has_validation", "value", "selected_by"),
    [
        ("exact_accuracy", False, (0.5 * 100 + 0.8 * 300) / 400, "test"),
        ("exact_accuracy", True, 0.3, "validation"),
        ("arc/pass@2", False, (0.25 * 3 + 0.5) / 4, "test"),
        ("arc/pass@2", True, None, "validation"),
        ("mine/valid_accuracy", False, (0.4 * 100 + 0.6 * 300) / 400, "test"),  # an evaluator without a count
        ("rare/accuracy", False, 0.5, "test"),  # an evaluator that counted nothing
        ("eval/b.all/exact_accuracy", True, 0.8, "test"),
        ("validation/all/exact_accuracy", True, 0.3, "validation"),
        ("eval_raw/a/exact_accuracy", False, 0.1, "test"),
        ("accuracy", False, None, "test"),
    ],
)
def test_the_value_of_a_row(keep_best, has_validation, value, selected_by):
    selection = Selection(keep_best, has_validation=has_validation)
    assert selection.value(_ROW) == (value if value is None else pytest.approx(value, rel=1e-12))
    assert selection.selected_by == selected_by


def test_the_best_is_the_highest_or_the_lowest_loss_and_of_equals_the_newest():
    values = {1: 0.5, 3: float("nan"), 4: 0.9, 6: 0.9, 8: 0.5}
    assert Selection("exact_accuracy", has_validation=False).best_step(values) == 6
    assert Selection("lm_loss", has_validation=False).best_step(values) == 8
    for name in ("coloring/conflicts", "undecided"):
        assert Selection(name, has_validation=False).best_step(values) == 8
    assert Selection("lm_loss", has_validation=False).best_step({3: float("nan")}) is None


@pytest.mark.parametrize(
    ("keep_best", "values", "patience", "is_exhausted"),
    [
        ("exact_accuracy", [0.1, 0.5, 0.4], 1, True),
        ("exact_accuracy", [0.1, 0.5, 0.4], 2, False),
        ("exact_accuracy", [0.5, 0.5, 0.5], 2, True),  # an equal value is not better
        ("exact_accuracy", [0.1, 0.2, 0.3], 1, False),
        ("lm_loss", [0.3, 0.2, 0.2], 1, True),
        ("lm_loss", [0.3, float("nan"), 0.2], 1, False),
        ("lm_loss", [], 1, False),
    ],
)
def test_patience_counts_the_evaluations_after_the_first_best(keep_best, values, patience, is_exhausted):
    """Also in a resumed run, which reads them in the log."""
    config = tiny_config(keep_best=f"eval/all/{keep_best}")
    best, resumed = BestStep(config), BestStep(config)
    rows = [{"step": step, f"eval/all/{keep_best}": value} for step, value in enumerate(values, 1)]
    for row in rows:
        best.record(row["step"], row)
    resumed.load_state(best.state(), rows)
    assert [each.is_exhausted(patience) for each in (best, resumed)] == [is_exhausted] * 2


def test_the_best_value_is_told_and_in_the_checkpoints_and_survives(run):
    name, values = "eval/all/accuracy", {1: 0.2, 2: 0.8, 3: 0.4}
    checkpoints = save(run, *values, metrics=values, keep_best=name)
    told = {"best/eval/all/accuracy": 0.8, "best/step": 2, "best/selected_by": "test"}
    assert checkpoints.best.record(3, {name: 0.4}) == told
    best = json.loads((run / "step_3" / "state.json").read_text())["best"]
    assert best == {"metric": name, "selected_by": "test", "step": 2, "value": 0.8}

    # The log says it to the next start; where it is lost, the checkpoint does.
    for is_there in (True, False):
        if not is_there:
            (run / "metrics.jsonl").unlink()
        with open_checkpoints(run, keep_best=name) as checkpoints:
            checkpoints.resume(blank_state())
        assert checkpoints.best.record(4, {name: 0.5}) == told
    with open_checkpoints(run, keep_best="eval/all/lm_loss") as checkpoints:
        checkpoints.resume(blank_state())
    assert checkpoints.best.record(4, {name: 0.5}) == {}, "another metric's best says nothing"


def test_a_value_in_the_log_that_is_no_number_is_ignored():
    best = BestStep(tiny_config(keep_best="exact_accuracy"))
    rows = [
        {"step": 1, "eval/a/exact_accuracy": "0.9"},
        {"step": 2, "eval/a/exact_accuracy": None, "eval/b/exact_accuracy": 0.4},
        {"step": 3, "eval/a/exact_accuracy": 0.5, "eval/b/exact_accuracy": 0.5, "eval/b/count": "x"},
    ]
    best.load_state(None, rows)
    assert best.state() == {"metric": "exact_accuracy", "selected_by": "test", "step": 3, "value": 0.5}


def test_an_unknown_metric_is_told_and_without_labels_no_count_is_advised(capsys):
    row = {"eval/all/arc/count": 0, "eval/all/arc/test_inputs": 0, "eval/all/arc/votes": 64}
    best = BestStep(tiny_config(keep_best="exact_accuracy"))
    assert best.record(1, {"train/lm_loss": 0.5}) == {}
    assert not capsys.readouterr().err
    assert best.record(1, row) == {}
    best.check(row | {"eval/all/arc/pass@2": 0.5})
    without, with_labels = capsys.readouterr().err.splitlines()
    assert without.endswith("is the best: the puzzles have no labels. Set keep_best=null.")
    assert "keep_best=exact_accuracy" in with_labels
    assert with_labels.endswith("Choose from arc/pass@2.")


def test_the_best_checkpoint_by_its_name(run):
    save(run, 1, 2, metrics={1: 0.8, 2: 0.4}, keep_best="eval/all/accuracy")
    log = run / "metrics.jsonl"
    with pytest.raises(ValueError, match="names no best checkpoint"):
        find_checkpoint(run / "best")
    row = {"step": 2, "best/accuracy": 0.8, "best/step": 1, "best/selected_by": "test"}
    log.write_text(log.read_text() + json.dumps(row) + '\n{"step": 3}\n{"step": 4, "tr')
    found = find_checkpoint(run / "best")
    assert (found.path, found.step, found.selected_by) == (run / "step_1", 1, "test")
    assert find_checkpoint(run).selected_by is None
    log.write_text(json.dumps(row | {"best/step": 7}) + "\n")
    with pytest.raises(ValueError, match="best checkpoint not found: .*step_7"):
        find_checkpoint(run / "best")


def test_which_values_of_a_metric_are_good_ones():
    goals = {
        "eval/all/exact_accuracy": "max",
        "eval/a.b/arc/pass@2": "max",
        "train/lm_loss": "min",
        "train/lr": None,
        "eval/all/act_steps": None,
        "best/selected_by": None,
    }
    assert {name: goal_of(name) for name in goals} == goals
