"""Killed runs, full disks, lost ranks, damaged files: nothing is lost, and saving continues."""

import contextlib
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import checkpointing.writer
import pretrain
import training.checkpoints
from checkpointing.files import (
    CorruptCheckpointError,
    checkpoints_in,
    choose_checkpoint,
    manifest_text,
    newest_checkpoint,
    step_of,
    verify_checkpoint,
)
from checkpointing.writer import CheckpointWriter
from distributed.world import rank
from tests.checkpoints import (
    assert_equal,
    checkpoint_names,
    flip_bit,
    open_checkpoints,
    random_state,
    resume,
    run_config,
    save,
    state_tensors,
)
from tests.ranks import call_each, run_ranks
from tests.tiny import OVERRIDES, logged_rows, run_of
from training.run_config import compose_run


def _kill_at_event(number: int) -> None:
    """Kills this process before the nth thing that it does to checkpoints from now on."""
    left = number

    def count(event: str, arguments: tuple) -> None:
        nonlocal left
        is_open = event == "open" and "step_" in str(arguments[0])
        if is_open or event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir"):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)


def _kill_everywhere(folder: Path) -> list[tuple[int, int]]:
    """(newest checkpoint, how many there are) after a kill at each event of a save, until it survives."""
    base, found = folder / "base", []
    save(base, 1, 2, keep_checkpoints=2)
    expected = {step: state_tensors(random_state(step)) for step in (2, 3)}
    state = random_state(3)
    while True:
        run = shutil.copytree(base, folder / f"run_{len(found)}")
        pid = os.fork()
        if pid == 0:
            with open_checkpoints(run, keep_checkpoints=2) as checkpoints:
                _kill_at_event(len(found) + 1)
                checkpoints.save(state)
                checkpoints._writer.wait()
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        for checkpoint in checkpoints_in(run):
            verify_checkpoint(checkpoint)
        newest = step_of(newest_checkpoint(run))
        found.append((newest, len(checkpoints_in(run))))
        assert_equal(state_tensors(resume(run, keep_checkpoints=2)), expected[newest])
        assert not list(run.glob("*.tmp-*"))
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            return found


@pytest.mark.slow
def test_killed_at_any_instant_there_is_a_whole_newest(tmp_path):
    (found,) = run_ranks(_kill_everywhere, 1, tmp_path)
    newest = [step for step, _ in found]
    assert newest == sorted(newest), "first the one before, then the new one"
    assert newest.count(2) >= 8, "while the new one is written"
    assert newest.count(3) >= 8, "while the old one is removed"
    assert min(count for _, count in found) == 2, "never fewer than before"
    assert found[-1] == (3, 2)


