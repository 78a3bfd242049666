import ctypes
import itertools
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
import torch

from dataset.format import IGNORE_LABEL_ID, SPLITS, open_dataset, open_split
from dataset.loader import Batch, PuzzleDataset, _close_connections, read_batches
from dataset.plan import EvaluationPlan, Stage, TrainPlan
from tests.puzzle_sets import BLANK, IGNORED, PAD_ID, SEQ_LEN, write

CPU = torch.device("cpu")
GROUPS = {"all": [[1, 2], [3], [2, 4, 1]], "more": [[2], [5]]}  # 13 and 7 examples
WORLD_SIZES = (1, 2, 3, 4)


@pytest.fixture
def folder(tmp_path) -> Path:
    return write(tmp_path / "data", train=GROUPS, test=GROUPS)


def make_plan(folder: Path, split: str, *, epochs: int = 4) -> TrainPlan | EvaluationPlan:
    sets = open_split(folder, split).sets
    if split == "test":
        return EvaluationPlan(sets, global_batch_size=6)
    return TrainPlan(sets, [Stage((0,), epochs, 2)], seed=0, global_batch_size=6)


def whole(
    folder: Path, split: str, *, epochs: int = 4, rank: int = 0, world_size: int = 1, **options
) -> PuzzleDataset:
    data, plan = open_dataset(folder, read_everything=False), make_plan(folder, split, epochs=epochs)
    return PuzzleDataset(data, split, plan, rank=rank, world_size=world_size, **options)


def read(folder: Path, split: str, **options) -> list[tuple[str, Batch]]:
    return list(whole(folder, split, **options))


def are_equal(these: Iterator[tuple[str, Batch]], those: Iterator[tuple[str, Batch]]) -> bool:
    """Whether names, values and dtypes are."""
    return all(
        one is not None and other is not None and one[0] == other[0]
        and all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(one[1], other[1], strict=True))
        for one, other in itertools.zip_longest(these, those)
    )  # fmt: skip


@pytest.mark.parametrize("split", SPLITS)
def test_values_are_those_on_disk(folder, split):
    batches = read(folder, split)
    plan = make_plan(folder, split)
    num_ignored = 0
    for (name, batch), planned in zip(batches, plan.batches(), strict=True):
        array = {path.stem: np.load(path) for path in (folder / split).glob("*.npy")}
        count = len(planned.rows)
        labels = array[f"{name}__labels"][planned.rows].astype(np.int32)
        num_ignored += np.count_nonzero(labels == IGNORED)
        labels[labels == IGNORED] = IGNORE_LABEL_ID
        assert name == planned.set_name
        assert [tensor.dtype for tensor in batch] == [torch.int32, torch.int32, torch.int32, torch.int64]
        assert [len(tensor) for tensor in batch] == [6] * 4
        assert np.array_equal(batch.inputs[:count], array[f"{name}__inputs"][planned.rows])
        assert np.array_equal(batch.labels[:count], labels)
        identifiers = array[f"{name}__puzzle_identifiers"][planned.puzzles]
        assert np.array_equal(batch.puzzle_identifiers[:count], identifiers)
        assert np.array_equal(batch.rows[:count], planned.rows)
    assert num_ignored > 0


def test_without_ignored_labels_every_label_stays(tmp_path):
    folder = write(tmp_path / "data", train=GROUPS, test=GROUPS, ignore_label_id=None)
    labels = np.load(folder / "test" / "all__labels.npy")
    assert (labels == IGNORED).any()
    assert np.array_equal(read(folder, "test")[0][1].labels, labels[:6])


def test_a_short_batch_is_padded(folder):
    batches = read(folder, "test")
    assert [(name, int(batch.is_real.sum())) for name, batch in batches] == [
        ("all", 6), ("all", 6), ("all", 1), ("more", 6), ("more", 1),
    ]  # fmt: skip
    for _, batch in batches:
        padding = ~batch.is_real
        assert batch.is_real.dtype == torch.bool
        assert (batch.rows[padding] == -1).all()
        assert (batch.inputs[padding] == PAD_ID).all()
        assert (batch.labels[padding] == IGNORE_LABEL_ID).all()
        assert (batch.puzzle_identifiers[padding] == BLANK).all()
        assert batch.is_real.tolist() == sorted(batch.is_real.tolist(), reverse=True)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("split", SPLITS)
