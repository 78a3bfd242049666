"""Makes both splits of a dataset from the pairs (input, label) that a builder has read or generated.

Pairs are uint8 [count, 2, cells]. Invariant: no test puzzle is in the training split, as it is or as a
variant, unless the source itself has the puzzle in both of its files.
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
import sys
import threading
import time
import types
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dataset.build.sources import choose_puzzle_files, find_source_files
from dataset.build.writing import write_dataset
from dataset.format import BLANK, Split, one_set_split
from dataset.randomness import random_bits, random_orders
from dataset.sets import PuzzleSet
from runtime.command_line import recorded, warn
from runtime.plugins import load_plugins, plugin_paths
from runtime.reading import sha256_of

# Streams of random bits. A new use takes a new number, since a changed number would change the datasets;
# builders have the numbers 4 to 99 for themselves.
GENERATE = {"test": 0, "train": 1}
_HOLD_OUT, _SUBSAMPLE, _TEST_SUBSAMPLE = 2, 3, 100

_CHUNK_ROWS = 1 << 15
_SECONDS_ALONE = 2.0  # of drawing in this process, before others are started
_DRAWS_OF_A_TASK = 8
_MOST_EXAMPLES = (1 << 31) - 1  # offsets are int32


def input_keys(inputs: np.ndarray) -> Iterator[bytes]:
    """Yields bytes that identify each input, uint8 [count, cells], whatever zeros are at the end."""
    for start in range(0, len(inputs), _CHUNK_ROWS):
        chunk = np.ascontiguousarray(inputs[start : start + _CHUNK_ROWS])
        yield from chunk.view(f"S{chunk.shape[1]}").ravel().tolist()


def are_among(inputs: np.ndarray, keys: set[bytes]) -> np.ndarray:
    """Returns which inputs have a key (`input_keys`) among `keys`: bool [count]."""
    return np.fromiter((key in keys for key in input_keys(inputs)), bool, len(inputs))


def check_count(*numbers: int) -> None:
    """Raises ValueError where a number of examples, the product of `numbers`, exceeds int32."""
    if math.prod(numbers) > _MOST_EXAMPLES:
        product = " x ".join(map(str, numbers))
        raise ValueError(f"{product} examples are more than int32 can count: lower --num-aug")


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
    """Builds a dataset: reads or generates pairs, augments the training split, and writes the folder.

    thing: a puzzle, in words. read: files -> pairs of each file, as tokens. generate: returns training and
    test pairs. draw_transforms: number of groups -> uint8 [groups, puzzles a group, bytes], transforms of
    `augmentation`; the first in each group is the identity. make_easier: training pairs -> easier inputs
    [count, cells] with the same labels, as a second example of each puzzle. The manifest records a digest of
    each source file instead of the path.
    """
    instead = {}
    if options.generate is None:
        needed, goal = "train.csv and test.csv", options.output_dir
        files = find_source_files(options.source, choose_puzzle_files, needed=needed, output_dir=goal)
        instead["source"] = {path.name: sha256_of(path) for path in files}
        train, test = _split_files(files, read(files), thing=thing, seed=options.seed)
    else:
        train, test = generate()
    asked = options.subsample_size, options.num_test
    train = _keep(train, asked[0], "--subsample-size", "training", seed=options.seed, stream=_SUBSAMPLE)
    test = _keep(test, asked[1], "--num-test", "test", seed=options.seed, stream=_TEST_SUBSAMPLE)
    held_out = set(input_keys(test[:, 0]))
    if num_shared := np.count_nonzero(are_among(train[:, 0], held_out)):
        warn(f"build {kind}", f"{num_shared} puzzles of the training split are in the test split too")

    num_groups, examples, augmented = len(train), train, {}
    if make_easier is not None:  # an input that is in the test split gives way to the original
        easier = train.copy()
        easier[:, 0] = make_easier(train)
        is_leak = are_among(easier[:, 0], held_out)
        easier[is_leak] = train[is_leak]
        examples = np.stack([train, easier], axis=1)
    test_split = make_split(test, vocab_size=vocab_size)
    if draw_transforms is not None:
        augmented = {"transforms": draw_transforms(num_groups), "materialize": options.materialize}
        augmented |= {"augmentation": augmentation, "held_out": test_split}
    train_split = make_split(examples, vocab_size=vocab_size, **augmented)
    splits = {"train": train_split, "test": test_split}
    builder = {"name": kind, "arguments": recorded(options, instead)}
    write_dataset(options.output_dir, splits=splits, identifiers=[BLANK], builder=builder)
    train_set, size = train_split.sets["all"], math.isqrt(train.shape[2])
    things, num_puzzles = f"{thing.partition(' ')[0]}s", len(train_set.puzzle_identifiers)
    easier = "" if make_easier is None else ", with an easier example of every one"
    variants = f"{num_puzzles // num_groups - 1} variants of each{easier}"
    print(f"train: {num_groups} {things} of {size}x{size} and {variants}, {train_set.num_examples} examples")
    print(f"test: {len(test)} {things}")


def _split_files(
    files: list[Path], read: Sequence[np.ndarray], *, thing: str, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns (training pairs, test pairs) of one file or two. ValueError where a file has none.

    Of a single file a random tenth becomes the test pairs; training pairs with an equal input are dropped.
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


def _keep(
    pairs: np.ndarray, count: int | None, option: str, split: str, *, seed: int, stream: int
) -> np.ndarray:
    """Returns `count` random pairs of a split; None: all. ValueError, naming `option`, for too many."""
    if count is None:
        return pairs
    if count > len(pairs):
        raise ValueError(f"{option} {count} is more than the {len(pairs)} {split} puzzles there are")
    return pairs[_choose(len(pairs), count, seed=seed, stream=stream)]


def _choose(total: int, count: int, *, seed: int, stream: int) -> np.ndarray:
    """Chooses `count` different rows out of `total` at random: int64, rising."""
    return np.sort(random_orders(random_bits(seed, stream=stream, index=0, count=total))[:count])


def draw_distinct(
    draw: Callable[[str, int], Sequence[np.ndarray]],
    *,
    num_train: int,
    num_test: int,
    max_misses: int,
    refusal: str,
) -> tuple[np.ndarray, np.ndarray]:
    """Draws puzzles with different inputs for both splits: (training, test), each [puzzles, parts, cells].

    draw: picklable, (split, index) -> puzzles [parts, cells], part 0 the input. After `max_misses` draws
    without a new puzzle raises ValueError(refusal), where {count} becomes the number of puzzles found.
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


