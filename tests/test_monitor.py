"""Rows of metrics: metrics.jsonl and the loggers, and what happens where one of them fails."""

import csv
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import time
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import training.console
import training.loggers
from config.files import FOLDER
from runtime import plugins
from runtime.metrics_file import cut_back_rows, read_rows
from tests.ranks import complete_program
from tests.tiny import OVERRIDES, tiny_config
from training.loggers import PICTURES, LoggedRun, Loggers, find_loggers
from training.monitor import Monitor


@pytest.fixture
def loggers(tmp_path):
    """Loggers without W&B."""
    config = tiny_config(checkpoint_path=str(tmp_path), project_name="p", run_name="r")
    opened = Loggers(LoggedRun(config, range(0, 10)))
    yield opened
    opened.close()


def test_a_failing_logger_is_one_warning_and_ends_nothing(loggers, tmp_path, capsys):
    class Broken:
        name = "the broken one"

        def __getattr__(self, name):
            raise OSError(f"disk full in {name}")

    loggers._all.insert(0, Broken())
    for step in (1, 2, 3):
        loggers.log(step, {"train/lm_loss": 0.5})
        loggers.step_done()
    loggers.close()
    (warning,) = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    assert "the broken one" in warning
    assert "disk full" in warning
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3


def test_rows_that_no_disk_has_room_for_are_two_warnings(loggers, tmp_path, capsys):
    loggers.log(1, {"train/lm_loss": 0.5})
    size, (_, hard) = (tmp_path / "metrics.jsonl").stat().st_size, resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 3, hard))
    try:
        for step in (2, 3):
            loggers.log(step, {"train/lm_loss": 0.5})
        loggers.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    warnings = [line for line in capsys.readouterr().err.splitlines() if "metrics.jsonl failed" in line]
    assert [re.sub(r".*\). ", "", line) for line in warnings] == [
        "Training continues. The rows are written later, if possible.",
        "The last rows are missing in the file.",
    ]
    assert [values["step"] for values, _ in read_rows(tmp_path)] == [1]


def test_the_last_line_of_progress_appears_once_and_names_an_evaluation(loggers, capsys):
    bar = loggers._all[1]._bar
    bar.mininterval = 0
    for _ in range(9):
        loggers.step_done()
    loggers.set_activity("evaluating")
    loggers.step_done()
    loggers.set_activity("training")
    loggers.close()
    *_, last = (line.partition(" in ")[0] for line in capsys.readouterr().err.splitlines())
    assert last == "evaluating: 10 of 10 steps"


def test_a_line_says_when_the_run_ends(loggers, capsys, monkeypatch):
    monkeypatch.setattr(training.console, "_FORECAST_SECONDS", 0)
    for _ in range(3):
        loggers.step_done()
    (line,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"about 1 min of training remain, until \d{4}-.*", line)
    training.console._show_end(2 * 3600)
    assert capsys.readouterr().err.startswith("about 2 h 0 min of training remain")
    training.console._show_end(100 * 86400)
    line = capsys.readouterr().err
    assert "takes about 100 more days on this machine. Training continues. Smaller experiments: " in line
    training.console._show_end(1e12)  # later than the last year of datetime
    assert "takes about 11,574,074 more days" in capsys.readouterr().err
    names = re.findall(r"experiment=(\w+)", line)
    assert all((FOLDER / f"experiment/{name}.yaml").is_file() for name in names)


def test_the_clock_of_the_estimate_starts_after_slow_loggers(tmp_path, monkeypatch):
    """W&B may take a minute."""

    class Slow:
        name = "slow"

        def __init__(self, _):
            Slow.ready = time.monotonic()

    monkeypatch.setattr(training.loggers, "find_loggers", lambda _: [Slow])
    loggers = Loggers(_logged_run(tmp_path))
    assert [logger.name for logger in loggers._all] == ["metrics.jsonl", "the progress bar", "slow"]
    assert loggers._all[1]._began >= Slow.ready
    loggers.close()


