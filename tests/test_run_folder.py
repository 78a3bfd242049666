"""One folder holds one run, of one process at a time; its log can be cut back."""

import errno
import fcntl
import json
import multiprocessing
import os
import re
import resource
import shutil
import signal
import subprocess
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpointing.files import STARTS_FILE
from distributed import launch
from distributed.number_format import instruction_set
from runtime.metrics_file import MetricsFile, cut_back_rows, last_wandb_step, read_rows
from runtime.plugins import load_plugins
from runtime.writing import to_yaml
from tests.ranks import _server
from tests.tiny import tiny_arch, tiny_config
from tests.waiting import PATIENCE
from training import code
from training.run_config import read_stored_config
from training.run_folder import claim_run_folder, record_start


def _hold(folder: Path, connection: Connection) -> None:
    """Opens the run folder, sends the pid of a forked child that outlives this process, and waits."""
    claim_run_folder(tiny_config(checkpoint_path=str(folder)))
    if child := os.fork():
        connection.send(child)
    time.sleep(60)


class _Owner:
    def __init__(self, folder: Path):
        receiver, sender = multiprocessing.Pipe(duplex=False)
        self.process = _server.Process(target=_hold, args=(folder, sender))
        self.process.start()
        assert receiver.poll(PATIENCE)
        self.child = receiver.recv()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


def _open(folder: Path, **changes) -> None:
    claim_run_folder(tiny_config(checkpoint_path=str(folder), **changes))


def test_a_second_owner_is_refused_until_the_first_is_dead(run):
    """Even if a forked child of it lives on. Only an owner removes unfinished files."""
    owner, unfinished = _Owner(run), run / ".metrics.jsonl.abcd.unfinished"
    unfinished.touch()
    with pytest.raises(ValueError, match=f"in use by process {owner.process.pid} on .*checkpoint_path"):
        _open(run)
    assert unfinished.exists()
    owner.kill()
    try:
        os.kill(owner.child, 0)  # it is alive
        _open(run)
        assert not unfinished.exists()
    finally:
        os.kill(owner.child, signal.SIGKILL)


