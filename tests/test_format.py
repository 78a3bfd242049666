import itertools
import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dataset.format import check_tokens, open_dataset, open_split
from dataset.mixture import fingerprint
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


def test_one_split_is_enough_where_no_other_is_asked_for(folder):
    (folder / "train").rename(folder / "elsewhere")
    assert list(open_dataset(folder, splits=("test",), read_everything=True).splits) == ["test"]


def test_files_may_be_links(folder, tmp_path):
    (folder / "train").rename(tmp_path / "elsewhere")
    (folder / "train").mkdir()
    for path in (tmp_path / "elsewhere").iterdir():
        (folder / "train" / path.name).symlink_to(path)
    open_dataset(folder, read_everything=True)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.uint32, np.int64])
@pytest.mark.parametrize("ignored", [IGNORED, 99, -1, None])
def test_ignored_labels_need_not_be_tokens(folder, dtype, ignored):
    for split in SPLITS:
        change_metadata(folder, split, ignore_label_id=ignored)
    for path in folder.glob("*/*labels.npy"):
        change_array(path, lambda labels: labels.astype(dtype))
    path = folder / "train" / "all__labels.npy"
    if ignored is not None and np.iinfo(dtype).min <= ignored:
        change_array(path, lambda labels: np.full_like(labels, ignored))
    open_dataset(folder, read_everything=True)
    change_array(path, lambda labels: np.full_like(labels, 98))
    with pytest.raises(ValueError, match="token 98 in row 0"):
        open_dataset(folder, read_everything=True)


def refusal(folder: Path) -> str:
    """What opening the folder says, checked for its form."""
    with pytest.raises(ValueError) as error:  # noqa: PT011
        open_dataset(folder, read_everything=True)
    assert error.type is ValueError
    message = str(error.value)
    assert "\n" not in message
    assert re.search("; build the dataset again$|build it, .*set data_path$", message)
    return message


def test_a_missing_folder_is_refused(folder, tmp_path):
    assert refusal(tmp_path / "nowhere").startswith(f"data folder {tmp_path / 'nowhere'} does not exist: ")
    file = folder / "manifest.json"
    assert refusal(file).startswith(f"data folder {file} is a file: build it, ")


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("has_folder", [True, False])
def test_a_missing_split_is_refused(folder, split, has_folder):
    if has_folder:
        (folder / split / "dataset.json").unlink()
    else:
        (folder / split).rename(folder / "elsewhere")
    path = folder / split / "dataset.json"
    assert refusal(folder).startswith(f"{path} is missing: {folder} is no dataset, or its {split} split")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "is not valid JSON (Expecting value"),
        (b'{"pad_id": 0,', "is not valid JSON (Expecting property name"),
        (b"\xff\xfe", "is not valid JSON ('utf-8' codec"),
        (b"[" * 100_000, "is not valid JSON (maximum recursion depth exceeded"),
        (b"1" * 5000, "is not valid JSON (Exceeds the limit"),
        (b"[]", "is no JSON object"),
        (b"null", "is no JSON object"),
        (b"{}", "has no field 'pad_id'"),
    ],
)
def test_metadata_that_is_none_is_refused(folder, content, problem):
    path = folder / "test" / "dataset.json"
    path.write_bytes(content)
    assert refusal(folder).startswith(f"{path} {problem}")


REQUIRED = ("pad_id", "ignore_label_id", "blank_identifier_id", "vocab_size", "seq_len")
REQUIRED += ("num_puzzle_identifiers", "total_groups", "mean_puzzle_examples", "sets")


@pytest.mark.parametrize("field", REQUIRED)
def test_a_missing_field_is_refused(folder, field):
    path = folder / "train" / "dataset.json"
    content = json.loads(path.read_text())
    del content[field]
    path.write_text(json.dumps(content))
    assert refusal(folder).startswith(f"{path} has no field {field!r}")


