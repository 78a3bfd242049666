"""Reads the batches of a plan as tensors. Each rank reads its slice of every global batch, in a thread."""

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from dataset.answers import read_answers
from dataset.description import read_names
from dataset.metadata import BLANK, IGNORE_LABEL_ID, Dataset, Metadata
from dataset.plan import EvaluationPlan, TrainPlan
from dataset.sets import ConcatenatedSet, PuzzleSet, rows_of

_BATCHES_AHEAD = 8
_END_SECONDS = 5.0  # maximum wait for a read in progress


class Batch(NamedTuple):
    """A batch of examples as tensors. With several ranks, this rank's part of the batch.

    The carry (what the slots store between two steps) also contains a `Batch`, with `answers` of None.

    Attributes:
        inputs: Tokens, int32 [batch, seq_len].
        labels: Right answers, int32 [batch, seq_len]. IGNORE_LABEL_ID for cells that are not scored.
        puzzle_identifiers: int32 [batch], row of the table of puzzle embeddings for each example.
        rows: int64 [batch], index of each example in its set of puzzles. -1 for padding.
        answers: int32 [batch, answers, seq_len], several right answers of each example. None unless a run
            trains with arch.num_answers > 1.
    """

    inputs: torch.Tensor
    labels: torch.Tensor
    puzzle_identifiers: torch.Tensor
    rows: torch.Tensor  # in `evaluation.test_time`: example index * number of samples + sample index
    answers: torch.Tensor | None = None

    @property
    def is_real(self) -> torch.Tensor:
        return self.rows >= 0  # padding has the row -1

    def to(self, device: torch.device) -> "Batch":
        return self.map(lambda tensor: tensor.to(device, non_blocking=True))

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "Batch":
        """Returns the batch with `function` applied to every tensor."""
        return Batch(*(None if tensor is None else function(tensor) for tensor in self))

    def select(self, slots: slice | torch.Tensor) -> "Batch":
        """Returns a batch with some of the examples.

        slots: A slice, positions (int64 [n]) or a mask (bool [batch]).
        """
        return self.map(lambda tensor: tensor[slots])

    @staticmethod
    def join(parts: "list[Batch]") -> "Batch":
        return Batch(*(torch.cat(column) for column in zip(*parts, strict=True) if column[0] is not None))


class PuzzleDataset:
    """Iterable over one rank's parts of the batches of a plan.

    Yields tuples (name of the set, `Batch`). Each rank gets ceil(global_batch_size / world_size) consecutive
    examples of every batch. The last ranks may get fewer or none. In an evaluation, padding replaces the
    missing examples. Only one thread at a time may iterate.

    Args:
        split: "train" or "test".
        plan: The examples of each batch.
        rank: Index of this rank in the group of ranks that divides the global batch.
        world_size: Number of ranks in this group.
        first_step: Number of batches to skip.
        num_answers: If greater than 1, `Batch.answers` contains up to this number of right answers of each
            example. If 1, `Batch.answers` is None.
        seed: If an example has more answers than `num_answers`, the seed selects some of them.
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
            puzzle_set = data.sets[batch.set_name]
            size = self.local_batch_size if isinstance(self.plan, EvaluationPlan) else len(rows)
            loaded = load_batch(puzzle_set, data.metadata, rows, puzzles, size=size)
            if self.num_answers > 1:
                options = {"num_answers": self.num_answers, "seed": self.seed}
                answers = read_answers(puzzle_set, rows, puzzles, **options)
                if data.metadata.ignore_label_id is not None:
                    answers[answers == data.metadata.ignore_label_id] = IGNORE_LABEL_ID
                loaded = loaded._replace(answers=torch.from_numpy(answers))
            yield batch.set_name, loaded

    def distinct_identifiers(self) -> np.ndarray:
        """Returns the puzzle identifiers that this rank will read: int64 [n], ascending, without repetitions.

        The identifier of padding is included.
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
    """Reads examples of a set of puzzles as one batch on the CPU.

    The batch is padded to `size` examples. In the batch, labels that are not scored are IGNORE_LABEL_ID, and
    padding has the row -1.

    metadata: Defines the padding token and the label that is not scored. rows: Indices of the examples, int64
    [n]. puzzles: Index of the puzzle of each example, int64 [n].
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
    """Context manager that yields an iterator over the batches of `dataset`. A thread reads 8 batches ahead.

    For a CUDA device, the batches are in pinned memory. If the thread raises an error, the iterator yields
    the batches before it, then raises the error. At its end, the `with` block waits up to 5 s for the thread.
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
    """Returns the indices (rows) of up to `count` examples of a set, evenly spaced: int64, ascending.

    Chooses only examples of originals (the first puzzle of each group). But if `puzzles` contains no
    original, chooses from the examples of all `puzzles`.

    puzzles: Indices of the puzzles to choose from, ascending, int64 [n]. If None, chooses from the whole set.
    """
    if puzzles is None:
        rows = original_rows(puzzle_set)
    else:
        originals = np.intersect1d(puzzles, puzzle_set.group_indices[:-1])
        rows = rows_of(puzzle_set.puzzle_indices, originals if len(originals) else puzzles)
    return rows if len(rows) <= count else rows[np.arange(count) * len(rows) // count]


def original_rows(puzzle_set: PuzzleSet | ConcatenatedSet) -> np.ndarray:
    """Returns the indices of the examples of the originals, the first puzzles of the groups: int64 [n]."""
    return rows_of(puzzle_set.puzzle_indices, np.asarray(puzzle_set.group_indices[:-1], np.int64))


def read_rows(data: Dataset, set_name: str, rows: np.ndarray) -> Batch:
    """Reads some examples of a test set as one batch on the CPU.

    rows: Indices of the examples in the set, int64 [n].
    """
    split = data.splits["test"]
    puzzles = np.asarray(split.sets[set_name].puzzle_indices).searchsorted(rows, side="right") - 1
    return load_batch(split.sets[set_name], split.metadata, rows, puzzles, size=len(rows))


def names_of(data: Dataset, set_names: Sequence[str], identifiers: np.ndarray) -> list[str]:
    """Returns the name of the puzzle of each puzzle identifier, "" if it has none.

    set_names: For each identifier, the name of a test set that contains it.
    """
    known = {folder: read_names(folder) for folder in data.folders}
    names = []
    for set_name, identifier in zip(set_names, identifiers.tolist(), strict=True):
        folder, _, first = data.origin(set_name)
        index = identifier - first
        name = known[folder][index] if 0 <= index < len(known[folder]) else ""
        names.append("" if name == BLANK else name)
    return names
