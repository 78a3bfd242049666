"""Puzzles as builders read or generate them, made into two splits.

What the builders share. Pairs are inputs and labels, uint8 [count, 2, cells]. In the training split a group
is a puzzle and its variants, the original first. Invariant: what is held out for testing is in no group,
neither as it is nor as a variant, unless the source itself has it in both of its files.
"""

import argparse
import concurrent.futures
import contextlib
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

from dataset.build.command_line import recorded, warn
from dataset.build.sources import find_source_files
from dataset.build.writing import write_dataset
from dataset.format import BLANK, Split, one_set_split, sha256_of
from dataset.randomness import random_bits, random_orders
from dataset.sets import PuzzleSet
from dataset.symmetries import AUGMENTATIONS

# Streams of random bits: a new use takes a new number, as a changed one would change the datasets. Those of
# a builder itself begin at 4.
GENERATE = {"test": 0, "train": 1}
_HOLD_OUT, _SUBSAMPLE = 2, 3

_CHUNK_ROWS = 1 << 15
_SECONDS_ALONE = 2.0  # of drawing, before other processes are started
_DRAWS_OF_A_TASK = 8
MOST_EXAMPLES = (1 << 31) - 1  # offsets are int32


def input_keys(inputs: np.ndarray) -> Iterator[bytes]:
    """Yields a key for each input, uint8 [count, cells]: its bytes, less the zeros at the end."""
    for start in range(0, len(inputs), _CHUNK_ROWS):
        chunk = np.ascontiguousarray(inputs[start : start + _CHUNK_ROWS])
        yield from chunk.view(f"S{chunk.shape[1]}").ravel().tolist()


def are_among(inputs: np.ndarray, keys: set[bytes]) -> np.ndarray:
    """Returns whether each input has one of the keys: bool [count]."""
    return np.fromiter((key in keys for key in input_keys(inputs)), bool, len(inputs))


def build_puzzles(
    options: argparse.Namespace,
    *,
    kind: str,
    thing: str,
    vocab_size: int,
    augmentation: str,
    read: Callable[[list[Path]], Sequence[np.ndarray]],
    generate: Callable[[], tuple[np.ndarray, np.ndarray]],
    draw_transforms: Callable[[int], np.ndarray] | None,
    make_easier: Callable[[np.ndarray], np.ndarray] | None = None,
) -> None:
    """Reads or generates the pairs of both splits, augments the training split, and writes the folder.

    read: files -> the pairs of each, as tokens. generate: -> (training, test). draw_transforms: number of
    groups -> uint8 [groups, puzzles of a group, bytes] of the kind's augmentation, the first of each group
    leaving everything as it is. make_easier: training pairs -> easier inputs [count, cells] of the same
    labels, a second example of each puzzle. The manifest records a digest of each file instead of its path.
    """
    instead = {}
    if options.generate is not None:
        train, test = generate()
    else:
        files = find_source_files(options.source, output_dir=options.output_dir)
        instead["source"] = {path.name: sha256_of(path) for path in files}
        train, test = _split_files(files, read(files), thing=thing, seed=options.seed)
    if options.subsample_size is not None:
        if (size := options.subsample_size) > (num := len(train)):
            raise ValueError(f"--subsample-size {size} is more than the {num} training puzzles there are")
        train = train[_choose(len(train), size, seed=options.seed, stream=_SUBSAMPLE)]
    held_out = set(input_keys(test[:, 0]))
    if num_shared := np.count_nonzero(are_among(train[:, 0], held_out)):
        warn(f"build {kind}", f"{num_shared} puzzles of the training split are in the test split too")

    num_groups, augmented = len(train), {}
    examples = train
    if make_easier is not None:  # behind every puzzle the easier one; itself again where that is held out
        easier = train.copy()
        easier[:, 0] = make_easier(train)
        is_leak = are_among(easier[:, 0], held_out)
        easier[is_leak] = train[is_leak]
        examples = np.stack([train, easier], axis=1).reshape(-1, *train.shape[1:])
    if draw_transforms is not None:
        transforms = draw_transforms(num_groups)
        drop_test_leaks(examples[:, 0], transforms, augmentation=augmentation, held_out=held_out)
        augmented = {"transforms": transforms, "materialize": options.materialize}
    splits = {
        "train": make_split(
            examples, num_groups=num_groups, vocab_size=vocab_size, augmentation=augmentation, **augmented
        ),
        "test": make_split(test, vocab_size=vocab_size),
    }
    builder = {"name": kind, "arguments": recorded(options, instead)}
    write_dataset(options.output_dir, splits=splits, identifiers=[BLANK], builder=builder)
    train_set, size = splits["train"].sets["all"], math.isqrt(train.shape[2])
    variants = f"{len(train_set.puzzle_identifiers) // num_groups - 1} variants of each"
    easier = "" if make_easier is None else ", with an easier example of every one"
    things = f"{thing.partition(' ')[0]}s"
    examples = f"{variants}{easier}, {train_set.num_examples} examples"
    print(f"train: {num_groups} {things} of {size}x{size} and {examples}")
    print(f"test: {len(test)} {things}")