def test_ranks_share_the_global_batch(folder, split, world_size):
    everything = read(folder, split)
    parts = [read(folder, split, rank=rank, world_size=world_size) for rank in range(world_size)]
    for (name, batch), *shares in zip(everything, *parts, strict=True):
        local = -(-6 // world_size)
        assert [share[0] for share in shares] == [name] * world_size
        assert [share[1].inputs.shape for share in shares] == [(local, SEQ_LEN)] * world_size
        for field in Batch._fields:
            joined = torch.cat([getattr(share[1], field) for share in shares])
            assert torch.equal(joined[:6], getattr(batch, field))
        assert (torch.cat([share[1].rows for share in shares])[6:] == -1).all()  # 3 ranks of 2, 4 of 2


@pytest.mark.parametrize("split", SPLITS)
def test_reading_starts_after_the_first_steps(folder, split):
    everything = read(folder, split)
    for step in range(len(everything) + 1):
        assert are_equal(read(folder, split, first_step=step), everything[step:])


def workers() -> list[multiprocessing.Process]:
    return multiprocessing.active_children()


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_worker_reads_the_same(folder, split, num_workers):
    dataset = whole(folder, split, rank=1, world_size=2)
    with read_batches(dataset, device=CPU, num_workers=num_workers) as batches:
        assert len(workers()) == num_workers
        assert are_equal(batches, iter(dataset))
    assert workers() == []


def endless(folder: Path) -> PuzzleDataset:
    return whole(folder, "train", epochs=1000)


def test_the_worker_is_gone_after_an_error_that_is_kept(folder):
    def fail() -> None:
        with read_batches(endless(folder), device=CPU) as batches:
            next(batches)
            raise RuntimeError("in the block")

    with pytest.raises(RuntimeError, match="in the block") as kept:
        fail()
    assert workers() == []
    assert kept.tb is not None  # it still holds the iterator


def test_signals_are_left_to_the_parent(folder):
    dataset, ignored = endless(folder), (signal.SIGINT, signal.SIGTERM)
    with read_batches(dataset, device=CPU, ignored_signals=ignored) as batches:
        seen = [next(batches)]
        (worker,) = workers()
        for number in ignored:
            os.kill(worker.pid, number)
        seen += itertools.islice(batches, 50)  # more than were read ahead
        assert worker.is_alive()
        assert are_equal(seen, itertools.islice(dataset, 51))
    assert workers() == []


def _connect_and_be_killed(folder: Path, address: tuple[str, int], pipe: Connection) -> None:
    torch.utils.data._utils.worker.MP_STATUS_CHECK_INTERVAL = 600.0  # it looks that rarely for its parent
    with socket.create_connection(address), read_batches(endless(folder), device=CPU) as batches:
        next(batches)
        pipe.send(workers()[0].pid)
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux alone")
def test_the_worker_holds_no_connection_of_its_parent(folder):
    """As long as it did, other ranks would not learn that its parent was killed."""
    ours, theirs = multiprocessing.Pipe()
    with socket.create_server(("127.0.0.1", 0)) as server:
        parent = multiprocessing.get_context("fork").Process(
            target=_connect_and_be_killed, args=(folder, server.getsockname(), theirs)
        )
        parent.start()
        connection, _ = server.accept()
    with connection:
        connection.settimeout(60)
        worker = ours.recv()
        try:
            assert connection.recv(1) == b""
            assert Path("/proc", str(worker)).exists()
        finally:
            os.kill(worker, signal.SIGKILL)
            parent.join()


def _hang_in_forks(folder: Path, num_hanging: int, pipe: Connection) -> None:
    forks = itertools.count()
    os.register_at_fork(
        before=forks.__next__, after_in_child=lambda: next(forks) > num_hanging or signal.pause()
    )
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            with read_batches(endless(folder), device=CPU) as batches:
                next(batches)
                said = "read"
        except RuntimeError as error:
            said = str(error)
    pipe.send((said, [str(each.message) for each in told], len(workers())))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux alone")
@pytest.mark.parametrize(
    ("num_hanging", "seconds", "expected"),
    [(1, 3.0, "read"), (3, 0.1, "the worker that reads the data hung in 3 of 3 forks: start again")],
)
def test_a_worker_that_hangs_in_its_fork_is_forked_again(num_hanging, seconds, expected, folder, monkeypatch):
    monkeypatch.setattr("dataset.loader._FORK_SECONDS", 3 * (seconds,))
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.1)
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(
        target=_hang_in_forks, args=(folder, num_hanging, theirs)
    )
    process.start()
    said, told, num_workers = ours.recv()
    process.join()
    assert (said, num_workers) == (expected, 0)
    assert len(told) == num_hanging
    assert all("hung in its fork, and was ended" in each for each in told)


