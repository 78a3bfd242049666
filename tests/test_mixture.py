"""Several dataset folders as one: which examples come when, and with which identifiers."""

import dataclasses

import numpy as np
import pytest

from dataset.files import open_dataset
from dataset.loader import PuzzleDataset
from dataset.mixture import fingerprint_of, open_datasets
from dataset.plan import EvaluationPlan, Stage, TrainPlan
from dataset.sets import ConcatenatedSet
from tests.puzzle_sets import NUM_IDENTIFIERS, A, make_set, write
from tests.tiny import tiny_config
from training.data import open_tests


def test_one_folder_is_left_as_it_is(folders):
    one, plain = (
        open_datasets(folders[:1], read_everything=True),
        open_dataset(folders[0], read_everything=True),
    )
    assert one.metadata == plain.metadata
    assert one.splits["test"].sets.keys() == plain.splits["test"].sets.keys()
    assert one.origin("all") == (folders[0], "all", 0)
    assert fingerprint_of(folders[:1]) not in (fingerprint_of(folders), fingerprint_of(folders[::-1]))


def test_every_example_is_there_under_its_own_identifier(folders):
    joined = open_datasets(folders, read_everything=True)
    assert joined.metadata.num_puzzle_identifiers == 2 * NUM_IDENTIFIERS
    assert list(joined.splits["train"].sets) == ["all", "more"]
    assert list(joined.splits["test"].sets) == ["a.all", "b.all", "b.more"]
    assert joined.origin("b.more") == (folders[1], "more", NUM_IDENTIFIERS)
    assert list(joined.origins) == ["a.all", "b.all", "b.more"]
    with pytest.raises(KeyError):
        joined.origin("all")
    parts = [open_dataset(folder, read_everything=False) for folder in folders]
    whole = joined.splits["train"].sets["all"]
    row = puzzle = 0
    for number, part in enumerate(parts):
        data = part.splits["train"].sets["all"]
        for own in range(len(data.puzzle_identifiers)):
            own_rows = np.arange(data.puzzle_indices[own], data.puzzle_indices[own + 1])
            rows = np.arange(whole.puzzle_indices[puzzle], whole.puzzle_indices[puzzle + 1])
            assert rows.tolist() == (own_rows + row).tolist()
            inputs, labels = whole.read(rows, np.full(len(rows), puzzle))
            assert np.array_equal(inputs, data.inputs[own_rows])
            assert np.array_equal(labels, data.labels[own_rows])
            expected = data.puzzle_identifiers[own] + number * NUM_IDENTIFIERS
            assert whole.puzzle_identifiers[puzzle] == expected
            puzzle += 1
        row += data.num_examples
    assert (whole.num_examples, len(whole.puzzle_identifiers)) == (row, puzzle)
    assert whole.folder_of_group.tolist() == [0, 0, 0, 1, 1]


def test_identifiers_that_are_bytes_do_not_overflow():
    part = dataclasses.replace(make_set([[1]] * 3), puzzle_identifiers=np.array([0, 1, 99], np.uint8))
    joined = ConcatenatedSet([part, part], folders=[0, 1], first_identifiers=[0, 200])
    assert joined.puzzle_identifiers.tolist() == [0, 1, 99, 200, 201, 299]


def test_rows_of_all_folders_in_one_batch(folders):
    joined = open_datasets(folders, read_everything=False)
    plan = TrainPlan(joined.splits["train"].sets, [Stage((0, 1), 20, 20)], seed=0, global_batch_size=5)
    batches = list(PuzzleDataset(joined, "train", plan, rank=0, world_size=1))
    identifiers = [batch.puzzle_identifiers.numpy() for name, batch in batches if name == "all"]
    assert any((each < NUM_IDENTIFIERS).any() and (each >= NUM_IDENTIFIERS).any() for each in identifiers)
    plan = EvaluationPlan(joined.splits["test"].sets, global_batch_size=4)
    for name, batch in PuzzleDataset(joined, "test", plan, rank=0, world_size=1):
        is_of_second = batch.puzzle_identifiers[batch.is_real] >= NUM_IDENTIFIERS
        assert is_of_second.all() if name.startswith("b.") else not is_of_second.any()


def test_folders_that_cannot_be_joined_are_refused(folders, tmp_path):
    other = write(tmp_path / "other", train=A, test=A, pad_id=1)
    with pytest.raises(ValueError, match="other: pad_id is 1, but 3 in .*a. One model cannot train on both"):
        open_datasets([folders[0], other], read_everything=False)
    twin = write(tmp_path / "twin" / "a", train=A, test=A)
    with pytest.raises(ValueError, match=r"must have different names: a, a\. Rename one"):
        open_datasets([folders[0], twin], read_everything=False)


def test_test_sets_with_the_same_name_are_refused(folders, tmp_path):
    first = write(tmp_path / "x", train=A, test={"all": A["all"], "y.z": A["all"]})
    second = write(tmp_path / "x.y", train=A, test={"z": A["all"]})
    joined = open_datasets([first, folders[0]], read_everything=False)
    assert list(joined.splits["test"].sets) == ["x.all", "x.y.z", "a.all"]
    message = r"^two test sets have the name x\.y\.z\. Rename one of x, x\.y\.$"
    with pytest.raises(ValueError, match=message):
        open_datasets([first, second], read_everything=False)
    open_datasets([first, second], splits=("train",), read_everything=False)
    config = tiny_config(test_data_path=[str(first), str(second)])
    with pytest.raises(ValueError, match=message):
        open_tests(config, open_dataset(folders[0], read_everything=False))


def test_test_data_that_a_model_cannot_read_is_refused(folders, tmp_path):
    trained = open_dataset(folders[0], read_everything=False)
    write(tmp_path / "other", train=A, test=A, pad_id=1)
    write(tmp_path / "more", train=A, test=A, num_puzzle_identifiers=NUM_IDENTIFIERS + 1)
    write(tmp_path / "twin" / "b", train=A, test=A)
    for names, message in (
        (["other"], "other: pad_id is 1, but 3 in .*a. "),
        (["more"], "test_data_path: .*more has puzzles without a trained embedding"),
        (["b", "twin/b"], "test_data_path: two folders have the name b. Rename one."),
    ):
        config = tiny_config(test_data_path=[str(tmp_path / name) for name in names])
        with pytest.raises(ValueError, match=message):
            open_tests(config, trained)
