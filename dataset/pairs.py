"""Puzzles of one question and one answer each, as builders read or generate them, made into two splits.

The builders of Sudokus and mazes share this. In the training split a group is a puzzle and its
variants, the original first. Invariant: what is held out for testing is in no group, neither as it is nor as
a variant, unless the source itself has it in both of its files.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from dataset.format import Metadata, Split
from dataset.kinds import all_augmentations
from dataset.puzzle_set import PuzzleSet
from dataset.randomness import random_orders, random_words

_CHUNK_ROWS = 1 << 15


@dataclasses.dataclass(frozen=True)
class Pairs:
    """Puzzles: questions and answers, each uint8 [count, cells]."""

    questions: np.ndarray
    answers: np.ndarray

    def __len__(self) -> int:
        return len(self.questions)

    def __getitem__(self, rows) -> "Pairs":
        return Pairs(self.questions[rows], self.answers[rows])

    @staticmethod
    def concatenate(parts: Sequence["Pairs"]) -> "Pairs":
        questions = np.concatenate([part.questions for part in parts])
        return Pairs(questions, np.concatenate([part.answers for part in parts]))


def question_keys(questions: np.ndarray) -> Iterator[bytes]:
    """A key for each question: its bytes, less the zeros at the end."""
    for start in range(0, len(questions), _CHUNK_ROWS):
        chunk = np.ascontiguousarray(questions[start : start + _CHUNK_ROWS])
        yield from chunk.view(f"S{chunk.shape[1]}").ravel().tolist()


def are_among(questions: np.ndarray, keys: set[bytes]) -> np.ndarray:
    """Whether each question has one of the keys: bool [count]."""
    return np.fromiter((key in keys for key in question_keys(questions)), bool, len(questions))


# ----------------------------------------------------------------------------------------------------- splits


def split_files(
    files: Sequence[Path], read: Sequence[Pairs], *, kind: str, seed: int, stream: int
) -> tuple[Pairs, Pairs]:
    """The training and the test puzzles, at least one each, from two files or from one.

    A tenth of a single file is for testing, and what repeats one of those is dropped. `kind` says what a file
    should have; ValueError where it has none.
    """
    for path, pairs in zip(files, read, strict=True):
        if not len(pairs):
            raise ValueError(f"{path} has no {kind}")
    if len(read) == 2:
        return read[0], read[1]
    pairs = read[0]
    test = pairs[_choose(len(pairs), max(len(pairs) // 10, 1), seed=seed, stream=stream)]
    train = pairs[~are_among(pairs.questions, set(question_keys(test.questions)))]
    if not len(train):
        raise ValueError(
            f"{files[0]} has too few different puzzles to hold out a test split: pass a folder of two files"
        )
    return train, test


def subsample(train: Pairs, size: int, *, seed: int, stream: int) -> Pairs:
    """`size` of the puzzles, at random, in their order."""
    if size > len(train):
        raise ValueError(f"--subsample-size {size} is more than the {len(train)} training puzzles there are")
    return train[_choose(len(train), size, seed=seed, stream=stream)]


def _choose(total: int, count: int, *, seed: int, stream: int) -> np.ndarray:
    """`count` different rows out of `total`, rising."""
    return np.sort(random_orders(random_words(seed, stream=stream, index=0, count=total))[:count])


def shared_puzzles_warning(train: Pairs, test: Pairs) -> str | None:
    num_shared = np.count_nonzero(are_among(train.questions, set(question_keys(test.questions))))
    return f"{num_shared} puzzles of the training split are in the test split too" if num_shared else None


# --------------------------------------------------------------------------------------------------- variants


def drop_test_leaks(train: Pairs, transforms: np.ndarray, *, augmentation: str, held_out: Pairs) -> None:
    """Replaces every variant that is a held-out question by its original: by the group's first transform.

    train, held_out: tokens. transforms: uint8 [groups, puzzles of a group, bytes], changed in place; the
    first of a group must leave everything as it is.
    """
    forbidden = set(question_keys(held_out.questions))
    num_groups, group_size, num_bytes = transforms.shape
    chunk_groups = max(1, _CHUNK_ROWS // group_size)
    for start in range(0, num_groups, chunk_groups):
        groups = slice(start, start + chunk_groups)
        variants = transforms[groups, 1:]
        originals = train.questions[groups].repeat(group_size - 1, axis=0)
        made = all_augmentations()[augmentation].apply(originals, variants.reshape(-1, num_bytes), None)
        variants[are_among(made, forbidden).reshape(variants.shape[:2])] = transforms[start, 0]


def make_split(
    pairs: Pairs,
    *,
    vocab_size: int,
    augmentation: str | None = None,
    transforms: np.ndarray | None = None,
    materialize: bool = False,
) -> Split:
    """A split with one set, "all"; every puzzle has the identifier 0. Token 0 is padding and counts nowhere.

    pairs: tokens. transforms: uint8 [groups, puzzles of a group, bytes] of the augmentation; without them a
    group is one puzzle. materialize: variants are written out, as the public tools have them.
    """
    num_groups, seq_len = pairs.questions.shape
    group_size = 1 if transforms is None else transforms.shape[1]
    num_puzzles = num_groups * group_size
    metadata = Metadata(
        pad_id=0,
        ignore_label_id=0,
        blank_identifier_id=0,
        vocab_size=vocab_size,
        seq_len=seq_len,
        num_puzzle_identifiers=1,
        total_groups=num_groups,
        mean_puzzle_examples=1.0,
        sets=("all",),
        total_puzzles=num_puzzles,
        augmentation=None if materialize else augmentation,
    )
    everything = PuzzleSet(
        inputs=pairs.questions,
        labels=pairs.answers,
        puzzle_identifiers=np.zeros(num_puzzles, np.int32),
        puzzle_indices=np.arange(num_puzzles + 1, dtype=np.int32),
        group_indices=np.arange(0, num_puzzles + 1, group_size, dtype=np.int32),
        augmentation=augmentation,
        transforms=None if transforms is None else transforms.reshape(num_puzzles, -1),
    )
    return Split(metadata, {"all": everything.materialize() if materialize else everything})
