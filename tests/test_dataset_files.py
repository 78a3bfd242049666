import io
import itertools
import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dataset.build import splits
from dataset.build.writing import write_dataset
from dataset.files import check_tokens, open_dataset, open_split
from dataset.mixture import fingerprint_of
from dataset.sets import FIELDS
from tests.puzzle_sets import ARRAYS, IGNORED, SPLITS, VOCAB_SIZE, make_split, write


@pytest.fixture
def folder(tmp_path) -> Path:
    return write(tmp_path / "data", **SPLITS)


def change_metadata(folder: Path, split: str = "train", **changes) -> None:
    path = folder / split / "dataset.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def change_array(path: Path, change: Callable[[np.ndarray], np.ndarray | None]) -> None:
    """`change` returns the new array, or changes the old one in place."""
    array = np.load(path, allow_pickle=True)
    changed = change(array)
    np.save(path, array if changed is None else changed)


def test_what_was_written_is_read(folder):
    data = open_dataset(folder, read_everything=True)
    for split, sets in SPLITS.items():
        expected = make_split(sets)
        assert data.splits[split].metadata == expected.metadata
        assert list(data.splits[split].sets) == list(sets)
        for name, puzzle_set in expected.sets.items():
            for field in FIELDS:
                written, read = getattr(puzzle_set, field), getattr(data.splits[split].sets[name], field)
                assert isinstance(read, np.memmap)
                assert read.dtype == written.dtype
                assert np.array_equal(read, written)
    assert data.metadata == data.splits["train"].metadata


def test_folders_of_the_public_tools_are_read(folder):
    for name in ("manifest.json", "identifiers.json"):
        (folder / name).unlink()
    for split in SPLITS:
        content = json.loads((folder / split / "dataset.json").read_text())
        assert "total_puzzles" not in content  # unknown here, so it was not written
        change_metadata(folder, split, mean_puzzle_examples=2, something_new=[1])
    data = open_dataset(folder, read_everything=True)
    assert data.metadata.total_puzzles is None
    assert data.metadata.mean_puzzle_examples == 2.0
    change_metadata(folder, total_puzzles=4)
    assert open_split(folder, "train").metadata.total_puzzles == 4


def test_files_may_be_links(folder, tmp_path):
    (folder / "train").rename(tmp_path / "elsewhere")
    (folder / "train").mkdir()
    for path in (tmp_path / "elsewhere").iterdir():
        (folder / "train" / path.name).symlink_to(path)
    open_dataset(folder, read_everything=True)


@pytest.mark.parametrize("dtype", [np.uint8, np.int64])
@pytest.mark.parametrize("ignored", [IGNORED, 99, -1, None])
def test_ignored_labels_need_not_be_tokens(folder, dtype, ignored):
    for split in SPLITS:
        change_metadata(folder, split, ignore_label_id=ignored)
    for path in folder.glob("*/*labels.npy"):
        change_array(path, lambda labels: labels.astype(dtype))
    path = folder / "train" / "all__labels.npy"
    if ignored is not None and np.iinfo(dtype).min <= ignored:
        change_array(path, lambda labels: np.append(np.full_like(labels[:-1], ignored), labels[-1:], axis=0))
    open_dataset(folder, read_everything=True)
    if ignored is not None and np.iinfo(dtype).min <= ignored:
        for each in folder.glob("train/*labels.npy"):
            change_array(each, lambda labels: np.full_like(labels, ignored))
        with pytest.raises(ValueError, match="no cell has a label, so a model cannot learn anything"):
            open_dataset(folder, read_everything=True)
    change_array(path, lambda labels: np.full_like(labels, 98))
    with pytest.raises(ValueError, match="token 98 in row 0"):
        open_dataset(folder, read_everything=True)


def refusal(folder: Path) -> str:
    """What opening the folder says, checked for its form."""
    with pytest.raises(ValueError) as error:  # noqa: PT011
        open_dataset(folder, read_everything=True)
    message = str(error.value)
    assert "\n" not in message
    assert re.search(r"\. Build the dataset again\.$|\. Build it.*set data_path\.$", message)
    return message


