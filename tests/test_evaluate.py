"""evaluate.py on any number of processes and any batch size: the same metrics, rows and files."""

import fcntl
import functools
import itertools
import json
import os
import re
import select
import shutil
import struct
import sys
import termios
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from checkpointing.finding import Checkpoint
from dataset.mixture import fingerprint_of
from report.run import read_run
from tests.checkpoints import save_on
from tests.float64 import TOLERANCE
from tests.ranks import NUM_THREADS, Finished, complete_program, run_program, start_program
from tests.sudoku_source import build_sets
from tests.tiny import OVERRIDES, assert_same_row

pytestmark = pytest.mark.slow

_TRAINED = (*OVERRIDES, "max_steps=20", "checkpoint_path=run", "save_outputs=[preds]", "evaluators=[sudoku]")
_GRID = ("halt_max_steps=[2,6]", "samples=[1,3]", "noise=0.5", "evaluators=[sudoku]")
_SELECTS = "select=[vote,q_head,rules]"
_TESTS = 40  # puzzles
_PASSES = {f"arc/pass@{number}" for number in (1, 2, 5, 10, 100, 1000)}
_SAVED = "save_outputs=[preds,logits,q_halt_logits,q_continue_logits,inputs,labels,puzzle_identifiers]"


def _evaluate(folder: Path, *arguments: str, **options: Any) -> Finished:
    """In float64, as `trained` was: rounding changes with the batch, and may not decide an answer."""
    words = (*arguments, "device=cpu", f"cpu_threads={NUM_THREADS}")
    return complete_program("evaluate", *words, folder=folder, is_float64=True, **options)