NUMBERS = (*REQUIRED[:-1], "total_puzzles")
NAMES = ("../x", "/etc/x", "", ".", "..", "a/b", "a\\b", ".hidden", "a b", "a\n", "a\0", "\u00e4")


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        *((field, value, "must be a") for field in NUMBERS for value in ("1", True, [], -101, 1 << 31)),
        *(
            (field, None, "must be a")
            for field in NUMBERS
            if field not in ("ignore_label_id", "total_puzzles")
        ),
        *((field, 1.5, "must be an integer from") for field in NUMBERS if field != "mean_puzzle_examples"),
        *(
            (field, 0, "must be an integer from 1 to")
            for field in NUMBERS
            if "vocab" in field or "num_" in field
        ),
        ("seq_len", 0, "must be an integer from 1 to"),
        ("pad_id", -1, "must be an integer from 0 to"),
        ("mean_puzzle_examples", float("nan"), "must be a number from 0 to"),
        ("mean_puzzle_examples", float("inf"), "must be a number from 0 to"),
        ("mean_puzzle_examples", 10**400, "must be a number from 0 to"),
        ("pad_id", VOCAB_SIZE, f"pad_id is {VOCAB_SIZE}, but vocab_size is {VOCAB_SIZE}"),
        ("blank_identifier_id", 50, "blank_identifier_id is 50, but num_puzzle_identifiers is 50"),
        ("sets", [], "'sets' must be a list of set names"),
        ("sets", "all", "'sets' must be a list of set names"),
        ("sets", {"all": 1}, "'sets' must be a list of set names"),
        ("sets", ["all", 1], "'sets' must be a list of set names"),
        ("sets", ["all", "all"], "'sets' names a set twice"),
        *(("sets", ["all", name], "cannot be a set's name") for name in NAMES),
    ],
)
def test_bad_metadata_is_refused(folder, field, value, problem):
    change_metadata(folder, **{field: value})
    message = refusal(folder)
    assert message.startswith(f"{folder / 'train' / 'dataset.json'}: ")
    assert problem in message
    assert field in message or field == "sets"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("pad_id", 1),
        ("ignore_label_id", None),
        ("blank_identifier_id", 1),
        ("vocab_size", 8),
        ("num_puzzle_identifiers", 51),
    ],
)
def test_splits_that_disagree_are_refused(folder, field, value):
    change_metadata(folder, "test", **{field: value})
    expected = f"{folder / 'test' / 'dataset.json'}: {field} is {value}, but "
    assert refusal(folder).startswith(expected)


def test_a_split_of_other_grids_is_refused(folder):
    change_metadata(folder, "test", seq_len=2)
    for path in (folder / "test").glob("*__*puts.npy"):
        change_array(path, lambda array: array[:, :2])
    for path in (folder / "test").glob("*__labels.npy"):
        change_array(path, lambda array: array[:, :2])
    assert "dataset.json: seq_len is 2, but 4 in the train split" in refusal(folder)


@pytest.mark.parametrize("name", ARRAYS[::3])
def test_a_missing_array_is_refused(folder, name):
    (folder / name).unlink()
    assert refusal(folder) == f"{folder / name} is missing; build the dataset again"


@pytest.mark.parametrize("name", ARRAYS[:5])
@pytest.mark.parametrize(
    "content", ["empty", "cut", "cut in the header", "long", "text", "zip", "pickle", "objects"]
)
def test_a_file_that_is_no_array_is_refused(folder, name, content):
    path = folder / name
    whole = path.read_bytes()
    if content == "objects":
        np.save(path, np.array([{}, []], object))
    elif content == "pickle":
        np.array([{}, []], object).dump(path)
    elif content == "zip":
        np.savez(folder / "arrays.npz", whole)
        (folder / "arrays.npz").rename(path)
    else:
        path.write_bytes(
            {
                "empty": b"",
                "cut": whole[:-1],
                "cut in the header": whole[:70],
                "long": b"\x93NUMPY\2\0"
                + (20_000).to_bytes(4, "little")
                + b" " * 20_000,  # told in several lines
                "text": b"1, 2, 3\n",
            }[content]
        )
    assert refusal(folder).startswith(f"{path} is empty, truncated or no .npy file of numbers (")


def test_damaged_headers_are_refused(folder):
    path = folder / "train" / "all__inputs.npy"
    whole = path.read_bytes()
    for position, character in itertools.product(range(128), b"\0('"):
        path.write_bytes(whole[:position] + bytes([character]) + whole[position + 1 :])
        try:
            open_split(folder, "train")
        except ValueError as error:
            assert error.args[0].startswith(str(path))  # noqa: PT017
            assert "\n" not in error.args[0]  # noqa: PT017


