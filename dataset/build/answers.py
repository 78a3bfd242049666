"""Writes a dataset of puzzles with many right answers: one training example for each right answer."""

import argparse
from collections.abc import Callable

import numpy as np

from dataset.build.splits import make_split
from dataset.build.writing import write_dataset
from dataset.metadata import BLANK
from dataset.randomness import random_bits, random_orders
from runtime.command_line import recorded

_SPLIT, _TEST_SUBSAMPLE = 4, 100  # streams of random bits


def split_classes(
    inputs: np.ndarray, classes: np.ndarray, *, most_tests: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Divides inputs into (training inputs, test inputs). Inputs of the same class stay together.

    A class is a set of inputs, such as graphs that differ only in the order of their nodes. Classes become
    test inputs in random order, until the next class would give more than `most_tests` test inputs.

    classes: Index of the class of each input, int64 [n].
    """
    order = random_orders(random_bits(seed, stream=_SPLIT, index=0, count=classes.max() + 1))
    is_test_class = np.bincount(classes)[order].cumsum() <= most_tests
    is_test = np.isin(classes, order[is_test_class])
    return inputs[~is_test], inputs[is_test]


def write_with_answers(
    options: argparse.Namespace,
    train: np.ndarray,
    test: np.ndarray,
    *,
    kind: str,
    find_answers: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]],
    vocab_size: int,
) -> None:
    """Writes a dataset of puzzles with several right answers.

    The training split has one example for each right answer. The examples of one input are a group, and an
    epoch uses one of them. The test split has one example for each input. The label of a test example is the
    first answer that `find_answers` returns. Prints the numbers of inputs and examples.

    options: Parsed command line. If `num_test` is set, at most this number of test inputs is kept, selected
    at random. train, test: Inputs, uint8 [n, cells], each of them once. ValueError is raised if `test` is
    empty. kind: Name of the kind of puzzle and of its builder. find_answers: (inputs) -> (all right answers,
    uint8 [total, cells], number of right answers of each input, int64 [n]). The answers to an input are next
    to each other.
    """
    if options.num_test is not None and options.num_test < len(test):
        order = random_orders(random_bits(options.seed, stream=_TEST_SUBSAMPLE, index=0, count=len(test)))
        test = test[np.sort(order[: options.num_test])]
    if not len(test):
        problem = "--split orbits: the first class of symmetric inputs is too large for the test split"
        raise ValueError(f"{problem}. Choose larger puzzles or another --seed.")
    (answers, counts), (test_answers, test_counts) = map(find_answers, (train, test))
    pairs = np.stack([train.repeat(counts, axis=0), answers], axis=1)
    firsts = test_counts.cumsum() - test_counts
    test_pairs = np.stack([test, test_answers[firsts]], axis=1)
    splits = {
        # A group is an input, and its puzzles are the right answers.
        "train": make_split(pairs, vocab_size=vocab_size, group_sizes=counts),
        "test": make_split(test_pairs, vocab_size=vocab_size),
    }
    builder = {"name": kind, "arguments": recorded(options, {})}
    numbers_of = {"train": counts, "test": test_counts}
    several = [split for split, numbers in numbers_of.items() if (numbers > 1).any()]
    write_dataset(
        options.output_dir, splits=splits, identifiers=[BLANK], builder=builder, several_solutions=several
    )
    for split, numbers in numbers_of.items():
        print(f"{split}: {len(numbers)} distinct inputs, {numbers.sum()} pairs of an input and an answer")
