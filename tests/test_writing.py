import dataclasses
import errno
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from dataset.build import writing
from dataset.build.writing import check_output_folder, write_dataset
from dataset.files import open_dataset
from runtime.reading import sha256_of
from tests.puzzle_sets import ARRAYS, SPLITS, TEST, TRAIN, make_set, make_split, write
from tests.ranks import _server
from tests.sudoku_source import files_of


@pytest.fixture
def folder(tmp_path) -> Path:
    return write(tmp_path / "data", **SPLITS)


def test_equal_arguments_give_equal_bytes_and_nothing_else(folder, tmp_path):
    assert files_of(write(tmp_path / "more" / "copy", **SPLITS)) == files_of(folder)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "more"]
    assert [path.name for path in (tmp_path / "more").iterdir()] == ["copy"]
    assert folder.stat().st_mode == (tmp_path / "more").stat().st_mode


def test_a_manifest_records_what_was_built(folder):
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["builder"] == {"module": "tests"}
    assert manifest["examples"] == {"train": {"all": 6, "more.hard": 2}, "test": {"all": 3, "more.hard": 3}}
    assert sorted(manifest["files"]) == sorted(
        ["identifiers.json", "train/dataset.json", "test/dataset.json", *ARRAYS]
    )


def test_extra_files_are_written_recorded_and_replaced_with_the_rest(folder):
    splits = {split: make_split(sets) for split, sets in SPLITS.items()}
    for content in ({"task": [[1, 2], [3, 4]]}, ["another"]):
        write_dataset(folder, splits=splits, identifiers=[], builder={}, extra_files={"extra.json": content})
        path = folder / "extra.json"
        assert json.loads(path.read_text()) == content
        assert path.read_text().count("\n") == 1
        recorded = json.loads((folder / "manifest.json").read_text())["files"]["extra.json"]
        assert recorded == {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
    write(folder, **SPLITS)
    assert not path.exists()


def test_a_failing_write_leaves_what_was_there(tmp_path, monkeypatch):
    saved = []

    def save(path, array, **options):
        saved.append(path)
        if len(saved) % 8 == 0:
            raise OSError(f"{array.size} requested and 1 written")
        original(path, array, **options)

    original = np.save
    monkeypatch.setattr(np, "save", save)
    message = (
        rf"cannot write {tmp_path}/data \(incomplete write, .*\). Free space on the disk of {tmp_path}, "
    )
    with pytest.raises(OSError, match=message):
        write(tmp_path / "data", **SPLITS)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    before = files_of(write(tmp_path / "data", **SPLITS))
    monkeypatch.setattr(np, "save", save)
    with pytest.raises(OSError, match=message):
        write(tmp_path / "data", train=TEST, test=TRAIN)
    assert files_of(tmp_path / "data") == before
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_what_cannot_be_read_is_not_written(tmp_path):
    splits = {split: make_split(sets) for split, sets in SPLITS.items()}
    train = splits["train"]
    broken_set = dataclasses.replace(train.sets["all"], labels=make_set([[1]]).labels)
    for broken in (
        dataclasses.replace(train, metadata=dataclasses.replace(train.metadata, sets=("../all",))),
        dataclasses.replace(train, metadata=dataclasses.replace(train.metadata, sets=())),
        dataclasses.replace(train, metadata=dataclasses.replace(train.metadata, vocab_size=2)),
        dataclasses.replace(train, sets={**train.sets, "all": broken_set}),
    ):
        with pytest.raises(ValueError, match="Build the dataset again"):
            write_dataset(tmp_path / "data", splits={**splits, "train": broken}, identifiers=[], builder={})
        assert list(tmp_path.iterdir()) == []


def _write_and_die(folder: Path, place: str) -> None:
    """Writes the second dataset over the first, and is killed at a place, such as after the second rename."""
    name, number = place.split()
    owner, calls = {"save": np, "rename": Path}[name], itertools.count(1)
    original = getattr(owner, name)

    def call_and_die(*arguments, **options):
        original(*arguments, **options)
        if next(calls) == int(number):
            os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, name, call_and_die)
    write(folder, train=TEST, test=TRAIN)


def kill_a_writer(folder: Path, place: str) -> None:
    process = _server.Process(target=_write_and_die, args=(folder, place))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.parametrize("place", ["save 7", "rename 1", "rename 2"])
def test_a_killed_writer_leaves_a_whole_dataset(folder, tmp_path, place):
    old = files_of(folder)
    new = files_of(write(tmp_path / "new", train=TEST, test=TRAIN))
    kill_a_writer(folder, place)
    assert len(list(tmp_path.iterdir())) == (2 if place == "rename 1" else 3)  # and the scratch folder
    if place == "rename 1":  # between the two moves: neither is in place, but both are whole
        scratch = tmp_path / "data.unfinished"
        assert files_of(scratch / "old") == old
        assert files_of(scratch / "new") == new
    else:
        assert files_of(folder) == (old if place == "save 7" else new)

    # The next attempt fails: all the same it has put the old one back, and cleared up.
    with pytest.raises(TypeError, match="not JSON serializable"):
        write_dataset(
            folder, splits={"train": make_split(TRAIN)}, identifiers=[], builder={"module": object()}
        )
    assert files_of(folder) == (new if place == "rename 2" else old)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "new"]


