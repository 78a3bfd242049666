"""Batches of tensors: this rank's slice of each global batch of a plan. A thread reads ahead."""

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import IterableDataset

from dataset.answers import read_answers
from dataset.description import read_names
from dataset.metadata import BLANK, IGNORE_LABEL_ID, Dataset, Metadata
from dataset.plan import EvaluationPlan, TrainPlan
from dataset.sets import ConcatenatedSet, PuzzleSet, rows_of

_BATCHES_AHEAD = 8
_END_SECONDS = 5.0  # maximum wait for a read in progress


class Batch(NamedTuple):
    """The examples of this rank in one step: its part of the global batch.

    It is also a part of the model's state between steps (the carry): the examples that the model still works
    on.

    Attributes:
        inputs: int32 [batch, seq_len].
        labels: int32 [batch, seq_len]. IGNORE_LABEL_ID for cells that are not scored.
        puzzle_identifiers: int32 [batch], number of each example's puzzle embedding.
        rows: int64 [batch], index of each example in its set. -1 for padding. In `evaluation.test_time`, the
            number of the attempt instead.
        answers: int32 [batch, answers, seq_len], right answers of each puzzle (dataset/answers.py). None,
            except in training with arch.num_answers > 1. The carry does not contain them.
    """

    inputs: torch.Tensor
    labels: torch.Tensor
    puzzle_identifiers: torch.Tensor
    rows: torch.Tensor
    answers: torch.Tensor | None = None

    @property
    def is_real(self) -> torch.Tensor:
        """A mask of the examples that are not padding: bool [batch]."""
        return self.rows >= 0

    def to(self, device: torch.device) -> "Batch":
        return self.map(lambda tensor: tensor.to(device, non_blocking=True))

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "Batch":
        """Returns the batch with `function` applied to every tensor."""
        return Batch(*(None if tensor is None else function(tensor) for tensor in self))

    def select(self, slots: slice | torch.Tensor) -> "Batch":
        """Returns a batch of only some examples.

        slots: Positions of these examples, as a slice, int64 [n] or bool [batch].
        """
        return self.map(lambda tensor: tensor[slots])

    @staticmethod
    def join(parts: "list[Batch]") -> "Batch":
        """Concatenates several batches to one. They have no answers."""
        return Batch(*(torch.cat(column) for column in zip(*parts, strict=True) if column[0] is not None))


