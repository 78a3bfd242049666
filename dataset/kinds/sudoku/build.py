"""Builds a Sudoku dataset, from the published CSV files or from puzzles generated here.

A CSV file has the columns question and answer, n * n characters row by row, '.' or '0' is empty, and an
integer, rating, where --min-difficulty asks for it. In the training split a group is a puzzle and its
variants, each of them a puzzle with one example. Invariant: every row is a question and a valid answer that
agrees with it; no variant is a test puzzle; the same command gives the same bytes on every machine.
"""

import argparse
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from dataset.build.command_line import builder_parser, integer, one_line_errors, refuse_options
from dataset.build.sources import (
    MATERIALIZE,
    NUM_TEST,
    SUBSAMPLE_SIZE,
    add_source_options,
    codes_of,
    expect,
    read_columns,
)
from dataset.build.splits import GENERATE, Pairs, build_puzzles, draw_distinct
from dataset.kinds.sudoku.rules import (
    BOXES,
    NUM_MINIMAL_PUZZLES,
    Box,
    are_solved,
    draw_symmetries,
    generate_puzzle,
    no_symmetry,
    with_more_clues,
    words_per_symmetry,
)
from dataset.randomness import random_words

_AUGMENT, _EASIER = 4, 5  # streams of random words: `pairs` has those before them
_MAX_REPEATS = 20_000  # generated puzzles in a row that were there already, before giving up
_ILLEGAL = 255
_DIGIT_OF_BYTE = np.full(256, _ILLEGAL, np.uint8)
_DIGIT_OF_BYTE[[ord(character) for character in ".0123456789"]] = [0, *range(10)]


def main(arguments: Sequence[str] | None = None) -> None:
    with one_line_errors("build sudoku"):
        build(_parse_options(arguments))


def build(options: argparse.Namespace) -> None:
    """Builds what the options ask for."""
    box, seed, least = BOXES[options.box], options.seed, options.min_difficulty

    def draw_transforms(num_groups: int) -> np.ndarray:
        num_examples = 2 if options.easier else 1
        return _draw_transforms(num_groups, options.num_aug, num_examples=num_examples, box=box, seed=seed)

    def make_easier(train: Pairs) -> Pairs:
        return _make_easier(train, clues=options.easier, seed=seed)

    build_puzzles(
        options,
        kind="sudoku",
        thing="puzzle" if least is None else f"puzzle with a rating of at least {least}",
        augmentation="sudoku",
        vocab_size=box[0] * box[1] + 2,
        read=lambda files: [_read(path, box=box, min_difficulty=least) for path in files],
        generate=lambda: _generate(options, box=box),
        make_easier=make_easier if options.easier else None,
        draw_transforms=draw_transforms if options.num_aug else None,
    )


def _to_tokens(questions: np.ndarray, answers: np.ndarray) -> Pairs:
    """Turns digits, 0 = empty, into tokens."""
    return Pairs(questions + np.uint8(1), answers + np.uint8(1))


