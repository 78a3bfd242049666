"""Makes both splits of a dataset from pairs (input, label) that a builder has read or generated.

Pairs are uint8 [count, 2, cells]. Invariant: the training split contains no test puzzle and no variant that
equals a test puzzle, unless both files of the source contain the puzzle.
"""

import argparse
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dataset.build.sources import choose_puzzle_files, find_source_files
from dataset.build.writing import write_dataset
from dataset.metadata import BLANK, Split, one_set_split
from dataset.randomness import random_bits, random_orders
from dataset.sets import PuzzleSet
from runtime.command_line import recorded, warn
from runtime.reading import sha256_of

# Streams of random bits. Take a new number for a new purpose, because a changed number changes the datasets.
# Builders use the numbers 4 to 99.
GENERATE = {"test": 0, "train": 1}
_HOLD_OUT, _SUBSAMPLE, _TEST_SUBSAMPLE, _SEVERAL = 2, 3, 100, 101

_MOST_EXAMPLES = (1 << 31) - 1  # offsets are int32
_SAMPLE, _SAMPLE_SECONDS = 1000, 10.0  # puzzles whose solutions are counted, and the maximum time for that


def _bytes_of(rows: np.ndarray) -> list[bytes]:
    # The bytes of each row of uint8 [count, cells]. Faster than `bytes` of each row.
    return np.ascontiguousarray(rows).view(f"V{rows.shape[1]}").ravel().tolist()


def _are_among(inputs: np.ndarray, keys: set[bytes]) -> np.ndarray:
    # Whether `keys` contains the bytes of each input: bool [count].
    return np.fromiter((tokens in keys for tokens in _bytes_of(inputs)), bool, len(inputs))


def check_count(*numbers: int) -> None:
    """Raises ValueError if a dataset would have too many examples for int32 indices.

    numbers: Factors of the number of examples, such as the number of puzzles and of variants of each.
    """
    if math.prod(numbers) > _MOST_EXAMPLES:
        product = " x ".join(map(str, numbers))
        raise ValueError(f"{product} examples exceed the range of int32. Lower --num-aug.")


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
    has_several: Callable[[np.ndarray], bool] | None = None,
) -> None:
    """Builds a dataset from puzzles that are read from files or generated.

    Args:
        options: Parsed command line of the builder.
        kind: Name of the kind of puzzle.
        thing: Word for a puzzle in messages, such as "maze".
        augmentation: Name of the transforms of variants in `AUGMENTATIONS`.
        read: `read(files)` returns the pairs of each file, [n, 2, cells].
        generate: Returns (training pairs, test pairs), [n, 2, cells] each. Called if --generate is given.
        draw_transforms: `draw_transforms(n)` returns the transforms of n puzzles, uint8 [n, 1 + variants,
            bytes]. The first transform of each puzzle changes nothing. If None, there are no variants.
        make_easier: Converts training pairs, [n, 2, cells], to easier inputs with the same labels, [n,
            cells]. The easier input becomes a second example of its puzzle. If it equals a test input, the
            second example repeats the first one.
        has_several: Returns whether a puzzle, given by its input [cells], has several solutions. Called for
            up to 1000 random puzzles of each split, if they were read from files.
    """
    instead = {}
    if options.generate is None:
        needed, output_dir = "train.csv and test.csv", options.output_dir
        files = find_source_files(options.source, choose_puzzle_files, needed=needed, output_dir=output_dir)
        # The manifest contains digests of the files, but no paths of this machine.
        instead["source"] = {path.name: sha256_of(path) for path in files}
        distinct = [
            _without_repeats(pairs, path, kind=kind) for path, pairs in zip(files, read(files), strict=True)
        ]
        train, test = _split_files(files, distinct, thing=thing, seed=options.seed)
    else:
        train, test = generate()
    size, seed = options.subsample_size, options.seed
    train = _keep(train, size, "--subsample-size", "training", seed=seed, stream=_SUBSAMPLE)
    test = _keep(test, options.num_test, "--num-test", "test", seed=seed, stream=_TEST_SUBSAMPLE)
    several_solutions = []
    if options.generate is None and has_several is not None:
        several_solutions = [
            split
            for split, pairs in (("train", train), ("test", test))
            if _have_several_solutions(pairs, split, kind=kind, has_several=has_several)
        ]
    held_out = set(_bytes_of(test[:, 0]))
    if num_shared := np.count_nonzero(_are_among(train[:, 0], held_out)):
        shared = f"{num_shared} puzzles of the training split are also in the test split"
        warn(f"build {kind}", f"{shared}, so the test accuracy will be too high. Remove them from one file.")

    examples = train
    if make_easier is not None:  # if an easier input is in the test split, keep the original
        easier = train.copy()
        easier[:, 0] = make_easier(train)
        is_leak = _are_among(easier[:, 0], held_out)
        easier[is_leak] = train[is_leak]
        examples = np.stack([train, easier], axis=1)
    test_split = make_split(test, vocab_size=vocab_size)
    train_split = make_split(
        examples,
        vocab_size=vocab_size,
        augmentation=augmentation,
        transforms=draw_transforms(len(train)) if draw_transforms else None,
        held_out=test_split,
        materialize=options.materialize,
    )
    write_dataset(
        options.output_dir,
        splits={"train": train_split, "test": test_split},
        identifiers=[BLANK],
        builder={"name": kind, "arguments": recorded(options, instead)},
        several_solutions=several_solutions,
    )
    train_set, size = train_split.sets["all"], math.isqrt(train.shape[2])
    things, num_puzzles = f"{thing.partition(' ')[0]}s", len(train_set.puzzle_identifiers)
    easier = "" if make_easier is None else ", with an easier example of every one"
    variants = f"{num_puzzles // len(train) - 1} variants of each{easier}"
    print(f"train: {len(train)} {things} of {size}x{size} and {variants}, {train_set.num_examples} examples")
    print(f"test: {len(test)} {things}")


