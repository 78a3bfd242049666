"""An ARC task as somebody asks it: its JSON, the test outputs perhaps not in it.

The rule of a task is in its demonstrations alone, and a model knows it by a puzzle embedding. So a question
can find the embedding that was trained on them, and lay them out to train a new one.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import numpy as np

from dataset.kinds.arc.evaluator import corner_grids
from dataset.kinds.arc.tasks import COLOR_0, SIZE, VOCAB_SIZE, Pair, Task, grid_tokens, parse_question
from dataset.kinds.arc.variants import IDENTITY, draw_translations, lay_out
from dataset.kinds.kind import Puzzle, to_grid
from dataset.sets import PuzzleSet

if TYPE_CHECKING:
    from dataset.format import Split


@dataclasses.dataclass(frozen=True)
class ArcQuestion(Puzzle):
    """A test input of a task. task: with its demonstrations."""

    task: Task | None = None
    has_own_rule = True

    def cells_of(self, tokens: np.ndarray) -> np.ndarray:
        """Returns the cells of the answer's grid, as the evaluation cuts it out (`corner_grids`)."""
        (grid,) = corner_grids(tokens[None])
        return to_grid(np.arange(len(tokens)))[: grid.shape[0], : grid.shape[1]]

    def laid_into(self, seq_len: int) -> ArcQuestion:
        size = math.isqrt(seq_len)
        if self.task.largest > size:
            field = f"the {size}x{size} cells that grids lie in here"
            raise ValueError(f"the task has a grid of {self.task.largest} rows or columns, more than {field}")
        sides = {"tokens": self.tokens, "solution": self.solution}
        laid = {
            name: None if tokens is None else grid_tokens(_cut_out(tokens), size=size)
            for name, tokens in sides.items()
        }
        return dataclasses.replace(self, **laid)

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
        size = math.isqrt(len(self.tokens))
        translations = draw_translations(self.task, transforms, len(pairs), size=size, seed=seed)
        identifiers = np.ones(num_views, np.int32)
        return lay_out([pairs], [transforms], [translations], [identifiers], size=size)


def _cut_out(tokens: np.ndarray) -> np.ndarray:
    """Returns the colours of a grid that lies anywhere in its field: uint8 [rows, columns]."""
    field = to_grid(tokens)
    rows, columns = (np.flatnonzero((field >= COLOR_0).any(axis=axis)) for axis in (1, 0))
    if not len(rows):
        return np.zeros((0, 0), np.uint8)
    return (field[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1] - COLOR_0).astype(np.uint8)


def read_puzzles(text: str) -> list[Puzzle]:
    """Reads a task from its JSON, {"train": [...], "test": [...]}; each test input is a question."""
    task, has_output = parse_question(text)
    return [
        ArcQuestion(
            grid_tokens(pair.input, size=SIZE),
            VOCAB_SIZE,
            solution=grid_tokens(pair.output, size=SIZE) if is_known else None,
            task=task,
        )
        for pair, is_known in zip(task.test, has_output, strict=True)
    ]
