"""What an evaluation leaves behind: intervals, tables, scaling.json and its picture."""

import math
import re
from collections import Counter
from pathlib import Path

import pytest

from config.architecture import architectures
from config.compose import config_with
from config.programs import EvaluateConfig
from evaluation.intervals import wilson_interval
from evaluation.metric_tables import (
    independent_count,
    metrics_table,
    scaling_table,
    setting_metrics,
    summarize,
    with_intervals,
    written_value,
)
from evaluation.names import NAMES, written_name
from evaluation.passes import SetResult
from evaluation.results import all_metrics, remove_other_format, scaling_of, write_measured
from models import network_class
from report.compute import compute_picture
from runtime.writing import write_json
from tests.ranks import REPOSITORY


@pytest.mark.parametrize("count", [1, 2, 7, 400, 10**6])
def test_ends_are_where_the_score_test_just_rejects(count):
    """The definition: |share - p| = z * sqrt(p (1 - p) / count) at both ends."""
    for successes in {0, 1, count // 3, count - 1, count}:
        share = successes / count
        low, high = wilson_interval(share, count, z=2.5)
        assert 0 <= low <= share + 1e-15
        assert share - 1e-15 <= high <= 1
        for end in (low, high):
            distance = 2.5 * math.sqrt(end * (1 - end) / count)
            assert abs(share - end) == pytest.approx(distance, rel=1e-6, abs=1e-9)


def test_an_interval_has_no_interval():
    once = with_intervals(
        {"arc/pass@1": 0.5, "arc/pass@1@steps=2": 0.5, "accuracy": 0.5, "arc/count": 4, "count": 4}
    )
    assert once["arc/pass@1_low"] < 0.5 < once["arc/pass@1_high"]
    assert with_intervals(once) == once


@pytest.mark.parametrize(
    ("metric", "value", "text"),
    [
        ("arc/pass@2", 1.0, "1.000"),
        ("act_steps", 2.346, "2.35"),
        ("steps", 16.0, "16"),
        ("trained_on", 12345.0, "12,345"),
        ("lm_loss", 0.123456, "0.1235"),
    ],
)
def test_a_value_is_written_in_one_way(metric, value, text):
    assert written_value(metric, value) == text


@pytest.mark.parametrize(
    ("evaluator", "expected"),
    [("", 30), ("unseen/", 10), ("sudoku/", 30), ("unseen/sudoku/", 10), ("arc/", 8), ("none/", 0)],
)
def test_equal_puzzles_count_once_in_an_interval(evaluator, expected):
    counts = {"count": 300, "distinct_count": 30, "unseen/count": 100, "sudoku/count": 300, "arc/count": 8}
    counts |= {"unseen/sudoku/count": 100}
    assert independent_count(counts, evaluator) == expected


def test_what_other_options_left_is_removed_but_not_what_another_evaluation_left(tmp_path):
    data = [Path("data/a"), Path("data/b")]
    for name in ("metrics.json", "a/submission.json", "b/tasks.json", "c/submission.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    write_measured(tmp_path, {"test": "a", "samples": 8}, data, checkpoint="run/step_1")
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.json")}
    assert left == {"measured.json", "c/submission.json"}
    for test, step, is_kept in (("a", 1, True), ("a", 2, False), ("b", 2, False)):
        (tmp_path / "metrics.json").touch()
        write_measured(tmp_path, {"test": test, "samples": 8}, data, checkpoint=f"run/step_{step}")
        assert (tmp_path / "metrics.json").exists() == is_kept


def test_what_was_computed_in_another_dtype_is_removed(tmp_path):
    write_json(tmp_path / "metrics.json", {"all": {"forward_dtype": "bfloat16"}})
    (tmp_path / "all__outputs.npz").touch()
    for forward_dtype in ("bfloat16", "float32"):
        remove_other_format(tmp_path, [], forward_dtype, stored="float32")
        assert (tmp_path / "all__outputs.npz").exists() == (forward_dtype == "bfloat16")


def test_what_training_or_an_older_version_left_in_the_default_folder_is_kept(tmp_path):
    for before in (None, {"samples": 8}):
        if before:
            write_json(tmp_path / "measured.json", before)
        (tmp_path / "all__outputs.npz").touch()
        measured = {"test": "a"} | (before or {})
        write_measured(tmp_path, measured, [], checkpoint=None)
        assert (tmp_path / "all__outputs.npz").exists()
        write_measured(tmp_path, measured | {"test": "b"}, [], checkpoint=None)
        assert not (tmp_path / "all__outputs.npz").exists()
        (tmp_path / "measured.json").unlink()


def test_a_table_of_the_best_checkpoints_says_who_chose_them():
    result = SetResult({"exact_accuracy": 0.5, "count": 8}, [], {})
    runs = [all_metrics({"all": result}, selected_by=each) for each in ("test", "test")]
    assert runs[0]["all"]["selected_by"] == "test"
    assert "selected_by" not in all_metrics({"all": result})["all"]
    summary = summarize(runs)
    assert summary["all"]["selected_by"] == "test"
    for table in (metrics_table(runs[0], title="one"), metrics_table(summary, title="two")):
        assert ["selected", "on", "(selected_by)", "test"] in [line.split() for line in table.splitlines()]
    assert metrics_table(runs[0], title="").splitlines()[2].split()[:2] == ["solved", "(exact_accuracy)"]
    corner = {"accuracy@steps=2,samples=1": 0.5, "accuracy_low@steps=2,samples=1": 0.4}
    names = {"accuracy@steps=2,samples=1", "accuracy_deviation@steps=2,samples=1"}
    assert summarize([{"all": corner}, {"all": corner}])["all"].keys() == names
    counts = [{"all": {"count": 8, "arc/votes": votes, "trained_on": 2}} for votes in (8, 9)]
    assert summarize(counts)["all"] == {"count": 8, "arc/votes": 8.5, "trained_on": 2}
    mixed = [runs[0], all_metrics({"all": result}, selected_by="validation")]
    assert summarize(mixed)["all"]["selected_by"] == "test, validation"


def test_every_metric_has_a_written_name_that_the_docs_list():
    """The console, the tables, the report and the model card use it. metrics.json keeps the metric's name."""
    for arch in architectures():
        objective = network_class(arch).objective_class
        names = objective.metrics | objective.training_metrics
        assert [each for each in names if each not in NAMES and written_name(each) == each] == []
    page = (REPOSITORY / "docs/metrics.md").read_text()
    assert [
        (metric, name) for metric, name in NAMES.items() if f"| *{name}* | `{metric}` |" not in page
    ] == []
    for metric, name in {
        "q_halt_accuracy": "halting value right",
        "unseen/arc/pass@2": "pass@2 of unseen puzzles",
        "arc/outputs/pass@2": "pass@2 of test inputs",
        "exact_accuracy_after_step_3": "solved after step 3",
        "any_exact_accuracy@steps=4,samples=2": "solved by any@steps=4,samples=2",
        "sudoku/valid_accuracy": "valid",
        "sudoku/exact_accuracy": "solved, sudoku",
    }.items():
        assert written_name(metric) == name
        rows = metrics_table({"all": {metric: 0.5}}, title="").splitlines()
        assert rows[2].startswith(f"{name} ({metric})  ")


def _scaling(*, calls: int = 400, **exact: int) -> dict:
    scores = Counter()
    for steps, samples in ((4, 1), (16, 2)):
        for way, number in exact.items():
            scores |= {(steps, samples, way, "exact"): number, (steps, samples, way, "calls"): calls}
    counts = {"count": 50, "gigaflops_per_step": 0.5}
    sets = {"all": SetResult(counts, [], {}, scores), "without labels": SetResult({}, [], {})}
    config = config_with(EvaluateConfig, checkpoint="run", noise=0.3)
    return scaling_of(sets, config)


def test_shares_are_of_the_puzzles_with_a_label():
    scaling = _scaling(vote=30, any=40)
    assert scaling["noise"] == 0.3
    assert set(scaling["sets"]) == {"all"}
    first, second = scaling["sets"]["all"]["corners"]
    low, high = wilson_interval(0.6, 50)
    share = {"exact_accuracy": 0.6, "exact_accuracy_low": low, "exact_accuracy_high": high, "calls": 8.0}
    assert first["ways"]["vote"] == share
    assert (second["steps"], second["samples"], second["ways"]["any"]["exact_accuracy"]) == (16, 2, 0.8)
    metrics = setting_metrics(scaling)["all"]
    assert metrics["exact_accuracy@steps=16,samples=2"] == 0.6
    assert "exact_accuracy_low@steps=4,samples=1" in metrics
    assert "_low" not in metrics_table({"all": metrics}, title="")
    assert scaling_table(scaling).splitlines()[-1].split() == ["16", "2", "8", "4", "0.6000", "0.8000"]


def test_the_picture_has_a_panel_for_each_way_to_select():
    scores = {"vote": 30, "q_head": 20, "any": 40}
    picture = compute_picture(_scaling(**scores))
    assert re.findall('font-weight="600"[^>]*>([^<]*)<', picture) == ["vote", "q_head"]
    assert re.findall(">(- - )?([^<]*)</tspan>", picture)[:3] == [
        *(("", "1 sample"), ("", "2 samples"), ("- - ", "any of 2"))
    ]
    assert picture == compute_picture(_scaling(**scores))
