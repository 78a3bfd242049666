"""Test puzzles that a person is shown: chosen evenly among those that are no variants, read, and named."""

from collections.abc import Sequence

import numpy as np
import torch

from dataset.facts import read_names
from dataset.format import BLANK, Batch, Dataset
from dataset.plan import EvaluationPlan
from dataset.puzzle_set import ConcatenatedSet, PuzzleSet
from dataset.puzzles import PuzzleDataset

_BATCH_SIZE = 256


def choose_rows(puzzle_set: PuzzleSet | ConcatenatedSet, count: int) -> np.ndarray:
    """Chooses up to `count` of the examples that are no variants, evenly: int64, rising."""
    rows = original_rows(puzzle_set)
    return rows if len(rows) <= count else rows[np.arange(count) * len(rows) // count]


def original_rows(puzzle_set: PuzzleSet | ConcatenatedSet) -> np.ndarray:
    """Returns the examples of the first puzzle of each group: the others are the same in another guise."""
    firsts = np.asarray(puzzle_set.group_indices[:-1], np.int64)
    indices = np.asarray(puzzle_set.puzzle_indices, np.int64)
    sizes = indices[firsts + 1] - indices[firsts]
    begins = sizes.cumsum() - sizes
    return (indices[firsts] - begins).repeat(sizes) + np.arange(sizes.sum())


def read_rows(data: Dataset, set_name: str, rows: np.ndarray) -> Batch:
    """Reads examples of a test set, int64 rising, as one batch on the CPU; one process, no worker."""
    puzzle_set = data.splits["test"].sets[set_name]
    puzzles = np.unique(np.asarray(puzzle_set.puzzle_indices).searchsorted(rows, side="right") - 1)
    plan = EvaluationPlan({set_name: puzzle_set}, global_batch_size=_BATCH_SIZE, puzzles={set_name: puzzles})
    dataset = PuzzleDataset(data.folders, "test", plan, rank=0, world_size=1)
    wanted, parts = torch.from_numpy(rows), []
    for _, batch in dataset:  # without a loader, which would draw a random number
        here = torch.isin(batch.rows, wanted).nonzero().flatten()
        parts.append(Batch(*(column[here] for column in batch)))
    return Batch(*map(torch.cat, zip(*parts, strict=True)))


def names_of(data: Dataset, set_names: Sequence[str], identifiers: np.ndarray) -> list[str]:
    """Returns the name of each puzzle's identifier; an empty text where it is blank, or has none."""
    known = {folder: read_names(folder) for folder in data.folders}
    names = []
    for set_name, identifier in zip(set_names, identifiers.tolist(), strict=True):
        folder, _, first = data.origin(set_name)
        place = identifier - first
        name = known[folder][place] if 0 <= place < len(known[folder]) else ""
        names.append("" if name == BLANK else name)
    return names