def _split_files(
    files: list[Path], read: Sequence[np.ndarray], *, thing: str, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the training and the test pairs of two files, or of one file: a tenth of it is held out for
    testing, and what repeats an input of that is dropped.
    """
    if empty := [path for path, pairs in zip(files, read, strict=True) if not len(pairs)]:
        raise ValueError(f"{empty[0]} has no {thing}")
    pairs = read[0]
    if len(read) == 2:
        return pairs, read[1]
    test = pairs[_choose(len(pairs), max(len(pairs) // 10, 1), seed=seed, stream=_HOLD_OUT)]
    train = pairs[~are_among(pairs[:, 0], set(input_keys(test[:, 0])))]
    if not len(train):
        few = f"{files[0]} has too few different puzzles to hold out a test split"
        raise ValueError(f"{few}: pass a folder of two files")
    return train, test


def _choose(total: int, count: int, *, seed: int, stream: int) -> np.ndarray:
    """Chooses `count` different rows out of `total`, rising."""
    return np.sort(random_orders(random_bits(seed, stream=stream, index=0, count=total))[:count])


def draw_distinct(
    draw: Callable[[str, int], Iterable[np.ndarray]],
    *,
    num_train: int,
    num_test: int,
    max_misses: int,
    refusal: str,
) -> tuple[np.ndarray, np.ndarray]:
    """Draws the training and the test puzzles, all with different inputs: the test split first.

    draw: split, index -> puzzles [parts, cells], the input first; can be pickled. refusal: the error, with
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


def drop_test_leaks(
    inputs: np.ndarray, transforms: np.ndarray, *, augmentation: str, held_out: set[bytes]
) -> int:
    """Replaces the transform of every variant with a held-out input by its original's; counts the variants.

    inputs: uint8 [examples, cells] of one puzzle of each group, group after group. transforms: as
    `build_puzzles` draws them, changed in place. held_out: `input_keys`.
    """
    num_groups, group_size, num_bytes = transforms.shape
    examples = inputs.reshape(num_groups, -1, inputs.shape[1])
    num_dropped = 0
    chunk_groups = max(1, _CHUNK_ROWS // group_size)
    for start in range(0, num_groups, chunk_groups):
        groups = slice(start, start + chunk_groups)
        variants = transforms[groups, 1:]
        is_leak = np.zeros(variants.shape[:2], bool)
        for example in range(examples.shape[1]):
            originals = examples[groups, example].repeat(group_size - 1, axis=0)
            made = AUGMENTATIONS[augmentation].apply(originals, variants.reshape(-1, num_bytes), None)
            is_leak |= are_among(made, held_out).reshape(is_leak.shape)
        variants[is_leak] = transforms[start, 0]
        num_dropped += int(is_leak.sum())
    return num_dropped


def make_split(
    pairs: np.ndarray,
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

    num_groups: how many groups the pairs are of, the examples of one puzzle each; None: one pair of each.
    transforms: uint8 [groups, puzzles of a group, bytes]; without them a group is one puzzle. identifiers:
    of the puzzles of each group, [groups]; without them 0.
    """
    num_groups = len(pairs) if num_groups is None else num_groups
    group_size = 1 if transforms is None else transforms.shape[1]
    num_puzzles, num_examples = num_groups * group_size, len(pairs) // max(num_groups, 1)
    identifiers = np.zeros(num_groups) if identifiers is None else identifiers
    everything = PuzzleSet(
        inputs=pairs[:, 0],
        labels=pairs[:, 1],
        puzzle_identifiers=identifiers.astype(np.int32).repeat(group_size),
        puzzle_indices=np.arange(num_puzzles + 1, dtype=np.int32) * np.int32(num_examples),
        group_indices=np.arange(0, num_puzzles + 1, group_size, dtype=np.int32),
        augmentation=None if transforms is None else augmentation,
        transforms=None if transforms is None else transforms.reshape(num_puzzles, -1),
    )
    everything = everything.materialize() if materialize else everything
    return one_set_split(everything, vocab_size=vocab_size, num_identifiers=num_identifiers)
