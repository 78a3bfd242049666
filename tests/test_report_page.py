"""The report of a run: the page holds the model's answers and names what is missing; nothing escapes."""

import base64
import dataclasses
import functools
import json
import re
import shutil
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from checkpointing.finding import find_checkpoint
from checkpointing.loading import load_trained_model
from dataset.files import IDENTIFIERS, open_dataset
from dataset.loader import Batch
from evaluation.intervals import wilson_interval
from evaluation.trace import record_trace
from models.trm import TRM
from report.__main__ import main
from report.compare import comparison_charts
from report.page import report_run
from report.page_content import learning_charts, page_values
from report.run import RunRecord, read_run
from report.table import build_table, group_runs, write_table
from report.trace import picture_data
from runtime.metrics_file import METRICS_FILE
from runtime.writing import write_json
from tests import refusals
from tests.refusals import cases, check
from tests.report_runs import random_traces, write_run

HOSTILE = "</script><img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def reported(tmp_path_factory, sudoku_folder) -> Path:
    """A run with its report."""
    run = write_run(tmp_path_factory.mktemp("reported") / "tiny", sudoku_folder)
    main([str(run)])
    return run


def unpacked(page: str) -> dict:
    packed = re.search(r'id="pictures">([^<]*)<', page)[1]
    return json.loads(zlib.decompress(base64.b64decode(packed)))


refusal = functools.partial(refusals.refusal, main, "report")


def test_the_page_holds_what_the_model_thinks(reported, sudoku_folder):
    content = unpacked((reported / "report.html").read_text())
    checkpoint, data = find_checkpoint(reported), open_dataset(sudoku_folder, read_everything=False)
    model, test = load_trained_model(checkpoint, data.metadata).eval(), data.splits["test"].sets["all"]
    columns = (test.inputs, test.labels, test.puzzle_identifiers, np.arange(100))
    batch = Batch(*(torch.from_numpy(column.astype(np.int32)) for column in columns))
    thoughts = record_trace(model, batch)

    assert sorted(puzzle["row"] for puzzle in content["puzzles"]) == list(range(100))
    assert (content["steps"], content["regions"]) == (4, [0, 0, 1, 1] * 2 + [2, 2, 3, 3] * 2)
    assert content["symbols"] == ["", "", *"1234"]
    assert content["clues"] == [2, 3, 4, 5]
    for puzzle in content["puzzles"]:
        row = puzzle["row"]
        assert puzzle["input"] == test.inputs[row].tolist()
        assert puzzle["label"] == test.labels[row].tolist()
        assert puzzle["answers"] == thoughts.preds[row].tolist()
        np.testing.assert_allclose(puzzle["confidences"], 100 * thoughts.confidence[row], atol=1.01)
        np.testing.assert_allclose(puzzle["rated"], 100 / (1 + np.exp(-thoughts.q_halt[row])), atol=0.51)
        halts = thoughts.wants_to_halt[row].any()
        assert puzzle["halts_at"] == (thoughts.halting_steps[row] if halts else None)
        assert (puzzle["stays_right_from"] is None) == (thoughts.preds[row, -1] != test.labels[row]).any()


def test_the_page_is_whole_and_small_and_asks_for_nothing(reported):
    page = (reported / "report.html").read_text()
    assert len(page.encode()) < 5_000_000
    assert "://" not in page
    assert not re.search(r'(src|href)="(?!#|data:)', page)
    told = ["tiny", "TRM on 4 \u00d7 4 Sudoku", "0.500", "20 s", "1,234", "2 cores of a test"]
    told += ["40 training steps, 5 PFLOP", "GFLOP per answer</dt><dd>10<", "c" * 12, "f" * 16]
    told += ["python pretrain.py lr=&lt;b&gt;1&lt;/b&gt;", "steps until halting</dt><dd>2.35<"]
    assert [text for text in told if text not in page] == []
    assert re.search(r"steps until halting</th>\s*<td[^>]*>2\.35<", page), (
        "the table rounds as the key numbers do"
    )
    assert "Missing from this report" not in page
    assert "Q head" not in page, "SE-RRM has none"
    titles = re.findall(r"<h3>([^<]*)</h3>", page)
    assert {"Loss", "Puzzles solved", "Thinking steps until halting", "Throughput", "Gradient norm"} <= set(
        titles
    )
    assert {"Accuracy over thinking steps", "Halting steps", "Calibration"} <= set(titles)
    pictures = "".join(re.findall(r"<svg.*?</svg>", page, re.DOTALL))
    assert not re.search(r'(fill|stroke): (?!none|var\(--)[^;"]', pictures)


