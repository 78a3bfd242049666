"""Puzzles of one question and one answer each, as builders read or generate them, made into two splits.

What the builders of Sudokus and mazes share. In the training split a group is a puzzle and its
variants, the original first. Invariant: what is held out for testing is in no group, neither as it is nor as
a variant, unless the source itself has it in both of its files.
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import math
import multiprocessing
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from dataset.build.command_line import warn
from dataset.build.sources import find_source_files
from dataset.build.writing import check_output_folder, write_dataset
from dataset.format import BLANK, Split, one_set_split, sha256_of
from dataset.randomness import random_orders, random_words
from dataset.sets import PuzzleSet
from dataset.symmetries import AUGMENTATIONS

# Streams of random words: a new use takes a new number, as a changed one would change the datasets. Those of
# a builder itself begin at 4.
GENERATE = {"test": 0, "train": 1}
_HOLD_OUT, _SUBSAMPLE = 2, 3

_CHUNK_ROWS = 1 << 15
_SECONDS_ALONE = 2.0  # of drawing, before further processes are started
_DRAWS_OF_A_TASK = 8


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
    def none(num_cells: int) -> "Pairs":
        return Pairs(*np.empty((2, 0, num_cells), np.uint8))

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


# ----------------------------------------------------------------------------------------------------- splits


def build_puzzles(
    options: argparse.Namespace,
    *,
    kind: str,
    thing: str,
    vocab_size: int,
    augmentation: str,
    read: Callable[[list[Path]], Sequence[Pairs]],
    generate: Callable[[], tuple[Pairs, Pairs]],
    draw_transforms: Callable[[int], np.ndarray] | None,
    make_easier: Callable[[Pairs], Pairs] | None = None,
) -> None:
    """Reads or generates the puzzles of both splits, at least one each, augments the training split, and
    writes the folder.

    read: files -> the puzzles of each, as tokens. generate: -> (training, test). draw_transforms: number of
    groups -> uint8 [groups, puzzles of a group, bytes] of the kind's augmentation, the first of each group
    leaving everything as it is. make_easier: training puzzles -> one for each, easier and of the same answer,
    which becomes a second example of it. The manifest records a digest of each file instead of where it is.
    """
    started = time.monotonic()
    check_output_folder(options.output_dir, builder=kind)
    arguments = {name: value for name, value in vars(options).items() if name != "output_dir"}
    if options.generate is not None:
        train, test = generate()
    else:
        files = find_source_files(options.source, output_dir=options.output_dir)
        arguments["source"] = {path.name: sha256_of(path) for path in files}
        train, test = _split_files(files, read(files), thing=thing, seed=options.seed)
    if options.subsample_size is not None:
        if (size := options.subsample_size) > (num := len(train)):
            raise ValueError(f"--subsample-size {size} is more than the {num} training puzzles there are")
        train = train[_choose(len(train), size, seed=options.seed, stream=_SUBSAMPLE)]
    if num_shared := np.count_nonzero(are_among(train.questions, set(question_keys(test.questions)))):
        warn(f"build {kind}", f"{num_shared} puzzles of the training split are in the test split too")

    num_groups, augmented = len(train), {}
    examples = train if make_easier is None else _with_easier(train, make_easier(train), held_out=test)
    if draw_transforms is not None:
        transforms = draw_transforms(num_groups)
        drop_test_leaks(examples, transforms, augmentation=augmentation, held_out=test)
        augmented = {
            "augmentation": augmentation,
            "transforms": transforms,
            "materialize": options.materialize,
        }
    splits = {
        "train": make_split(examples, num_groups=num_groups, vocab_size=vocab_size, **augmented),
        "test": make_split(test, vocab_size=vocab_size),
    }
    builder = {"name": kind, "arguments": arguments}
    write_dataset(options.output_dir, splits=splits, identifiers=[BLANK], builder=builder)
    train_set = splits["train"].sets["all"]
    num_variants, num_examples = len(train_set.puzzle_identifiers) // num_groups - 1, train_set.num_examples
    easier = "" if make_easier is None else ", with an easier example of every one"
    size = math.isqrt(train.questions.shape[1])
    things = f"{thing.partition(' ')[0]}s"
    variants = f"{num_variants} variants of each{easier}, {num_examples} examples"
    print(f"train: {num_groups} {things} of {size}x{size} and {variants}")
    print(f"test: {len(test)} {things}")
    print(f"wrote {options.output_dir} in {time.monotonic() - started:.1f} seconds")


def _with_easier(train: Pairs, easier: Pairs, *, held_out: Pairs) -> Pairs:
    """Returns every puzzle and behind it the easier one, unless that is a held-out question: itself again."""
    is_leak = are_among(easier.questions, set(question_keys(held_out.questions)))[:, None]
    both = np.stack([train.questions, np.where(is_leak, train.questions, easier.questions)], axis=1)
    return Pairs(both.reshape(-1, both.shape[2]), train.answers.repeat(2, axis=0))


def _split_files(files: list[Path], read: Sequence[Pairs], *, thing: str, seed: int) -> tuple[Pairs, Pairs]:
    """Makes the training and the test puzzles from two files, or from one: a tenth of it is for testing, and
    what repeats one of those is dropped.
    """
    if empty := [path for path, pairs in zip(files, read, strict=True) if not len(pairs)]:
        raise ValueError(f"{empty[0]} has no {thing}")
    pairs = read[0]
    if len(read) == 2:
        return pairs, read[1]
    test = pairs[_choose(len(pairs), max(len(pairs) // 10, 1), seed=seed, stream=_HOLD_OUT)]
    train = pairs[~are_among(pairs.questions, set(question_keys(test.questions)))]
    if not len(train):
        few = f"{files[0]} has too few different puzzles to hold out a test split"
        raise ValueError(f"{few}: pass a folder of two files")
    return train, test


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

    draw: split, index -> puzzles [parts, cells], the question first; can be pickled. refusal: the error, with
    {count} puzzles until then, after `max_misses` draws without a new one. Returns arrays [puzzles, parts,
    cells].
    """
    seen: set[bytes] = set()
    drawn = {}
    for split, count in (("test", num_test), ("train", num_train)):
        kept: list[np.ndarray] = []
        last_index = -1  # of the draw with the puzzle kept last
        with contextlib.closing(_draw_in_turn(functools.partial(draw, split))) as draws:
            for index, puzzles in enumerate(draws):
                for puzzle in puzzles:
                    key = puzzle[0].tobytes()
                    if key not in seen and len(kept) < count:
                        seen.add(key)
                        kept.append(puzzle)
                        last_index = index
                if len(kept) >= count:
                    break
                if index - last_index >= max_misses:
                    raise ValueError(refusal.format(count=len(seen)))
        drawn[split] = np.stack(kept)
    return drawn["train"], drawn["test"]


