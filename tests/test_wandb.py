"""W&B's own client against a server on this machine: what arrives, and that nothing is lost."""

import json
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from report import dashboard
from runtime.metrics_file import read_rows
from tests.ranks import REPOSITORY, Finished, run_program
from tests.tiny import OVERRIDES
from tests.wandb_server import ReceivedRun, WandbServer
from training.loggers import PICTURES

# pretrain.py, in which something happens once a row is logged: CODE, at the step STEP.
_EVENTFUL = f"""
import os, runpy, signal, sys, time
from pathlib import Path
sys.path.insert(0, {str(REPOSITORY)!r})
from training.monitor import Monitor
log = Monitor.log
def log_and_more(self, state, row):
    log(self, state, row)
    if state.step == STEP:
        CODE
Monitor.log = log_and_more
sys.argv[0] = {str(REPOSITORY / "pretrain.py")!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def _train(
    folder: Path, data: Path, *options: str, server: WandbServer, program: str = "pretrain", **kwargs: Any
) -> Finished:
    arguments = (f"data_path={data}", *OVERRIDES, "checkpoint_path=run", "project_name=some-project")
    environment = {**server.environment, "WANDB_DATA_DIR": str(folder), "WANDB_CACHE_DIR": str(folder)}
    return run_program(program, *arguments, *options, folder=folder, **environment, **kwargs)


def _eventful(folder: Path, *, step: int, code: str) -> str:
    text = _EVENTFUL.replace("STEP", str(step)).replace("CODE", code)
    (folder / "eventful.py").write_text(text)
    return str(folder / "eventful")


def _rows(run: Path) -> list[dict[str, Any]]:
    return [values for values, _ in read_rows(run)]


def _assert_has_all_rows(received: list[dict[str, Any]], run: Path) -> None:
    """Compares the rows at W&B with those of metrics.jsonl, whose `step` is W&B's own there."""
    rows = [{"step": row["_step"]} | {name: row[name] for name in row if name[0] != "_"} for row in received]
    for row in rows:
        row.pop(PICTURES, None)
    assert rows == [pytest.approx(row) for row in _rows(run)]


def _unexpected(finished: Finished) -> list[str]:
    """What a person would wonder about."""
    words = ("warning", "error", "Traceback", "wandb:")
    return [line for line in finished.error_lines if any(map(line.__contains__, words))]


@pytest.fixture(scope="module")
def resumed(tmp_path_factory, sudoku_folder) -> Iterator[tuple[Path, WandbServer, ReceivedRun]]:
    """A run that was killed after step 20, and went on to its end."""
    folder = tmp_path_factory.mktemp("resumed")
    options = ("evaluators=[sudoku]", "wandb_log_checkpoints=all", "keep_best=accuracy", "wandb_group=tiny")
    options += ("checkpoint_interval=12", "keep_checkpoints=null")  # none is removed before it is sent
    with WandbServer() as server:
        killer = _eventful(folder, step=20, code="os.kill(os.getpid(), signal.SIGKILL)")
        killed = _train(folder, sudoku_folder, *options, server=server, program=killer)
        assert killed.statuses == [-9], killed.stderr
        finished = _train(folder, sudoku_folder, *options, "report=true", server=server)
        assert finished.statuses == [0], finished.stderr
        assert not _unexpected(finished)
        (name, run), *others = server.runs.items()
        assert not others, "both starts are one run"
        assert f"W&B: {server.url}/somebody/some-project/runs/{name}\n" in finished.stdout
        yield folder / "run", server, run


@pytest.mark.slow
def test_server_has_every_row_once_though_training_was_killed(resumed):
    folder, _, run = resumed
    assert [row["step"] for row in _rows(folder)] == [1, 10, 16, 20, 30, 32]
    _assert_has_all_rows(run.history, folder)
    assert run.exit_code == 0


@pytest.mark.slow
def test_server_knows_what_the_run_is(resumed):
    folder, _, run = resumed
    names = ("project", "groupName", "jobType", "displayName", "tags")
    known = ("some-project", "tiny", "train", "run (seed 0)", ["sudoku", "hrm"])
    assert tuple(run.fields[name] for name in names) == known
    assert run.config["arch"]["hidden_size"] == 32
    assert run.config["num_parameters"] > 10_000
    assert len(run.config["dataset_fingerprint"]) == 64
    assert "git_commit" in run.config
    assert run.files["report.html"] == (folder / "report.html").read_bytes()
    assert b"finished at training step" in run.files["report.html"]


@pytest.mark.slow
def test_summary_has_best_and_last_values_of_the_whole_run(resumed):
    folder, _, run = resumed
    rows = [row for row in _rows(folder) if "eval/all/accuracy" in row]
    assert len(rows) == 2, "one evaluation before the kill, one after it"
    for name, best in (("eval/all/accuracy", max), ("eval/all/lm_loss", min), ("train/lm_loss", min)):
        values = [row[name] for row in _rows(folder)[-3:] if name in row]  # of the second start
        assert run.summary[name] == pytest.approx({best.__name__: best(values), "last": values[-1]})
        if name.startswith("eval"):
            assert run.summary[f"best/{name}"] == pytest.approx(best(row[name] for row in rows))
    assert run.summary["train/lr"] == rows[-1]["train/lr"], "what has no goal is a plain number"
    assert run.summary["best/step"] in (16, 32)