def test_an_evaluation_is_one_line_in_the_words_of_the_report(loggers, capsys, monkeypatch):
    """The best is marked, on the puzzles that choose it."""
    row = {"train/lm_loss": 0.5, "eval/all/count": 9, "eval/all/exact_accuracy": 0.5711, "best/step": 3}
    row |= {"eval/all/accuracy": 0.95, "eval/all/steps": 16.0, "eval/all/act_steps": 7.63}
    row |= {"eval/all/sudoku/valid_accuracy": 0.58, "eval/all/sudoku/exact_accuracy": 0.5711}
    loggers.log(3, row | {"best/selected_by": "test"})
    loggers.log(9, row | {"best/selected_by": "test"})
    first, second = (re.sub(" +", " ", line) for line in capsys.readouterr().err.splitlines())
    values = "valid 0.580 cells right 0.950 steps until halting 7.63"
    assert re.fullmatch(rf"step 3 \d\d:\d\d solved 0\.571 \(best\) {values}", first)
    assert re.fullmatch(rf"step 9 \d\d:\d\d solved 0\.571 {values}", second)
    loggers.log(9, row | {"eval/all/trained_on": 4.0, "eval/all/unseen/exact_accuracy": 0.4})
    words = re.sub(" +", " ", capsys.readouterr().err)
    assert words.rstrip().endswith(f"{values} trained on 4 solved of unseen puzzles 0.400")
    other = {"validation/all/exact_accuracy": 0.25, "best/selected_by": "validation", "best/step": 6}
    monkeypatch.setattr(loggers._all[1], "_has_colors", True)
    loggers.log(6, row | other)
    first, second = capsys.readouterr().err.splitlines()
    assert "validation/all\033[0m   solved \033[1;32m0.250 (best)\033[0m" in first
    assert "(best)" not in second
    row |= {"eval/all/exact_accuracy": 0.0, "best/exact_accuracy": 0.0, "best/selected_by": "test"}
    loggers.log(3, row)
    assert "(best)" not in capsys.readouterr().err, "no puzzle is solved yet"
    loggers.close()


def test_the_metric_that_selects_the_best_comes_first():
    metrics = {"exact_accuracy": 0.5, "unseen/exact_accuracy": 0.25}
    for keep_best in ("unseen/exact_accuracy", "eval/all/unseen/exact_accuracy"):
        (_, first), (_, second) = training.console._shown_metrics(metrics, keep_best)
        assert (first, second) == ("0.250", "0.500")


def test_answers_without_labels_are_counted(loggers, capsys):
    loggers.log(3, {"eval/all/arc/count": 0, "eval/all/arc/test_inputs": 0, "eval/all/arc/votes": 64})
    assert re.fullmatch(r"step  3 +\d\d:\d\d   64 answers, no labels", capsys.readouterr().err.rstrip())
    loggers.close()


def _logged_run(folder: Path, *names: str, first_step: int = 0) -> LoggedRun:
    config = tiny_config(checkpoint_path=str(folder), loggers=list(names))
    return LoggedRun(config, range(first_step, 99), {"num_parameters": 7})


def _log(run: LoggedRun, rows: dict[int, dict[str, float]]) -> None:
    loggers = Loggers(run)
    for step, row in rows.items():
        loggers.log(step, row)
    loggers.close()


def test_a_table_gets_columns_and_loses_no_line(tmp_path):
    """Rows after the checkpoint at step 2 are logged again, and once."""
    path, text = tmp_path / "metrics.csv", {"best/selected_by": 'a "test", split'}
    rows = {1: {"train/loss": 0.1}, 2: {"train/loss": 1e-9, "eval/all/accuracy": 0.5}, 3: {"train/loss": 9.0}}
    _log(_logged_run(tmp_path, "csv"), rows)
    assert path.read_text() == "step,train/loss,eval/all/accuracy\n1,0.1,\n2,1e-09,0.5\n3,9.0,\n"
    cut_back_rows(tmp_path, step=2)
    _log(_logged_run(tmp_path, "csv", first_step=2), {3: {"train/loss": 0.3} | text, 4: {}})
    with path.open(newline="") as file:
        found = list(csv.DictReader(file))
    assert [row["step"] for row in found] == list("1234")
    assert [row["train/loss"] for row in found] == ["0.1", "1e-09", "0.3", ""]
    assert [row["best/selected_by"] for row in found] == ["", "", 'a "test", split', ""]