def _draw_in_turn(draw: Callable[[int], Iterable[np.ndarray]]) -> Iterator[list[np.ndarray]]:
    """Yields draw(0), draw(1), ...: what takes more than two seconds is drawn by a process for each core."""
    started = time.monotonic()
    index = 0
    while time.monotonic() - started < _SECONDS_ALONE:
        yield list(draw(index))
        index += 1
    num_processes = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    pool = concurrent.futures.ProcessPoolExecutor(
        num_processes,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_leave_interrupts_to_parent,
    )
    try:
        pending: deque[concurrent.futures.Future] = deque()
        for first in itertools.count(index, _DRAWS_OF_A_TASK):
            pending.append(pool.submit(_draw_lists, draw, range(first, first + _DRAWS_OF_A_TASK)))
            if len(pending) > 2 * num_processes:
                yield from pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _draw_lists(draw: Callable[[int], Iterable[np.ndarray]], indices: range) -> list[list[np.ndarray]]:
    return [list(draw(index)) for index in indices]


def _leave_interrupts_to_parent() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def drop_test_leaks(train: Pairs, transforms: np.ndarray, *, augmentation: str, held_out: Pairs) -> int:
    """Replaces every variant with a held-out question by its original, in place (as in `build_puzzles`).

    train: the examples of one puzzle of each group, group after group. Returns how many variants those are.
    """
    forbidden = set(question_keys(held_out.questions))
    num_groups, group_size, num_bytes = transforms.shape
    examples = train.questions.reshape(num_groups, -1, train.questions.shape[1])
    num_dropped = 0
    chunk_groups = max(1, _CHUNK_ROWS // group_size)
    for start in range(0, num_groups, chunk_groups):
        groups = slice(start, start + chunk_groups)
        variants = transforms[groups, 1:]
        is_leak = np.zeros(variants.shape[:2], bool)
        for example in range(examples.shape[1]):
            originals = examples[groups, example].repeat(group_size - 1, axis=0)
            made = AUGMENTATIONS[augmentation].apply(originals, variants.reshape(-1, num_bytes), None)
            is_leak |= are_among(made, forbidden).reshape(is_leak.shape)
        variants[is_leak] = transforms[start, 0]
        num_dropped += int(is_leak.sum())
    return num_dropped


def make_split(
    pairs: Pairs,
    *,
    vocab_size: int,
    num_groups: int | None = None,
    augmentation: str | None = None,
    transforms: np.ndarray | None = None,
    materialize: bool = False,
    identifiers: np.ndarray | None = None,
    num_identifiers: int = 1,
) -> Split:
    """Makes a split of one set, "all"; token 0 is padding, counted nowhere.

    num_groups: of which pairs are the examples of one puzzle each, as many of every group; None: one of each.
    transforms: uint8 [groups, puzzles of a group, bytes]; without them a group is one puzzle. identifiers:
    of the puzzles of each group, [groups]; without them 0.
    """
    num_groups = len(pairs) if num_groups is None else num_groups
    group_size = 1 if transforms is None else transforms.shape[1]
    num_puzzles, num_examples = num_groups * group_size, len(pairs) // max(num_groups, 1)
    identifiers = np.zeros(num_groups) if identifiers is None else identifiers
    everything = PuzzleSet(
        inputs=pairs.questions,
        labels=pairs.answers,
        puzzle_identifiers=identifiers.astype(np.int32).repeat(group_size),
        puzzle_indices=np.arange(num_puzzles + 1, dtype=np.int32) * np.int32(num_examples),
        group_indices=np.arange(0, num_puzzles + 1, group_size, dtype=np.int32),
        augmentation=augmentation,
        transforms=None if transforms is None else transforms.reshape(num_puzzles, -1),
    )
    everything = everything.materialize() if materialize else everything
    return one_set_split(everything, vocab_size=vocab_size, num_identifiers=num_identifiers)
