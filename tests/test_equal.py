"""Which examples are equal, and what a model was trained on."""

import dataclasses
import json

import numpy as np
import pytest
import safetensors.numpy

from dataset import equal
from dataset.equal import (
    Trained,
    hash_examples,
    hash_training,
    join_repeats,
    read_trained,
    trained_in_folders,
)
from dataset.files import open_dataset
from dataset.loader import original_rows
from dataset.mixture import open_datasets
from tests import arc_source
from tests.arc_set import lay
from tests.puzzle_sets import A, B, make_set, write
from tests.sudoku_source import build_sets


def _hashes(folder, split="train", **changes) -> list[int]:
    data = open_dataset(folder, read_everything=False).splits[split].sets["all"]
    return hash_examples(dataclasses.replace(data, **changes), split, [folder]).tolist()


def test_the_dtype_and_other_folders_do_not_matter(tmp_path):
    a, b = write(tmp_path / "a", train=A, test=A), write(tmp_path / "b", train=B, test=A)
    alone = _hashes(a)
    assert len(set(alone)) == len(alone) == 6  # examples of the first puzzles: 1, 3 and 2
    assert _hashes(a, inputs=make_set(A["all"]).inputs.astype(np.int64)) == alone
    joined = open_datasets([b, a], read_everything=False).splits["train"].sets["all"]
    assert hash_examples(joined, "train", [b, a]).tolist() == [*_hashes(b), *alone]
    assert len(original_rows(joined)) == len(alone) + len(_hashes(b))


def test_the_hash_is_that_of_checkpoints_of_earlier_versions():
    tokens = np.arange(20, dtype=np.uint8).reshape(2, 10)
    assert equal.hash_rows(tokens).tolist() == [17992673231302329983, 15663598950839961897]
    assert equal._hash_name("turn") == 14914494917266671731


def test_variants_are_not_read_and_the_original_is_the_same_in_both_forms(tmp_path):
    words = ("--generate", 30, "--num-test", 5, "--box", "2x2", "--num-aug", 3)
    build_sets("sudoku", tmp_path / "made", *words)
    build_sets("sudoku", tmp_path / "written", *words, "--materialize")
    assert len(set(_hashes(tmp_path / "made"))) == 30
    assert _hashes(tmp_path / "made") == _hashes(tmp_path / "written")


def test_arc_pairs_are_equal_in_any_field_at_any_position(tmp_path):
    tasks = arc_source.make_tasks(6, largest=5)
    source = arc_source.write_folder(tmp_path / "evaluation", tasks)
    small, large = tmp_path / "small", tmp_path / "large"
    arc_source.build(small, "--source", source, "--num-aug", 2, "--max-size", 6)
    arc_source.build(large, "--source", source, "--num-aug", 2, "--materialize")
    assert _hashes(small) == _hashes(large)
    data = open_dataset(large, read_everything=False).splits["test"].sets["all"]
    expected = hash_examples(data, "test", [large]).tolist()
    tests = [pair for task in sorted(tasks) for pair in tasks[task]["test"]]
    moved = [np.array([lay(np.array(pair[side]), 4, 7) for pair in tests]) for side in ("input", "output")]
    rows = original_rows(data)
    inputs, labels = data.inputs.copy(), data.labels.copy()
    inputs[rows], labels[rows] = moved
    assert _hashes(large, "test", inputs=inputs, labels=labels) == expected
    labels[rows[0]] = 0
    assert _hashes(large, "test", labels=labels) == [equal.UNKNOWN, *expected[1:]]
    labels[rows[0]] = labels[rows[1]]
    assert _hashes(large, "test", labels=labels)[0] not in expected  # the answer belongs to a pair


def test_the_name_of_a_task_belongs_to_its_examples(tmp_path):
    source = tmp_path / "pairs.jsonl"
    lines = [{"input": "ab", "output": "ba", "task": task} for task in ("turn", "swap")]
    lines += [{"input": f"b{'a' * n}", "output": "b", "task": "turn"} for n in range(5)]
    source.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    build_sets("pairs", tmp_path / "named", "--source", source, "--test-fraction", 0.3)
    source.write_text("".join(f"{json.dumps({**line, 'task': 'turn'})}\n" for line in lines[1:]))
    build_sets("pairs", tmp_path / "one", "--source", source, "--test-fraction", 0.3)
    named, one = ({*_hashes(tmp_path / each), *_hashes(tmp_path / each, "test")} for each in ("named", "one"))
    assert (len(named), len(one), len(named & one)) == (7, 6, 0)


