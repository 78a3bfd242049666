"""The plan of a run: the examples in the global batch of every step. It is equal on every rank.

The order depends only on the seed, the stage, the set and the epoch. So checkpoints contain no state of a
random generator. A resumed run skips the batches of earlier iterations without computing them. Within its
iteration, it counts the batches before its step.

The order is that of the public tools. An epoch visits the groups of a set in random order. A visit samples
one puzzle of the group and takes its examples in random order, as many as still fit into the batch. An
iteration is `eval_interval` epochs of each set, one set after the other. A batch may contain the end of one
epoch and the start of the next. If the last batch of a set in an iteration is not full, it is dropped. After
each iteration, an evaluation follows. With `train_steps`, the main stage is a single iteration, and an
evaluation follows after every `eval_steps` steps and at the end.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from dataset.randomness import BitStream, random_bits, random_orders
from dataset.sets import ConcatenatedSet, PuzzleSet, rows_of

_STREAMS = 1 << 16  # streams of random bits reserved for each stage, one for each set
_VALIDATION_STREAM = 1 << 62  # stream of random bits that selects the groups for validation


@dataclasses.dataclass(frozen=True)
class GlobalBatch:
    """The examples of one batch, before the batch is divided among the ranks.

    Attributes:
        set_name: Name of the set that contains the examples.
        rows: int64 [n], index of each example in the set.
        puzzles: int64 [n], index in the set of the puzzle of each example. This is not the puzzle identifier.
    """

    set_name: str
    rows: np.ndarray
    puzzles: np.ndarray


class _SetPlan:
    """The order in which one stage of the training reads one set of puzzles.

    Args:
        groups: Mask of the groups to read, bool [num_groups].
        stream: Random bits of this stage and set. Each epoch has its own random bits.
        epochs: Number of epochs in the stage.
        eval_interval: Number of epochs in an iteration of the stage.

    Attributes:
        steps_per_iteration: Number of training steps with batches of this set, for each iteration.
    """

    def __init__(
        self,
        name: str,
        data: PuzzleSet | ConcatenatedSet,
        groups: np.ndarray,
        stream: BitStream,
        global_batch_size: int,
        epochs: int,
        eval_interval: int,
    ):
        assert epochs % eval_interval == 0
        self.name, self.stream = name, stream
        self.global_batch_size, self.eval_interval = global_batch_size, eval_interval
        self.first_example = np.asarray(data.puzzle_indices[:-1], np.int64)
        sizes = np.diff(np.asarray(data.puzzle_indices, np.int64))
        self.puzzle_sizes = sizes.astype(np.min_scalar_type(sizes.max()))  # small: faster random reads
        group_indices = np.asarray(data.group_indices, np.int64)
        self.first_puzzle, self.group_sizes = group_indices[:-1][groups], np.diff(group_indices)[groups]

        # If all puzzles have the same size, the number of steps is known without sampling puzzles.
        sizes_of_all = self.puzzle_sizes[groups.repeat(np.diff(group_indices))]
        self.same_size = int(sizes_of_all[0]) if (sizes_of_all == sizes_of_all[0]).all() else None
        self.steps_per_iteration = self._count_steps(epochs // eval_interval)

    @property
    def num_groups(self) -> int:
        return len(self.group_sizes)

    def _count_steps(self, num_iterations: int) -> list[int]:
        if self.same_size is not None:
            visits_per_batch = -(-self.global_batch_size // self.same_size)
            return [self.eval_interval * self.num_groups // visits_per_batch] * num_iterations
        steps = [0] * num_iterations
        for iteration in range(num_iterations):
            open_examples = 0
            for epoch in self._epochs(iteration):
                ends, open_examples = self._batch_ends(self._visit_sizes(epoch), open_examples)
                steps[iteration] += len(ends)
        return steps

    def _epochs(self, iteration: int) -> range:
        return range(iteration * self.eval_interval, (iteration + 1) * self.eval_interval)

    def _visit_sizes(self, epoch: int) -> np.ndarray:
        if self.same_size is not None:
            return np.full(self.num_groups, self.same_size)
        return self.puzzle_sizes[self._draw_puzzles(epoch)]  # in the order of the epoch

    def _batch_ends(self, visit_sizes: np.ndarray, open_examples: int) -> tuple[list[int], int]:
        """Returns (ends of the batches of an epoch, number of examples in the unfinished last batch).

        Each end is a number of examples from the start of the epoch. A batch ends after the visit that fills
        it.

        visit_sizes: Number of examples of each visit of the epoch. open_examples: Number of examples in the
        unfinished last batch of the previous epoch.
        """
        visit_ends = visit_sizes.cumsum(dtype=np.int64)
        is_end = np.zeros(int(visit_ends[-1]) + 1, np.uint8)
        is_end[visit_ends] = 1
        marks = is_end.tobytes()  # bytes.find is faster than a search in visit_ends
        ends, begin = [], -open_examples
        while (end := marks.find(1, begin + self.global_batch_size)) >= 0:
            ends.append(end)
            begin = end
        return ends, len(marks) - 1 - begin

    def _draw_puzzles(self, epoch: int) -> np.ndarray:
        """Samples one puzzle of each group for an epoch, in random order: int64 [num_groups]."""
        self.stream.seek(epoch)
        groups = random_orders(self.stream.read(self.num_groups))
        fractions = (self.stream.read(len(groups)) >> np.uint64(11)) * 2.0**-53  # uniform in [0, 1)
        return self.first_puzzle[groups] + (fractions * self.group_sizes[groups]).astype(np.int64)

    def _visits(self, epoch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        visited = self._draw_puzzles(epoch)
        sizes = self.puzzle_sizes[visited].astype(np.int64)
        puzzles = visited.repeat(sizes)
        inside = np.arange(len(puzzles)) - (sizes.cumsum() - sizes).repeat(sizes)
        if len(puzzles) > len(visited):
            visits = np.arange(len(visited)).repeat(sizes)
            inside = inside[np.lexsort((self.stream.read(len(puzzles)), visits))]
        # The examples in their order, the puzzle of each example, and the size of each sampled puzzle.
        return self.first_example[puzzles] + inside, puzzles, sizes

    def batches(self, iteration: int, *, skip: int) -> Iterator[GlobalBatch]:
        """Yields the batches of one iteration of the stage, without the first `skip` batches."""
        batch = open_examples = 0  # index of the unfinished batch, and number of its examples
        pieces = []
        for epoch in self._epochs(iteration):
            if batch < skip:
                ends, left_open = self._batch_ends(self._visit_sizes(epoch), open_examples)
                if batch + len(ends) < skip:
                    batch, open_examples = batch + len(ends), left_open
                    continue
            rows, puzzles, sizes = self._visits(epoch)
            ends, open_examples = self._batch_ends(sizes, open_examples)
            for begin, end in itertools.pairwise([0, *ends]):
                pieces.append((rows[begin:end], puzzles[begin:end]))
                if batch >= skip:
                    joined = (np.concatenate(parts) for parts in zip(*pieces, strict=True))
                    yield GlobalBatch(self.name, *(part[: self.global_batch_size] for part in joined))
                pieces, batch = [], batch + 1
            last_end = ends[-1] if ends else 0
            pieces.append((rows[last_end:], puzzles[last_end:]))


@dataclasses.dataclass(frozen=True)
class Stage:
    """The settings of one stage of the training, such as its data.

    Attributes:
        folders: Indices of the dataset folders to train on.
        epochs: Number of epochs in the stage.
        eval_interval: Number of epochs between two evaluations.
        cycles: Numbers of loops of each thinking step in this stage, such as {"H_cycles": 2}. A missing key
            has its value from the config section `arch`.
    """

    folders: tuple[int, ...]
    epochs: int
    eval_interval: int
    cycles: Mapping[str, int] = dataclasses.field(default_factory=dict)


class TrainPlan:
    """The order of the training examples in a run that may have several stages.

    The last stage is the main stage. Earlier stages do not change the order of its examples.

    Attributes:
        total_steps: Number of training steps in the run.
        iteration_ends: Training steps, counted from 1, after which an evaluation is due. The last is
            `total_steps`.
        main: The main stage.
    """

    def __init__(
        self,
        sets: Mapping[str, PuzzleSet | ConcatenatedSet],
        stages: Sequence[Stage],
        *,
        seed: int,
        global_batch_size: int,
        parts: Sequence[tuple[float, Stage]] = (),
        held_out: Mapping[str, np.ndarray] | None = None,
        train_steps: int | None = None,
        eval_steps: int | None = None,
    ):
        """Plans all stages of the training.

        Raises ValueError if the examples between two evaluations do not fill one batch, or if all groups of a
        stage are held out.

        Args:
            sets: {name: training set}.
            stages: Stages of the training. The last is the main stage.
            parts: Parts at the start of the main stage, one after the other, with other numbers of cycles
                (`Stage.cycles`). A part is a tuple: its fraction of the training steps of the main stage, and
                a `Stage` that equals the main stage except for `cycles`. After the last part, the main stage
                has its own cycles.
            held_out: {name of a set: bool [num_groups]}. True for groups that are not trained on.
            train_steps: Number of training steps of the main stage. If given, `epochs` and `eval_interval` of
                the main stage are ignored.
            eval_steps: With `train_steps`, the number of training steps between two evaluations in the main
                stage. If None, only one evaluation is due, at the end of the main stage.
        """
        self._sets, self._seed, self._held_out = sets, seed, held_out or {}
        self.global_batch_size = global_batch_size
        self._iterations = []  # (plans of the sets, index of the iteration in its stage, steps of each set)
        if train_steps is not None:
            stages = [*stages[:-1], dataclasses.replace(stages[-1], epochs=1, eval_interval=1)]
        first_steps, ends = [], [0]
        for index, stage in enumerate(stages):
            stream = (index + 1) % len(stages) * _STREAMS
            plans = self._plan_sets(stage, stream)
            if not plans:
                problem = "validation_fraction holds out all training puzzles of a stage, with their repeats"
                raise ValueError(f"{problem}. Lower or remove it.")
            is_cut = train_steps is not None and stage is stages[-1]
            while is_cut:
                if (steps := sum(plan.steps_per_iteration[0] for plan in plans)) >= train_steps:
                    break
                epochs = max(stage.epochs + 1, -(-stage.epochs * train_steps // max(steps, 1)))
                stage = dataclasses.replace(stage, epochs=epochs, eval_interval=epochs)
                plans = self._plan_sets(stage, stream)
            first_steps.append(ends[-1])
            for iteration, steps in enumerate(
                zip(*(plan.steps_per_iteration for plan in plans), strict=True)
            ):
                if not sum(steps):
                    visited = sum(plan.num_groups for plan in plans)
                    puzzles = f"{visited} training puzzle{'s' * (visited != 1)}"
                    problem = f"{stage.eval_interval} epochs of {puzzles} do not fill one batch"
                    longer = (
                        "eval_interval" if stage.eval_interval < stage.epochs else "epochs and eval_interval"
                    )
                    remedy = f"Lower global_batch_size, add puzzles, or raise {longer}."
                    raise ValueError(f"{problem} of {global_batch_size}. {remedy}")
                self._iterations.append((plans, iteration, steps))
                ends.append(ends[-1] + sum(steps))
        if train_steps is not None:
            first, last = first_steps[-1], first_steps[-1] + train_steps
            ends[-1:] = [*range(first, last, eval_steps or train_steps)[1:], last]
        self.main, self.iteration_ends, self.total_steps = stage, ends[1:], ends[-1]
        shares = itertools.accumulate(share for share, _ in parts)
        main_steps = self.total_steps - first_steps[-1]
        part_ends = [first_steps[-1] + round(share * main_steps) for share in shares]
        self._last_steps = [*first_steps[1:], *part_ends, self.total_steps]
        self._stages = [*stages[:-1], *(stage for _, stage in parts), self.main]

    def _plan_sets(self, stage: Stage, stream: int) -> list[_SetPlan]:
        plans = []
        for index, (name, data) in enumerate(self._sets.items()):
            groups = np.isin(data.folder_of_group, stage.folders)
            groups &= ~self._held_out[name] if name in self._held_out else True
            if groups.any():
                bits = BitStream(self._seed, stream=stream + index)
                sizes = (self.global_batch_size, stage.epochs, stage.eval_interval)
                plans.append(_SetPlan(name, data, groups, bits, *sizes))
        return plans

    def stage_of(self, step: int) -> Stage:
        """Returns the stage that contains the training step `step` (from 1).

        If the step belongs to a part of the main stage, returns the `Stage` of this part.
        """
        return self._stages[min(int(np.searchsorted(self._last_steps, step)), len(self._stages) - 1)]

    def epochs(self, step: int) -> float:
        """Returns the number of epochs in the first `step` training steps, over all stages, such as 2.5."""
        epochs = 0.0
        for plans, _, steps_of_sets in self._iterations:
            steps = sum(steps_of_sets)
            epochs += plans[0].eval_interval * min(step, steps) / steps
            step -= min(step, steps)
        return epochs

    def num_steps(self, last: int) -> list[tuple[Stage, int]]:
        """Counts how many of the first `last` training steps belong to each stage.

        Returns [(stage, number of steps), ...] in the order of the stages. If the main stage is divided into
        parts, each part is a separate entry.
        """
        ends = [min(last, step) for step in (0, *self._last_steps)]
        return [(stage, b - a) for stage, (a, b) in zip(self._stages, itertools.pairwise(ends), strict=True)]

    def batches(self, first_step: int = 0) -> Iterator[GlobalBatch]:
        """Yields the global batch of each training step from `first_step` + 1 to `total_steps`."""
        remaining = self.total_steps - first_step
        for plans, iteration, steps_of_sets in self._iterations:
            for plan, steps in zip(plans, steps_of_sets, strict=True):
                if first_step < steps:
                    yield from itertools.islice(plan.batches(iteration, skip=first_step), max(remaining, 0))
                    remaining -= steps - first_step
                first_step = max(0, first_step - steps)


def held_out_groups(data: PuzzleSet | ConcatenatedSet, *, seed: int, fraction: float) -> np.ndarray:
    """Selects the groups of a training set that are used for validation: bool [num_groups].

    In each dataset folder, the fraction `fraction` of the groups is selected, rounded down. The selection
    depends only on the seed, the fraction and the number of groups in each folder. A larger fraction selects
    the same groups and more.
    """
    held_out = np.zeros(len(data.folder_of_group), bool)
    for folder in np.unique(data.folder_of_group):
        (groups,) = (data.folder_of_group == folder).nonzero()
        bits = random_bits(seed, stream=_VALIDATION_STREAM, index=0, count=len(groups))
        held_out[groups[random_orders(bits)[: int(fraction * len(groups))]]] = True
    return held_out


class EvaluationPlan:
    """The order of the examples in an evaluation. The last batch of a set may be smaller.

    Args:
        only_first_batches: Whether to evaluate only the first batch of each set.
        puzzles: {name of a set: indices of the puzzles to evaluate, int64, ascending}. If None, all puzzles
            are evaluated.
    """

    def __init__(
        self,
        sets: Mapping[str, PuzzleSet | ConcatenatedSet],
        *,
        global_batch_size: int,
        only_first_batches: bool = False,
        puzzles: Mapping[str, np.ndarray] | None = None,
    ):
        self._indices = {name: np.asarray(data.puzzle_indices, np.int64) for name, data in sets.items()}
        self._puzzles = puzzles
        self.global_batch_size, self._only_first_batches = global_batch_size, only_first_batches

    def batches(self, first_step: int = 0) -> Iterator[GlobalBatch]:
        for name, indices in self._indices.items():
            puzzles = self._puzzles and self._puzzles[name]
            chosen = np.arange(indices[-1]) if puzzles is None else rows_of(indices, puzzles)
            starts = range(0, len(chosen), self.global_batch_size)
            for start in starts[:1] if self._only_first_batches else starts:
                if first_step > 0:
                    first_step -= 1
                    continue
                rows = chosen[start : start + self.global_batch_size]
                yield GlobalBatch(name, rows, indices.searchsorted(rows, side="right") - 1)
