"""Which examples make step k: the order of a run, decided once for the global batch and equal on every rank.

Everything here is a pure function of (seed, set, epoch) through a counter-based generator (Philox), so any
step can be reached without replaying the ones before it, and no generator state is ever saved. Only raw bits
of the generator are used: what numpy derives from them may change between its versions, the bits do not.

The order is the one of the public tools: an epoch visits the groups of a set in random order; of each group
it takes one random puzzle, and of that as many random examples as still fit the batch. `eval_interval` epochs
follow one another without a seam and are called an iteration; the last partial batch of an iteration is
dropped, then comes an evaluation.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np

from dataset.format import PuzzleSet


@dataclasses.dataclass(frozen=True)
class GlobalBatch:
    """The examples of one step over all ranks: rows of the set and the puzzle (not the identifier) of each,
    int64 [n].
    """

    set_name: str
    rows: np.ndarray
    puzzles: np.ndarray


@dataclasses.dataclass(frozen=True)
class _Epoch:
    """One epoch of one set: the puzzle of each visited group, and the running number of examples before each
    visit.
    """

    puzzles: np.ndarray  # [visits]
    offsets: np.ndarray  # [visits + 1]
    random_bits: np.ndarray  # uint64 [offsets[-1]] or empty: orders the examples inside each puzzle


class _SetPlan:
    """The order of one set, and for every epoch of the run the batches begun before it.

    A batch is the shortest run of visits with at least `global_batch_size` examples; the last visit is cut to
    fit. `begun[e]` counts the batches of the iteration begun before epoch e, `fill[e]` the examples already
    in the batch then open.
    """

    def __init__(
        self,
        data: PuzzleSet,
        *,
        seed: int,
        stream: int,
        global_batch_size: int,
        epochs: int,
        eval_interval: int,
    ):
        self.seed, self.stream = seed, stream
        self.global_batch_size, self.eval_interval = global_batch_size, eval_interval
        self.first_example = np.asarray(data.puzzle_indices[:-1], dtype=np.int64)
        self.puzzle_sizes = np.diff(np.asarray(data.puzzle_indices, dtype=np.int64))
        self.first_puzzle = np.asarray(data.group_indices[:-1], dtype=np.int64)
        self.group_sizes = np.diff(np.asarray(data.group_indices, dtype=np.int64))
        self.begun, self.fill, self.steps_per_iteration = self._count(epochs)

    @property
    def num_groups(self) -> int:
        return len(self.group_sizes)

    def _count(self, epochs: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        num_iterations = epochs // self.eval_interval
        size = int(self.puzzle_sizes[0])
        if (
            self.puzzle_sizes == size
        ).all():  # every visit brings the same number of examples: count in closed form
            visits_per_batch = -(-self.global_batch_size // size)
            visits_before = np.arange(self.eval_interval + 1, dtype=np.int64) * self.num_groups
            begun = -(-visits_before[:-1] // visits_per_batch)
            fill = visits_before[:-1] % visits_per_batch * size
            steps = visits_before[-1] // visits_per_batch
            return (
                np.tile(begun, num_iterations),
                np.tile(fill, num_iterations),
                np.full(num_iterations, steps),
            )

        begun, fill = np.zeros(epochs, np.int64), np.zeros(epochs, np.int64)
        steps = np.zeros(num_iterations, np.int64)
        for epoch in range(epochs):
            iteration, inside = divmod(epoch, self.eval_interval)
            if inside == 0:
                complete = open_examples = 0
            begun[epoch] = complete + (open_examples > 0)
            fill[epoch] = open_examples
            ends, open_examples = self._cut(self._epoch(epoch, with_examples=False).offsets, open_examples)
            complete += len(ends)
            steps[iteration] = complete
        return begun, fill, steps

    def _cut(self, offsets: np.ndarray, fill: int) -> tuple[list[int], int]:
        """The visit after which each batch of an epoch ends, and the examples left in the batch that stays
        open.
        """
        ends = []
        begin = -fill
        while True:
            end = int(offsets.searchsorted(begin + self.global_batch_size))
            if end == len(offsets):
                return ends, int(offsets[-1]) - begin
            ends.append(end)
            begin = int(offsets[end])

    def _epoch(self, epoch: int, *, with_examples: bool = True) -> _Epoch:
        philox = np.random.Philox(key=[self.seed, self.stream], counter=[0, 0, 0, epoch])
        bits = philox.random_raw(2 * self.num_groups)
        groups = _shuffled(bits[: self.num_groups])
        sizes = self.group_sizes[groups]
        fractions = (bits[self.num_groups :] >> np.uint64(11)) * 2.0**-53  # uniform in [0, 1)
        puzzles = self.first_puzzle[groups] + (fractions * sizes).astype(np.int64)
        offsets = np.zeros(self.num_groups + 1, np.int64)
        np.cumsum(self.puzzle_sizes[puzzles], out=offsets[1:])
        is_shuffled = with_examples and offsets[-1] > self.num_groups
        return _Epoch(
            puzzles, offsets, philox.random_raw(int(offsets[-1])) if is_shuffled else np.zeros(0, np.uint64)
        )

    def batches(self, iteration: int, *, skip: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(rows, puzzles) of each batch of an iteration but the first `skip`, without generating those."""
        first, last = iteration * self.eval_interval, (iteration + 1) * self.eval_interval
        epoch = first + int(self.begun[first:last].searchsorted(skip, side="right")) - 1
        open_batch = int(self.begun[epoch]) - (
            self.fill[epoch] > 0
        )  # the batch that is open where this epoch begins
        fill, pieces = int(self.fill[epoch]), []
        for current in range(epoch, last):
            order = self._epoch(current)
            ends, fill = self._cut(order.offsets, fill)
            begin = 0
            for end in ends:
                if open_batch >= skip:
                    pieces.append(self._visited(order, begin, end))
                    yield tuple(
                        np.concatenate(part)[: self.global_batch_size] for part in zip(*pieces, strict=True)
                    )
                pieces, begin, open_batch = [], end, open_batch + 1
            if fill and open_batch >= skip and begin < self.num_groups:
                pieces.append(self._visited(order, begin, self.num_groups))

    def _visited(self, order: _Epoch, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """(rows, puzzles) of the visits begin..end of an epoch, each puzzle's examples together and in random
        order.
        """
        sizes = np.diff(order.offsets[begin : end + 1])
        puzzles = order.puzzles[begin:end].repeat(sizes)
        inside = np.arange(len(puzzles)) - (order.offsets[begin:end] - order.offsets[begin]).repeat(sizes)
        if len(order.random_bits):
            visits = np.arange(end - begin).repeat(sizes)
            inside = inside[
                np.lexsort((order.random_bits[order.offsets[begin] : order.offsets[end]], visits))
            ]
        return self.first_example[puzzles] + inside, puzzles


class TrainPlan:
    """The whole order of a training run.

    total_steps      updates in the run, counted exactly
    iteration_ends   the steps (counted from 1) after which an evaluation is due; the last is `total_steps`
    """

    def __init__(
        self,
        sets: dict[str, PuzzleSet],
        *,
        seed: int,
        global_batch_size: int,
        epochs: int,
        eval_interval: int,
    ):
        assert epochs % eval_interval == 0
        self._plans = {
            name: _SetPlan(
                data,
                seed=seed,
                stream=stream,
                global_batch_size=global_batch_size,
                epochs=epochs,
                eval_interval=eval_interval,
            )
            for stream, (name, data) in enumerate(sets.items())
        }
        self.global_batch_size = global_batch_size
        self._steps = np.stack(
            [plan.steps_per_iteration for plan in self._plans.values()], axis=1
        )  # [iterations, sets]
        self.iteration_ends = [int(end) for end in self._steps.sum(axis=1).cumsum()]
        self.total_steps = self.iteration_ends[-1]
        if self._steps.sum(axis=1).min() == 0:
            groups = sum(plan.num_groups for plan in self._plans.values())
            raise ValueError(
                f"{eval_interval} epochs of {groups} groups do not fill one batch of {global_batch_size}: "
                "lower global_batch_size or raise eval_interval"
            )

    def batches(self, first_step: int = 0) -> Iterator[GlobalBatch]:
        """The global batches of the steps after `first_step` (those already done), to the end of the run."""
        skip = first_step
        for iteration, steps_of_sets in enumerate(self._steps):
            for (name, plan), steps in zip(self._plans.items(), steps_of_sets, strict=True):
                if skip < steps:
                    for rows, puzzles in plan.batches(iteration, skip=skip):
                        yield GlobalBatch(name, rows, puzzles)
                skip = max(0, skip - int(steps))


class EvaluationPlan:
    """Every example of every set once, in order; the last batch of a set may be short."""

    def __init__(self, sets: dict[str, PuzzleSet], *, global_batch_size: int):
        self._puzzle_indices = {
            name: np.asarray(data.puzzle_indices, np.int64) for name, data in sets.items()
        }
        self.global_batch_size = global_batch_size

    def batches(self, first_step: int = 0) -> Iterator[GlobalBatch]:
        for name, indices in self._puzzle_indices.items():
            for start in range(0, int(indices[-1]), self.global_batch_size):
                if first_step > 0:
                    first_step -= 1
                    continue
                rows = np.arange(start, min(start + self.global_batch_size, int(indices[-1])))
                yield GlobalBatch(name, rows, indices.searchsorted(rows, side="right") - 1)


def _shuffled(bits: np.ndarray) -> np.ndarray:
    """A permutation of 0..n-1 from n random words: sorted by their high bits, the low ones hold the position.

    The words are made unique by that, so that every machine sorts them alike (and sorting is faster than
    argsort).
    """
    low = np.uint64((1 << max(1, int(len(bits) - 1).bit_length())) - 1)
    return (np.sort((bits & ~low) | np.arange(len(bits), dtype=np.uint64)) & low).astype(np.int64)
