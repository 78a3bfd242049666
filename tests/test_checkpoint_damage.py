"""Checkpoints that are damaged: noticed, set aside, and the one before is used."""

import hashlib
import json
import random
import shutil
from pathlib import Path

import pytest

from checkpointing.files import CorruptCheckpointError, choose_checkpoint, manifest_text, verify_checkpoint
from tests.checkpoints import checkpoint_names, flip_bit, resume, run_config, save


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
