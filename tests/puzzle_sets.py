"""Creates sets of puzzles with random content for tests.

`Groups` describes a set. Each group is a list with the number of examples of each of its puzzles. Example:
[[1, 2], [3]] is a group of two puzzles and a group of one puzzle with three examples.
"""

from pathlib import Path

import numpy as np

from dataset.build.writing import write_dataset
from dataset.metadata import Metadata, Split
from dataset.sets import FIELDS, PuzzleSet

VOCAB_SIZE, SEQ_LEN, NUM_IDENTIFIERS = 7, 4, 50
PAD_ID, IGNORED, BLANK = 3, 5, 2

Groups = list[list[int]]

# A small dataset with everything in it.
TRAIN: dict[str, Groups] = {"all": [[1, 2], [3]], "more.hard": [[2]]}
TEST: dict[str, Groups] = {"all": [[1], [1, 1]], "more.hard": [[2, 1]]}
SPLITS = {"train": TRAIN, "test": TEST}
ARRAYS = [
    f"{split}/{name}__{field}.npy" for split, sets in SPLITS.items() for name in sets for field in FIELDS
]

# Two that are joined.
A: dict[str, Groups] = {"all": [[1, 2], [3], [2, 2, 2]]}
B: dict[str, Groups] = {"all": [[1], [1, 1]], "more": [[2]]}


def make_set(groups: Groups, *, seed: int = 0) -> PuzzleSet:
    """Returns a set with random tokens, labels and puzzle identifiers. Some labels are `IGNORED`."""
    random = np.random.Generator(np.random.Philox(seed))
    sizes = [size for group in groups for size in group]
    shape = (sum(sizes), SEQ_LEN)
    return PuzzleSet(
        inputs=random.integers(VOCAB_SIZE, size=shape, dtype=np.uint8),
        labels=random.integers(VOCAB_SIZE, size=shape, dtype=np.int16),
        puzzle_identifiers=random.integers(NUM_IDENTIFIERS, size=len(sizes), dtype=np.int32),
        puzzle_indices=np.cumsum([0, *sizes], dtype=np.int32),
        group_indices=np.cumsum([0, *map(len, groups)], dtype=np.int32),
    )


def make_split(sets: dict[str, Groups], **changes) -> Split:
    """Returns a split with random content. sets: {set: groups}. changes: Changed fields of the metadata."""
    values = {
        "pad_id": PAD_ID,
        "ignore_label_id": IGNORED,
        "blank_identifier_id": BLANK,
        "vocab_size": VOCAB_SIZE,
        "seq_len": SEQ_LEN,
        "num_puzzle_identifiers": NUM_IDENTIFIERS,
        "total_groups": sum(map(len, sets.values())),
        "mean_puzzle_examples": 1.5,
        "sets": tuple(sets),
    }
    made = {name: make_set(groups, seed=seed) for seed, (name, groups) in enumerate(sets.items())}
    return Split(Metadata(**{**values, **changes}), made)


def write(folder: Path, *, train: dict[str, Groups], test: dict[str, Groups], **changes) -> Path:
    splits = {"train": make_split(train, **changes), "test": make_split(test, **changes)}
    write_dataset(folder, splits=splits, identifiers=["<blank>"], builder={"module": "tests"})
    return folder