@pytest.mark.slow
def test_checkpoints_and_code_are_artifacts(resumed):
    folder, server, run = resumed
    versions = server.versions(f"checkpoint-{run.fields['name']}")
    versions = versions[-2:]  # those of the second start: the kill may have come first
    assert [version.metadata["step"] for version in versions] == [24, 32]
    assert ["latest" in version.aliases for version in versions] == [False, True]
    (best,) = (version for version in versions if "best" in version.aliases)
    assert best.metadata["step"] == run.summary["best/step"]
    files = server.content(versions[1])
    for path in (folder / "step_32").iterdir():
        assert files[f"step_32/{path.name}"] == path.read_bytes()

    (code,) = server.versions("code")
    assert {"pretrain.py", "models/hrm.py", "config/pretrain.yaml"} <= server.content(code).keys()
    assert not [name for name in server.content(code) if name.startswith(("tests", ".venv", "benchmarks"))]


@pytest.mark.slow
def test_the_last_evaluation_has_pictures(resumed):
    _, _, run = resumed
    # Of the first start no more than its numbers came through.
    *_, row = (row for row in run.history if "eval/all/accuracy" in row)
    page = run.files[row[PICTURES]["path"]].decode()
    captions = re.findall("<p>(.*)</p>", page)
    assert len(captions) == page.count("</svg>") == 4
    assert re.fullmatch(r"all, example 0: .*; would (halt after step [1-4]|not halt in 4 steps)", captions[0])


@pytest.mark.slow
def test_every_panel_of_the_dashboard_shows_what_a_run_logs(resumed, tmp_path):
    _, server, run = resumed
    names = {name for row in run.history for name in row}
    sections = [panels for name, panels in dashboard.SECTIONS.items() if name != "others"]  # other nets
    wanted = [metrics for panels in sections for metrics in panels.values()]
    assert {name for name in names if name.startswith("train/")} - {"train/count", "train/epoch"} == {
        name for name in names for metrics in wanted if name[:6] == "train/" and re.fullmatch(metrics, name)
    }
    for metrics in wanted:
        assert any(re.fullmatch(metrics, name) for name in names), metrics
    assert PICTURES in names

    words, environment = ("--project", "some-project"), {**server.environment, "PATH": "", "HOME": "/nowhere"}
    finished = run_program("report/dashboard", *words, folder=tmp_path, world_size=None, **environment)
    assert (finished.statuses, finished.stderr) == ([0], "")
    assert finished.stdout.startswith(f"W&B: {server.url}/somebody/some-project?nw=")
    (view,) = server.views
    sections = json.loads(view["spec"])["section"]["panelBankConfig"]["sections"]
    assert [section["name"] for section in sections] == list(dashboard.SECTIONS)
    shown = {panel["config"].get("metricRegex") for section in sections for panel in section["panels"]}
    assert {f"^{metrics}$" for metrics in wanted} < shown


def test_the_dashboard_shows_every_kind_of_set():
    panels = dashboard.SECTIONS["evaluation"].values()
    for split in ("eval", "eval_raw", "test", "validation"):
        for metric in ("exact_accuracy", "accuracy", "lm_loss", "sudoku/valid_accuracy"):
            assert any(re.fullmatch(each, f"{split}/folder.all/{metric}") for each in panels), (split, metric)


@pytest.mark.slow
def test_dashboard_is_shown_without_a_network(capsys, monkeypatch, tmp_path):
    dashboard.main(["--project", "p", "--dry-run"])
    assert "  loss                                            ^train/lm_loss$\n" in capsys.readouterr().out
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "nothing"))
    with pytest.raises(SystemExit, match="dashboard: error: not logged in to W&B"):
        dashboard.main(["--project", "p"])


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("unanswered", ["ArtifactType", "CreateArtifact"])
def test_no_row_is_lost_because_an_artifact_fails(tmp_path, sudoku_folder, unanswered):
    """Without an answer to ArtifactType, log_artifact raises. Without CreateArtifact's, the client ends, and
    the next start sends the rows.

    The stages of a pipeline think of the puzzles in the pictures together.
    """
    with WandbServer(unanswered=[unanswered]) as server:
        options = ("max_steps=12", "wandb_log_checkpoints=all", "pipeline_parallel_degree=2")
        options += ("arch.q_target=exact", "arch.H_layers=2", "arch.L_layers=2")
        finished = _train(tmp_path, sudoku_folder, *options, server=server, world_size=2)
        assert finished.statuses == [0, 0], finished.stderr
        (run,) = server.runs.values()
        assert not server.versions("code")
        told = _unexpected(finished)
        if unanswered == "ArtifactType":
            _assert_has_all_rows(run.history, tmp_path / "run")
            assert run.exit_code == 0
            assert any(PICTURES in row for row in run.history)
            assert [re.match(r"(.+: W&B upload failed: .+?) \(", line)[1] for line in told] == [
                f"warning (rank 0 (stage 0)): W&B upload failed: {what}"
                for what in ("the code", "run/step_12")
            ]
        else:
            assert len(told) == 1
            assert "W&B's client has ended" in told[0] or "W&B did not receive all data" in told[0]
            assert "panic" in (tmp_path / "run" / "logs" / "wandb.log").read_text()
            server.unanswered.clear()
            again = _train(tmp_path, sudoku_folder, *options[1:], server=server, world_size=2)
            assert again.statuses == [0, 0], again.stderr
            _assert_has_all_rows(run.history, tmp_path / "run")