def test_puzzles_of_a_plugin_that_is_not_imported_are_numbers(sudoku_folder, tmp_path, capsys):
    data = shutil.copytree(sudoku_folder, tmp_path / "data")
    manifest = json.loads((data / "manifest.json").read_text())
    manifest["builder"]["name"] = "mine"
    (data / "manifest.json").write_text(json.dumps(manifest))
    run = write_run(tmp_path / "run", data, plugins=["mine/board.py"])
    main([str(run), "--puzzles", "2"])
    assert "so tokens are shown as numbers." in (error := capsys.readouterr().err)
    assert error.endswith("add --plugin mine/board.py.\n")
    page = (run / "report.html").read_text()
    assert "TRM on data<" in page
    assert unpacked(page)["symbols"] == ["", *"12345"]


@pytest.mark.slow
def test_hostile_names_are_only_text(reported, sudoku_folder, tmp_path):
    run, data = shutil.copytree(reported, tmp_path / "run"), shutil.copytree(sudoku_folder, tmp_path / "data")
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config.replace("run_name: tiny", f"run_name: {json.dumps(HOSTILE)}"))
    for split in ("train", "test"):
        path = data / split / "dataset.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "num_puzzle_identifiers": 2}))
    (data / IDENTIFIERS).write_text(json.dumps([HOSTILE, "other"]))
    with (run / METRICS_FILE).open("a") as log:
        log.write(json.dumps({"step": 50, f"eval/{HOSTILE}/exact_accuracy": 0.1}) + "\n")
    main([str(run), "--data", str(data), "--puzzles", "7"])
    page = (run / "report.html").read_text()
    assert "<img" not in page
    assert page.count("</script>") == 2  # of the pictures and of the program
    assert "&lt;/script&gt;&lt;img" in page
    content = unpacked(page)
    assert [puzzle["name"] for puzzle in content["puzzles"]] == [HOSTILE] * 7
    main([str(run), str(reported), "--output", str(tmp_path / "both.html")])
    assert "<img" not in (tmp_path / "both.html").read_text()


def test_zeros_that_a_power_loss_leaves_in_the_log_are_no_error(tmp_path):
    (tmp_path / METRICS_FILE).write_bytes(b'{"step": 1}\n\0\0\0{"step": 2}\n\0\0\0')
    run = read_run(tmp_path)
    assert [row["step"] for row in run.rows] == [1, 2]
    assert run.warnings == [f"{tmp_path / 'config.yaml'} is missing"]


def test_a_log_alone_is_enough_and_the_page_says_what_is_missing(sudoku_folder, tmp_path, capsys):
    run = write_run(tmp_path / "bare", sudoku_folder, has_checkpoint=False)
    lines = (run / METRICS_FILE).read_text().splitlines()
    (run / METRICS_FILE).write_text("\n".join([lines[0], "nonsense", *lines[1:], '{"step": 50, "tr']))
    main([str(run)])
    page, told = (run / "report.html").read_text(), capsys.readouterr().err
    for text in (page, told):
        assert "no checkpoint step_&lt;N&gt; in" in text or "no checkpoint step_<N> in" in text
        assert "line 2: not a record of metrics. It is skipped." in text
    assert told.count("\n") == 2
    assert 'id="pictures"' not in page
    assert "Gradient norm" in page

    run = write_run(tmp_path / "moved", tmp_path / "data", has_checkpoint=False)
    (run / "config.yaml").unlink()
    (run / METRICS_FILE).write_text("")
    (run / "starts.jsonl").unlink()
    main([str(run), "--puzzles", "0"])
    page = (run / "report.html").read_text()
    for text in ("No metrics are logged", "No evaluation is", "command was not", "config.yaml is missing"):
        assert text in page


@cases("report command lines", "given")
def test_mistakes_are_one_line(reported, tmp_path, given, words):
    arguments = given.replace("RUN", str(reported)).replace("HERE", str(tmp_path))
    check(refusal(*arguments.split()), words)
    assert list(tmp_path.iterdir()) == []


def test_the_report_of_a_training_runs_on_its_device(sudoku_folder, tmp_path, monkeypatch):
    """With device=cpu, also on a machine with a GPU that the run must not use."""
    run = write_run(tmp_path / "run", sudoku_folder)
    monkeypatch.setattr("report.trace.choose_device", lambda _: pytest.fail("another device is chosen"))
    report_run(run, torch.device("cpu"))
    assert 'id="pictures"' in (run / "report.html").read_text()


