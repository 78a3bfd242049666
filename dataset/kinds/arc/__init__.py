"""ARC: tasks with a few demonstration pairs and test pairs of colored grids, in square fields.

The rule of a task is only given by its demonstrations. A model learns the rule as a puzzle embedding. An
`ArcPuzzle` finds the embedding that was trained on the demonstrations of its task. If there is none, it
provides the demonstrations, so that a new embedding can be trained.
"""

import dataclasses
import math

import numpy as np

from dataset.augmentations import END, PAD
from dataset.kinds.arc.evaluator import ArcEvaluator, corner_grids
from dataset.kinds.arc.tasks import COLOR_0, SIZE, VOCAB_SIZE, Pair, Task, grid_tokens, parse_puzzle
from dataset.kinds.arc.variants import IDENTITY, draw_translations, lay_out
from dataset.kinds.kind import FAINT, Kind, Puzzle, Style, crop, to_grid
from dataset.metadata import Metadata, Split
from dataset.sets import PuzzleSet

# The colors 0 to 9 as on ARC's website, then similar colors of a terminal: text and background.
_COLORS = (
    *("#000000", "#0074d9", "#ff4136", "#2ecc40", "#ffdc00"),
    *("#aaaaaa", "#f012be", "#ff851b", "#7fdbff", "#870c25"),
)
_TEXTS, _BACKGROUNDS = (
    (15, 15, 15, 16, 16, 16, 15, 16, 16, 15),
    (16, 26, 196, 40, 220, 248, 199, 208, 117, 88),
)
_STYLES = [f"38;5;{text};48;5;{under}" for text, under in zip(_TEXTS, _BACKGROUNDS, strict=True)]


def _mismatch(metadata: Metadata) -> str | None:
    size = math.isqrt(metadata.seq_len)
    if size**2 != metadata.seq_len or size > SIZE or metadata.vocab_size != VOCAB_SIZE:
        sizes = f"seq_len is {metadata.seq_len} and its vocab_size {metadata.vocab_size}"
        return f"{sizes}, not {SIZE**2} (or a smaller square) and {VOCAB_SIZE}"
    return None


@dataclasses.dataclass(frozen=True)
class ArcPuzzle(Puzzle):
    """One test input of an ARC task, with the task. solve.py shows the model's answer to it."""

    task: Task | None = None
    has_own_rule = True

    def cells_of(self, tokens: np.ndarray) -> np.ndarray:
        (grid,) = corner_grids(tokens[None])  # the largest rectangle of colors at the top left
        return to_grid(np.arange(len(tokens)))[: grid.shape[0], : grid.shape[1]]

    def laid_into(self, seq_len: int) -> "ArcPuzzle":
        size = math.isqrt(seq_len)
        if self.task.largest > size:
            field = f"The field of this model has {size}x{size} cells."
            raise ValueError(f"the task has a grid of {self.task.largest} rows or columns. {field}")
        sides = {"tokens": self.tokens, "solution": self.solution}
        laid = {
            side: None if tokens is None else grid_tokens(_cut_out(tokens), size=size)
            for side, tokens in sides.items()
        }
        return dataclasses.replace(self, **laid)

    def find_identifier(self, training: Split) -> int | None:
        demonstrations = {pair.key for pair in self.task.train}
        for puzzle_set in training.sets.values():
            for puzzle in puzzle_set.group_indices[:-1].tolist():  # the first of a group: not augmented
                rows = np.arange(*puzzle_set.puzzle_indices[puzzle : puzzle + 2])
                if len(rows) < len(demonstrations):
                    continue
                inputs, labels = puzzle_set.read(rows, np.full(len(rows), puzzle))
                pairs = (
                    Pair(_cut_out(input_tokens), _cut_out(label_tokens))
                    for input_tokens, label_tokens in zip(inputs, labels, strict=True)
                )
                if demonstrations <= {pair.key for pair in pairs}:
                    return int(puzzle_set.puzzle_identifiers[puzzle])
        return None

    def draw_demonstrations(self, num_views: int, *, seed: int) -> PuzzleSet:
        # Do not rotate, mirror or recolor the grids, because such variants have embeddings of their own.
        pairs, transforms = self.task.train, np.tile(np.array(IDENTITY, np.uint8), (num_views, 1))
        size = math.isqrt(len(self.tokens))
        translations = draw_translations(self.task, pairs, transforms, size=size, seed=seed)
        identifiers = np.ones(num_views, np.int32)
        return lay_out([(pairs, transforms, translations, identifiers)], size=size)


def _cut_out(tokens: np.ndarray) -> np.ndarray:
    """Returns the grid in a token array as colors from 0 to 9: uint8 [rows, columns]."""
    field = to_grid(tokens)
    return (crop(field, field >= COLOR_0) - COLOR_0).astype(np.uint8)


def read_puzzles(text: str) -> list[Puzzle]:
    """Reads an ARC task from JSON. Returns one puzzle for each test input.

    Raises ValueError if the text is not valid. Test pairs may have no output.

    text: {"train": [{"input": grid, "output": grid}, ...], "test": [...]}. A grid is a list of rows.
    """
    task, has_output = parse_puzzle(text)
    return [
        ArcPuzzle(
            grid_tokens(pair.input, size=SIZE),
            VOCAB_SIZE,
            solution=grid_tokens(pair.output, size=SIZE) if is_known else None,
            task=task,
        )
        for pair, is_known in zip(task.test, has_output, strict=True)
    ]


KIND = Kind(
    name="arc",
    title="ARC",
    plural="ARC tasks",
    mismatch=_mismatch,
    build_evaluator=ArcEvaluator,
    augmentation="arc",
    style=Style(
        symbols="_+0123456789",
        ansi={PAD: FAINT, END: FAINT, **dict(enumerate(_STYLES, COLOR_0))},
        colors=dict(enumerate(_COLORS, COLOR_0)),
        gap="",
        first_of_field=COLOR_0,
    ),
    read_puzzles=read_puzzles,
)
