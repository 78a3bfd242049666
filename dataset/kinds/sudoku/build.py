"""Builds a Sudoku dataset, from the published CSV files or from puzzles generated here.

Tokens: 0 = pad, 1 = empty, 2 .. n + 1 = the digits 1 .. n. In the training split a group is a puzzle and its
variants, each of them a puzzle with one example; variants are made when they are read, unless --materialize
has them written out. Invariant: every row is a question and a valid answer that agrees with it; no variant is
a test puzzle; the same command gives the same bytes on every machine.
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from dataset.command_line import builder_parser, integer, one_line_errors, refuse_options
from dataset.kinds.sudoku.rows import read_puzzles
from dataset.kinds.sudoku.rules import BOXES, NUM_MINIMAL_PUZZLES, Box, generate_puzzle
from dataset.kinds.sudoku.symmetries import draw_symmetries, no_symmetry, words_per_symmetry
from dataset.pairs import GENERATE, Pairs, add_source_options, draw_distinct, load_pairs, write_pairs
from dataset.randomness import random_words

_AUGMENT = 4  # a stream of random words: `pairs` has those before it

_MAX_REPEATS = 20_000  # generated puzzles in a row that were there already, before giving up


def main(arguments: Sequence[str] | None = None) -> None:
    with one_line_errors("build_sudoku"):
        build(_parse_options(arguments))


def build(options: argparse.Namespace) -> None:
    """Reads or generates the puzzles of both splits, augments the training split and writes the folder."""
    started = time.monotonic()
    box = BOXES[options.box]

    def read(files: list[Path]) -> list[Pairs]:
        found = (read_puzzles(path, box=box, min_difficulty=options.min_difficulty) for path in files)
        return [_to_tokens(pairs.questions, pairs.answers) for pairs in found]

    rated = "" if options.min_difficulty is None else f" with a rating of at least {options.min_difficulty}"
    train, test, arguments = load_pairs(
        options,
        program="build_sudoku",
        thing=f"puzzle{rated}",
        read=read,
        generate=lambda: _generate(options.generate, box=box, seed=options.seed),
    )
    augmented = {}
    if options.num_aug:
        transforms = _draw_transforms(len(train), options.num_aug, box=box, seed=options.seed)
        augmented = {"augmentation": "sudoku", "transforms": transforms}
    builder = {"module": "dataset.build_sudoku", "arguments": arguments}
    vocab_size = box[0] * box[1] + 2
    num_examples = write_pairs(options, train, test, builder=builder, vocab_size=vocab_size, **augmented)
    print(f"train: {len(train)} puzzles and {options.num_aug} variants of each, {num_examples} examples")
    print(f"test: {len(test)} puzzles")
    print(f"wrote {options.output_dir} in {time.monotonic() - started:.1f} seconds")


def _to_tokens(questions: np.ndarray, answers: np.ndarray) -> Pairs:
    """Turns digits, 0 = empty, into tokens."""
    return Pairs(questions + np.uint8(1), answers + np.uint8(1))


# ---------------------------------------------------------------------------------------------------- options


def _parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = builder_parser("dataset.build_sudoku", description=__doc__.partition("\n")[0])
    add_source_options(
        parser,
        thing="puzzle",
        columns="columns question, answer and, for --min-difficulty, rating; '.' or '0' is empty",
        generated="generate N training puzzles and N // 10 test puzzles, at least 100, all different and "
        "minimal: one solution, and more than one without any one clue",
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
    """Generates the training and the test puzzles."""
    num_test = max(num_train // 10, 100)
    if num_train + num_test > NUM_MINIMAL_PUZZLES.get(box, num_train + num_test):
        raise ValueError(
            f"--generate {num_train} needs {num_train + num_test} different puzzles with the test split, but "
            f"{box[0]}x{box[1]} boxes have only {NUM_MINIMAL_PUZZLES[box]}: ask for fewer, or larger boxes"
        )

    def draw(split: str, index: int) -> Iterator[np.ndarray]:
        yield np.array(generate_puzzle(seed, stream=GENERATE[split], index=index, box=box), np.uint8)

    train, test = draw_distinct(
        draw,
        num_train=num_train,
        num_test=num_test,
        max_misses=_MAX_REPEATS + 1,
        refusal=f"{box[0]}x{box[1]} boxes gave {{count}} puzzles, then no new one: ask for fewer",
    )
    return _to_tokens(train[:, 0], train[:, 1]), _to_tokens(test[:, 0], test[:, 1])


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