def test_without_locks_a_run_is_possible(run, monkeypatch, capsys):
    def fail(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", fail)
    _open(run)
    assert "cannot lock" in capsys.readouterr().err


def test_a_new_run_names_the_run_of_another_project_with_its_name(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    old, new = Path("checkpoints/p/r"), Path("checkpoints/q/r")
    hint = "checkpoints/p/r has the same run_name. To continue it, add checkpoint_path=checkpoints/p/r."
    config = {"project_name": "q", "run_name": "r"}
    _open(new, **config)
    assert hint not in capsys.readouterr().out
    old.mkdir(parents=True)
    (old / "config.yaml").write_text(to_yaml(tiny_config(checkpoint_path=str(old)).model_dump()))
    _open(new, **config)
    assert hint in capsys.readouterr().out
    _open(old, **config)  # as advised
    assert hint not in capsys.readouterr().out

    stat = os.stat

    def refuse(path: Any, **options: Any) -> os.stat_result:
        if path == old / "config.yaml":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, **options)

    monkeypatch.setattr(os, "stat", refuse)
    _open(Path("checkpoints/s/r"), project_name="s", run_name="r")  # p is a folder of another user


def test_only_what_may_change_may_change(run):
    _open(run)
    (run / "config.yaml").write_text(to_yaml(tiny_config(checkpoint_path=str(run)).model_dump()))
    _open(run, checkpoint_interval=7, keep_best="eval/all/accuracy", resume="must", max_steps=3)
    with pytest.raises(
        ValueError, match="another config .epochs: 4 -> 6, lr: 0.001 -> 0.5.. .*checkpoint_path"
    ):
        _open(run, lr=0.5, epochs=6)


def test_a_key_that_the_run_began_without_has_its_default(run):
    exact = tiny_arch(q_target="exact").model_dump()
    _open(run, arch=exact)
    text = to_yaml(tiny_config(checkpoint_path=str(run), arch=exact).model_dump())
    for line in ("grad_clip_norm: null\n", "  q_target: exact\n"):
        assert line in text
        text = text.replace(line, "")
    (run / "config.yaml").write_text(text)
    _open(run, arch=exact)
    with pytest.raises(ValueError, match="another config .arch.q_target: exact -> deferred"):
        _open(run, arch=tiny_arch(q_target="deferred").model_dump())


def test_files_that_a_power_loss_has_emptied(run, capsys):
    run.mkdir()
    (run / "metrics.jsonl").write_bytes(b'{"step": 1}\n' + bytes(300) + b'\n{"step": 2}\n' + bytes(7))
    assert [values["step"] for values, _ in read_rows(run)] == [1, 2]
    assert cut_back_rows(run, step=2) == [{"step": 1}, {"step": 2}]
    assert (run / "metrics.jsonl").read_bytes() == b'{"step": 1}\n{"step": 2}\n'
    (run / "wandb_step").write_text("")
    assert last_wandb_step(run) == 0
    config = to_yaml(tiny_config().model_dump())
    for folder, text in ((run, ""), (run / "step_3", config)):
        folder.mkdir(exist_ok=True)
        (folder / "config.yaml").write_text(text)
    (run / "step_3" / "manifest.json").write_text("{}")
    assert read_stored_config(run).folder == run / "step_3"
    assert "config.yaml is empty. The config of step_3 is used." in capsys.readouterr().err


def test_cutting_the_log_back(run):
    run.mkdir()
    assert cut_back_rows(run, step=3) == []
    assert last_wandb_step(run) == 0
    path = run / "metrics.jsonl"
    lines = [json.dumps({"step": step, "eval/all/accuracy": step / 10}) for step in (1, 5, 10, 15)]
    unfinished = '{"step": 16, "train/lm'
    for step in (15, 12, 10, 0):
        path.write_text("\n".join(lines) + f"\nno json\n[1]\n{unfinished}")
        rows = cut_back_rows(run, step=step)
        kept = [line for line in lines if json.loads(line)["step"] <= step]
        assert rows == [json.loads(line) for line in kept]
        assert path.read_text().splitlines() == kept
        assert [(values, line) for values, line in read_rows(run)] == [
            (json.loads(line), line) for line in kept
        ]
    assert last_wandb_step(run) == 15


def test_a_row_that_the_disk_has_no_room_for_is_written_later(run):
    run.mkdir()
    file, (_, hard) = MetricsFile(run), resource.getrlimit(resource.RLIMIT_FSIZE)
    file.log(1, {"train/loss": 0.5})
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, ((run / file.name).stat().st_size + 9, hard))
        for step in (2, 3):  # a part of it is written, then nothing
            with pytest.raises(OSError, match="No space left|File too large"):
                file.log(step, {"train/loss": 0.5})
            assert (run / file.name).read_text().count("\n") == 1
            assert (run / file.name).read_text().endswith("\n")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    for step in (4, 5):
        file.log(step, {"train/loss": 0.5})
    file.close(has_failed=False)
    assert [values["step"] for values, _ in read_rows(run)] == [1, 2, 3, 4, 5]
    assert (run / file.name).read_text().count("\n") == 5


def test_each_start_has_a_line_and_a_full_disk_is_only_a_warning(run, monkeypatch, capsys):
    run.mkdir()
    monkeypatch.setattr("sys.argv", ["/somewhere/pretrain.py", "data_path=a b", "lr=1e-3"])
    for step in (0, 7):
        record_start(run, step=step, num_parameters=5, gradient_sync="flat", device=torch.device("cpu"))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    record_start(run, step=9, num_parameters=5, gradient_sync="flat", device=torch.device("cpu"))
    starts = [values for values, _ in read_rows(run, STARTS_FILE)]
    assert [start["step"] for start in starts] == [0, 7, 9]
    assert [start["processes"] for start in starts] == [1, 1, 4]
    assert starts[0]["gradient_sync"] == "flat"
    asked = "pretrain.py 'data_path=a b' lr=1e-3"
    assert [start["command"] for start in starts[1:]] == [
        f"python {asked}",
        f"torchrun --nnodes 2 --nproc-per-node 2 {asked}",
    ]
    name = instruction_set(torch.device("cpu"))
    assert re.fullmatch(rf"\d+ cores of .+ \({name}\)", starts[0]["hardware"])
    (run / STARTS_FILE).unlink()
    (run / STARTS_FILE).mkdir()
    record_start(run, step=9, num_parameters=5, gradient_sync="flat", device=torch.device("cpu"))
    assert "starts.jsonl (" in capsys.readouterr().err


