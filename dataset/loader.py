"""Puzzles as batches of tensors: this rank's slice of the global plan, read in a worker process ahead of the
step.
"""

import contextlib
import functools
import multiprocessing
import os
import signal
import socket
import sys
import warnings
from collections.abc import Iterator, Sequence
from multiprocessing.synchronize import Event
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from dataset.description import read_names
from dataset.format import BLANK, IGNORE_LABEL_ID, Dataset, Split
from dataset.mixture import open_datasets
from dataset.plan import EvaluationPlan, TrainPlan
from dataset.sets import ConcatenatedSet, PuzzleSet, rows_of

_PREFETCHED_BATCHES = 8
_SHARED_MEMORY = "/dev/shm"  # where Linux has it
# A fork takes 0.02 s; elsewhere it is what the platform has.
_START_METHOD = "fork" if sys.platform == "linux" else None
# In which a worker has begun, for each try: more patience each time, for machines that are very busy.
_FORK_SECONDS = (5.0, 15.0, 45.0)
_HANG = (
    "the worker that reads the data hung in its fork, and was ended; Python before 3.12, 3.11.10 and 3.10.15 "
    "is known for that"
)


class Batch(NamedTuple):
    """One rank's share of a global batch, as tensors; the carry keeps the same for what its slots work on.

    inputs              int32 [batch, seq_len]
    labels              int32 [batch, seq_len]: IGNORE_LABEL_ID where a cell counts nowhere
    puzzle_identifiers  int32 [batch]
    rows                int64 [batch]: the example's index in its set; -1 in padding of a short batch
    """

    inputs: torch.Tensor
    labels: torch.Tensor
    puzzle_identifiers: torch.Tensor
    rows: torch.Tensor

    @property
    def is_real(self) -> torch.Tensor:
        """bool [batch]: False in padding."""
        return self.rows >= 0

    def to(self, device: torch.device) -> "Batch":
        return Batch(*(tensor.to(device, non_blocking=True) for tensor in self))

    def select(self, slots: slice | torch.Tensor) -> "Batch":
        """Returns some of the rows: a slice, int64 [n] or bool [batch]."""
        return Batch(*(tensor[slots] for tensor in self))

    @staticmethod
    def join(parts: "list[Batch]") -> "Batch":
        """Returns the rows of all parts, one after the other."""
        return Batch(*map(torch.cat, zip(*parts, strict=True)))