def _draw_in_turn(draw: Callable[[int], Sequence[np.ndarray]]) -> Iterator[Sequence[np.ndarray]]:
    """Yields draw(0), draw(1), ... in order; after two seconds, one process a core computes them."""
    started = time.monotonic()
    index = 0
    while time.monotonic() - started < _SECONDS_ALONE:
        yield draw(index)
        index += 1
    num_processes = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    pool = concurrent.futures.ProcessPoolExecutor(
        num_processes, multiprocessing.get_context("spawn"), initializer=_start, initargs=(plugin_paths(),)
    )
    try:
        pending: deque[Iterator] = deque()
        for first in itertools.count(index, _DRAWS_OF_A_TASK):
            draws = range(first, first + _DRAWS_OF_A_TASK)
            with _without_main():  # which starts processes
                pending.append(pool.map(draw, draws, chunksize=_DRAWS_OF_A_TASK))
            if len(pending) > 2 * num_processes:
                yield from pending.popleft()
    except concurrent.futures.BrokenExecutor:
        raise MemoryError("a process that draws puzzles was killed: is there too little memory?") from None
    finally:
        pool.shutdown(cancel_futures=True)


def _start(plugins: list[str]) -> None:
    """Imports the plugins, leaves Ctrl-C to the parent process, and ends when the parent has ended."""
    load_plugins(plugins)

    def watch() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=watch, daemon=True).start()


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Prevents processes that start during the block from running the caller's script once more."""
    main, sys.modules["__main__"] = sys.modules["__main__"], types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def make_split(
    pairs: np.ndarray,
    *,
    vocab_size: int,
    augmentation: str | None = None,
    transforms: np.ndarray | None = None,
    held_out: Split | None = None,
    materialize: bool = False,
    identifiers: np.ndarray | None = None,
    num_identifiers: int = 1,
    **others: Any,
) -> Split:
    """Returns a split with one set, "all", from pairs; token 0 is padding, which is not scored.

    pairs: uint8 [groups, 2, cells] or [groups, examples, 2, cells]. transforms: uint8 [groups, puzzles a
    group, bytes]; None: a group is one puzzle. held_out: the test split; a variant that equals a test puzzle
    of the same identifier becomes its original again. materialize: whether to write the variants out.
    identifiers: of each group's puzzles, [groups]; None: 0. others: fields of the metadata.
    """
    pairs = pairs.reshape(len(pairs), -1, *pairs.shape[-2:])
    num_groups, num_examples, _, num_cells = pairs.shape
    group_size = 1 if transforms is None else transforms.shape[1]
    num_puzzles = num_groups * group_size
    identifiers = np.zeros(num_groups) if identifiers is None else identifiers
    puzzles = PuzzleSet(
        inputs=pairs[:, :, 0].reshape(-1, num_cells),
        labels=pairs[:, :, 1].reshape(-1, num_cells),
        puzzle_identifiers=identifiers.astype(np.int32).repeat(group_size),
        puzzle_indices=np.arange(num_puzzles + 1, dtype=np.int32) * np.int32(num_examples),
        group_indices=np.arange(0, num_puzzles + 1, group_size, dtype=np.int32),
        augmentation=None if transforms is None else augmentation,
        transforms=None if transforms is None else transforms.reshape(num_puzzles, -1),
    )
    if transforms is not None and held_out is not None:
        _drop_test_leaks(puzzles, held_out.sets["all"])
    puzzles = puzzles.materialize() if materialize else puzzles
    return one_set_split(puzzles, vocab_size=vocab_size, num_identifiers=num_identifiers, **others)


def _drop_test_leaks(train: PuzzleSet, test: PuzzleSet) -> None:
    """Turns each variant that equals a test puzzle back into its original, and prints how many."""
    held_out = set(zip(test.puzzle_identifiers.tolist(), input_keys(test.inputs), strict=True))
    is_leak = np.zeros(len(train.puzzle_identifiers), bool)
    for rows, puzzles in train.chunks():
        keys = input_keys(train.read(rows, puzzles)[0])
        keys = zip(train.puzzle_identifiers[puzzles].tolist(), keys, strict=True)
        is_leak[puzzles[[key in held_out for key in keys]]] = True
    is_leak[train.group_indices[:-1]] = False
    train.transforms[is_leak] = train.transforms[0]
    if num_leaks := np.count_nonzero(is_leak):
        print(f"variants that are test puzzles, left out: {num_leaks}")