def test_what_is_missing_is_refused(folder, tmp_path):
    assert refusal(tmp_path / "nowhere").startswith(f"data folder {tmp_path / 'nowhere'} does not exist. ")
    file = folder / "manifest.json"
    assert refusal(file).startswith(f"data folder {file} is a file. Build it ")
    for name in ("test/all__labels.npy", "train/more.hard__group_indices.npy"):
        content = (folder / name).read_bytes()
        (folder / name).unlink()
        assert refusal(folder) == f"{folder / name} is missing. Build the dataset again."
        (folder / name).write_bytes(content)
    missing = f"{folder / 'train' / 'dataset.json'} is missing: {folder} is not a dataset, or its train"
    (folder / "train" / "dataset.json").unlink()
    assert refusal(folder).startswith(missing)
    (folder / "train").rename(folder / "elsewhere")
    assert refusal(folder).startswith(missing)


def test_metadata_that_is_none_is_refused(folder):
    path = folder / "test" / "dataset.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({"num_puzzles": 9, "num_groups": 3, "grid_size": 4, "vocab_size": 7}))
    assert "is a dataset of nano-trm" in refusal(folder)
    for none in (b"", b'{"pad_id": 0,', b"\xff\xfe", b"[" * 100_000, b"1" * 5000, b"[]", b"null", b"{}"):
        path.write_bytes(none)
        assert refusal(folder).startswith(str(path))
    for field in content:
        path.write_text(json.dumps({name: value for name, value in content.items() if name != field}))
        assert refusal(folder).startswith(f"{path}: {field}: ")


LEAST = {"ignore_label_id": -100, "vocab_size": 1, "seq_len": 1, "num_puzzle_identifiers": 1}
LEAST |= dict.fromkeys(("pad_id", "blank_identifier_id", "total_groups", "total_puzzles"), 0)
LEAST["mean_puzzle_examples"] = 0
NAMES = ("../x", "/etc/x", "", ".", "..", "a/b", "a\\b", ".hidden", "a b", "a\n", "a\0", "\u00e4")
BAD_METADATA = [
    *((field, value) for field, least in LEAST.items() for value in ("1", True, [], least - 1, 1 << 31)),
    *((field, None) for field in LEAST if field not in ("ignore_label_id", "total_puzzles")),
    *((field, 1.5) for field in LEAST if field != "mean_puzzle_examples"),
    *(("mean_puzzle_examples", value) for value in (float("nan"), float("inf"), 10**400)),
    *((field, (1 << 20) + 1) for field in ("vocab_size", "seq_len")),
    ("pad_id", VOCAB_SIZE),
    ("blank_identifier_id", 50),
    *(("sets", value) for value in ([], "all", {"all": 1}, ["all", 1], ["all", "all"])),
    *(("sets", ["all", name]) for name in NAMES),
    ("augmentation", "rotated"),
    ("num_columns", 2),
    ("symbols", list("abcde")),
]


def test_bad_metadata_is_refused(folder):
    path = folder / "train" / "dataset.json"
    content = path.read_text()
    for field, value in BAD_METADATA:
        change_metadata(folder, **{field: value})
        message = refusal(folder)
        assert message.startswith(str(path)), (field, value)
        assert field in message, (field, value)
        path.write_text(content)
    change_metadata(folder, augmentation="arc")
    assert (
        f"ignore_label_id is {IGNORED}, but augmentation=arc exchanges this token. Use null, 0 or 1."
        in refusal(folder)
    )
    path.write_text(content)
    own = {"symbols": list("abcde"), "num_columns": 2}
    for wrong in ({"symbols": list("abcd")}, {"symbols": list("abcda")}, {"symbols": list("abcd\t")},
                  {"num_columns": 3}):  # fmt: skip
        for split in SPLITS:
            change_metadata(folder, split, **own | wrong)
        message = refusal(folder)
        assert next(iter(wrong)) in message
        assert "in the train split" not in message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("pad_id", 1),
        ("ignore_label_id", None),
        ("blank_identifier_id", 1),
        ("vocab_size", 8),
        ("num_puzzle_identifiers", 51),
        ("seq_len", 2),
    ],
)
def test_splits_that_disagree_are_refused(folder, field, value):
    change_metadata(folder, "test", **{field: value})
    for path in (folder / "test").glob("*__[il]*.npy") if field == "seq_len" else ():
        change_array(path, lambda array: array[:, :2])
    expected = f"{folder / 'test' / 'dataset.json'}: {field} is {value}, but "
    assert refusal(folder).startswith(expected)