BROKEN_ARRAYS = [
    *(
        (field, lambda array: array.astype(float), "dtype is float64, expected an integer")
        for field in FIELDS
    ),
    *((field, lambda array: array > 1, "dtype is bool, expected an integer") for field in FIELDS),
    *(
        (field, lambda array: array.ravel(), "shape is [24], expected [examples, seq_len")
        for field in FIELDS[:2]
    ),
    *((field, lambda array: array[:, 1:], "shape is [6, 3], expected [exam") for field in FIELDS[:2]),
    *((field, lambda array: array[None], "expected one dimension") for field in FIELDS[2:]),
    *((field, lambda array: array[0, ...].sum(), "shape is [], expected") for field in FIELDS),
    *((field, lambda array: array[:0], "empty, but a set has at least one") for field in FIELDS),
    ("labels", lambda array: array[1:], "5 examples, but 6 in the inputs"),
    ("puzzle_indices", lambda array: array + 1, "the offsets do not start at 0 and rise"),
    ("puzzle_indices", lambda array: array[[0, 2, 1, 3]], "the offsets do not start at 0 and rise"),
    ("puzzle_indices", lambda array: array[[0, 1, 1, 3]], "the offsets do not start at 0 and rise"),
    ("puzzle_indices", lambda array: array[[0, 1, 1, 3]].astype(np.uint8), "the offsets do not start at 0"),
    ("puzzle_indices", lambda array: array[:-1], "ends at 3, but there are 6 examples"),
    ("puzzle_indices", lambda array: array[[0, 1, 3]], "3 offsets, expected one more than the 3 puzzles"),
    ("puzzle_identifiers", lambda array: array[1:], "ends at 3, but there are 2 puzzles"),
    ("group_indices", lambda array: array - 1, "the offsets do not start at 0 and rise"),
    ("group_indices", lambda array: array[:-1], "ends at 2, but there are 3 puzzles"),
    ("group_indices", lambda array: array + (array > 2), "ends at 4, but there are 3 puzzles"),
    ("puzzle_identifiers", lambda array: array * 0 + [0, 50, 7], "identifiers run from 0 to 50, but num_"),
    ("puzzle_identifiers", lambda array: array * 0 - 1, "identifiers run from -1 to -1, but num_puzzle"),
    ("puzzle_identifiers", lambda array: array.astype(np.int64) + (1 << 33), "identifiers run from"),
    *(
        (field, lambda array: array * 0 + VOCAB_SIZE, "token 7 in row 0 is outside 0..6")
        for field in FIELDS[:2]
    ),
    *(
        (field, lambda array: array.astype(int) * 0 - 1, "token -1 in row 0 is outside 0..6")
        for field in FIELDS[:2]
    ),
    ("inputs", lambda array: array.astype(int) * 0 - 100, "token -100 in row 0 is outside"),
    ("labels", lambda array: array.astype(int) * 0 - 100, "token -100 in row 0 is outside"),
]


@pytest.mark.parametrize(("field", "change", "problem"), BROKEN_ARRAYS)
def test_bad_arrays_are_refused(folder, field, change, problem):
    path = folder / "train" / f"all__{field}.npy"
    change_array(path, change)
    message = refusal(folder)
    named = field if field != "puzzle_identifiers" or "ends at" not in problem else "group_indices"
    assert message.startswith(f"{folder / 'train' / f'all__{named}.npy'}: ")
    assert problem in message


def test_the_row_of_a_bad_token_is_right_in_later_chunks(folder, monkeypatch):
    monkeypatch.setattr("dataset.format._CHUNK_ROWS", 2)

    def spoil(labels: np.ndarray) -> None:
        labels[5, 2] = VOCAB_SIZE

    change_array(folder / "train" / "all__labels.npy", spoil)
    assert "all__labels.npy: token 7 in row 5 is outside 0..6 (vocab_size); build" in refusal(folder)
    check_tokens(folder, "test", open_split(folder, "test"))


def test_a_fingerprint_is_the_same_with_and_without_a_manifest(folder, tmp_path, monkeypatch):
    recorded = fingerprint(folder)
    assert recorded == fingerprint(write(tmp_path / "copy", **SPLITS))
    (folder / "train" / ".DS_Store").write_text("what nobody reads")
    assert fingerprint(folder) == recorded
    (folder / "manifest.json").unlink()
    assert fingerprint(folder) == recorded
    monkeypatch.setattr("dataset.mixture.sha256_of", None)
    assert fingerprint(tmp_path / "copy") == recorded  # not computed, but read


@pytest.mark.parametrize("has_manifest", [True, False])
def test_a_fingerprint_changes_with_any_byte(folder, has_manifest):
    if not has_manifest:
        (folder / "manifest.json").unlink()
    seen = {fingerprint(folder)}
    names = [*ARRAYS, "train/dataset.json", "test/dataset.json"]
    for name in names:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(
            content[:-1] + bytes([content[-1] ^ 1]) if name in ARRAYS else content + b" "
        )
        seen.add(fingerprint(folder))
    assert len(seen) == 1 + len(names)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"files": []}', '{"files": {}}'])
def test_a_manifest_that_says_nothing_is_not_used(folder, content):
    expected = fingerprint(folder)
    (folder / "manifest.json").write_text(content)
    assert fingerprint(folder) == expected


def test_a_stale_manifest_is_not_used(folder):
    before = fingerprint(folder)
    path = folder / "train" / "all__inputs.npy"
    path.write_bytes(path.read_bytes() + b"1")
    times = (folder / "manifest.json").stat()
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns - 1))
    changed = fingerprint(folder)
    assert changed != before
    (folder / "manifest.json").unlink()
    assert fingerprint(folder) == changed
