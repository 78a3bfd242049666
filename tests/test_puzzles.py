import itertools
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from dataset.files import open_dataset, open_split
from dataset.loader import Batch, PuzzleDataset, read_batches
from dataset.metadata import IGNORE_LABEL_ID, SPLITS
from dataset.plan import EvaluationPlan, Stage, TrainPlan
from tests.puzzle_sets import BLANK, IGNORED, PAD_ID, SEQ_LEN, write
from tests.waiting import wait_for

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
        and all(a.dtype == b.dtype and torch.equal(a, b)
                for a, b in zip(one[1][:-1], other[1][:-1], strict=True))
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
        assert [tensor.dtype for tensor in batch[:-1]] == [torch.int32, torch.int32, torch.int32, torch.int64]
        assert [len(tensor) for tensor in batch[:-1]] == [6] * 4
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
    """Padding makes their shares equal in an evaluation; in training 4 ranks have 2, 2, 2 and 0 of 6 rows."""
    everything = read(folder, split)
    parts = [read(folder, split, rank=rank, world_size=world_size) for rank in range(world_size)]
    for (name, batch), *shares in zip(everything, *parts, strict=True):
        local = [-(-6 // world_size)] * world_size
        if split == "train" and world_size == 4:
            local[-1] = 0
        assert [share[0] for share in shares] == [name] * world_size
        assert [share[1].inputs.shape for share in shares] == [(each, SEQ_LEN) for each in local]
        for field in Batch._fields[:-1]:
            joined = torch.cat([getattr(share[1], field) for share in shares])
            assert torch.equal(joined[:6], getattr(batch, field))
        assert (torch.cat([share[1].rows for share in shares])[6:] == -1).all()


class WatchedDataset(PuzzleDataset):
    """A dataset that counts what was read of it, and whose file system may not answer any more."""

    num_read = 0

    def __iter__(self):
        for each in super().__iter__():
            self.num_read += 1
            yield each
            if self.num_read == 20:
                self.answers.wait()


def _watched(folder: Path) -> WatchedDataset:
    data, plan = open_dataset(folder, read_everything=False), make_plan(folder, "train", epochs=1000)
    dataset = WatchedDataset(data, "train", plan, rank=0, world_size=1)
    dataset.answers = threading.Event()
    return dataset


def test_a_few_batches_are_read_ahead_until_an_error_that_is_kept(folder):
    dataset, before = _watched(folder), threading.active_count()

    def fail() -> None:
        with read_batches(dataset, device=CPU) as batches:
            next(batches)
            wait_for(lambda: dataset.num_read >= 2, "nothing is read ahead")
            raise RuntimeError("in the block")

    with pytest.raises(RuntimeError, match="in the block") as kept:
        fail()
    assert threading.active_count() <= before
    assert dataset.num_read <= 10
    assert kept.tb is not None  # it still holds the iterator


def test_a_file_system_that_does_not_answer_holds_nobody_up(folder, monkeypatch):
    monkeypatch.setattr("dataset.loader._END_SECONDS", 0.1)
    dataset = _watched(folder)
    with read_batches(dataset, device=CPU) as batches:
        assert len(list(itertools.islice(batches, 20))) == 20
    dataset.answers.set()


def test_what_was_opened_stays_read_where_the_folder_is_built_anew(folder):
    expected, dataset = read(folder, "train"), whole(folder, "train")
    before = threading.active_count()
    shutil.rmtree(folder)
    write(folder, train={"all": [[1]], "more": [[1]]}, test=GROUPS)
    with read_batches(dataset, device=CPU) as batches:
        assert are_equal(batches, iter(expected))
    assert threading.active_count() <= before


def test_what_fails_in_the_thread_fails_here(folder):
    dataset = whole(folder, "test")
    dataset.plan = None
    with pytest.raises(AttributeError, match="batches"), read_batches(dataset, device=CPU) as batches:
        next(batches)
