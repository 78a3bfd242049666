"""Puzzles of one question and one answer each, as builders read or generate them, made into two splits.

The builders of Sudokus and mazes share this. In the training split a group is a puzzle and its
variants, the original first. Invariant: what is held out for testing is in no group, neither as it is nor as
a variant, unless the source itself has it in both of its files.
"""

import argparse
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dataset.command_line import integer, warn
from dataset.csv_rows import source_files
from dataset.format import Metadata, Split, sha256_of
from dataset.kinds import all_augmentations
from dataset.puzzle_set import PuzzleSet
from dataset.randomness import random_orders, random_words
from dataset.writing import check_output_folder, write_dataset

# Streams of random words: a new use takes a new number, as a changed one would change the datasets. Those of
# a builder itself begin at 4.
GENERATE = {"test": 0, "train": 1}
_HOLD_OUT, _SUBSAMPLE = 2, 3

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
    """Yields a key for each question: its bytes, less the zeros at the end."""
    for start in range(0, len(questions), _CHUNK_ROWS):
        chunk = np.ascontiguousarray(questions[start : start + _CHUNK_ROWS])
        yield from chunk.view(f"S{chunk.shape[1]}").ravel().tolist()


def are_among(questions: np.ndarray, keys: set[bytes]) -> np.ndarray:
    """Whether each question has one of the keys: bool [count]."""
    return np.fromiter((key in keys for key in question_keys(questions)), bool, len(questions))


# ---------------------------------------------------------------------------------------------------- options


def add_source_options(parser: argparse.ArgumentParser, *, thing: str, columns: str, generated: str) -> None:
    """Adds --source and --generate, of which one must be given."""
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument(
        "--source",
        type=Path,
        metavar="PATH",
        help=f"a folder with train.csv and test.csv, or one CSV file, of which a tenth (at least 1 {thing}, "
        "chosen by the seed, its repeats dropped) becomes the test split and the rest the training split; "
        f".csv.gz too; {columns}",
    )
    group.add_argument("--generate", type=integer(at_least=1), metavar="N", help=generated)


# ----------------------------------------------------------------------------------------------------- splits


def load_pairs(
    options: argparse.Namespace,
    *,
    program: str,
    thing: str,
    read: Callable[[list[Path]], Sequence[Pairs]],
    generate: Callable[[], tuple[Pairs, Pairs]],
) -> tuple[Pairs, Pairs, dict[str, Any]]:
    """Reads or generates the training and the test puzzles, at least one each, as tokens.

    read: files -> the puzzles of each. generate: -> (training, test). Returns with them the arguments for the
    manifest: the options, with a digest of each file instead of where it is.
    """
    check_output_folder(options.output_dir)
    arguments = {name: value for name, value in vars(options).items() if name != "output_dir"}
    if options.generate is not None:
        train, test = generate()
    else:
        files = source_files(options.source, output_dir=options.output_dir)
        arguments["source"] = {path.name: sha256_of(path) for path in files}
        train, test = _split_files(files, read(files), thing=thing, seed=options.seed)
    if options.subsample_size is not None:
        train = _subsample(train, options.subsample_size, seed=options.seed)
    if num_shared := np.count_nonzero(are_among(train.questions, set(question_keys(test.questions)))):
        warn(program, f"{num_shared} puzzles of the training split are in the test split too")
    return train, test, arguments


def _split_files(
    files: Sequence[Path], read: Sequence[Pairs], *, thing: str, seed: int
) -> tuple[Pairs, Pairs]:
    """Makes the training and the test puzzles from two files or from one.

    A tenth of a single file is for testing, and what repeats one of those is dropped.
    """
    for path, pairs in zip(files, read, strict=True):
        if not len(pairs):
            raise ValueError(f"{path} has no {thing}")
    if len(read) == 2:
        return read[0], read[1]
    pairs = read[0]
    test = pairs[_choose(len(pairs), max(len(pairs) // 10, 1), seed=seed, stream=_HOLD_OUT)]
    train = pairs[~are_among(pairs.questions, set(question_keys(test.questions)))]
    if not len(train):
        raise ValueError(
            f"{files[0]} has too few different puzzles to hold out a test split: pass a folder of two files"
        )
    return train, test


def _subsample(train: Pairs, size: int, *, seed: int) -> Pairs:
    """Chooses `size` of the puzzles, at random, in their order."""
    if size > len(train):
        raise ValueError(f"--subsample-size {size} is more than the {len(train)} training puzzles there are")
    return train[_choose(len(train), size, seed=seed, stream=_SUBSAMPLE)]


def _choose(total: int, count: int, *, seed: int, stream: int) -> np.ndarray:
    """Chooses `count` different rows out of `total`, rising."""
    return np.sort(random_orders(random_words(seed, stream=stream, index=0, count=total))[:count])


def draw_distinct(
    draw: Callable[[str, int], Iterable[np.ndarray]],
    *,
    num_train: int,
    num_test: int,
    max_misses: int,
    refusal: str,
) -> tuple[np.ndarray, np.ndarray]:
    """Draws the training and the test puzzles, all with different questions: the test split first.

    draw: split, index -> puzzles [parts, cells], the question first. refusal: the error, with {count} puzzles
    until then, after `max_misses` draws in a row without a new one. Returns two arrays
    [puzzles, parts, cells].
    """
    seen: set[bytes] = set()
    drawn = {}
    for split, count in (("test", num_test), ("train", num_train)):
        kept: list[np.ndarray] = []
        last_index = -1  # of the draw with the puzzle kept last
        for index in itertools.count():
            if len(kept) >= count:
                break
            for puzzle in draw(split, index):
                key = puzzle[0].tobytes()
                if key not in seen and len(kept) < count:
                    seen.add(key)
                    kept.append(puzzle)
                    last_index = index
            if index - last_index >= max_misses:
                raise ValueError(refusal.format(count=len(seen)))
        drawn[split] = np.stack(kept)
    return drawn["train"], drawn["test"]


# ---------------------------------------------------------------------------------------------------- writing


def write_pairs(
    options: argparse.Namespace,
    train: Pairs,
    test: Pairs,
    *,
    builder: dict[str, Any],
    vocab_size: int,
    augmentation: str | None = None,
    transforms: np.ndarray | None = None,
) -> int:
    """Writes the dataset; returns the number of training examples.

    builder: for the manifest. transforms: uint8 [groups, puzzles of a group, bytes] of the augmentation, the
    first of each group leaving everything as it is; it replaces those that would make a test puzzle.
    """
    augmented = {}
    if transforms is not None:
        drop_test_leaks(train, transforms, augmentation=augmentation, held_out=test)
        augmented = {
            "augmentation": augmentation,
            "transforms": transforms,
            "materialize": options.materialize,
        }
    splits = {
        "train": make_split(train, vocab_size=vocab_size, **augmented),
        "test": make_split(test, vocab_size=vocab_size),
    }
    write_dataset(options.output_dir, splits=splits, identifiers=["<blank>"], builder=builder)
    return splits["train"].sets["all"].num_examples


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
    """Makes a split of one set, "all". Every puzzle has identifier 0; token 0 is padding, counted nowhere.

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