def test_a_file_that_is_no_array_is_refused(folder):
    path = folder / ARRAYS[0]
    whole, objects, zipped = path.read_bytes(), io.BytesIO(), io.BytesIO()
    np.save(objects, np.array([{}, []], object))
    np.savez(zipped, whole)
    told_in_several_lines = b"\x93NUMPY\2\0" + (20_000).to_bytes(4, "little") + b" " * 20_000
    pickled = np.array([{}, []], object).dumps()
    contents = (b"", whole[:-1], whole[:70], told_in_several_lines, b"1, 2, 3\n", pickled)
    for content in (*contents, objects.getvalue(), zipped.getvalue()):
        path.write_bytes(content)
        assert refusal(folder).startswith(f"{path} is empty, truncated or not a .npy file of numbers (")


def test_damaged_headers_are_refused(folder):
    path = folder / "train" / "all__inputs.npy"
    whole, num_refused = path.read_bytes(), 0
    for position, character in itertools.product(range(128), b"\0('"):
        path.write_bytes(whole[:position] + bytes([character]) + whole[position + 1 :])
        try:
            open_split(folder, "train")
        except ValueError as error:
            assert error.args[0].startswith(str(path))  # noqa: PT017
            assert "\n" not in error.args[0]  # noqa: PT017
            num_refused += 1
    assert num_refused > 150, num_refused


BROKEN_ARRAYS = [
    *((field, lambda array: array.astype(float), "dtype is float64") for field in FIELDS),
    *((field, lambda array: array > 1, "dtype is bool") for field in FIELDS),
    *((field, lambda array: array.ravel(), "shape is [24], expected [24, 4]") for field in FIELDS[:2]),
    *((field, lambda array: array[:, 1:], "shape is [6, 3], expected [6, 4]") for field in FIELDS[:2]),
    *((field, lambda array: array[None], "expected [1]") for field in FIELDS[2:]),
    *((field, lambda array: array[0, ...].sum(), "shape is [], expected") for field in FIELDS),
    *((field, lambda array: array[:0], "empty, but a set has at least one") for field in FIELDS),
    ("labels", lambda array: array[1:], "5 examples, but 6 in the inputs"),
    ("puzzle_indices", lambda array: array + 1, "the offsets do not start at 0 and increase"),
    ("puzzle_indices", lambda array: array[[0, 2, 1, 3]], "the offsets do not start at 0 and increase"),
    ("puzzle_indices", lambda array: array[[0, 1, 1, 3]], "the offsets do not start at 0 and increase"),
    ("puzzle_indices", lambda array: array[[0, 1, 1, 3]].astype(np.uint8), "the offsets do not start at 0"),
    ("puzzle_indices", lambda array: array[:-1], "ends at 3, but there are 6 examples"),
    ("puzzle_indices", lambda array: array[[0, 1, 3]], "3 offsets, expected one more than the 3 puzzles"),
    ("group_indices", lambda array: array - 1, "the offsets do not start at 0 and increase"),
    ("group_indices", lambda array: array[:-1], "ends at 2, but there are 3 puzzles"),
    ("group_indices", lambda array: array + (array > 2), "ends at 4, but there are 3 puzzles"),
    ("puzzle_identifiers", lambda array: array * 0 + [0, 50, 7], "identifiers are from 0 to 50, but num_"),
    ("puzzle_identifiers", lambda array: array * 0 - 1, "identifiers are from -1 to -1, but num_puzzle"),
    ("puzzle_identifiers", lambda array: array.astype(np.int64) + (1 << 33), "identifiers are from"),
    *((field, lambda array: array * 0 + VOCAB_SIZE, "token 7 in row 0") for field in FIELDS[:2]),
    *((field, lambda array: array.astype(int) * 0 - 1, "token -1 in row 0") for field in FIELDS[:2]),
    *((field, lambda array: array.astype(int) * 0 - 100, "token -100 in row 0") for field in FIELDS[:2]),
]


def test_bad_arrays_are_refused(folder):
    for field, change, problem in BROKEN_ARRAYS:
        path = folder / "train" / f"all__{field}.npy"
        content = path.read_bytes()
        change_array(path, change)
        message = refusal(folder)
        assert message.startswith(f"{path}: "), problem
        assert problem in message
        path.write_bytes(content)