def test_held_out_groups_are_not_trained_on(tmp_path):
    folders = [write(tmp_path / "a", train=A, test=A), write(tmp_path / "b", train=B, test=A)]
    data = open_datasets(folders, read_everything=False)
    held_out = {"all": np.array([False, True, False, False, False])}
    found = trained_in_folders(data, hash_training(data), held_out)
    alone = _hashes(folders[0])
    assert found[0].tolist() == [alone[0], *alone[4:]]
    assert [len(each) for each in found.values()] == [3, 4]  # two sets of the folder b


def test_groups_with_equal_examples_move_to_the_side_of_the_first(tmp_path):
    groups = {"all": [[1], [1], [2], [1, 1], [2], [1]], "more": [[1], [1]]}
    data = open_datasets([write(tmp_path / "a", train=groups, test=A)], read_everything=False)
    # Groups 1, 2, 4 and 6 are connected, and 5 is equal to 3. The examples without an answer are different.
    examples = [[equal.UNKNOWN], [10], [11, 12], [20], [12, 10], [20], [11], [equal.UNKNOWN]]
    hashes = np.array([each for group in examples for each in group], np.uint64)
    hashes = dict(zip(groups, np.split(hashes, [8]), strict=True))
    for first, expected in ((True, [0, 1, 1, 0, 1, 0, 1, 1]), (False, [0, 0, 0, 0, 0, 0, 0, 1])):
        held_out = {"all": np.array([0, first, 0, 0, 1, 1], bool), "more": np.array([0, 1], bool)}
        joined = join_repeats(data, hashes, held_out)
        assert np.concatenate([*joined.values()]).tolist() == expected


def _draw(count: int, *, seed: int) -> Trained:
    return Trained.of([np.random.default_rng(seed).integers(1, 2**64, count, np.uint64)])


def test_a_large_set_is_stored_as_a_sample_that_can_be_joined(tmp_path, monkeypatch):
    monkeypatch.setattr(equal, "_MOST_HASHES", 1000)
    large, small = _draw(10_000, seed=0), _draw(500, seed=1)
    path = tmp_path / "trained_on.safetensors"
    path.write_bytes(large.to_bytes())
    sample = read_trained(path)
    assert sample.rate in (1 / 16, 1 / 8)
    assert 500 < len(sample.hashes) <= 1000
    assert np.array_equal(sample.hashes, large.hashes[large.hashes < 2**64 * sample.rate])
    assert large.join(sample) is large  # it adds nothing
    joined = small.join(sample)
    assert (joined.rate, joined.is_complete) == (sample.rate, True)
    assert set(joined.hashes) == {*small.sample(sample.rate).hashes, *sample.hashes}
    assert large.contains(large.hashes).all()
    assert not large.contains(np.array([equal.UNKNOWN, 2**64 - 1], np.uint64)).any()
    assert sample.covers(large.hashes).sum() == len(sample.hashes)
    unknown = dataclasses.replace(small, is_complete=False)
    path.write_bytes(large.join(unknown).to_bytes())
    assert not read_trained(path).is_complete


@pytest.mark.parametrize(
    "changes",
    [
        {"rate": np.float64(0.3)},
        {"rate": np.float64(np.nan)},
        {"rate": np.zeros(2)},
        {"hashes": np.array([2, 1], np.uint64)},
        {"hashes": np.array([1, 2], np.int64)},
        {"hashes": np.array([1, 2**63], np.uint64), "rate": np.float64(0.5)},
        {"more": np.zeros(1)},
        b"",
        bytes(900_000),
    ],
)
def test_a_forged_file_is_refused_in_one_line(tmp_path, changes):
    good = {"hashes": np.array([1, 2], np.uint64), "rate": np.float64(1), "is_complete": np.bool_(1)}
    path = tmp_path / "trained_on.safetensors"
    assert read_trained(path) is None
    content = changes
    if isinstance(changes, dict):
        content = safetensors.numpy.save({name: np.asarray(each) for name, each in (good | changes).items()})
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"trained_on.safetensors .*Delete it\. "):
        read_trained(path)
