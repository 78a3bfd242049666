"""Builds a Sudoku dataset, from the published CSV files or from puzzles generated here.

Tokens: 0 = pad, 1 = empty, 2 .. n + 1 = the digits 1 .. n. In the training split a group is a puzzle and its
variants, each of them a puzzle with one example; variants are made when they are read, unless --materialize
has them written out. Invariant: every row is a question and a valid answer that agrees with it; no variant is
a test puzzle; the same command gives the same bytes on every machine.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dataset.command_line import builder_parser, integer, one_line_errors, refuse_options
from dataset.csv_rows import source_files
from dataset.format import sha256_of
from dataset.kinds.sudoku.rows import read_puzzles
from dataset.kinds.sudoku.rules import BOXES, NUM_MINIMAL_PUZZLES, Box, generate_puzzle
from dataset.kinds.sudoku.symmetries import draw_symmetries, no_symmetry, words_per_symmetry
from dataset.pairs import Pairs, drop_test_leaks, make_split, shared_puzzles_warning, split_files, subsample
from dataset.randomness import random_words
from dataset.writing import check_output_folder, write_dataset

# Streams of random words: a new use takes a new number, as a changed one would change the datasets.
_GENERATE = {"test": 0, "train": 1}
_HOLD_OUT, _SUBSAMPLE, _AUGMENT = 2, 3, 4

_MAX_REPEATS = 20_000  # generated puzzles in a row that were there already, before giving up


def main(arguments: Sequence[str] | None = None) -> None:
    with one_line_errors("build_sudoku"):
        build(_parse_options(arguments))


def build(options: argparse.Namespace) -> None:
    """Reads or generates the puzzles of both splits, augments the training split and writes the folder."""
    started = time.monotonic()
    box = BOXES[options.box]
    check_output_folder(options.output_dir)
    arguments = {name: value for name, value in vars(options).items() if name != "output_dir"}

    if options.generate is not None:
        train, test = _generate(options.generate, box=box, seed=options.seed)
    else:
        files = source_files(options.source, output_dir=options.output_dir)
        arguments["source"] = {path.name: sha256_of(path) for path in files}
        train, test = _read_source(files, box=box, min_difficulty=options.min_difficulty, seed=options.seed)

    if options.subsample_size is not None:
        train = subsample(train, options.subsample_size, seed=options.seed, stream=_SUBSAMPLE)
    if warning := shared_puzzles_warning(train, test):
        print(f"build_sudoku: warning: {warning}", file=sys.stderr)
    train, test = (
        Pairs(pairs.questions + np.uint8(1), pairs.answers + np.uint8(1)) for pairs in (train, test)
    )

    vocab_size, augmented = box[0] * box[1] + 2, {}
    if options.num_aug:
        transforms = _draw_transforms(len(train), options.num_aug, box=box, seed=options.seed)
        drop_test_leaks(train, transforms, augmentation="sudoku", held_out=test)
        augmented = {"augmentation": "sudoku", "transforms": transforms, "materialize": options.materialize}
    splits = {
        "train": make_split(train, vocab_size=vocab_size, **augmented),
        "test": make_split(test, vocab_size=vocab_size),
    }
    builder = {"module": "dataset.build_sudoku", "arguments": arguments}
    write_dataset(options.output_dir, splits=splits, identifiers=["<blank>"], builder=builder)
    num_examples = splits["train"].sets["all"].num_examples
    print(f"train: {len(train)} puzzles and {options.num_aug} variants of each, {num_examples} examples")
    print(f"test: {len(test)} puzzles")
    print(f"wrote {options.output_dir} in {time.monotonic() - started:.1f} seconds")


# ---------------------------------------------------------------------------------------------------- options


def _parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = builder_parser("dataset.build_sudoku", description=__doc__.partition("\n")[0])
    puzzles = parser.add_mutually_exclusive_group(required=True)
    puzzles.add_argument(
        "--source",
        type=Path,
        metavar="PATH",
        help="a folder with train.csv and test.csv, or one CSV file, of which a tenth (at least 1 puzzle, "
        "chosen by the seed, its repeats dropped) becomes the test split and the rest the training split; "
        ".csv.gz too; columns question, answer and, for --min-difficulty, rating; '.' or '0' is empty",
    )
    puzzles.add_argument(
        "--generate",
        type=integer(at_least=1),
        metavar="N",
        help="generate N training puzzles and N // 10 test puzzles, at least 100, all different and minimal: "
        "one solution, and more than one without any one clue",
    )
    parser.add_argument(
        "--box", choices=BOXES, default="3x3", help="rows x columns of a box; 3x3 makes 9x9 (default)"
    )
    parser.add_argument(
        "--subsample-size",
        type=integer(at_least=1),
        metavar="K",
        help="keep K training puzzles of the source, at random",
    )
    parser.add_argument(
        "--num-aug",
        type=integer(at_least=0),
        default=0,
        metavar="A",
        help="variants of each training puzzle (default 0); the test split has none",
    )
    parser.add_argument(
        "--materialize",
        action="store_true",
        help="write all variants out, as the public tools do; else they are made when they are read",
    )
    parser.add_argument(
        "--min-difficulty",
        type=integer(at_least=0),
        metavar="R",
        help="keep source puzzles, of both splits, with rating >= R",
    )
    options = parser.parse_args(arguments)
    if options.generate is not None:
        refuse_options(options, ("subsample_size", "min_difficulty"), "--source, not for --generate")
    if options.materialize and not options.num_aug:
        raise ValueError("--materialize writes out the variants of --num-aug: drop it, or ask for some")
    return options


# ------------------------------------------------------------------------------------------------- generating


def _generate(num_train: int, *, box: Box, seed: int) -> tuple[Pairs, Pairs]:
    """The training and the test puzzles, all different: the test split is drawn first."""
    num_test = max(num_train // 10, 100)
    if num_train + num_test > NUM_MINIMAL_PUZZLES.get(box, num_train + num_test):
        raise ValueError(
            f"--generate {num_train} needs {num_train + num_test} different puzzles with the test split, but "
            f"{box[0]}x{box[1]} boxes have only {NUM_MINIMAL_PUZZLES[box]}: ask for fewer, or larger boxes"
        )
    seen: set[bytes] = set()
    test = _generate_split("test", num_test, box=box, seed=seed, seen=seen)
    return _generate_split("train", num_train, box=box, seed=seed, seen=seen), test


def _generate_split(split: str, count: int, *, box: Box, seed: int, seen: set[bytes]) -> Pairs:
    kept: list[tuple[list[int], list[int]]] = []
    last_index = -1  # of the puzzle kept last
    for index in itertools.count():
        if len(kept) == count:
            break
        question, answer = generate_puzzle(seed, stream=_GENERATE[split], index=index, box=box)
        if bytes(question) not in seen:
            seen.add(bytes(question))
            kept.append((question, answer))
            last_index = index
        elif index - last_index > _MAX_REPEATS:
            raise ValueError(
                f"{box[0]}x{box[1]} boxes gave {len(seen)} puzzles, then no new one: ask for fewer"
            )
    grids = np.array(kept, np.uint8)
    return Pairs(grids[:, 0], grids[:, 1])


# ---------------------------------------------------------------------------------------------------- reading


def _read_source(
    files: list[Path], *, box: Box, min_difficulty: int | None, seed: int
) -> tuple[Pairs, Pairs]:
    """The training and the test puzzles, at least one each."""
    read = [read_puzzles(path, box=box, min_difficulty=min_difficulty) for path in files]
    rated = "" if min_difficulty is None else f" with a rating of at least {min_difficulty}"
    return split_files(files, read, kind=f"puzzle{rated}", seed=seed, stream=_HOLD_OUT)


# ------------------------------------------------------------------------------------------------- augmenting


def _draw_transforms(num_groups: int, num_aug: int, *, box: Box, seed: int) -> np.ndarray:
    """Draws the transforms of every puzzle and its variants: uint8 [groups, 1 + num_aug, bytes]; none of the
    variants is checked yet.

    That a variant is a held-out puzzle is common with 2x2 boxes, where all minimal puzzles are variants of
    36, and unheard of with 3x3.
    """
    if num_groups * (1 + num_aug) >= 1 << 31:
        raise ValueError(
            f"{num_groups} x {1 + num_aug} puzzles are more than int32 can count: lower --num-aug"
        )
    width, first = words_per_symmetry(box), no_symmetry(box)
    transforms = np.empty((num_groups, 1 + num_aug, len(first)), np.uint8)
    transforms[:, 0] = first
    for group in range(num_groups):
        words = random_words(seed, stream=_AUGMENT, index=group, count=num_aug * width)
        transforms[group, 1:] = draw_symmetries(words.reshape(num_aug, width), box=box)
    return transforms