def test_code_that_is_not_that_of_the_commit_is_recorded(run, monkeypatch, capsys):
    """Changed files and new ones, but neither tests nor what is no code."""
    repository = run / "code"
    for name in ("models/__init__.py", "models/trm.py", "tests/test.py", "data/new.txt"):
        (repository / name).parent.mkdir(parents=True, exist_ok=True)
        (repository / name).write_text("was = 1\n")

    def git(*words: str) -> str:
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words]
        return subprocess.run(command, cwd=repository, check=True, capture_output=True, text=True).stdout

    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    git("init", "-q")
    git("add", "models", "tests")
    git("commit", "-qm", "all")
    for module in (code, launch):
        monkeypatch.setattr(module, "REPOSITORY", repository)

    def recorded(step: int = 0) -> dict[str, Any]:
        for function in (code.git_commit, code.code_diff):
            function.cache_clear()
        record_start(run, step=step, num_parameters=5, gradient_sync="flat", device=torch.device("cpu"))
        return list(read_rows(run, STARTS_FILE))[-1][0]

    commit = git("rev-parse", "HEAD").strip()
    (repository / "tests/test.py").write_text("was = 2\n")
    for name in ("mine/lion.py", "mine/arch/gru.yaml", "own/__init__.py", "sweep.yaml"):
        (repository / name).parent.mkdir(parents=True, exist_ok=True)
        (repository / name).write_text("class LOGGER:\n    name = 1\n")
    load_plugins([str(repository / "own")])
    start = recorded()
    assert start["git_commit"] == commit
    assert not list(run.glob("*.diff"))
    (repository / "models/trm.py").write_text("now = 3\n")
    (repository / "models/mine.py").write_text("new = 4\n" * 2**18)
    start = recorded()
    assert start["git_commit"] == commit + code.CHANGES
    diff = (run / start["changes"]).read_text()
    assert "-was = 1\n+now = 3\n" in diff
    assert "+new = 4\n" in diff
    assert "was = 2" not in diff
    assert diff.endswith("(cut off here)\n")
    assert len(diff) < 2**20 + 100
    recorded(step=7)
    assert capsys.readouterr().err == ""
    (repository / "own/__init__.py").write_text("class LOGGER:\n    name = 2\n")
    (repository / "models/mine.py").unlink()
    recorded(step=8)
    changed = "previous launch of this run: this repository, plugin_own/own/__init__.py. Training continues"
    assert changed in capsys.readouterr().err
    (repository / "tests/test.py").write_text("was = 3\n")
    (repository / "models/.#trm.py").symlink_to("the lock file of an editor")
    git("commit", "-qam", "more")
    assert recorded(step=9)["git_commit"] not in (commit, commit + code.CHANGES)
    assert capsys.readouterr().err == ""  # another commit, but the same code
    (repository / "models/trm.py").write_text("now = 4\n")
    git("commit", "-qam", "even more")
    recorded(step=10)
    assert "launch of this run: this repository. Training" in capsys.readouterr().err
    shutil.rmtree(repository / ".git")
    monkeypatch.setenv("CODE_COMMIT", "d" * 40)  # as in an image
    assert recorded()["git_commit"] == "d" * 40
    for function in (code.git_commit, code.code_diff):
        function.cache_clear()