def test_missing_packages_are_named(reported, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert "a report needs matplotlib. Run pip install matplotlib." in refusal(reported)


def test_runs_before_and_after_their_data_was_rebuilt_are_two_groups(sudoku_folder, tmp_path):
    folders = [write_run(tmp_path / f"run{seed}", sudoku_folder, seed=seed) for seed in range(3)]
    state = folders[2] / "step_40" / "state.json"
    write_json(state, json.loads(state.read_text()) | {"dataset_fingerprint": "0" * 64})
    groups = group_runs([read_run(folder) for folder in folders])
    assert [(group.label, len(group.runs)) for group in groups] == [
        ("data=ffffffff", 2),
        ("data=00000000", 1),
    ]
    main([*map(str, folders[1:]), "--output", str(tmp_path / "both.html")])
    assert "The runs use different data" in (tmp_path / "both.html").read_text()


@pytest.mark.slow
def test_runs_that_differ_only_in_their_seed_are_a_group(sudoku_folder, tmp_path):
    shares = {"a0": 0.4, "a1": 0.6, "b0": 0.9}
    folders = []
    for name, share in shares.items():
        keys = {"seed": int(name[1]), "lr": 0.01 if name[0] == "b" else 0.001, "accuracy": share}
        folders.append(write_run(tmp_path / name, sudoku_folder, has_checkpoint=False, **keys))
    groups = group_runs([read_run(folder) for folder in folders])
    assert [(group.label, len(group.runs)) for group in groups] == [("lr=0.001", 2), ("lr=0.01", 1)]
    table = build_table(groups)
    half = 12.706 * np.std([0.4, 0.6], ddof=1) / 2**0.5  # Student's t, one degree of freedom
    first, second = table.records
    assert (first["lr"], first["seeds"], first["p"]) == ("0.001", 2, None)
    assert first["solved"] == pytest.approx(0.5)
    assert (first["low"], first["high"]) == (max(0, 0.5 - half), min(1, 0.5 + half))
    assert (second["low"], second["high"]) == pytest.approx(wilson_interval(0.9, 100))
    assert second["p"] == pytest.approx(1 - 2 / np.pi * np.arctan(0.4 / (0.02 * 1.5) ** 0.5))
    assert table.rows[0][:4] == ["0.001", "2", "0.500 [0.000, 1.000]", ""]
    assert table.rows[1][:3] == ["0.01", "1", "0.900 [0.826, 0.945]"]

    for name, part in {
        "a.tex": "lr & seeds & solved & p & best",
        "a.csv": "lr,seeds,solved,low,high,p,best",
    }.items():
        write_table(folders, tmp_path / name)
        assert part in (tmp_path / name).read_text()
    file = tmp_path / "new" / "folder" / "a.md"
    main([*map(str, folders), "--output", str(tmp_path / "all.html"), "--table", str(file)])
    assert "| 0.01  | 1     | 0.900 [0.826, 0.945] |" in file.read_text()
    page = (tmp_path / "all.html").read_text()
    assert "://" not in page
    # Over examples a step counts 24 of them, over seconds half a one, over petaflops an eighth.
    for axis, last in {"training steps": 40, "examples": 960, "petaflops": 5, "seconds": 20}.items():
        part = page.split(f'data-over="{axis}"')[1].split("data-over")[0]
        assert f"lr=0.001 0.500 at {last} {axis}" in part
        assert f"lr=0.01 0.900 at {last} {axis}" in part


def test_a_log_of_huge_numbers_has_a_report(tmp_path):
    for value in (1e308, -1e308, 1e100, -1e100):
        metrics = dict.fromkeys(("train/step_seconds", "train/petaflops", "train/steps"), value)
        rows = [json.dumps({"step": step, **metrics}) + "\n" for step in (1, 2, 3)]
        (tmp_path / "metrics.jsonl").write_text("".join(rows))
        main([str(tmp_path), "--puzzles", "0", "--output", str(tmp_path / "page.html")])


def test_a_run_may_be_called_best(tmp_path):
    for name in ("best", "step_3"):
        (tmp_path / name).mkdir()
        (tmp_path / name / METRICS_FILE).write_text('{"step": 1, "train/lm_loss": 1.0}\n')
        main([str(tmp_path / name), "--puzzles", "0"])
        assert (tmp_path / name / "report.html").exists()


def test_a_log_of_impossible_accuracies_has_a_report(tmp_path):
    after_step = "exact_accuracy_after_step_"
    for number, metrics in enumerate([
        {f"{after_step}1": -0.5, "exact_accuracy": 1.5, "count": 10},
        {f"{after_step}1": 0.5, "exact_accuracy": -0.5, "count": -3},
        {f"{after_step}1": 0.5, "exact_accuracy": 0.5, "count": 1e308},
        {f"{after_step}007": 0.5, f"{after_step}{'9' * 400}": 0.5, f"{after_step}\u00b2": 0.5, "5": 0.5},
        {"unseen/exact_accuracy": 0.5, "unseen/count": 3, "count": 0, "distinct_count": 2},
    ]):  # fmt: skip
        run = tmp_path / f"run{number}"
        run.mkdir()
        row = {f"eval/all/{name}": value for name, value in metrics.items()}
        (run / METRICS_FILE).write_text(json.dumps({"step": 1, **row}) + "\n")
        main([str(run), "--puzzles", "0"])


def test_a_metric_of_one_network_is_drawn(tmp_path, sudoku_folder, monkeypatch):
    run = write_run(tmp_path / "run", sudoku_folder, has_checkpoint=False)
    log = run / METRICS_FILE
    log.write_text(log.read_text().replace('"train/steps"', '"train/struck": 5.0, "train/steps"'))
    plain = [chart.title for chart in learning_charts(read_run(run))]
    objective = TRM.objective_class
    monkeypatch.setattr(objective, "training_metrics", objective.training_metrics | {"struck": "slots"})
    assert {chart.title for chart in learning_charts(read_run(run))} - {*plain} == {"struck"}
    drawn = comparison_charts(group_runs([read_run(run)]), "training steps")
    assert "struck, training" in {chart.title for chart in drawn}


def test_a_puzzle_that_never_halts_and_a_step_without_a_log_row_are_named(sudoku_folder, tmp_path):
    traced = random_traces(n=3)
    wants = np.array([[False, True, False], [False] * 3, [False] * 3])
    traced = dataclasses.replace(traced, trace=traced.trace._replace(wants_to_halt=wants))
    halts = {puzzle["row"]: puzzle["halts_at"] for puzzle in picture_data(traced)["puzzles"]}
    assert halts == {0: 2, 1: None, 2: None}
    run = write_run(tmp_path / "run", sudoku_folder, has_checkpoint=False)
    (run / "status").write_text('{"status": "stopped", "step": 47}')
    values = page_values(read_run(run), traced)
    captions = [chart.caption for chart in values["thinking_charts"]]
    assert [text for text in captions if text.endswith("The last bar includes those that never halt: 1.")]
    meanings = {name: meaning for name, _, meaning in values["highlights"]}
    assert meanings["training time"].startswith("the first 40 of 47 training steps")
    assert meanings["steps until halting"] == "of at most 3. Never halting counts as 3"


def test_metrics_of_an_evaluator_have_charts(tmp_path):
    names = ("signs_obeyed", "valid_accuracy", "count", "exact_accuracy", "pass@2", "pass@100")
    of_all = {f"own/{name}": 0.5 for name in names} | {"unseen/own/valid_accuracy": 0.5, "accuracy": 0.5}
    row = {"step": 1} | {f"eval/all/{name}": value for name, value in of_all.items()}
    (tmp_path / METRICS_FILE).write_text(json.dumps(row))
    titles = {chart.title for chart in learning_charts(read_run(tmp_path))}
    assert titles == {"Cells right", "signs obeyed", "valid", "pass@2"}


def test_each_test_set_has_a_chart(tmp_path):
    for name, sets in (("first", {"easy": 0.9, "hard": 0.1}), ("second", {"hard": 0.3})):
        (tmp_path / name).mkdir()
        row = {f"eval/{set_name}/exact_accuracy": value for set_name, value in sets.items()}
        (tmp_path / name / METRICS_FILE).write_text(json.dumps({"step": 1, **row}) + "\n")
    groups = group_runs([read_run(tmp_path / name) for name in ("first", "second")])
    drawn = {chart.title: chart.legend for chart in comparison_charts(groups, "training steps")}
    first, second = ((group.label, group.role) for group in groups)
    expected = {"Puzzles solved, test, easy": [first], "Puzzles solved, test, hard": [first, second]}
    assert {title: [(name, role) for name, role in legend] for title, legend in drawn.items()} == expected


def test_a_model_without_finite_outputs_has_a_page():
    traced = random_traces(n=3)
    nan = {name: np.full_like(getattr(traced.trace, name), np.nan) for name in ("q_halt", "confidence")}
    traced = dataclasses.replace(traced, trace=traced.trace._replace(**nan))
    values = page_values(RunRecord(Path("run"), {}, [], [], {}, {}, None, None, []), traced)
    assert "Calibration" in {chart.title for chart in values["thinking_charts"]}
    shown = picture_data(traced)["puzzles"]
    assert {number for puzzle in shown for number in (*puzzle["rated"], *sum(puzzle["confidences"], []))} == {
        0
    }
