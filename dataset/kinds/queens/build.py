"""Builds a dataset of N-Queens completion: all boards with 1 to 3 queens given, and all right answers.

A group of the training split is an input, and its puzzles are the input with each of its right answers. So an
epoch visits each input once, with a random answer. The test split has one example for each input.

Invariant: no test input is a training input. With --split orbits, no test input is a rotated or mirrored
training input.
"""

import argparse

import numpy as np

from dataset.augmentations import NUM_DIHEDRAL, find_augmentation
from dataset.build import sources
from dataset.build.answers import split_classes, write_with_answers
from dataset.kinds.queens import QUEEN, SIZES, VOCAB_SIZE, all_inputs, count_answers, find_answers
from runtime.command_line import integer

_TEST_FRACTION = 0.15  # as in the published data


def add_options(parser: argparse.ArgumentParser) -> None:
    size = f"rows and columns of the board, {SIZES[0]} to {SIZES[-1]} (default 8)"
    parser.add_argument("--size", type=integer(at_least=SIZES[0], at_most=SIZES[-1]), default=8, help=size)
    split = (
        "what to divide at random, 85 %% for training and 15 %% for testing. inputs: the boards. orbits: "
        "classes of boards that are rotated or mirrored copies of each other (default inputs)"
    )
    parser.add_argument("--split", choices=["inputs", "orbits"], default="inputs", help=split)
    num_test = "keep T random test inputs"
    parser.add_argument("--num-test", **sources.NUM_TEST | {"help": num_test})


def check_options(options: argparse.Namespace) -> None:
    pass


def build(options: argparse.Namespace) -> None:
    inputs = all_inputs(options.size)
    queens = (inputs == QUEEN).sum(axis=1)
    by_given = ", ".join(f"{count} with {given}" for given, count in enumerate(np.bincount(queens)[1:], 1))
    num_pairs = count_answers(inputs).sum()
    print(f"{len(inputs)} distinct inputs ({by_given} queens given), {num_pairs} pairs with a right answer")
    classes = _orbits(inputs) if options.split == "orbits" else np.arange(len(inputs))
    most_tests = round(_TEST_FRACTION * len(inputs))
    train, test = split_classes(inputs, classes, most_tests=most_tests, seed=options.seed)
    if (options.num_test or 0) > len(test):
        raise ValueError(
            f"--num-test {options.num_test} is too large. There are only {len(test)} test inputs."
        )
    write_with_answers(options, train, test, kind="queens", find_answers=find_answers, vocab_size=VOCAB_SIZE)


def _orbits(inputs: np.ndarray) -> np.ndarray:
    # Numbers the inputs, int64 [n], so that rotated and mirrored copies of a board get the same number.
    apply = find_augmentation("square").apply
    images = [
        apply(inputs, np.full((len(inputs), 1), number, np.uint8), None) for number in range(NUM_DIHEDRAL)
    ]
    keys = ([row.tobytes() for row in image] for image in images)
    firsts = [min(copies) for copies in zip(*keys, strict=True)]
    return np.unique(firsts, return_inverse=True)[1]