class StuckDataset(PuzzleDataset):
    """Its file system does not answer any more."""

    def __iter__(self):
        yield from itertools.islice(super().__iter__(), 1)
        time.sleep(600)


def test_a_stuck_worker_is_gone_too(folder, monkeypatch):
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.1)  # it waits so long, seconds
    data = open_dataset(folder, read_everything=False)
    dataset = StuckDataset(data, "test", make_plan(folder, "test"), rank=0, world_size=1)
    with read_batches(dataset, device=CPU) as batches:
        next(batches)
    assert workers() == []


@pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux alone")
def test_what_fails_at_its_start_fails_here(folder, monkeypatch):
    def fail() -> None:
        raise OSError("too many open files")

    monkeypatch.setattr("dataset.loader._close_connections", fail)
    with pytest.raises(OSError, match="too many open files"):
        with read_batches(whole(folder, "test"), device=CPU) as batches:
            next(batches)
    assert workers() == []


def _lose_connections(connection: socket.socket, pipe: Connection) -> None:
    """Then a file gets a number, and the object of the connection, which has another one, is gone."""
    _close_connections()
    with open(os.devnull) as file:
        connection.close()
        pipe.send((file.fileno(), file.read()))


@pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux alone")
def test_numbers_of_connections_stay_taken():
    with socket.create_server(("127.0.0.1", 0)) as server:
        connection = socket.create_connection(server.getsockname())
        taken, (ours, theirs) = connection.fileno(), multiprocessing.Pipe()
        process = multiprocessing.get_context("fork").Process(
            target=_lose_connections, args=(connection, theirs)
        )
        process.start()
        theirs.close()
        number, text = ours.recv()
        process.join()
        connection.close()
    assert text == ""
    assert number != taken


@pytest.mark.parametrize("num_workers", [0, 1])
def test_what_was_opened_stays_read_where_the_folder_is_built_anew(folder, num_workers):
    expected, dataset = read(folder, "train"), whole(folder, "train")
    shutil.rmtree(folder)
    write(folder, train={"all": [[1]], "more": [[1]]}, test=GROUPS)
    with read_batches(dataset, device=CPU, num_workers=num_workers) as batches:
        assert are_equal(batches, iter(expected))


def _read_with_little_shared_memory(folder: Path) -> None:
    """Reads batches of 2 MB each where shared memory has 4 MB."""
    assert not ctypes.CDLL(None).unshare(0x00020000), "a mount namespace"
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", "/dev/shm"], check=True)
    data = open_dataset(folder, read_everything=False)
    plan = TrainPlan(data.splits["train"].sets, [Stage((0,), 40, 40)], seed=0, global_batch_size=16384)
    dataset = PuzzleDataset(data, "train", plan, rank=0, world_size=1)
    with read_batches(dataset, device=CPU) as batches:
        time.sleep(1)  # in which the worker would have filled the memory
        assert are_equal(batches, iter(dataset))


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="root alone can mount")
def test_where_shared_memory_is_small_batches_are_handed_over_otherwise(tmp_path):
    folder = write(tmp_path / "data", train={"all": [[16384]]}, test=GROUPS)
    process = multiprocessing.get_context("fork").Process(
        target=_read_with_little_shared_memory, args=(folder,)
    )
    process.start()
    process.join(60)
    assert process.exitcode == 0


def test_what_fails_in_the_worker_fails_here(folder):
    dataset = whole(folder, "test")
    dataset.plan = None
    with pytest.raises(AttributeError, match="batches"), read_batches(dataset, device=CPU) as batches:
        next(batches)
    assert workers() == []


def test_a_dataset_of_the_public_tools(golden_folder):
    folder = golden_folder / "hrm_checkpoint" / "dataset"
    data = open_dataset(folder, read_everything=True)
    assert (data.metadata.vocab_size, data.metadata.seq_len, data.metadata.ignore_label_id) == (6, 16, 0)
    sizes = {name: split.sets["all"].num_examples for name, split in data.splits.items()}
    assert sizes == {"train": 4000, "test": 1000}
    plan = EvaluationPlan(data.splits["test"].sets, global_batch_size=1000)
    ((_, batch),) = PuzzleDataset(data, "test", plan, rank=0, world_size=1)
    for name in ("inputs", "labels"):
        assert np.array_equal(getattr(batch, name), np.load(folder / "test" / f"all__{name}.npy"))
