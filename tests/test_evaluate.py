"""evaluate.py on any number of processes and any batch size: the same metrics, the same rows."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.float64 import TOLERANCE
from tests.ranks import NUM_THREADS, Finished, complete_program, run_program
from tests.tiny import OVERRIDES

pytestmark = pytest.mark.slow

_SAVED = "save_outputs=[preds,logits,q_halt_logits,q_continue_logits,inputs,labels,puzzle_identifiers]"


def _evaluate(folder: Path, *arguments: str, world_size: int = 1) -> Finished:
    """In float64, as `trained` was: rounding changes with the batch, and may not decide an answer."""
    words = (*arguments, "device=cpu", f"cpu_threads={NUM_THREADS}")
    return complete_program("evaluate", *words, folder=folder, world_size=world_size, is_float64=True)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, sudoku_folder) -> Path:
    """A run of two processes, with its own evaluation logged; its data_path is relative."""
    folder = tmp_path_factory.mktemp("trained")
    shutil.copytree(sudoku_folder, folder / "data" / "sudoku")
    words = ("data_path=data/sudoku", *OVERRIDES, "max_steps=20", "checkpoint_path=run")
    complete_program("pretrain", *words, "save_outputs=[preds]", folder=folder, world_size=2, is_float64=True)
    return folder / "run"


@pytest.fixture(scope="module")
def expected(trained) -> tuple[dict, dict]:
    """Metrics and outputs of one process with the default batch."""
    finished = _evaluate(trained.parent, "checkpoint=run", _SAVED)
    output = trained / "evaluation" / "step_20"
    assert "exact_accuracy" in finished.stdout
    return json.loads((output / "metrics.json").read_text()), dict(np.load(output / "all__outputs.npz"))


def test_metrics_are_those_that_training_logged(trained, expected):
    logged = json.loads((trained / "metrics.jsonl").read_text().splitlines()[-1])
    metrics = expected[0]["all"]
    names = {"accuracy", "exact_accuracy", "q_halt_accuracy", "steps", "lm_loss", "q_halt_loss", "count"}
    names |= {"act_exact_accuracy", "act_steps"}
    after_steps = {f"exact_accuracy_after_step_{step}" for step in (1, 2, 3, 4)}
    accuracies = {"accuracy", "exact_accuracy", "q_halt_accuracy", "act_exact_accuracy"}
    intervals = {f"{name}_{end}" for name in accuracies for end in ("low", "high")}
    assert {name for name in metrics if "after_step" not in name} == names | intervals
    assert {name for name in metrics if re.fullmatch(r".*_after_step_\d", name)} == after_steps
    for name in accuracies:
        assert metrics[f"{name}_low"] <= metrics[name] <= metrics[f"{name}_high"]
    for name in names:
        assert metrics[name] == pytest.approx(logged[f"eval/all/{name}"], rel=TOLERANCE)
    assert metrics["count"] == 100
    assert metrics["exact_accuracy_after_step_4"] == pytest.approx(metrics["exact_accuracy"])


def test_outputs_are_the_real_rows_in_dataset_order(trained, expected):
    outputs = expected[1]
    test = trained.parent / "data" / "sudoku" / "test"
    assert np.array_equal(outputs["inputs"], np.load(test / "all__inputs.npy"))
    assert np.array_equal(outputs["labels"], np.load(test / "all__labels.npy"))
    assert np.array_equal(outputs["preds"], outputs["logits"].argmax(-1))
    accuracy = (outputs["preds"] == outputs["labels"]).mean(-1).mean()
    assert expected[0]["all"]["accuracy"] == pytest.approx(accuracy)


def test_processes_and_batch_size_change_nothing(trained, expected, tmp_path):
    words = ("checkpoint=run/step_20", _SAVED, "eval_batch_size=7", f"output_dir={tmp_path / 'out'}")
    _evaluate(trained.parent, *words, world_size=3)
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())["all"]
    for name, value in expected[0]["all"].items():
        assert metrics[name] == pytest.approx(value, rel=TOLERANCE, abs=TOLERANCE), name
    with np.load(tmp_path / "out" / "all__outputs.npz") as outputs:
        assert set(outputs.files) == set(expected[1])
        for name, value in expected[1].items():
            np.testing.assert_allclose(outputs[name], value, rtol=TOLERANCE, atol=TOLERANCE, err_msg=name)


def test_data_is_found_from_the_configs_folder_and_can_be_given(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    shutil.copytree(trained.parent / "data", tmp_path / "run" / "data")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    _evaluate(elsewhere, f"checkpoint={tmp_path / 'run'}")
    assert (tmp_path / "run" / "evaluation" / "step_20" / "metrics.json").is_file()
    _evaluate(
        elsewhere, f"checkpoint={trained}", f"data_path={trained.parent / 'data' / 'sudoku'}", "output_dir=o"
    )
    assert (elsewhere / "o" / "metrics.json").is_file()


def test_rows_without_labels_count_nowhere_but_have_predictions(trained, tmp_path):
    data = shutil.copytree(trained.parent / "data" / "sudoku", tmp_path / "data")
    shutil.rmtree(data / "train")  # the test split is enough
    labels = np.load(data / "test" / "all__labels.npy")
    labels[10:] = 0  # the dataset's ignore_label_id
    np.save(data / "test" / "all__labels.npy", labels)
    arguments = (f"checkpoint={trained}", "data_path=data", "output_dir=out", "save_outputs=[preds]")
    _evaluate(tmp_path, *arguments, world_size=2)
    assert json.loads((tmp_path / "out" / "metrics.json").read_text())["all"]["count"] == 10
    assert len(np.load(tmp_path / "out" / "all__outputs.npz")["preds"]) == 100
    labels[:] = 0
    np.save(data / "test" / "all__labels.npy", labels)
    _evaluate(tmp_path, *arguments, world_size=2)
    assert json.loads((tmp_path / "out" / "metrics.json").read_text())["all"] == {"count": 0}, (
        "no count to divide by: nothing is reported, and nothing fails"
    )


def test_checkpoints_with_one_folder_for_their_results_are_refused(trained, tmp_path):
    for name in ("a", "b"):
        shutil.copytree(trained, tmp_path / name / "run")
    one, twin, twice = "a/run/step_20", "b/run/step_20", tmp_path / "a" / "run" / "evaluation" / "step_20"
    for arguments, both, folder in (
        (["checkpoint=[a/run,b/run]", "output_dir=out"], (one, twin), "out/run_step_20"),
        (["checkpoint=[a/run,a/run/step_20]"], (one, one), twice),
    ):
        finished = run_program("evaluate", *arguments, folder=tmp_path, world_size=2)
        assert finished.statuses == [1, 1]
        (line,) = finished.error_lines
        assert f"{' and '.join(both)} would both have their results in {folder}: leave one out" in line
        assert finished.stdout == "", "refused before anything is evaluated"
    assert not (tmp_path / "out").exists()


def test_a_report_is_written_once_by_rank_0(trained, tmp_path):
    run = shutil.copytree(trained, tmp_path / "run")
    folder = trained.parent  # whose data the config names
    finished = _evaluate(
        folder, f"checkpoint={run}", f"data_path={folder}/data/sudoku", "report=true", world_size=2
    )
    page = (run / "report.html").read_text()
    assert finished.stdout.count(f"wrote {run / 'report.html'}") == 1
    metrics = json.loads((run / "evaluation" / "step_20" / "metrics.json").read_text())["all"]
    assert f"{metrics['accuracy']:.3f}" in page
    [start] = [json.loads(line) for line in (run / "starts.jsonl").read_text().splitlines()]
    assert (start["step"], start["processes"], start["num_parameters"] > 0) == (0, 2, True)
    assert start["command"].endswith(
        "pretrain.py data_path=data/sudoku "
        + " ".join([*OVERRIDES, "max_steps=20", "checkpoint_path=run", "'save_outputs=[preds]'"])
    )
    for text in (start["hardware"], (start["git_commit"] or "not recorded")[:12]):
        assert text in page
