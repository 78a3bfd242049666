"""Square mazes with one start and one goal.

Tokens: 0 = pad, then '#', space, S, G and 'o' as 1 .. 5. A maze has a great many shortest paths, and a label
is one of them: the exact share tells how well a model copies the rule that chose it, the valid and the
shortest share how well it solves mazes.
"""

import math

import numpy as np

from dataset.evaluator import RowEvaluator
from dataset.format import Metadata
from dataset.kinds import Kind, Look
from dataset.kinds.maze.rules import (
    CHARACTERS,
    GOAL,
    PATH,
    START,
    VOCAB_SIZE,
    WALL,
    is_path,
    shortest_path_cells,
)
from dataset.symmetries import SQUARE


def _misfit(metadata: Metadata) -> str | None:
    if metadata.vocab_size != VOCAB_SIZE:
        return f"vocab_size is {metadata.vocab_size}, not {VOCAB_SIZE}"
    if math.isqrt(metadata.seq_len) ** 2 != metadata.seq_len:
        return f"seq_len, {metadata.seq_len}, is no square"
    return None


def check_answers(inputs: np.ndarray, preds: np.ndarray) -> dict[str, np.ndarray]:
    """valid: whether the answer is the maze with exactly one path from start to goal on it (`is_path`);
    shortest: valid, and no path has fewer cells. Tokens [n, seq_len] -> bool [n].
    """
    is_valid = is_path(inputs, preds)
    path_cells = np.isin(preds, (START, PATH, GOAL)).sum(axis=1)
    return {"valid": is_valid, "shortest": is_valid & (path_cells == shortest_path_cells(inputs))}


KIND = Kind(
    name="maze",
    builder="dataset.build_maze",
    misfit=_misfit,
    build_evaluator=lambda _folder, _metadata: RowEvaluator("maze", check_answers),
    augmentations={"square": SQUARE},
    look=Look(
        symbols="_" + CHARACTERS,
        styles={WALL: "90;100", START: "30;102", GOAL: "30;101", PATH: "30;103"},
        colors={WALL: "#4a5160", START: "#3f9d6b", GOAL: "#d1574c", PATH: "#e3b341"},
        gap="",
    ),
)