def _parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = builder_parser("sudoku", description=__doc__.partition("\n")[0])
    add_source_options(
        parser,
        thing="puzzle",
        columns="columns question, answer and, for --min-difficulty, rating; '.' or '0' is empty",
        generated="generate N training puzzles and N // 10 test puzzles, at least 100, all different and "
        "minimal: one solution, and more than one without any one clue; those of 9x9 at 50 a second and core",
    )
    box = "rows x columns of a box; 3x3 makes 9x9 (default)"
    parser.add_argument("--box", choices=BOXES, default="3x3", help=box)
    clues = "generate puzzles with MIN to MAX clues: minimal ones with clues added, so that they are easier"
    parser.add_argument("--clues", type=_clues, metavar="MIN-MAX", help=clues)
    easier = "train on each puzzle also with MIN to MAX clues, further ones added: it helps with hard puzzles"
    parser.add_argument("--easier", type=_clues, metavar="MIN-MAX", help=easier)
    parser.add_argument("--num-test", **NUM_TEST)
    parser.add_argument("--subsample-size", **SUBSAMPLE_SIZE)
    count = integer(at_least=0)
    num_aug = "variants of each training puzzle (default 0); the test split has none"
    parser.add_argument("--num-aug", type=count, default=0, metavar="A", help=num_aug)
    parser.add_argument("--materialize", **MATERIALIZE)
    difficulty = "keep source puzzles, of both splits, with rating >= R"
    parser.add_argument("--min-difficulty", type=count, metavar="R", help=difficulty)
    options = parser.parse_args(arguments)
    if options.generate is not None:
        refuse_options(options, ("subsample_size", "min_difficulty"), "--source, not for --generate")
        options.num_test = options.num_test or max(options.generate // 10, 100)
    else:
        refuse_options(options, ("clues", "num_test"), "--generate, not for --source")
    size = math.prod(BOXES[options.box])
    for name in ("clues", "easier"):
        if (clues := getattr(options, name)) and clues[1] > size**2:
            raise ValueError(f"--{name}: a {size}x{size} grid has {size**2} cells, not {clues[1]}")
    if options.materialize and not options.num_aug:
        raise ValueError("--materialize writes out the variants of --num-aug: drop it, or ask for some")
    return options


def _clues(text: str) -> tuple[int, int]:
    least, _, most = text.partition("-")
    if not (least.isdecimal() and most.isdecimal() and 0 < int(least) <= int(most)):
        raise argparse.ArgumentTypeError(f"{text!r} is not MIN-MAX, such as 32-40")
    return int(least), int(most)


def _generate(options: argparse.Namespace, *, box: Box) -> tuple[Pairs, Pairs]:
    """Generates the training and the test puzzles."""
    num_train, num_test, clues = options.generate, options.num_test, options.clues
    boxes = f"{box[0]}x{box[1]} boxes"
    if clues is None and num_train + num_test > NUM_MINIMAL_PUZZLES.get(box, num_train + num_test):
        raise ValueError(
            f"--generate {num_train} needs {num_train + num_test} different puzzles with the test split, but "
            f"{boxes} have only {NUM_MINIMAL_PUZZLES[box]}: ask for fewer, or larger boxes"
        )
    few = f"{boxes} with {clues[0]} to {clues[1]} clues" if clues else boxes
    drawn = draw_distinct(
        functools.partial(_draw, seed=options.seed, box=box, clues=clues),
        num_train=num_train,
        num_test=num_test,
        max_misses=_MAX_REPEATS + 1,
        refusal=f"{few} gave {{count}} puzzles, then no new one: ask for fewer",
    )
    train, test = (_to_tokens(puzzles[:, 0], puzzles[:, 1]) for puzzles in drawn)
    return train, test


def _draw(
    split: str, index: int, *, seed: int, box: Box, clues: tuple[int, int] | None
) -> Iterator[np.ndarray]:
    wanted = None if clues is None else range(clues[0], clues[1] + 1)
    puzzle = generate_puzzle(seed, stream=GENERATE[split], index=index, box=box, clues=wanted)
    if puzzle is not None:
        yield np.array(puzzle, np.uint8)


def _make_easier(train: Pairs, *, clues: tuple[int, int], seed: int) -> Pairs:
    """Makes of every puzzle one with more clues; what has more than wanted stays as it is."""
    numbers, questions = range(clues[0], clues[1] + 1), train.questions.copy()
    for index, (question, answer) in enumerate(zip(train.questions, train.answers, strict=True)):
        words = random_words(seed, stream=_EASIER, index=index, count=1 + len(question))
        digits = (tokens.tolist() for tokens in (question - 1, answer - 1))
        if (easier := with_more_clues(*digits, clues=numbers, words=words)) is not None:
            questions[index] = np.add(easier, 1)
    return Pairs(questions, train.answers)


def _draw_transforms(num_groups: int, num_aug: int, *, num_examples: int, box: Box, seed: int) -> np.ndarray:
    """Draws the transforms of every puzzle and its variants: uint8 [groups, 1 + num_aug, bytes]; none of the
    variants is checked yet. num_examples: of each of them.

    That a variant is a held-out puzzle is common with 2x2 boxes, where all minimal puzzles are variants of
    36, and unheard of with 3x3.
    """
    if num_groups * (1 + num_aug) * num_examples >= 1 << 31:
        num = f"{num_groups} x {1 + num_aug}" + (f" x {num_examples}" if num_examples > 1 else "")
        raise ValueError(f"{num} puzzles are more than int32 can count: lower --num-aug")
    width, first = words_per_symmetry(box), no_symmetry(box)
    transforms = np.empty((num_groups, 1 + num_aug, len(first)), np.uint8)
    transforms[:, 0] = first
    for group in range(num_groups):
        words = random_words(seed, stream=_AUGMENT, index=group, count=num_aug * width)
        transforms[group, 1:] = draw_symmetries(words.reshape(num_aug, width), box=box)
    return transforms


# ------------------------------------------------------------------------------------------------------ files


def _read(path: Path, *, box: Box, min_difficulty: int | None) -> Pairs:
    """Reads every puzzle of a CSV file, checks, then filters it, as tokens."""
    names = ["question", "answer"] + (["rating"] if min_difficulty is not None else [])
    read = [Pairs.none((box[0] * box[1]) ** 2)]
    for lines, columns in read_columns(path, names):
        expect_here = functools.partial(expect, path, lines)
        questions, answers = (_parse(columns[name], name, box, expect_here) for name in names[:2])
        expect_here((answers > 0).all(axis=1), "the answer has an empty cell")
        expect_here(are_solved(answers, box=box), "the answer repeats a digit in a row, a column or a box")
        agrees = ((questions == 0) | (questions == answers)).all(axis=1)
        expect_here(agrees, "the answer contradicts the question")
        puzzles = _to_tokens(questions, answers)
        if min_difficulty is not None:
            ratings = columns["rating"]
            are_integers = [text.strip().removeprefix("-").isdecimal() for text in ratings]
            expect_here(np.array(are_integers), "the rating is not an integer")
            puzzles = puzzles[np.array([int(text) >= min_difficulty for text in ratings])]
        read.append(puzzles)
    return Pairs.concatenate(read)


def _parse(
    texts: list[str], name: str, box: Box, expect_here: Callable[[np.ndarray, str], None]
) -> np.ndarray:
    """Parses grids of digits, 0 = empty: uint8 [count, n * n]."""
    size = box[0] * box[1]
    lengths = np.fromiter(map(len, texts), np.int64, len(texts))
    message = f"the {name} does not have {size**2} cells; is --box {box[0]}x{box[1]} right?"
    expect_here(lengths == size**2, message)
    grids = codes_of(texts, table=_DIGIT_OF_BYTE)
    message = f"the {name} has a character that is neither '.' or '0' (empty) nor a digit from 1 to {size}"
    expect_here((grids <= size).all(axis=1), message)
    return grids