def _metrics(folder: Path) -> dict[str, float]:
    return json.loads((folder / "metrics.json").read_text())["all"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A run of two processes, with its own evaluation logged; its data_path is relative."""
    folder = tmp_path_factory.mktemp("trained")
    build_sets("sudoku", folder / "data" / "sudoku", "--generate", 200, "--num-test", _TESTS, "--box", "2x2")
    words = ("data_path=data/sudoku", *_TRAINED)
    complete_program("pretrain", *words, folder=folder, world_size=2, is_float64=True)
    return folder / "run"


_RESULTS = shutil.ignore_patterns("evaluation")  # of other tests


@pytest.fixture(scope="module")
def expected(trained) -> tuple[dict, dict]:
    """Metrics and outputs of one process with the default batch."""
    finished = _evaluate(trained.parent, "checkpoint=run", "evaluators=[sudoku]", _SAVED)
    output = trained / "evaluation" / "step_20"
    assert "exact_accuracy" in finished.stdout
    return _metrics(output), dict(np.load(output / "all__outputs.npz"))


def test_metrics_are_those_that_training_logged(trained, expected):
    logged = json.loads((trained / "metrics.jsonl").read_text().splitlines()[-1])
    metrics = expected[0]
    names = {"accuracy", "exact_accuracy", "q_halt_accuracy", "steps", "lm_loss", "q_halt_loss", "count"}
    names |= {
        "act_exact_accuracy",
        "act_steps",
        "sudoku/count",
        "distinct_count",
        "trained_on",
        "trained_on_rate",
    }
    after_steps = {f"exact_accuracy_after_step_{step}" for step in (1, 2, 3, 4)}
    accuracies = {"accuracy", "exact_accuracy", "q_halt_accuracy", "act_exact_accuracy"}
    accuracies |= {"sudoku/valid_accuracy", "sudoku/exact_accuracy"}
    intervals = {f"{name}_{end}" for name in accuracies for end in ("low", "high")}
    others = {"forward_dtype"}
    assert {name for name in metrics if "after_step" not in name} == names | accuracies | intervals | others
    assert metrics["forward_dtype"] == "float32"
    assert {name for name in metrics if re.fullmatch(r".*_after_step_\d", name)} == after_steps
    for name in accuracies:
        assert metrics[f"{name}_low"] <= metrics[name] <= metrics[f"{name}_high"]
    for name in names | accuracies:
        assert metrics[name] == pytest.approx(logged[f"eval/all/{name}"], rel=TOLERANCE)
    assert metrics["count"] == _TESTS
    assert metrics["exact_accuracy_after_step_4"] == pytest.approx(metrics["exact_accuracy"])


def _show_on(terminal: str) -> None:
    """Makes a terminal the stderr of this process."""
    os.dup2(os.open(terminal, os.O_WRONLY | os.O_NOCTTY), 2)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)


def test_a_terminal_shows_how_far_it_is_and_how_good(trained, tmp_path):
    ours, its = os.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("4H", 24, 100, 0, 0))  # rows and columns
    words = ("checkpoint=run", f"output_dir={tmp_path}", "eval_batch_size=1", "halt_max_steps=400")
    options = {"folder": trained.parent, "spoil": functools.partial(_show_on, os.ttyname(its))}
    process = start_program("evaluate", *words, "device=cpu", "compile=false", "cpu_threads=1", **options)
    shown = b""
    bar = re.compile(rb"evaluating all \d+ of %d \|.* left, solved [01]\.\d+  cells right [01]" % _TESTS)
    while not bar.search(shown):
        if select.select([ours], [], [], 1)[0]:
            shown += os.read(ours, 1 << 16)
        else:
            assert process.is_alive(), shown
    process.terminate()
    process.join()
    for each in (ours, its):
        os.close(each)


def test_other_data_and_options_have_folders_of_their_own(trained, expected):
    own, data = trained / "evaluation" / "step_20", trained.parent / "data"
    shutil.copytree(data / "sudoku", data / "other")
    for words, measured in (
        (["halting=act"], {"halting": "act"}),
        (["data_path=data/other"], {"data": [str(data / "other")]}),
        (["data_path=data/sudoku"], {}),
    ):
        finished = _evaluate(trained.parent, "checkpoint=run", *words)
        folder = trained.parent / finished.stdout.splitlines()[-1].removeprefix("wrote ")
        written = json.loads((folder / "measured.json").read_text())
        assert written.pop("test") == fingerprint_of([data / "sudoku"], ("test",))
        assert written == measured
        assert (folder == own) == (not measured)
    assert len(list(own.parent.glob("step_20*"))) == 3
    assert read_run(trained).evaluation == json.loads((own / "metrics.json").read_text())


def test_results_of_a_test_split_that_was_rebuilt_are_not_mixed(trained, expected, tmp_path):
    """Of the same size too, in the default folder, in output_dir, and in a mean."""
    shutil.copytree(trained.parent, tmp_path / "copy", ignore=_RESULTS)
    run, data = tmp_path / "copy" / "run", tmp_path / "copy" / "data" / "sudoku"
    evaluate = functools.partial(_evaluate, run.parent, "checkpoint=run")
    saved = ("output_dir=out", "save_outputs=[preds]", "halting=act")
    assert evaluate().stderr == evaluate(*saved).stderr == ""
    own = run / "evaluation" / "step_20"
    before = {path.name: path.read_bytes() for path in own.iterdir()}
    results = read_run(run).evaluation
    build_sets("sudoku", data, "--generate", 200, "--num-test", _TESTS, "--box", "2x2", "--seed", 5)

    assert "built again after" in evaluate().stderr
    assert {path.name: path.read_bytes() for path in own.iterdir()} == before
    (other,) = set(own.parent.iterdir()) - {own}
    assert json.loads((other / "measured.json").read_text())["data"] == [str(data)]
    assert _metrics(other) != _metrics(own)
    assert read_run(run).evaluation == results
    assert "are from other data than the log" in read_run(run, evaluation=other).warnings[-1]
    evaluate(saved[0], saved[2])
    assert not (run.parent / "out" / "all__outputs.npz").exists()

    finished = _evaluate(tmp_path, f"checkpoint=[{trained},{run}]")
    assert "evaluated on 2 different test splits. Set data_path" in finished.stderr
    assert "mean and standard deviation" not in finished.stdout


def test_outputs_are_the_real_rows_in_dataset_order(trained, expected):
    outputs = expected[1]
    test = trained.parent / "data" / "sudoku" / "test"
    assert np.array_equal(outputs["inputs"], np.load(test / "all__inputs.npy"))
    assert np.array_equal(outputs["labels"], np.load(test / "all__labels.npy"))
    assert np.array_equal(outputs["preds"], outputs["logits"].argmax(-1))
    accuracy = (outputs["preds"] == outputs["labels"]).mean(-1).mean()
    assert expected[0]["accuracy"] == pytest.approx(accuracy)


def test_processes_and_batch_size_change_nothing(trained, expected, tmp_path):
    words = ("checkpoint=run/step_20", "evaluators=[sudoku]", _SAVED, f"output_dir={tmp_path / 'out'}")
    _evaluate(trained.parent, *words, "eval_batch_size=7", world_size=3)
    metrics = _metrics(tmp_path / "out")
    assert_same_row(metrics, expected[0], tolerance=TOLERANCE)
    with np.load(tmp_path / "out" / "all__outputs.npz") as outputs:
        assert set(outputs.files) == set(expected[1])
        for name, value in expected[1].items():
            np.testing.assert_allclose(outputs[name], value, rtol=TOLERANCE, atol=TOLERANCE, err_msg=name)


def test_data_is_found_from_the_configs_folder(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "run", ignore=_RESULTS)
    shutil.copytree(trained.parent / "data", tmp_path / "run" / "data")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    labels = next((tmp_path / "run" / "data" / "sudoku" / "train").glob("*__labels.npy"))
    np.save(labels, np.load(labels)[::-1])
    assert "sudoku: built again after " in _evaluate(elsewhere, f"checkpoint={tmp_path / 'run'}").stderr
    assert (tmp_path / "run" / "evaluation" / "step_20" / "metrics.json").is_file()


def test_rows_without_labels_count_nowhere_but_have_predictions(trained, tmp_path):
    data = shutil.copytree(trained.parent / "data" / "sudoku", tmp_path / "data")
    shutil.rmtree(data / "train")  # the test split is enough
    labels = np.load(data / "test" / "all__labels.npy")
    labels[10:] = 0  # the dataset's ignore_label_id
    np.save(data / "test" / "all__labels.npy", labels)
    arguments = (f"checkpoint={trained}", "data_path=data", "output_dir=out", "save_outputs=[preds]")
    _evaluate(tmp_path, *arguments, world_size=2)
    assert _metrics(tmp_path / "out")["count"] == 10
    assert len(np.load(tmp_path / "out" / "all__outputs.npz")["preds"]) == _TESTS
    labels[:] = 0
    np.save(data / "test" / "all__labels.npy", labels)
    _evaluate(tmp_path, *arguments)
    metrics = _metrics(tmp_path / "out")
    assert metrics == {"count": 0, "forward_dtype": "float32"}, "no count to divide by: nothing fails"


def test_checkpoints_with_one_folder_for_their_results_are_refused(trained, tmp_path):
    shutil.copytree(trained.parent / "data", tmp_path / "data")
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
        assert f"{' and '.join(both)} would both write their results into {folder}. Remove one" in line
        assert finished.stdout == "", "refused before anything is evaluated"
    assert not (tmp_path / "out").exists()


def test_a_report_is_written_once_by_rank_0(trained, tmp_path):
    run = shutil.copytree(trained, tmp_path / "run", ignore=_RESULTS)
    folder = trained.parent  # whose data the config names
    finished = _evaluate(
        folder, f"checkpoint={run}", f"data_path={folder}/data/sudoku", "report=true", world_size=2
    )
    assert "built anew" not in finished.stderr
    page = (run / "report.html").read_text()
    assert finished.stdout.count(f"wrote {run / 'report.html'}") == 1
    metrics = _metrics(run / "evaluation" / "step_20")
    assert f"{metrics['accuracy']:.3f}" in page
    [start] = [json.loads(line) for line in (run / "starts.jsonl").read_text().splitlines()]
    assert (start["step"], start["processes"], start["num_parameters"] > 0) == (0, 2, True)
    assert start["command"].endswith(
        "pretrain.py data_path=data/sudoku "
        + " ".join(f"'{word}'" if "[" in word else word for word in _TRAINED)
    )
    for text in (start["hardware"], (start["git_commit"] or "not recorded")[:12]):
        assert text in page


@pytest.mark.slow
def test_different_models_have_no_mean(sudoku_folder, tmp_path):
    for name in ("hrm", "trm"):
        save_on(sudoku_folder, tmp_path / name, name=name, H_cycles=1, L_cycles=1)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "summary.json").touch()  # of an earlier evaluation
    words = ("checkpoint=[hrm,trm]", "device=cpu", "output_dir=out")
    finished = complete_program("evaluate", *words, folder=tmp_path)
    assert "no mean is computed, because the models differ: hrm, trm" in finished.stderr
    assert "mean and standard deviation" not in finished.stdout
    assert not (tmp_path / "out" / "summary.json").exists()


@pytest.mark.long
def test_grids_of_several_checkpoints_have_equal_bytes_on_any_number_of_processes(trained, tmp_path):
    words = ("checkpoint=[run/step_16,run/step_20]", *_GRID, _SELECTS)
    for folder, more, world_size in (("alone", "seed=0", 1), ("shared", "eval_batch_size=10", 3)):
        output = tmp_path / folder
        finished = _evaluate(trained.parent, *words, more, f"output_dir={output}", world_size=world_size)
    assert "mean and standard deviation of 2 checkpoints" in finished.stdout
    for step, name in itertools.product((16, 20), ("scaling.json", "scaling.svg")):
        ours, theirs = (tmp_path / folder / f"run_step_{step}" / name for folder in ("alone", "shared"))
        assert ours.read_bytes() == theirs.read_bytes(), ours
    names = {"measured.json", "metrics.json", "scaling.json", "scaling.svg"}
    assert {path.name for path in ours.parent.iterdir()} == names
    before, metrics = (_metrics(tmp_path / "alone" / f"run_step_{step}") for step in (16, 20))
    summary = json.loads((tmp_path / "shared" / "summary.json").read_text())["sets"]["all"]
    values = before["accuracy"], metrics["accuracy"]
    assert summary["accuracy"] == pytest.approx(sum(values) / 2)
    assert summary["accuracy_deviation"] == pytest.approx(abs(values[0] - values[1]) / 2**0.5)
    assert summary["count"] == _TESTS
    assert "exact_accuracy_deviation@steps=6,samples=3" in summary
    assert not [name for name in summary if "_low" in name]
    largest = "@steps=6,samples=3"
    for name in ("exact_accuracy", "valid_accuracy", "calls", "any_exact_accuracy", "exact_accuracy_low"):
        assert name + largest in metrics
    assert f"exact_accuracy{largest},select=q_head" in metrics
    assert "valid_accuracy@steps=2,samples=1,select=rules" in metrics
    assert metrics[f"exact_accuracy{largest}"] == pytest.approx(metrics["exact_accuracy"])
    assert metrics[f"valid_accuracy{largest}"] == pytest.approx(metrics["sudoku/valid_accuracy"])
    assert metrics[f"calls{largest}"] == 18
    assert not [name for name in metrics if "after_step" in name or name.startswith("act_")]


def test_arc_votes_are_logged_and_submitted(tmp_path):
    """On tiny tasks, and with few cycles."""
    build_sets("arc", tmp_path / "data", "--generate", 5, "--num-aug", 2, "--max-size", 8)
    words = (*OVERRIDES, "data_path=data", "eval_interval=null", "epochs=2", "arch.halt_max_steps=2")
    words += ("checkpoint_path=run", "evaluators=[arc]", "arch.H_cycles=1", "arch.L_cycles=1")
    complete_program("pretrain", *words, folder=tmp_path, world_size=2, is_float64=True)
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert {f"eval/all/{name}" for name in (*_PASSES, "arc/count")} <= line.keys()
    assert line["eval/all/arc/count"] == 5
    left = tmp_path / "run" / "evaluation" / f"step_{line['step']}"
    submission = json.loads((left / "submission.json").read_text())
    assert len(submission) == 5
    assert all({"attempt_1", "attempt_2"} == set(attempt) for task in submission.values() for attempt in task)

    words = ("checkpoint=run", "evaluators=[arc]")
    _evaluate(tmp_path, *words, "output_dir=alone")
    evaluated = _metrics(tmp_path / "alone")
    for name in _PASSES:
        assert evaluated[name] == pytest.approx(line[f"eval/all/{name}"])
        assert evaluated[f"{name}_low"] <= evaluated[name] <= evaluated[f"{name}_high"]
    assert (tmp_path / "alone" / "submission.json").read_bytes() == (left / "submission.json").read_bytes()


def test_data_is_found_from_any_working_folder(tmp_path):
    """A run in checkpoints/<project>/<run> was started two folders above."""
    (tmp_path / "data" / "x" / "test").mkdir(parents=True)
    (tmp_path / "data" / "x" / "test" / "dataset.json").touch()
    run = SimpleNamespace(data_paths=["data/x", "y"], run_folder=tmp_path / "checkpoints" / "p" / "r")
    assert Checkpoint.find_data(run) == [tmp_path / "data" / "x", Path("y")]
