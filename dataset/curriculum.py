"""A run in stages: on easier data, or with fewer cycles, before the main training.

The stages follow one another as if they were one plan, so that any step of any stage can be reached. All
datasets of all stages are opened as one (`mixture`): a stage visits the groups of its folders.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from dataset.mixture import ConcatenatedSet
from dataset.plan import GlobalBatch, TrainPlan
from dataset.puzzle_set import PuzzleSet

_STREAMS = 1 << 16  # of random words for each stage, more than there are sets


@dataclasses.dataclass(frozen=True)
class Stage:
    """A stage of a run. folders: those of the dataset that it visits. H_cycles, L_cycles: None as in the
    architecture.
    """

    folders: tuple[int, ...]
    epochs: int
    eval_interval: int
    H_cycles: int | None = None
    L_cycles: int | None = None


class CurriculumPlan:
    """The plans of all stages, one after the other, used as a `TrainPlan` is.

    The last stage is the main one, whose order does not depend on the others.
    """

    def __init__(
        self,
        sets: Mapping[str, PuzzleSet | ConcatenatedSet],
        stages: Sequence[Stage],
        *,
        seed: int,
        global_batch_size: int,
    ):
        self.stages, self.global_batch_size = stages, global_batch_size
        self._plans = []
        for number, stage in enumerate(stages):
            visited = {name: np.isin(each.folder_of_group, stage.folders) for name, each in sets.items()}
            plan = TrainPlan(
                sets,
                seed=seed,
                global_batch_size=global_batch_size,
                epochs=stage.epochs,
                eval_interval=stage.eval_interval,
                groups={name: groups for name, groups in visited.items() if groups.any()},
                first_stream=(number + 1) % len(stages) * _STREAMS,
            )
            self._plans.append(plan)
        self._last_steps = np.cumsum([plan.total_steps for plan in self._plans]).tolist()
        self.iteration_ends = [
            first + end
            for first, plan in zip([0, *self._last_steps], self._plans, strict=False)
            for end in plan.iteration_ends
        ]
        self.total_steps = self._last_steps[-1]

    def stage_of(self, step: int) -> Stage:
        """Finds the stage that update `step`, counted from 1, belongs to."""
        return self.stages[min(int(np.searchsorted(self._last_steps, step)), len(self.stages) - 1)]

    def batches(self, first_step: int = 0) -> Iterator[GlobalBatch]:
        """Yields the global batches of the steps after `first_step`, to the end of the run."""
        for plan in self._plans:
            if first_step < plan.total_steps:
                yield from plan.batches(first_step)
            first_step = max(0, first_step - plan.total_steps)
