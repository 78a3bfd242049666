"""Rows of metrics: metrics.jsonl and W&B, and what happens where one of them fails."""

import json
import os
import shutil
from pathlib import Path

import pytest

from parallel import log
from tests.ranks import Finished, run_program
from tests.tiny import OVERRIDES, tiny_config
from tests.wandb_file import history, read_records
from training.monitor import Loggers
from training.wandb import PICTURES, choose_mode


@pytest.fixture
def loggers(tmp_path, monkeypatch):
    """Loggers without W&B."""
    monkeypatch.setattr(log._console, "shown", set())
    config = tiny_config(checkpoint_path=str(tmp_path), project_name="p", run_name="r")
    return Loggers(config, range(0, 10), run_info={}, tags=[])


def test_lines_are_on_disk_at_once(loggers, tmp_path):
    loggers.log(1, {"train/lm_loss": 0.5})
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "train/lm_loss": 0.5}
    loggers.close()


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


def test_other_ranks_write_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    loggers = Loggers(tiny_config(checkpoint_path=str(tmp_path / "run")), range(10), run_info={}, tags=[])
    loggers.log(1, {"train/lm_loss": 0.5})
    loggers.close()
    assert not (tmp_path / "run").exists()


def test_wandb_mode_never_asks(monkeypatch, tmp_path):
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    netrc = tmp_path / "netrc"
    monkeypatch.setenv("NETRC", str(netrc))
    assert choose_mode("auto") == "offline"
    netrc.write_text("machine api.wandb.ai login user password secret\n")
    netrc.chmod(0o600)
    assert choose_mode("auto") == "online"
    netrc.unlink()
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    assert choose_mode("auto") == "online"
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert choose_mode("auto") == "offline"
    assert choose_mode("offline") == "offline"


def test_online_without_a_login_goes_offline_and_says_so(monkeypatch, tmp_path, capsys):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "nothing"))
    assert choose_mode("online") == "offline"
    assert "no W&B login" in capsys.readouterr().err
    monkeypatch.setenv("WANDB_MODE", "online")
    assert choose_mode("auto") == "offline"


def _warnings(finished: Finished) -> list[str]:
    """But that a rank is slower than the other, as on a busy machine, and what old Pythons do in forks."""
    told = [line for line in finished.error_lines if "warning" in line]
    return [line for line in told if "straggler" not in line and "hung in its fork" not in line]


@pytest.fixture(scope="module")
def offline_run(tmp_path_factory, sudoku_folder) -> Path:
    """Two processes with an offline W&B run, in two starts."""
    folder = tmp_path_factory.mktemp("offline")
    for overrides in (["max_steps=12"], []):
        finished = run_program(
            "pretrain",
            f"data_path={sudoku_folder}",
            *OVERRIDES,
            "epochs=2",
            *overrides,
            "checkpoint_path=run",
            "project_name=some-project",
            "wandb_mode=offline",
            folder=folder,
            world_size=2,
            WANDB_SILENT="true",
        )
        assert finished.statuses == [0, 0], finished.stderr
        assert not _warnings(finished)
    return folder / "run"


def _wandb_files(run: Path) -> list[Path]:
    return sorted(run.glob("wandb/offline-run-*/run-*.wandb"), key=os.path.getmtime)


@pytest.mark.slow
def test_offline_run_holds_every_logged_line_once(offline_run):
    files = _wandb_files(offline_run)
    assert len(files) == 2, "one folder for each start, from rank 0 alone"
    logged = [line for path in files for line in history(read_records(path))]
    written = [json.loads(line) for line in (offline_run / "metrics.jsonl").read_text().splitlines()]
    assert [int(line["_step"]) for line in logged] == [line["step"] for line in written]
    for theirs, ours in zip(logged, written, strict=True):
        own = {name: value for name, value in theirs.items() if not name.startswith(("_", PICTURES))}
        assert own == pytest.approx({name: value for name, value in ours.items() if name != "step"})
    names = {name for line in logged for name in line}
    assert {
        "train/lm_loss",
        "train/examples_per_second",
        "train/step_seconds",
        "eval/all/exact_accuracy",
    } <= names


@pytest.mark.slow
def test_a_step_that_is_done_again_is_one_point(tmp_path, sudoku_folder):
    """Killed after step 3 was logged, a run goes on from step 2: W&B cannot take lines back."""
    command = (f"data_path={sudoku_folder}", *OVERRIDES, "checkpoint_path=run", "wandb_mode=offline")
    steps = ("max_steps=3", "checkpoint_interval=2", "log_interval=1")
    for _ in range(2):
        finished = run_program("pretrain", *command, *steps, folder=tmp_path, WANDB_SILENT="true")
        assert finished.statuses == [0], finished.stderr
        shutil.rmtree(tmp_path / "run" / "step_3")
    files = _wandb_files(tmp_path / "run")
    assert len(files) == 2
    logged = [int(line["_step"]) for path in files for line in history(read_records(path))]
    assert logged == [1, 2, 3]


@pytest.mark.slow
def test_offline_run_holds_config_and_identity(offline_run):
    ids = set()
    for path in _wandb_files(offline_run):
        records = read_records(path)
        (run,) = (record["run"] for record in records if record["type"] == "run")
        assert (run["project"], run["display_name"]) == ("some-project", "run (seed 0)")
        ids.add(run["run_id"])
        config = run["config"]["update"]
        assert config["lr"] == 1e-3
        assert config["arch"]["hidden_size"] == 32
        assert config["num_parameters"] > 10_000
        assert "git_commit" in config
    assert ids == {(offline_run / "wandb_run_id").read_text()}, "both starts are one W&B run"


@pytest.mark.slow
def test_unreachable_wandb_does_not_end_the_run(tmp_path, sudoku_folder):
    """A folder that W&B cannot write into: one warning, and the metrics are there."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "wandb_run_id").mkdir()
    finished = run_program(
        "pretrain",
        f"data_path={sudoku_folder}",
        *OVERRIDES,
        "checkpoint_path=run",
        "max_steps=2",
        "wandb_mode=offline",
        folder=tmp_path,
        world_size=2,
    )
    assert finished.statuses == [0, 0], finished.stderr
    assert len(_warnings(finished)) == 1
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2
