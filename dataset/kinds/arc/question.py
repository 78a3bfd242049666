"""An ARC task as somebody asks it: its JSON, the test outputs perhaps not in it.

The rule of a task is in its demonstrations alone, and a model knows it by a puzzle embedding. So a question
can find the embedding that was trained on them, and lay them out to train a new one.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from dataset.kinds.arc.build import lay_out
from dataset.kinds.arc.evaluator import corner_grids
from dataset.kinds.arc.tasks import COLOR_0, SIZE, VOCAB_SIZE, Pair, Task, grid_tokens, parse_question
from dataset.kinds.arc.variants import IDENTITY, draw_translations
from dataset.puzzle_set import PuzzleSet
from dataset.question import Question

if TYPE_CHECKING:
    from dataset.format import Split

_CELLS = np.arange(SIZE**2).reshape(SIZE, SIZE)


@dataclasses.dataclass(frozen=True)
class ArcQuestion(Question):
    """A test input of a task. task: with its demonstrations."""

    task: Task | None = None
    has_own_rule = True

    def cells_of(self, tokens: np.ndarray) -> np.ndarray:
        """Returns the cells of the answer's grid, as the evaluation cuts it out (`corner_grids`)."""
        (grid,) = corner_grids(tokens[None])
        return _CELLS[: grid.shape[0], : grid.shape[1]]

    def find_identifier(self, training: Split) -> int | None:
        """Compares the demonstrations with those of the original of every task, the first of its group."""
        wanted = {pair.key for pair in self.task.train}
        for puzzle_set in training.sets.values():
            for puzzle in puzzle_set.group_indices[:-1].tolist():
                rows = np.arange(*puzzle_set.puzzle_indices[puzzle : puzzle + 2])
                if len(rows) < len(wanted):
                    continue
                inputs, labels = puzzle_set.read(rows, np.full(len(rows), puzzle))
                pairs = (
                    Pair(_cut_out(given), _cut_out(label))
                    for given, label in zip(inputs, labels, strict=True)
                )
                if wanted <= {pair.key for pair in pairs}:
                    return int(puzzle_set.puzzle_identifiers[puzzle])
        return None

    def draw_demonstrations(self, num_views: int, *, seed: int) -> PuzzleSet:
        """Lays all demonstrations out `num_views` times, elsewhere in the field each time.

        Neither turned nor in other colours: those are other puzzles, with embeddings of their own.
        """
        pairs, transforms = self.task.train, np.tile(np.array(IDENTITY, np.uint8), (num_views, 1))
        translations = draw_translations(self.task, transforms, len(pairs), seed=seed)
        identifiers = np.ones(num_views, np.int32)
        return lay_out([pairs], [transforms], [translations], [identifiers])


def _cut_out(tokens: np.ndarray) -> np.ndarray:
    """Returns the colours of a grid that lies anywhere in its field: uint8 [rows, columns]."""
    field = tokens.reshape(SIZE, SIZE)
    rows, columns = (np.flatnonzero((field >= COLOR_0).any(axis=axis)) for axis in (1, 0))
    if not len(rows):
        return np.zeros((0, 0), np.uint8)
    return (field[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1] - COLOR_0).astype(np.uint8)


def read_questions(text: str) -> list[Question]:
    """Reads a task from its JSON, {"train": [...], "test": [...]}; each test input is a question."""
    task, has_output = parse_question(text)
    return [
        ArcQuestion(
            grid_tokens(pair.input),
            VOCAB_SIZE,
            solution=grid_tokens(pair.output) if is_known else None,
            task=task,
        )
        for pair, is_known in zip(task.test, has_output, strict=True)
    ]
