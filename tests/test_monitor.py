"""Rows of metrics: metrics.jsonl and W&B, and what happens where one of them fails."""

import json
import os
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import training.loggers
from config.files import FOLDER
from runtime.metrics_file import read_rows
from tests.ranks import Finished, complete_program
from tests.tiny import OVERRIDES, tiny_config
from training.monitor import Loggers, Monitor
from training.wandb import PICTURES, choose_mode


@pytest.fixture
def loggers(tmp_path):
    """Loggers without W&B."""
    config = tiny_config(checkpoint_path=str(tmp_path), project_name="p", run_name="r")
    return Loggers(config, range(0, 10), run_info={}, tags=[])


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
    monkeypatch.setattr(training.loggers, "_FORECAST_SECONDS", 0)
    for _ in range(3):
        loggers.step_done()
    (line,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"about 0 h 0 min of training remain, until \d{4}-.*", line)
    training.loggers._show_end(100 * 86400)
    line = capsys.readouterr().err
    assert "takes about 100 more days on this machine. Training continues. Smaller experiments: " in line
    names = re.findall(r"experiment=(\w+)", line)
    assert all((FOLDER / f"experiment/{name}.yaml").is_file() for name in names)
    loggers.close()


def test_an_evaluation_is_one_line_in_the_words_of_the_report(loggers, capsys, monkeypatch):
    """The best is marked, on the puzzles that choose it."""
    row = {"train/lm_loss": 0.5, "eval/all/count": 9, "eval/all/exact_accuracy": 0.5711, "best/step": 3}
    row |= {"eval/all/accuracy": 0.95, "eval/all/steps": 16.0, "eval/all/act_steps": 7.63}
    row |= {"eval/all/sudoku/valid_accuracy": 0.58, "eval/all/sudoku/exact_accuracy": 0.5711}
    loggers.log(3, row | {"best/selected_by": "test"})
    loggers.log(9, row | {"best/selected_by": "test"})
    first, second = (re.sub(" +", " ", line) for line in capsys.readouterr().err.splitlines())
    values = "valid 0.580 cells right 0.950 thinking steps 7.6"
    assert re.fullmatch(rf"step 3 \d\d:\d\d solved 0\.571 \(best\) {values}", first)
    assert re.fullmatch(rf"step 9 \d\d:\d\d solved 0\.571 {values}", second)
    other = {"validation/all/exact_accuracy": 0.25, "best/selected_by": "validation", "best/step": 6}
    monkeypatch.setattr(loggers._all[1], "_has_colors", True)
    loggers.log(6, row | other)
    first, second = capsys.readouterr().err.splitlines()
    assert "validation/all\033[0m   solved \033[1;32m0.250 (best)\033[0m" in first
    assert "(best)" not in second
    loggers.close()


def test_a_run_names_the_slots_of_its_processes(monkeypatch):
    monitor = types.SimpleNamespace(_config=tiny_config(global_batch_size=12))
    carry, ranks = types.SimpleNamespace(halted=range(4)), types.SimpleNamespace(size=3)
    state = types.SimpleNamespace(carry=carry, ranks=ranks)
    monkeypatch.setattr("training.monitor.world_size", lambda: 3)
    assert Monitor._slots(monitor, state) == "4 slots on each of 3 processes"
    monitor._config = tiny_config(global_batch_size=10)
    assert Monitor._slots(monitor, state) == "at most 4 slots on each of 3 processes"


def test_wandb_mode_never_asks(monkeypatch, tmp_path, capsys):
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
    monkeypatch.setenv("WANDB_MODE", "online")
    assert choose_mode("auto") == "offline"
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    assert choose_mode("auto") == "online"
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert choose_mode("auto") == choose_mode("offline") == "offline"


def _warnings(finished: Finished) -> list[str]:
    """But that a rank is slower than the other, as on a busy machine."""
    return [line for line in finished.error_lines if "warning" in line and "straggler" not in line]


def _read_records(path: Path) -> list[dict[str, Any]]:
    """All records of a `run-*.wandb` file, in order, by W&B's own reader."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(path)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return [json.loads(line) for line in lines]


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
        assert not _warnings(finished)
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


@pytest.mark.slow
def test_a_logger_that_cannot_begin_does_not_end_the_run(tmp_path, sudoku_folder):
    """A folder that W&B cannot write into: one warning, and the metrics are there."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "wandb_run_id").mkdir()
    words = (f"data_path={sudoku_folder}", *OVERRIDES, "checkpoint_path=run", "max_steps=2")
    finished = complete_program("pretrain", *words, "wandb_mode=offline", folder=tmp_path, world_size=2)
    assert len(_warnings(finished)) == 1
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2
