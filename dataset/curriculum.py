"""A run in stages: on easier data, or with fewer cycles, before the main training.

The stages follow one another as if they were one plan, so that any step of any stage can be reached. All
datasets of all stages are opened as one (`mixture`): a stage visits the groups of its folders.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from dataset.mixture import ConcatenatedSet
from dataset.plan import GlobalBatch, TrainPlan
from dataset.puzzle_set import PuzzleSet

_STREAMS = 1 << 16  # of random words for each stage, more than there are sets


@dataclasses.dataclass(frozen=True)
class Stage:
    """folders: which of the dataset's folders it visits. H_cycles, L_cycles: None as in the architecture."""

    folders: tuple[int, ...]
    epochs: int
    eval_interval: int
    H_cycles: int | None = None
    L_cycles: int | None = None


class CurriculumPlan:
    """The plans of all stages, one after the other; the face of a `TrainPlan`.

    The last stage is the main one, whose order does not depend on the others.
    """

    def __init__(
        self,
        sets: dict[str, PuzzleSet | ConcatenatedSet],
        stages: Sequence[Stage],
        *,
        seed: int,
        global_batch_size: int,
    ):
        self.stages, self.global_batch_size = stages, global_batch_size
        self._plans = [
            TrainPlan(
                sets,
                seed=seed,
                global_batch_size=global_batch_size,
                epochs=stage.epochs,
                eval_interval=stage.eval_interval,
                groups=_groups_of(sets, stage),
                first_stream=(number + 1) % len(stages) * _STREAMS,
            )
            for number, stage in enumerate(stages)
        ]
        self._last_steps = np.cumsum([plan.total_steps for plan in self._plans])
        firsts = self._last_steps - [plan.total_steps for plan in self._plans]
        self.iteration_ends = [
            int(first + end)
            for first, plan in zip(firsts, self._plans, strict=True)
            for end in plan.iteration_ends
        ]
        self.total_steps = int(self._last_steps[-1])

    def stage_of(self, step: int) -> Stage:
        """The stage that update `step`, counted from 1, belongs to."""
        return self.stages[min(int(self._last_steps.searchsorted(step)), len(self.stages) - 1)]

    def batches(self, first_step: int = 0) -> Iterator[GlobalBatch]:
        """The global batches of the steps after `first_step`, to the end of the run."""
        for plan in self._plans:
            if first_step < plan.total_steps:
                yield from plan.batches(first_step)
            first_step = max(0, first_step - plan.total_steps)


def _groups_of(sets: dict[str, PuzzleSet | ConcatenatedSet], stage: Stage) -> dict[str, np.ndarray]:
    """The groups that the stage visits, of every set in which there are any."""
    groups = {}
    for name, puzzle_set in sets.items():
        if isinstance(puzzle_set, ConcatenatedSet):
            is_visited = np.isin(puzzle_set.folder_of_group, stage.folders)
        else:
            is_visited = np.ones(len(puzzle_set.group_indices) - 1, bool)
        if is_visited.any():
            groups[name] = is_visited
    return groups