def test_a_full_disk_leaves_no_part_of_a_line(tmp_path):
    table = find_loggers(_logged_run(tmp_path, "csv").config)[0](_logged_run(tmp_path, "csv"))
    for step in (1, 2, 3):
        table.log(step, {"train/loss": 0.25})
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = (tmp_path / "metrics.csv").stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 3, hard))
    try:
        with pytest.raises(OSError, match="No space left"):
            table.log(4, {"train/loss": 0.25})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    table.log(5, {"train/loss": 0.25})
    lines = (tmp_path / "metrics.csv").read_text().splitlines()
    assert lines == ["step,train/loss", "1,0.25", "2,0.25", "3,0.25", "5,0.25"]


def test_tensorboard_has_every_step_once(tmp_path):
    pytest.importorskip("tensorboard", reason="the logger tensorboard needs the package tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def read() -> EventAccumulator:
        return EventAccumulator(str(tmp_path / "tensorboard")).Reload()

    def scalars() -> list[tuple[int, float]]:
        return [(each.step, each.value) for each in read().Scalars("train/loss")]

    _log(_logged_run(tmp_path), {1: {"train/loss": 1.0}})  # before the logger is added
    first = Loggers(_logged_run(tmp_path, "tensorboard", first_step=1))
    pictures = SimpleNamespace(images=lambda: [("all, example 3", np.zeros((8, 9, 3), np.uint8))])
    first.log_puzzles(2, pictures)
    for step in (2, 3):
        first.log(step, {"train/loss": 9.0, "best/selected_by": "test"})
    assert scalars() == [(1, 1), (2, 9), (3, 9)], "a kill loses nothing"
    first.close()
    cut_back_rows(tmp_path, step=2)
    _log(_logged_run(tmp_path, "tensorboard", first_step=2), {3: {"train/loss": 3.0}, 4: {"train/loss": 4.0}})
    assert scalars() == [(1, 1), (2, 9), (3, 3), (4, 4)]
    assert [each.step for each in read().Images("puzzles/all, example 3")] == [2]
    text = read().Tensors("config/text_summary")[-1].tensor_proto.string_val[0].decode()
    assert "    num_parameters: 7\n" in text


def test_what_the_key_loggers_may_name(tmp_path, monkeypatch):
    monkeypatch.setattr(plugins, "_loaded", {})
    run = _logged_run(tmp_path, "csv", "wandb", "csv")
    assert [each.name for each in find_loggers(run.config)] == ["csv"], "wandb_mode=disabled"
    Path(tmp_path / "own.py").write_text("class LOGGER:\n    name = 'own'\n")
    with pytest.raises(
        ValueError, match=r"unknown logger in loggers: own. Choose from csv, tensorboard, wandb."
    ):
        find_loggers(_logged_run(tmp_path, "own").config)
    plugins.load_plugins([str(tmp_path / "own.py")])
    assert [each.name for each in find_loggers(_logged_run(tmp_path, "own").config)] == ["own"]
    monkeypatch.delitem(sys.modules, "plugin_own")
    for name in [each for each in sys.modules if each.startswith(("tensorboard", "torch.utils.tensorboard"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "training.loggers.tensorboard", raising=False)
    monkeypatch.setitem(sys.modules, "tensorboard", None)  # not installed
    with pytest.raises(
        ValueError, match=r"Run pip install tensorboard, or remove tensorboard from loggers.$"
    ):
        find_loggers(_logged_run(tmp_path, "tensorboard").config)


def test_the_environment_disables_wandb(tmp_path, monkeypatch, capsys):
    config = tiny_config(checkpoint_path=str(tmp_path), wandb_mode="offline")
    assert [each.name for each in find_loggers(config)] == ["wandb"]
    monkeypatch.setenv("WANDB_DISABLED", "true")
    Loggers(LoggedRun(config, range(9))).close()
    assert "W&B is disabled, because WANDB_DISABLED=true\n" in capsys.readouterr().out
    assert not (tmp_path / "wandb").exists()


def test_a_run_names_the_slots_of_its_processes(monkeypatch):
    monitor = types.SimpleNamespace(_config=tiny_config(global_batch_size=12))
    carry, ranks = types.SimpleNamespace(halted=range(4)), types.SimpleNamespace(size=3)
    state = types.SimpleNamespace(carry=carry, ranks=ranks)
    monkeypatch.setattr("training.monitor.world_size", lambda: 3)
    assert Monitor._slots(monitor, state) == "4 slots on each of 3 processes"
    monitor._config = tiny_config(global_batch_size=10)
    assert Monitor._slots(monitor, state) == "at most 4 slots on each of 3 processes"


def test_wandb_mode_never_asks(monkeypatch, tmp_path, capsys):
    import wandb  # for a second
    from wandb.sdk.lib import wbauth

    from training.loggers.wandb import choose_mode

    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    netrc = tmp_path / "netrc"
    monkeypatch.setenv("NETRC", str(netrc))
    assert choose_mode("auto") == "offline"
    assert choose_mode("online") == "offline"
    assert "no W&B login" in capsys.readouterr().err
    netrc.write_text("machine api.wandb.ai login user password secret\n")
    netrc.chmod(0o600)
    assert choose_mode("auto") == "online"
    netrc.unlink()
    wbauth.write_netrc_auth(host=wandb.Settings().base_url, api_key="x" * 40)  # as `wandb login` does
    assert choose_mode("auto") == "online"
    netrc.unlink()
    monkeypatch.setenv("WANDB_MODE", "online")
    assert choose_mode("auto") == "offline"
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    assert choose_mode("auto") == "online"
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert choose_mode("auto") == choose_mode("offline") == "offline"


def _read_records(path: Path) -> list[dict[str, Any]]:
    """All records of a `run-*.wandb` file, in order, by W&B's own reader."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(path)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.long
@pytest.mark.slow
def test_offline_runs_hold_every_logged_line_once(tmp_path, sudoku_folder):
    """Killed after step 3 was logged, a run goes on from step 2: W&B cannot take lines back."""
    words = (f"data_path={sudoku_folder}", *OVERRIDES, "checkpoint_path=run", "wandb_mode=offline")
    words += ("project_name=some-project", "checkpoint_interval=2", "log_interval=1")
    run = tmp_path / "run"
    for max_steps in (3, 5):
        arguments = (*words, f"max_steps={max_steps}")
        finished = complete_program(
            "pretrain", *arguments, folder=tmp_path, world_size=2, WANDB_SILENT="true"
        )
        assert not [line for line in finished.error_lines if "warning" in line]
        shutil.rmtree(run / f"step_{max_steps}")
    files = sorted(run.glob("wandb/offline-run-*/run-*.wandb"), key=os.path.getmtime)
    assert len(files) == 2, "one folder for each start, from rank 0 alone"
    records = [record for path in files for record in _read_records(path)]
    logged = [record["history"]["item"] for record in records if record["type"] == "history"]
    written = [values for values, _ in read_rows(run)]
    assert [int(line["_step"]) for line in logged] == [line["step"] for line in written] == [1, 2, 3, 4, 5]
    for theirs, ours in zip(logged, written, strict=True):
        own = {name: value for name, value in theirs.items() if not name.startswith(("_", PICTURES))}
        if ours["step"] != 3:  # done again, without an evaluation
            assert own | {"step": ours["step"]} == pytest.approx(ours)
    runs = [record["run"] for record in records if record["type"] == "run"]
    assert {each["run_id"] for each in runs} == {(run / "wandb_run_id").read_text()}
    assert (runs[0]["project"], runs[0]["display_name"]) == ("some-project", "run (seed 0)")


def test_a_logger_that_cannot_begin_is_one_warning(tmp_path, capsys):
    """A folder that W&B cannot write into. The metrics are there."""
    (tmp_path / "wandb_run_id").mkdir()
    config = tiny_config(checkpoint_path=str(tmp_path), wandb_mode="offline")
    _log(LoggedRun(config, range(9)), {1: {"train/loss": 0.5}, 2: {"train/loss": 0.25}})
    (warning,) = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    assert warning.startswith("warning: wandb failed (")
    assert [values["step"] for values, _ in read_rows(tmp_path)] == [1, 2]


@pytest.mark.parametrize(("status", "expected"), [("running", "failed"), ("finished", "finished")])
def test_a_run_that_the_watchdog_ends_has_failed(tmp_path, status, expected):
    """Unless its last checkpoint is saved."""
    (tmp_path / "status").write_text(json.dumps({"status": status, "step": 7}))
    config = SimpleNamespace(checkpoint_path=str(tmp_path))
    Monitor._record_hang(SimpleNamespace(_config=config, _step=7))
    assert json.loads((tmp_path / "status").read_text()) == {"status": expected, "step": 7}