def _split_files(
    files: list[Path], read: Sequence[np.ndarray], *, thing: str, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Divides the pairs of one or two files into training pairs and test pairs.

    If there are two files, the first is for training and the second is for testing. If there is one file, a
    random tenth of its pairs is for testing, and training pairs with the input of a test pair are left out.
    """
    if empty := [path for path, pairs in zip(files, read, strict=True) if not len(pairs)]:
        raise ValueError(f"{empty[0]} has no {thing}. Pass another --source.")
    pairs = read[0]
    if len(read) == 2:
        return pairs, read[1]
    test = pairs[_choose(len(pairs), max(len(pairs) // 10, 1), seed=seed, stream=_HOLD_OUT)]
    train = pairs[~_are_among(pairs[:, 0], set(_bytes_of(test[:, 0])))]
    if not len(train):
        few = f"{files[0]} has too few different puzzles to hold out a test split"
        raise ValueError(f"{few}. Pass more puzzles, or a folder with train.csv and test.csv.")
    return train, test


def _without_repeats(pairs: np.ndarray, path: Path, *, kind: str) -> np.ndarray:
    """Returns the pairs without repeats, and prints how many were left out.

    Warns if an input occurs with different answers, and if an answer is equal to its input. These pairs are
    kept.
    """
    seen: set[tuple[bytes, bytes]] = set()
    inputs: set[bytes] = set()
    is_new, num_doubtful = np.zeros(len(pairs), bool), 0
    for row, pair in enumerate(zip(*(_bytes_of(pairs[:, side]) for side in (0, 1)), strict=True)):
        if pair not in seen:
            num_doubtful += pair[0] in inputs
            seen.add(pair)
            inputs.add(pair[0])
            is_new[row] = True
    if num_repeats := len(pairs) - len(seen):
        print(f"{path}: {num_repeats} of {len(pairs)} puzzles repeat another one, left out")
    if num_doubtful:
        text = f"{num_doubtful} of {len(seen)} puzzles have the input of another one, but another answer"
        warn(f"build {kind}", f"{path}: {text}. No model can get all of them right.")
    if num_solved := sum(of_input == answer for of_input, answer in seen):
        text = f"{num_solved} of {len(seen)} puzzles have an answer equal to their input"
        warn(f"build {kind}", f"{path}: {text}. Check that the columns are not exchanged.")
    return pairs[is_new]


def _have_several_solutions(
    pairs: np.ndarray, split: str, *, kind: str, has_several: Callable[[np.ndarray], bool]
) -> bool:
    size = min(len(pairs), _SAMPLE)
    num_checked = num_several = 0
    started = time.monotonic()
    for row in random_orders(random_bits(0, stream=_SEVERAL, index=0, count=len(pairs)))[:size].tolist():
        num_several += has_several(pairs[row, 0])
        num_checked += 1
        if time.monotonic() - started > _SAMPLE_SECONDS:
            break
    if num_several:
        sample = "" if num_checked == len(pairs) else "sampled "
        text = f"{num_several} of {num_checked} {sample}puzzles of the {split} split have several solutions"
        advice = f"An answer may be valid and differ from the label. See the metrics of evaluators=[{kind}]."
        warn(f"build {kind}", f"{text}. {advice}")
    return num_several > 0


def _keep(
    pairs: np.ndarray, count: int | None, option: str, split: str, *, seed: int, stream: int
) -> np.ndarray:
    """Returns `count` random pairs, in their original order. If `count` is None, returns all pairs."""
    if count is None:
        return pairs
    if count > len(pairs):
        raise ValueError(f"{option} {count} is too large. The source has only {len(pairs)} {split} puzzles.")
    return pairs[_choose(len(pairs), count, seed=seed, stream=stream)]


def _choose(total: int, count: int, *, seed: int, stream: int) -> np.ndarray:
    # Samples `count` different integers from 0 to total - 1: int64, ascending.
    return np.sort(random_orders(random_bits(seed, stream=stream, index=0, count=total))[:count])


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
    group_sizes: np.ndarray | None = None,
    **others: Any,
) -> Split:
    """Creates the training or test split of a dataset from pairs (input, label).

    The split has one set of puzzles, named "all". A group is a puzzle and its variants, or several puzzles
    (see `group_sizes`). Token 0 is padding, and labels of 0 are not scored.

    Args:
        pairs: Inputs and labels of n puzzles, without variants, uint8 [n, 2, cells]. If each puzzle has
            several examples, uint8 [n, examples, 2, cells].
        vocab_size: Number of different tokens.
        augmentation: Name of the family of `transforms` in `AUGMENTATIONS`, such as "sudoku". Without
            `transforms`, it has no effect.
        transforms: Transforms that make the puzzles of each group, uint8 [n, 1 + variants, bytes]. The first
            transform of each group changes nothing. If None, there are no variants.
        held_out: Test split to compare with. If a variant has the same input and the same puzzle identifier
            as a test puzzle, its original replaces it. The set "all" of the test split must have one example
            for each puzzle, and no transforms.
            Labels are not compared. If None, this is not checked. Without `transforms`, it has no effect.
        materialize: Whether the split contains the tokens of the variants instead of their transforms.
        identifiers: Puzzle identifier (row of the table of learned embeddings) of each puzzle, [n]. Variants
            have the identifier of their original. If None, all identifiers are 0.
        num_identifiers: Number of puzzle identifiers in the dataset.
        group_sizes: Number of puzzles in each group, [groups]. Their sum is n. Example: with [2, 3], the
            first two puzzles are a group. If None, each puzzle is a group, together with its variants.
        **others: Other fields of `Metadata`, such as `num_columns`.

    Raises:
        ValueError: Both `transforms` and `group_sizes` are given.
    """
    if transforms is not None and group_sizes is not None:
        raise ValueError("make_split has both transforms and group_sizes. Pass only one of them.")
    pairs = pairs.reshape(len(pairs), -1, *pairs.shape[-2:])
    num_groups, num_examples, _, num_cells = pairs.shape
    group_size = 1 if transforms is None else transforms.shape[1]
    num_puzzles = num_groups * group_size
    group_indices = np.arange(0, num_puzzles + 1, group_size, dtype=np.int32)
    if group_sizes is not None:
        group_indices = np.cumsum([0, *group_sizes], dtype=np.int32)
    identifiers = np.zeros(num_groups) if identifiers is None else identifiers
    puzzles = PuzzleSet(
        inputs=pairs[:, :, 0].reshape(-1, num_cells),
        labels=pairs[:, :, 1].reshape(-1, num_cells),
        puzzle_identifiers=identifiers.astype(np.int32).repeat(group_size),
        puzzle_indices=np.arange(num_puzzles + 1, dtype=np.int32) * np.int32(num_examples),
        group_indices=group_indices,
        augmentation=None if transforms is None else augmentation,
        transforms=None if transforms is None else transforms.reshape(num_puzzles, -1),
    )
    if transforms is not None and held_out is not None:
        _drop_test_leaks(puzzles, held_out.sets["all"])
    puzzles = puzzles.materialize() if materialize else puzzles
    return one_set_split(puzzles, vocab_size=vocab_size, num_identifiers=num_identifiers, **others)


def _drop_test_leaks(train: PuzzleSet, test: PuzzleSet) -> None:
    """Replaces training variants that equal a test puzzle by their originals, in place.

    A variant equals a test puzzle if both have the same puzzle identifier and a common input. Labels are not
    compared.
    """
    held_out = set(zip(test.puzzle_identifiers.tolist(), _bytes_of(test.inputs), strict=True))
    is_leak = np.zeros(len(train.puzzle_identifiers), bool)
    for rows, puzzles in train.chunks():
        inputs, _ = train.read(rows, puzzles)
        keys = zip(train.puzzle_identifiers[puzzles].tolist(), _bytes_of(inputs), strict=True)
        is_leak[puzzles[[key in held_out for key in keys]]] = True
    is_leak[train.group_indices[:-1]] = False
    train.transforms[is_leak] = train.transforms[0]
    if num_leaks := np.count_nonzero(is_leak):
        print(f"variants that equal test puzzles, left out: {num_leaks}")