class PuzzleDataset(IterableDataset):
    """Yields (set name, Batch) for every global batch of the plan after `first_step`.

    Rank r holds the rows [r * local, (r + 1) * local) of each global batch, local = ceil(global /
    world_size). Rows beyond the end of a short batch are padding: inputs pad_id, labels IGNORE_LABEL_ID,
    identifier blank_identifier_id, row -1.

    A forked reader has the arrays of `data`, whatever becomes of its folders; another opens them again.
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
    ):
        super().__init__()
        self.data, self.split, self.plan, self.first_step = data, split, plan, first_step
        self.local_batch_size = -(-plan.global_batch_size // world_size)
        self.slice = slice(rank * self.local_batch_size, (rank + 1) * self.local_batch_size)

    def __iter__(self) -> Iterator[tuple[str, Batch]]:
        data = self.data.splits[self.split]
        for batch in self.plan.batches(self.first_step):
            rows, puzzles = batch.rows[self.slice], batch.puzzles[self.slice]
            yield batch.set_name, _load(data, batch.set_name, rows, puzzles, size=self.local_batch_size)

    @property
    def num_bytes(self) -> int:
        """The bytes of all batches that are read ahead, of the one in use, and of the one that is made."""
        seq_len = self.data.splits[self.split].metadata.seq_len
        return (_PREFETCHED_BATCHES + 2) * self.local_batch_size * (2 * 4 * seq_len + 4 + 8)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "data": (self.data.folders, tuple(self.data.splits))}

    def __setstate__(self, state: dict[str, Any]) -> None:
        folders, splits = state["data"]
        vars(self).update({**state, "data": open_datasets(folders, splits=splits, read_everything=False)})

    def distinct_identifiers(self) -> np.ndarray:
        """Finds the puzzle identifiers in the batches of this rank, and of padding: int64 [n], rising."""
        data = self.data.splits[self.split]
        found = [np.array([data.metadata.blank_identifier_id])]
        for batch in self.plan.batches(self.first_step):
            found.append(data.sets[batch.set_name].puzzle_identifiers[batch.puzzles[self.slice]])
        return np.unique(np.concatenate(found)).astype(np.int64)


def _load(data: Split, set_name: str, rows: np.ndarray, puzzles: np.ndarray, *, size: int) -> Batch:
    """Reads the examples `rows` of a set, which belong to `puzzles`, padded to a batch of `size`."""
    puzzle_set, metadata = data.sets[set_name], data.metadata
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
def read_batches(
    dataset: PuzzleDataset,
    *,
    device: torch.device,
    num_workers: int = 1,
    num_readers: int = 1,
    ignored_signals: Sequence[int] = (),
) -> Iterator[Iterator[tuple[str, Batch]]]:
    """Yields an iterator over the batches, read ahead by a worker process (or read here: num_workers 0); into
    pinned memory for a CUDA device.

    The worker ends with the block, whatever ended it. It hands batches over in shared memory where that has
    room for the batches of all `num_readers` on this machine, else through a pipe. ignored_signals: those
    that reach the whole process group, such as Ctrl-C: a worker that died of them would take the data away
    while its parent still saves.
    """
    assert num_workers in (0, 1), "every worker would read every batch"
    is_piped = num_workers > 0 and not _has_shared_memory(num_readers * dataset.num_bytes)
    loader = DataLoader(
        dataset,
        batch_size=None,
        num_workers=num_workers,
        prefetch_factor=_PREFETCHED_BATCHES if num_workers else None,
        pin_memory=device.type == "cuda" and not is_piped,
        collate_fn=_to_arrays if is_piped else None,
        multiprocessing_context=multiprocessing.get_context(_START_METHOD) if num_workers else None,
    )
    batches = _start_worker(loader, ignored_signals) if num_workers else iter(loader)
    try:
        yield map(_to_tensors, batches) if is_piped else batches
    finally:
        if num_workers:
            _end_worker(batches)


def _has_shared_memory(needed: int) -> bool:
    """Returns whether there is room for batches in shared memory, which is small in many containers."""
    try:
        found = os.statvfs(_SHARED_MEMORY)
    except OSError:  # it is elsewhere
        return True
    return found.f_bavail * found.f_frsize >= needed


def _to_arrays(named: tuple[str, Batch]) -> tuple[str, list[np.ndarray]]:
    return named[0], [tensor.numpy() for tensor in named[1]]


def _to_tensors(named: tuple[str, list[np.ndarray]]) -> tuple[str, Batch]:
    return named[0], Batch(*map(torch.from_numpy, named[1]))


def _start_worker(loader: DataLoader, ignored_signals: Sequence[int]) -> Iterator:
    """Starts to read ahead, with another fork where the worker does not begin. RuntimeError where none does.

    CPython before 3.12, 3.11.10 and 3.10.15 has a lock that gloo's threads take when they drop a tensor, on
    which a fork can hang (issue 112275).
    """
    for seconds in _FORK_SECONDS:
        begun = loader.multiprocessing_context.Event()  # its own: one that is ended may hold the lock of it
        loader.worker_init_fn = functools.partial(_begin_worker, begun, ignored_signals)
        batches = iter(loader)
        if _START_METHOD != "fork" or begun.wait(seconds):
            return batches
        _end_worker(batches)
        warnings.warn(_HANG, stacklevel=2)
    tries = len(_FORK_SECONDS)
    raise RuntimeError(f"the worker that reads the data hung in {tries} of {tries} forks: start again")


def _end_worker(batches: Iterator) -> None:
    """Ends the worker of a DataLoader's iterator; kills it where it does not listen.

    An exception keeps the iterator alive through its traceback, and Python, at its end, waits forever for a
    worker that ignores SIGTERM. So it is ended now; there is no public way to.
    """
    batches._shutdown_workers()
    for worker in batches._workers:
        worker.kill()
        worker.join()


def _begin_worker(begun: Event, ignored_signals: Sequence[int], _worker: int) -> None:
    try:
        if _START_METHOD == "fork":
            _close_connections()
        for number in ignored_signals:
            signal.signal(number, signal.SIG_IGN)
    finally:  # what fails comes to the parent with the first batch
        begun.set()


def _close_connections() -> None:
    """Closes what a fork has copied of the connections between ranks.

    While they are open anywhere, the other ranks do not learn that the parent is gone; and a worker looks for
    its parent every 5 seconds only. Their numbers stay taken, as objects of the parent still have them.
    """
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        try:
            connection = socket.socket(fileno=descriptor)
        except OSError:  # it is none
            continue
        connection.detach()
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            os.dup2(nowhere, descriptor)
    os.close(nowhere)


def choose_rows(puzzle_set: PuzzleSet | ConcatenatedSet, count: int) -> np.ndarray:
    """Chooses up to `count` of the examples that are no variants, evenly: int64, rising."""
    rows = original_rows(puzzle_set)
    return rows if len(rows) <= count else rows[np.arange(count) * len(rows) // count]


def original_rows(puzzle_set: PuzzleSet | ConcatenatedSet) -> np.ndarray:
    """Returns the examples of the first puzzle of each group: the others are its variants."""
    return rows_of(puzzle_set.puzzle_indices, np.asarray(puzzle_set.group_indices[:-1], np.int64))


def read_rows(data: Dataset, set_name: str, rows: np.ndarray) -> Batch:
    """Reads examples of a test set, int64 [n], as one batch on the CPU."""
    split = data.splits["test"]
    puzzles = np.asarray(split.sets[set_name].puzzle_indices).searchsorted(rows, side="right") - 1
    return _load(split, set_name, rows, puzzles, size=len(rows))


def names_of(data: Dataset, set_names: Sequence[str], identifiers: np.ndarray) -> list[str]:
    """Returns the name of each puzzle's identifier; an empty text where it is blank, or has none."""
    known = {folder: read_names(folder) for folder in data.folders}
    names = []
    for set_name, identifier in zip(set_names, identifiers.tolist(), strict=True):
        folder, _, first = data.origin(set_name)
        index = identifier - first
        name = known[folder][index] if 0 <= index < len(known[folder]) else ""
        names.append("" if name == BLANK else name)
    return names