@pytest.mark.long
@pytest.mark.slow
def test_a_copy_of_a_run_is_another_run(tmp_path, sudoku_folder):
    """The id that an agent chose belongs to the first folder, and each of both has all of its rows."""
    with WandbServer() as server:
        agent = {"WANDB_RUN_ID": "of-agent", "WANDB_SWEEP_ID": "sweep"}
        first = _train(tmp_path, sudoku_folder, "max_steps=12", server=server, **agent)
        assert first.statuses == [0], first.stderr
        assert (tmp_path / "run" / "wandb_run_id").read_text() == "of-agent"
        shutil.copytree(tmp_path / "run", tmp_path / "copy")
        options = ("max_steps=20", "checkpoint_path=copy")
        copied, again = (_train(tmp_path, sudoku_folder, *options, server=server) for _ in range(2))
        assert f"copy is a copy of {tmp_path / 'run'}. It gets its own W&B run.\n" in copied.stdout
        (tmp_path / "copy").rename(tmp_path / "moved")
        moved = ("checkpoint_path=moved",)
        outputs = [_train(tmp_path, sudoku_folder, *each, server=server).stdout for each in (moved, ())]
        assert not [text for text in (again.stdout, *outputs) if "is a copy" in text]
        names = [(tmp_path / folder / "wandb_run_id").read_text() for folder in ("run", "moved")]
        assert list(server.runs) == names
        assert names[0] == "of-agent"
        for name, folder in zip(names, ("run", "moved"), strict=True):
            _assert_has_all_rows(server.runs[name].history, tmp_path / folder)


def test_a_value_that_is_not_finite_is_never_the_best():
    from training.loggers.wandb import WandbRun

    logger = SimpleNamespace(_best={}, _run=SimpleNamespace(summary={}))
    for loss in (float("nan"), 0.5, 0.7):
        WandbRun._record_best(logger, {"eval/all/lm_loss": loss})
    assert logger._run.summary == {"best/eval/all/lm_loss": 0.5}


def test_a_malformed_key_is_no_problem_of_the_network(capsys):
    import wandb  # which takes half a second, in every worker if it is at the top of this file

    from training.loggers.wandb import WandbRun

    def init(mode: str) -> SimpleNamespace:
        if mode == "online":
            raise wandb.errors.AuthenticationError("WANDB_API_KEY invalid: too short")
        return SimpleNamespace(offline=True)

    WandbRun._start(SimpleNamespace(_init=init, _how_to_send=lambda: "Send it."), "online")
    line = capsys.readouterr().err
    assert line.startswith("warning: W&B login failed (WANDB_API_KEY invalid: too short). ")
    assert line.endswith("The W&B run is offline. Send it.\n")


@pytest.mark.long
@pytest.mark.slow
def test_a_server_that_is_gone_costs_nothing(tmp_path, sudoku_folder):
    """It goes at step 10, is not there for the second start, and `wandb sync` brings it all later."""
    wait = 'Path("gone").touch(); [time.sleep(0.01) for _ in iter(lambda: Path("gone").exists(), False)]'
    leaver, gone = _eventful(tmp_path, step=10, code=wait), tmp_path / "gone"
    limits = {"WANDB_INIT_TIMEOUT": "2", "WANDB_FINISH_TIMEOUT": "2"}
    with WandbServer() as server:

        def leave() -> None:
            while not gone.exists():
                time.sleep(0.01)
            server.stop()
            gone.unlink()

        threading.Thread(target=leave, daemon=True).start()
        first = _train(tmp_path, sudoku_folder, "max_steps=16", server=server, program=leaver, **limits)
        second = _train(tmp_path, sudoku_folder, server=server, **limits)
        assert (first.statuses, second.statuses) == ([0], [0]), first.stderr + second.stderr
        assert len(_rows(tmp_path / "run")) == 6
        told = [*_unexpected(first), *_unexpected(second)]
        assert len(told) == 2, told
        assert "W&B did not receive all data" in told[0]
        assert "cannot reach W&B" in told[1]

        server.start()
        (sync,) = {re.search("To send it later, run `wandb (sync .+)`", line)[1] for line in told}
        environment = {**server.environment, "HOME": str(tmp_path)}
        command = f"{sys.executable} -m wandb {sync}"
        synced = subprocess.run(command, shell=True, cwd=tmp_path, env=environment, capture_output=True)
        assert synced.returncode == 0, synced.stderr
        (run,) = server.runs.values()
        _assert_has_all_rows(run.history, tmp_path / "run")