def test_what_was_being_removed_is_not_put_back(folder, tmp_path):
    kill_a_writer(folder, "rename 2")
    shutil.rmtree(folder)
    with pytest.raises(TypeError, match="not JSON serializable"):
        write_dataset(
            folder, splits={"train": make_split(TRAIN)}, identifiers=[], builder={"module": object()}
        )
    assert list(tmp_path.iterdir()) == []


def test_everything_is_on_the_disk_before_anything_moves(folder, monkeypatch):
    events = []

    def flush(path: Path) -> None:
        events.append(path.name)
        original(path)

    def rename(path: Path, goal: Path) -> Path:
        events.append(f"{path.name} -> {goal.name}")
        os.rename(path, goal)

    original = writing.flush
    monkeypatch.setattr(writing, "flush", flush)
    monkeypatch.setattr(Path, "rename", rename)
    write(folder, train=TEST, test=TRAIN)
    moves = events.index("data -> old")
    assert events[moves:] == ["data -> old", "new -> data", folder.parent.name]
    assert {path.name for path in folder.rglob("*")} | {"new"} <= set(events[:moves])


def test_living_attempts_and_the_folders_of_others_are_left_alone(folder, tmp_path):
    kill_a_writer(folder, "save 2")
    scratch = tmp_path / "data.unfinished"
    holder = subprocess.Popen(
        [sys.executable, "-c", "import fcntl, sys; f = open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_EX); "
         "print(flush=True); sys.stdin.read()", scratch / "lock"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    before = files_of(folder)
    with holder:
        holder.stdout.readline()
        with pytest.raises(ValueError, match="another process is writing .*data. Wait"):
            write(folder, train=TEST, test=TRAIN)
        assert (scratch / "new").is_dir()
    assert files_of(folder) == before
    write(folder, **SPLITS)
    scratch.mkdir()
    (scratch / "thesis.txt").touch()
    with pytest.raises(ValueError, match="cannot create .*data.unfinished: a folder of that name exists"):
        write(folder, train=TEST, test=TRAIN)
    assert files_of(folder) == before


def test_a_link_to_a_dataset_is_followed(folder, tmp_path):
    new = files_of(write(tmp_path / "new", train=TEST, test=TRAIN))
    (tmp_path / "links").mkdir()
    link = tmp_path / "links" / "data"
    link.symlink_to(folder)
    write(link, train=TEST, test=TRAIN)
    assert link.is_symlink()
    assert files_of(folder) == new
    (tmp_path / "links" / "later").symlink_to(tmp_path / "later")
    write(tmp_path / "links" / "later", **SPLITS)
    open_dataset(tmp_path / "later", read_everything=True)
    assert len(list((tmp_path / "links").iterdir())) == 2


def test_output_folders_that_cannot_be_replaced_are_refused(folder, tmp_path, monkeypatch):
    def refusal(path: Path | str) -> str:
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(ValueError, match="[Cc]hoose a") as error:
            write_dataset(Path(path), splits={}, identifiers=[], builder={})
        with pytest.raises(ValueError, match=re.escape(str(error.value))):
            check_output_folder(Path(path))
        assert sorted(tmp_path.rglob("*")) == before
        assert "\n" not in str(error.value)
        return str(error.value)

    (tmp_path / "file").touch()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").touch()
    (tmp_path / "mine" / "manifest.json").write_text('{"name": "my app", "files": {}}')
    (tmp_path / "to mine").symlink_to(tmp_path / "mine")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "empty").mkdir()
    assert refusal(tmp_path / "file") == f"{tmp_path / 'file'} is a file. Choose another --output-dir."
    assert f"cannot write into {tmp_path / 'file'}" in refusal(tmp_path / "file" / "data")
    assert "is not empty and was not made by a builder" in refusal(tmp_path / "mine")
    assert "is not empty and was not made by a builder" in refusal(tmp_path / "to mine")
    assert "is a symbolic link to itself" in refusal(tmp_path / "loop")
    assert refusal("/").startswith("/ is not empty")
    for place, path in ((folder, "."), (folder / "train", ".."), (tmp_path / "empty", "."), (folder, folder)):
        monkeypatch.chdir(place)
        assert f"cannot replace {path}: it contains the current directory. Change to" in refusal(path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == tmp_path / "empty")
    assert "is a mount point and cannot be replaced. Choose a folder in it" in refusal(tmp_path / "empty")
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    assert refusal(tmp_path / "new" / "data") == f"cannot write into {tmp_path}. Choose another --output-dir."


def test_only_a_full_disk_needs_space(tmp_path, monkeypatch):
    for number, advice in (
        (errno.EACCES, "Choose another"),
        (errno.ENOSPC, f"Free space on the disk of {tmp_path}, or choose another"),
    ):
        failing = mock.Mock(side_effect=OSError(number, "no"))
        monkeypatch.setattr(np, "save", failing)
        with pytest.raises(OSError, match=rf"cannot write {tmp_path}/data \(no\). {advice} --output-dir"):
            write(tmp_path / "data", **SPLITS)