def _limit_files(size: int) -> None:
    """From here on no file of this process can grow beyond `size`: as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def _fill_the_disk_for_a_while(run: Path, rank_with_full_disk: int) -> tuple[list[set[str]], list]:
    names, failed = [], []
    states = [random_state(step) for step in (1, 2, 3, 4, 5)]
    with open_checkpoints(run, keep_checkpoints=2) as checkpoints:
        for state in states:
            if rank() == rank_with_full_disk:
                _limit_files(2000 if state.step in (3, 4) else resource.RLIM_INFINITY)
            checkpoints.save(state)
            checkpoints._writer.wait()
            names.append(checkpoint_names(run))
            failed.append(checkpoints._writer.failure)
    return names, [*failed, checkpoints.last_save_failed]


@pytest.mark.slow
def test_a_full_disk_ends_nothing(tmp_path):
    two = {"step_1", "step_2"}
    cases = [(tmp_path / str(number), number) for number in range(2)]
    of_ranks = run_ranks(call_each, 2, _fill_the_disk_for_a_while, cases)
    for full, results in enumerate(zip(*of_ranks, strict=True)):
        names, failed = results[0]
        assert names == [{"step_1"}, two, two, two, {"step_2", "step_5"}]
        assert [failure is not None for failure in failed[:5]] == [False, False, True, True, False]
        assert f"rank {full}: " in failed[2]
        assert "File too large" in failed[2]
        assert [failed[5] for _, failed in results] == [False, False]


def _train_on_a_full_disk(folder: Path, data: Path) -> int | str | None:
    """What the program does, but in the group that there is already."""
    words = (*OVERRIDES, "max_steps=4", "checkpoint_interval=2", f"checkpoint_path={folder / 'run'}")
    if rank() == 0:
        _limit_files(20_000)
    with pytest.raises(SystemExit) as ended:
        pretrain.train(run_of(compose_run([f"data_path='{data}'", *words])))
    return ended.value.code


@pytest.mark.slow
def test_the_run_ends_with_an_error_if_its_last_save_failed(tmp_path, sudoku_folder):
    """Training goes on to the end."""
    assert run_ranks(_train_on_a_full_disk, 2, tmp_path, sudoku_folder) == [1, 1]
    assert logged_rows(tmp_path / "run")[-1]["step"] == 4
    assert json.loads((tmp_path / "run" / "status").read_text()) == {"status": "failed", "step": 4}
    assert not checkpoint_names(tmp_path / "run")


def test_a_folder_that_is_gone_ends_nothing(run, capsys):
    with open_checkpoints(run) as checkpoints:
        run.rmdir()
        run.touch()
        checkpoints.save(random_state(1))
    assert checkpoints.last_save_failed
    assert "checkpoint not saved" in capsys.readouterr().err


def raising(error: Exception) -> Callable:
    def fail(*_, **__):
        raise error

    return fail


def test_a_copy_for_which_there_is_no_memory_ends_nothing(run, monkeypatch, capsys):
    state = random_state(1)
    monkeypatch.setattr(torch, "empty", raising(MemoryError("no memory")))
    with open_checkpoints(run) as checkpoints:
        checkpoints.save(state)
    assert checkpoints.last_save_failed
    assert "rank 0: MemoryError: no memory" in capsys.readouterr().err
    assert not list(run.iterdir())


@pytest.mark.parametrize("is_last", [False, True])
def test_a_warning_says_that_training_continues_only_if_it_does(run, is_last, monkeypatch):
    warned: list[str] = []
    monkeypatch.setattr(checkpointing.writer.log, "warning", warned.append)
    for name in ("step_1", "step_2"):
        (run / name).mkdir(parents=True)
    writer = CheckpointWriter(run, keep=1, best_of=lambda _: None)
    writer.wait(is_last=is_last)
    with monkeypatch.context() as patches:
        patches.setattr(shutil, "rmtree", raising(OSError("busy")))
        writer.remove_old()
    monkeypatch.setattr(checkpointing.writer, "is_main", lambda: False)
    monkeypatch.setattr(checkpointing.writer, "connect_store", raising(ConnectionError("gone")))
    writer._write(run, run / "step_3", {}, "")
    expected = ("cannot remove the old checkpoint", "cannot reach rank 0 (ConnectionError: gone)")
    for text, words in zip(warned, expected, strict=True):
        assert words in text
        assert ("Training continues." in text) == (not is_last)


def _lose_a_part(run: Path, is_known: bool) -> bool:
    """Rank 1 never says that it has written, as if it had died, or its node had; a collective may say so."""
    checkpointing.writer._OTHERS_SECONDS = 600.0 if is_known else 0.3
    training.checkpoints._LAST_OTHERS_SECONDS = 0.3
    warned: list[str] = []
    checkpointing.writer.log.warning = warned.append
    if rank() == 1:
        checkpointing.writer._send_to_rank_0 = lambda *_: None
    with contextlib.suppress(RuntimeError), open_checkpoints(run) as checkpoints:
        checkpoints.save(random_state(1))
        if is_known:
            raise torch.distributed.DistNetworkError("the connection to rank 1 is lost")
    expected = "(RuntimeError: rank 1 did not report written files within 0.3 s). Earlier checkpoints"
    assert [expected in text for text in warned] == [True] * (rank() == 0), warned
    return is_known or checkpoints.last_save_failed


@pytest.mark.slow
@pytest.mark.parametrize("is_known", [False, True])
def test_a_rank_that_is_gone_is_not_waited_for_forever(run, is_known):
    assert run_ranks(_lose_a_part, 2, run, is_known) == [True, True]
    assert not checkpoint_names(run)


def _fail_while_rank_1_writes(run: Path) -> None:
    training.checkpoints._LAST_OTHERS_SECONDS = 0.1
    if rank() == 1:
        tell = checkpointing.writer._send_to_rank_0
        checkpointing.writer._send_to_rank_0 = lambda *part: (time.sleep(0.5), tell(*part))
    with contextlib.suppress(ValueError), open_checkpoints(run) as checkpoints:
        checkpoints.save(random_state(1))
        raise ValueError("all ranks find the same mistake")


@pytest.mark.slow
def test_an_exception_waits_for_ranks_that_are_there(run):
    run_ranks(_fail_while_rank_1_writes, 2, run)
    verify_checkpoint(run / "step_1")


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("whole") / "run"
    save(run, 3)
    return run / "step_3"


@pytest.mark.parametrize("name", ["weights", "optimizer", "carry", "state", "config", "manifest"])
def test_every_flipped_bit_is_noticed(whole, tmp_path, name):
    folder = shutil.copytree(whole, tmp_path / "step_3")
    (path,) = folder.glob(f"{name}*")
    size, draw = path.stat().st_size, random.Random(0)
    verify_checkpoint(folder)
    drawn = [0, size - 1, *(draw.randrange(size) for _ in range(20))]
    content = path.read_bytes()
    for place in range(0, size, 3) if name == "manifest" else drawn:
        flip_bit(path, place, draw.randrange(8))
        _assert_is_corrupt(folder)
        path.write_bytes(content)
    for damaged in (b"", content[:1], content[: size // 2], content[:-1], content + b"\n"):
        path.write_bytes(damaged)
        _assert_is_corrupt(folder)
    path.unlink()
    _assert_is_corrupt(folder)


def _assert_is_corrupt(folder: Path) -> None:
    with pytest.raises(CorruptCheckpointError, match="corrupt"):
        verify_checkpoint(folder)


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname", "sub/file", ".."])
def test_names_in_a_manifest_lead_nowhere_else(whole, tmp_path, name):
    folder = shutil.copytree(whole, tmp_path / "step_3")
    (tmp_path / "outside").write_text("x")
    files = json.loads((folder / "manifest.json").read_text())["files"]
    files[name] = {"bytes": 1, "sha256": hashlib.sha256(b"x").hexdigest()}
    (folder / "manifest.json").write_text(manifest_text(files))
    _assert_is_corrupt(folder)


@pytest.mark.slow
def test_damaged_ones_are_set_aside_and_the_one_before_is_used(run, capsys):
    save(run, 1, 2, 3, 4, 5, keep_checkpoints=None)
    (run / "step_5" / "manifest.json").unlink()
    flip_bit(run / "step_4" / "state.json", 10)
    (run / "step_3" / "weights.safetensors").write_bytes(b"")
    assert resume(run).step == 2
    errors = capsys.readouterr().err
    for step in (3, 4, 5):
        assert f"step_{step} is corrupt" in errors
    assert checkpoint_names(run) == {"step_1", "step_2", "step_3.corrupt", "step_4.corrupt", "step_5.corrupt"}
    save(run, 3, keep_checkpoints=None)
    flip_bit(run / "step_3" / "state.json", 10)
    assert resume(run).step == 2
    assert "step_3.corrupt-2" in checkpoint_names(run)


def test_no_whole_one_is_for_a_person_to_decide(run):
    save(run, 1, 2)
    for step in (1, 2):
        flip_bit(run / f"step_{step}" / "config.yaml", 0)
    for mode in ("auto", "must"):
        with pytest.raises(ValueError, match="step_2 is corrupt .* No checkpoint in .* is intact"):
            choose_checkpoint(run, run_config(run, resume=mode))
    assert checkpoint_names(run) == {"step_1", "step_2"}


def test_another_runs_checkpoints_are_left_as_they_are(run, tmp_path, capsys):
    save(run, 1, 2)
    flip_bit(run / "step_2" / "config.yaml", 0)
    branch = tmp_path / "branch"
    assert choose_checkpoint(branch, run_config(branch, resume=str(run))) == run / "step_1"
    assert "step_2 is corrupt" in capsys.readouterr().err
    assert checkpoint_names(run) == {"step_1", "step_2"}
    with pytest.raises(ValueError, match="corrupt"):
        choose_checkpoint(branch, run_config(branch, resume=str(run / "step_2")))
    flip_bit(run / "step_1" / "config.yaml", 0)
    with pytest.raises(ValueError, match=f"No checkpoint in {run} is intact. Choose another folder.$"):
        choose_checkpoint(branch, run_config(branch, resume=str(run)))