class PuzzleDataset(IterableDataset):
    """The examples of one rank. Yields (set name, Batch) for the steps `first_step` + 1, ... of a plan.

    A plan says which examples are in the global batch of each step. With local = ceil(global_batch_size /
    world_size), rank r gets the examples r * local to (r + 1) * local - 1 of it. In an evaluation, a batch
    with fewer examples is padded to `local` examples: inputs pad_id, labels IGNORE_LABEL_ID, identifier
    blank_identifier_id, row -1. Only one thread at a time may iterate, because the random generators of the
    plan have state.

    split: "train" or "test". plan: Order of the examples. num_answers: If above 1, each batch has up to this
    number of answers of each example. seed: Selects a part of the answers.
    """

    def __init__(
        self,
        data: Dataset,
        split: str,
        plan: TrainPlan | EvaluationPlan,
        *,
        rank: int,
        world_size: int,
        first_step: int = 0,
        num_answers: int = 1,
        seed: int = 0,
    ):
        self.num_answers, self.seed = num_answers, seed
        self.data, self.split, self.plan, self.first_step = data, split, plan, first_step
        self.local_batch_size = -(-plan.global_batch_size // world_size)
        self.slice = slice(rank * self.local_batch_size, (rank + 1) * self.local_batch_size)

    def __iter__(self) -> Iterator[tuple[str, Batch]]:
        data = self.data.splits[self.split]
        for batch in self.plan.batches(self.first_step):
            rows, puzzles = batch.rows[self.slice], batch.puzzles[self.slice]
            set_and_metadata = data.sets[batch.set_name], data.metadata
            size = self.local_batch_size if isinstance(self.plan, EvaluationPlan) else len(rows)
            loaded = load_batch(*set_and_metadata, rows, puzzles, size=size)
            if self.num_answers > 1:
                options = {"num_answers": self.num_answers, "seed": self.seed}
                answers = read_answers(set_and_metadata[0], rows, puzzles, **options)
                if data.metadata.ignore_label_id is not None:
                    answers[answers == data.metadata.ignore_label_id] = IGNORE_LABEL_ID
                loaded = loaded._replace(answers=torch.from_numpy(answers))
            yield batch.set_name, loaded

    def distinct_identifiers(self) -> np.ndarray:
        """Returns all puzzle identifiers that this rank will read: int64 [n], ascending.

        A puzzle identifier is the number of a puzzle embedding. Includes the identifier of padding.
        """
        data = self.data.splits[self.split]
        found = [np.array([data.metadata.blank_identifier_id])]
        for batch in self.plan.batches(self.first_step):
            found.append(data.sets[batch.set_name].puzzle_identifiers[batch.puzzles[self.slice]])
        return np.unique(np.concatenate(found)).astype(np.int64)


def load_batch(
    puzzle_set: PuzzleSet | ConcatenatedSet,
    metadata: Metadata,
    rows: np.ndarray,
    puzzles: np.ndarray,
    *,
    size: int,
) -> Batch:
    """Reads some examples of a set as a batch on the CPU, padded to `size` examples.

    Padded examples have the row -1. Labels that are not scored become IGNORE_LABEL_ID.

    metadata: Says which tokens are padding or not scored. rows: Indices of the examples, int64 [n]. puzzles:
    Index of the puzzle of each example, int64 [n].
    """
    inputs, labels = puzzle_set.read(rows, puzzles)
    columns = (
        (inputs, np.int32, metadata.pad_id),
        (labels, np.int32, IGNORE_LABEL_ID),
        (puzzle_set.puzzle_identifiers[puzzles], np.int32, metadata.blank_identifier_id),
        (rows, np.int64, -1),
    )
    padded = [np.full((size, *values.shape[1:]), fill, dtype) for values, dtype, fill in columns]
    for array, (values, *_) in zip(padded, columns, strict=True):
        array[: len(values)] = values
    if metadata.ignore_label_id is not None:
        padded[1][padded[1] == metadata.ignore_label_id] = IGNORE_LABEL_ID
    return Batch(*map(torch.from_numpy, padded))


@contextlib.contextmanager
def read_batches(dataset: PuzzleDataset, *, device: torch.device) -> Iterator[Iterator[tuple[str, Batch]]]:
    """Context manager that yields an iterator of (set name, Batch). A thread reads up to 8 batches ahead.

    For a CUDA device, the batches are in pinned memory. If the thread fails, the iterator yields the batches
    that it has read, then raises the error of the thread. At the end of the block, the thread stops. This
    waits at most 5 s.
    """
    batches: queue.SimpleQueue[tuple[str, Batch] | BaseException | None] = queue.SimpleQueue()
    room, is_over = threading.Semaphore(_BATCHES_AHEAD), threading.Event()

    def read() -> None:
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)  # the current device is set per thread
            for set_name, batch in dataset:
                if device.type == "cuda":
                    batch = batch.map(torch.Tensor.pin_memory)
                room.acquire()
                if is_over.is_set():
                    return
                batches.put((set_name, batch))
            batches.put(None)
        except BaseException as error:
            batches.put(error)

    def take() -> Iterator[tuple[str, Batch]]:
        while (item := batches.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            room.release()
            yield item

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    try:
        yield take()
    finally:
        is_over.set()
        room.release()
        thread.join(_END_SECONDS)


def choose_rows(
    puzzle_set: PuzzleSet | ConcatenatedSet, count: int, puzzles: np.ndarray | None = None
) -> np.ndarray:
    """Selects up to `count` examples of a set, at equal distances. Leaves out augmented copies of puzzles.

    Returns the indices of the examples, int64, ascending. puzzles: Indices of the puzzles to choose from,
    int64 [n]. If all of them are augmented copies, they are not left out. If None, all puzzles.
    """
    if puzzles is None:
        rows = original_rows(puzzle_set)
    else:
        originals = np.intersect1d(puzzles, puzzle_set.group_indices[:-1])
        rows = rows_of(puzzle_set.puzzle_indices, originals if len(originals) else puzzles)
    return rows if len(rows) <= count else rows[np.arange(count) * len(rows) // count]


def original_rows(puzzle_set: PuzzleSet | ConcatenatedSet) -> np.ndarray:
    """Returns the indices of all examples of a set that are not augmented copies: int64 [n]."""
    return rows_of(puzzle_set.puzzle_indices, np.asarray(puzzle_set.group_indices[:-1], np.int64))


def read_rows(data: Dataset, set_name: str, rows: np.ndarray) -> Batch:
    """Reads some examples of a test set as one batch on the CPU. rows: Their indices, int64 [n]."""
    split = data.splits["test"]
    puzzles = np.asarray(split.sets[set_name].puzzle_indices).searchsorted(rows, side="right") - 1
    return load_batch(split.sets[set_name], split.metadata, rows, puzzles, size=len(rows))


def names_of(data: Dataset, set_names: Sequence[str], identifiers: np.ndarray) -> list[str]:
    """Returns the name of the puzzle behind each puzzle identifier, or "" if it has no name.

    A puzzle identifier is the number of a puzzle embedding. set_names: For each identifier, the test set that
    it is used in.
    """
    known = {folder: read_names(folder) for folder in data.folders}
    names = []
    for set_name, identifier in zip(set_names, identifiers.tolist(), strict=True):
        folder, _, first = data.origin(set_name)
        index = identifier - first
        name = known[folder][index] if 0 <= index < len(known[folder]) else ""
        names.append("" if name == BLANK else name)
    return names