def test_bad_transforms_are_refused(tmp_path):
    transforms = np.arange(6, dtype=np.uint8).reshape(2, 3, 1)  # of two mazes, three variants of each
    options = {"vocab_size": 6, "augmentation": "square", "transforms": transforms}
    split = splits.make_split(np.ones((2, 2, 4), np.uint8), **options)
    write_dataset(tmp_path / "data", splits={"train": split}, identifiers=[], builder={})
    for field, change, problem in (
        ("transforms", lambda array: array + np.uint8(3), "row 5 is not a valid transform"),
        ("transforms", lambda array: array.astype(int), "dtype is int64, not uint8"),
        ("transforms", lambda array: array.repeat(2, axis=1), "expected [6, 1]"),
        ("transforms", lambda array: array[1:], "5 rows, expected 6"),
        ("inputs", lambda array: array.astype(int), "dtype is int64, not uint8"),
        ("puzzle_indices", lambda array: array + (array > 5), "differ in their number of examples"),
        ("group_indices", lambda array: array[[0, 2]], "2 originals, expected 1"),
    ):
        path = tmp_path / "data" / "train" / f"all__{field}.npy"
        content = path.read_bytes()
        change_array(path, change)
        with pytest.raises(ValueError, match=re.escape(problem)):
            open_dataset(tmp_path / "data", splits=("train",), read_everything=True)
        path.write_bytes(content)


def test_groups_of_puzzles_have_no_transforms():
    options = {"vocab_size": 6, "augmentation": "square", "transforms": np.zeros((3, 2, 1), np.uint8)}
    with pytest.raises(ValueError, match="both transforms and group_sizes"):
        splits.make_split(np.ones((3, 2, 4), np.uint8), **options, group_sizes=np.array([4, 2]))


def test_the_row_of_a_bad_token_is_right_in_later_chunks(folder, monkeypatch):
    monkeypatch.setattr("dataset.files._CHUNK_ROWS", 2)

    def spoil(labels: np.ndarray) -> None:
        labels[5, 2] = VOCAB_SIZE

    change_array(folder / "train" / "all__labels.npy", spoil)
    assert "all__labels.npy: token 7 in row 5 is outside 0..6 (vocab_size). Build" in refusal(folder)
    check_tokens(folder, "test", open_split(folder, "test"))


def test_a_fingerprint_is_the_same_with_and_without_a_manifest(folder, tmp_path, monkeypatch):
    recorded = fingerprint_of([folder])
    assert recorded == fingerprint_of([write(tmp_path / "copy", **SPLITS)])
    (folder / "train" / ".DS_Store").write_text("what nobody reads")
    assert fingerprint_of([folder]) == recorded
    (folder / "manifest.json").unlink()
    assert fingerprint_of([folder]) == recorded
    monkeypatch.setattr("dataset.mixture.sha256_of", None)
    assert fingerprint_of([tmp_path / "copy"]) == recorded  # not computed, but read


@pytest.mark.parametrize("has_manifest", [True, False])
def test_a_fingerprint_changes_with_any_byte(folder, has_manifest):
    if not has_manifest:
        (folder / "manifest.json").unlink()
    seen = {fingerprint_of([folder])}
    names = [*ARRAYS, "train/dataset.json", "test/dataset.json"]
    for name in names:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(
            content[:-1] + bytes([content[-1] ^ 1]) if name in ARRAYS else content + b" "
        )
        seen.add(fingerprint_of([folder]))
    assert len(seen) == 1 + len(names)


def test_a_manifest_that_says_nothing_is_not_used(folder):
    expected = fingerprint_of([folder])
    for content in ("", "[]", "{}", '{"files": []}', '{"files": {}}'):
        (folder / "manifest.json").write_text(content)
        assert fingerprint_of([folder]) == expected


def test_a_stale_manifest_is_not_used(folder):
    before = fingerprint_of([folder])
    path = folder / "train" / "all__inputs.npy"
    path.write_bytes(path.read_bytes() + b"1")
    times = (folder / "manifest.json").stat()
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns - 1))
    changed = fingerprint_of([folder])
    assert changed != before
    (folder / "manifest.json").unlink()
    assert fingerprint_of([folder]) == changed
