"""Test puzzles that a model was trained on. Their accuracy says nothing about new puzzles.

`dataset.equal` decides which examples are equal. Rank 0 compares hashes, the other ranks get the result.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from checkpointing.files import TRAINED_FILE
from checkpointing.finding import Checkpoint, find_checkpoint
from config.schema import PretrainConfig
from dataset.equal import (
    UNKNOWN,
    Trained,
    hash_examples,
    hash_training,
    join_repeats,
    read_trained,
    trained_in_folders,
)
from dataset.loader import original_rows
from dataset.mixture import fingerprint_of, open_datasets
from dataset.plan import held_out_groups
from dataset.sets import ConcatenatedSet, PuzzleSet, rows_of
from distributed import log
from distributed.collectives import broadcast_object
from distributed.errors import collective_errors
from distributed.world import is_main
from evaluation.intervals import wilson_interval


@dataclasses.dataclass(frozen=True)
class Leak:
    """The puzzles of a test set that the model was also trained on ("leaked" puzzles).

    Attributes:
        rows: Indices of the leaked examples in the test set, int64 [n], ascending. They include the augmented
            variants of a leaked puzzle.
        rate: Fraction of the training examples that were compared with the test set. 1: all. Between 0 and 1:
            a random sample. `rows` is then empty, and `share` is an estimate. 0: unknown. `rows` then
            contains the leaked examples that were found.
        num_distinct: Number of different puzzles in the test set.
        share: (estimated fraction of leaked test examples, low end of its 95 % interval, high end). None
            unless `rate` is between 0 and 1.
    """

    rows: np.ndarray
    rate: float
    num_distinct: int
    share: tuple[float, float, float] | None = None


class _Tested(NamedTuple):
    where: Path  # folder of the test split, for messages
    data: PuzzleSet | ConcatenatedSet
    has_variants: bool  # whether augmented variants of the puzzles are evaluated too
    rows: np.ndarray  # indices of the examples without augmentation, int64 [n]
    hashes: np.ndarray  # hashes of these examples, uint64 [n]


class Leaks:
    """Finds the test puzzles that the model was trained on.

    Call `add` for every test set, then `broadcast_find`.

    Args:
        reaction: What to do if a test puzzle was trained on: "warn" logs a warning. "error" prints a message
            and exits on all ranks.

    Attributes:
        found: {test set: leak}. Empty before `broadcast_find`.
    """

    def __init__(self, reaction: Literal["warn", "error"]):
        self._reaction = reaction
        self._tested: dict[str, _Tested] = {}  # only on rank 0
        self.found: dict[str, Leak] = {}

    def add(
        self,
        name: str,
        data: PuzzleSet | ConcatenatedSet,
        split: str,
        folders: Sequence[Path],
        *,
        hashes: np.ndarray | None = None,
        groups: np.ndarray | None = None,
        puzzles: np.ndarray | None = None,
    ) -> None:
        """Adds a test set to compare with the training data. Only rank 0 calls it.

        name, data: Name of the test set, and its examples.
        split: Split that contains the test set, such as "test".
        folders: Dataset folders that contain the split.
        hashes: Hash of each example without augmentation, uint64 [n], from `hash_examples`. If None, the
        hashes are computed.
        groups: Groups to evaluate, bool [num_groups]. Only their originals are evaluated. If None, all
        originals and their augmented variants are evaluated.
        puzzles: Indices of the puzzles to evaluate, int64 [n]. If None, all puzzles.
        """
        rows = original_rows(data)
        hashes = hash_examples(data, split, folders) if hashes is None else hashes
        if groups is not None:
            firsts = np.asarray(data.group_indices[:-1], np.int64)
            is_evaluated = groups.repeat(np.diff(data.puzzle_indices)[firsts])
            rows, hashes = rows[is_evaluated], hashes[is_evaluated]
        if puzzles is not None:
            puzzle_of_row = np.asarray(data.puzzle_indices).searchsorted(rows, side="right") - 1
            is_evaluated = np.isin(puzzle_of_row, puzzles)
            rows, hashes = rows[is_evaluated], hashes[is_evaluated]
        where = folders[data.parts[0][0]] / split
        self._tested[name] = _Tested(where, data, groups is None, rows, hashes)

    def broadcast_find(self, trained: Trained | None, *, model: str) -> None:
        """Compares all added test sets with the training examples. All ranks call it.

        Afterwards, `found` contains the result on all ranks.

        trained: Hashes of the examples that the model was trained on. Needed only on rank 0. If None, these
        examples are unknown.
        model: Name of the model for messages.
        """
        with collective_errors():
            if is_main():
                if trained is None or not trained.is_complete:
                    log.info(
                        f"Some training puzzles of {model} are unknown, so some test puzzles may be "
                        "trained on without a warning (trained_on_rate=0)."
                    )
                self.found = {
                    name: self._find(name, tested, trained) for name, tested in self._tested.items()
                }
        self.found = broadcast_object(self.found)

    def _find(self, name: str, tested: _Tested, trained: Trained | None) -> Leak:
        num_distinct = len(np.setdiff1d(tested.hashes, [np.uint64(UNKNOWN)]))
        if trained is None:
            return Leak(np.zeros(0, np.int64), 0.0, num_distinct)
        rows = tested.rows[trained.contains(tested.hashes)]
        num_known, share = int(trained.covers(tested.hashes).sum()), None
        rate = trained.rate if trained.is_complete and num_known else 0.0
        count_text = f"{len(rows)} of {len(tested.rows)}"
        if 0 < rate < 1:
            part = len(rows) / num_known
            share = (part, *wilson_interval(part, num_known))
            estimate, low, high = (round(fraction * len(tested.rows)) for fraction in share)
            count_text = f"about {estimate} ({low} to {high}) of {len(tested.rows)}"
        elif rate == 0:
            count_text = f"at least {count_text}"
        if len(rows):
            first = f"set {name} ({tested.where}), the first is row {rows[0]}"
            problem = f"{count_text} test puzzles were trained on: {first}."
            if self._reaction == "error":
                raise ValueError(f"leaks=error: {problem} Remove them from one split, or set leaks=warn.")
            unseen = " The metrics unseen/... count only the other puzzles." if rate == 1 else ""
            log.warning(f"{problem} Their accuracy says nothing about new puzzles.{unseen}")
        rows = rows[:0] if share else rows  # with a sample, the other puzzles are not known
        rows = _with_variants(tested.data, rows) if tested.has_variants else rows
        return Leak(rows, rate, num_distinct, share)


def _with_variants(data: PuzzleSet | ConcatenatedSet, rows: np.ndarray) -> np.ndarray:
    """Returns the indices of the given examples and of their augmented variants, ascending.

    rows: Indices of examples without augmentation, int64 [n].
    """
    indices, group_indices = (
        np.asarray(starts, np.int64) for starts in (data.puzzle_indices, data.group_indices)
    )
    puzzles = indices.searchsorted(rows, side="right") - 1
    groups = group_indices.searchsorted(puzzles, side="right") - 1
    offsets = (rows - indices[puzzles]).repeat(np.diff(group_indices)[groups])
    variants = rows_of(group_indices, groups)
    found = indices[variants] + offsets
    return np.sort(found[found < indices[variants + 1]])


def find_trained(checkpoint: Checkpoint) -> Trained | None:
    """Returns hashes of the examples that the model in a checkpoint was trained on.

    Reads the hashes from a file of the checkpoint. If the checkpoint has no such file, computes them from the
    dataset folders of the training. Returns None if these folders are missing or have changed. If some of the
    examples are unknown, `is_complete` of the result is False. Raises ValueError if the file is damaged.
    """
    if checkpoint.trained_file is not None and (found := read_trained(checkpoint.trained_file)):
        return found
    folders = checkpoint.find_data()
    try:
        if checkpoint.fingerprint is None or checkpoint.fingerprint != fingerprint_of(folders):
            return None
        data = open_datasets(folders, splits=("train",), read_everything=False)
    except (ValueError, OSError):
        return None
    options = {"seed": checkpoint.seed, "fraction": checkpoint.validation_fraction}
    sets = data.splits["train"].sets
    held_out = {name: held_out_groups(training_set, **options) for name, training_set in sets.items()}
    hashes = hash_training(data)
    if checkpoint.joins_repeats:
        held_out = join_repeats(data, hashes, held_out)
    trained = trained_in_folders(data, hashes, held_out)
    return Trained.of([*trained.values()], is_complete=checkpoint.init_from is None)


def find_trained_before(
    config: PretrainConfig, checkpoint: Path | None, *, is_this_run: bool
) -> Trained | None:
    """Returns hashes of the examples on which the weights of a run were trained before this launch.

    If some of the examples are unknown, the field `is_complete` of the result is False. Returns None if the
    weights are random. Raises ValueError if a file is damaged.

    checkpoint: Folder of the checkpoint from which training continues. If None, the weights come from the
    checkpoint `init_from`, or are random. is_this_run: Whether `checkpoint` is a checkpoint of this run.
    """
    if checkpoint is None and config.init_from is None:
        return None
    if checkpoint is None:
        found = find_trained(find_checkpoint(config.init_from))
    elif (found := read_trained(checkpoint / TRAINED_FILE)) is None and not is_this_run:
        found = find_trained(find_checkpoint(checkpoint))
    elif found is None:  # an older version saved it: only the examples of `init_from` are unknown
        return Trained.of([], is_complete=config.init_from is None)
    return Trained.of([], is_complete=False) if found is None else found
