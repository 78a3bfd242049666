"""What a grid leaves behind: scaling.json, its picture, and names in metrics.json; by the real program."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from config.compose import config_with
from config.schema import EvaluateConfig
from evaluation.passes import SetResult
from evaluation.results import metrics_table, scaling_of, scaling_table, setting_metrics, wilson_interval
from report.compute import compute_picture
from tests.ranks import Finished, complete_program
from tests.tiny import OVERRIDES

_GRID = ("halt_max_steps=[2,6]", "samples=[1,3]", "noise=0.5", "evaluators=[sudoku]")
_SELECTS = "select=[vote,q_head,rules]"


def _run(folder: Path, name: str, *arguments: str, world_size: int = 1) -> Finished:
    return complete_program(name, *arguments, folder=folder, world_size=world_size, is_float64=True)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, sudoku_folder) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    options = (*OVERRIDES, f"data_path={sudoku_folder}", "max_steps=8", "checkpoint_path=run")
    _run(folder, "pretrain", *options)
    _run(folder, "evaluate", "checkpoint=run", *_GRID, _SELECTS, "device=cpu", "output_dir=alone")
    return folder


@pytest.mark.slow
def test_metrics_have_the_corners_names(trained):
    metrics = json.loads((trained / "alone" / "metrics.json").read_text())["all"]
    largest = "@steps=6,samples=3"
    for name in ("exact_accuracy", "valid_accuracy", "calls", "any_exact_accuracy", "exact_accuracy_low"):
        assert name + largest in metrics
    assert f"exact_accuracy{largest},select=q_head" in metrics
    assert "valid_accuracy@steps=2,samples=1,select=rules" in metrics
    assert metrics[f"exact_accuracy{largest}"] == pytest.approx(metrics["exact_accuracy"])
    assert metrics[f"valid_accuracy{largest}"] == pytest.approx(metrics["sudoku/valid_accuracy"])
    assert metrics[f"calls{largest}"] == 18
    assert not [name for name in metrics if "after_step" in name or name.startswith("act_")]
    _run(trained, "evaluate", "checkpoint=run", "device=cpu", "output_dir=plain")
    assert "@" not in (trained / "plain" / "metrics.json").read_text()
    assert {path.name for path in (trained / "plain").iterdir()} == {"metrics.json"}


@pytest.mark.slow
def test_equal_bytes_on_any_number_of_processes(trained, tmp_path):
    options = (*_GRID, _SELECTS, "device=cpu", f"output_dir={tmp_path}", "eval_batch_size=10")
    _run(trained, "evaluate", "checkpoint=run", *options, world_size=3)
    for name in ("scaling.json", "scaling.svg"):
        assert (tmp_path / name).read_bytes() == (trained / "alone" / name).read_bytes(), name


# ---------------------------------------------------------------------------------------------------- content


def _scaling(*, calls: int = 400, **exact: int) -> dict:
    scores = Counter()
    for steps, samples in ((4, 1), (16, 2)):
        for way, number in exact.items():
            scores |= {(steps, samples, way, "exact"): number, (steps, samples, way, "calls"): calls}
    sets = {"all": SetResult({"count": 50}, [], {}, scores), "without labels": SetResult({}, [], {})}
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
    assert scaling_table(scaling).splitlines()[-1].split() == ["16", "2", "8", "0.6000", "0.8000"]


def test_the_picture_has_a_panel_for_each_way_to_select():
    scores = {"vote": 30, "q_head": 20, "any": 40}
    picture = compute_picture(_scaling(**scores))
    assert re.findall('font-weight="600"[^>]*>([^<]*)<', picture) == ["vote", "q_head"]
    assert re.findall(">(- - )?([^<]*)</tspan>", picture)[:3] == [
        *(("", "1 sample"), ("", "2 samples"), ("- - ", "any of 2"))
    ]
    assert picture == compute_picture(_scaling(**scores))
