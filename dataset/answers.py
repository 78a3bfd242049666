"""The right answers of training examples, for models that train on several (LDT with arch.num_answers).

If a puzzle has several right answers, the dataset has one example for each of them, and these examples are in
one group. So the answers of an example are the distinct labels of all examples of its group that have the
same input.
"""

import numpy as np

from dataset.metadata import IGNORE_LABEL_ID
from dataset.randomness import random_bits, random_orders
from dataset.sets import ConcatenatedSet, PuzzleSet

_STREAM = 1 << 61  # stream of random bits that selects answers, if an example has too many


def read_answers(
    puzzle_set: PuzzleSet | ConcatenatedSet,
    rows: np.ndarray,
    puzzles: np.ndarray,
    *,
    num_answers: int,
    seed: int,
) -> np.ndarray:
    """Returns up to `num_answers` right answers of each example: int32 [n, num_answers, seq_len].

    The first answer is the label of the example. If the example has more than `num_answers` - 1 other
    answers, `num_answers` - 1 of them are selected at random. The selection depends only on the seed and the
    index of the example. Unused entries are IGNORE_LABEL_ID.

    rows: Indices of the examples in the set, int64 [n]. puzzles: For each example, the index of its puzzle in
    the set, int64 [n].
    """
    inputs, labels = puzzle_set.read(rows, puzzles)
    answers = np.full((len(rows), num_answers, inputs.shape[1]), IGNORE_LABEL_ID, np.int32)
    groups = puzzle_set.group_indices.searchsorted(puzzles, side="right") - 1
    for group in np.unique(groups):
        first, last = puzzle_set.puzzle_indices[puzzle_set.group_indices[group : group + 2]]
        members = np.arange(first, last)
        puzzles_of_members = puzzle_set.puzzle_indices.searchsorted(members, side="right") - 1
        known_inputs, known_labels = puzzle_set.read(members, puzzles_of_members)
        for index in (groups == group).nonzero()[0]:
            others = known_labels[(known_inputs == inputs[index]).all(axis=1)]
            others = np.unique(others[(others != labels[index]).any(axis=1)], axis=0)
            if len(others) >= num_answers:
                bits = random_bits(seed, stream=_STREAM, index=int(rows[index]), count=len(others))
                others = others[random_orders(bits)[: num_answers - 1]]
            answers[index, : 1 + len(others)] = [labels[index], *others]
    return answers
