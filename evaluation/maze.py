"""Whether an answer is a way through its maze: any way counts, not only the one on record.

A maze has a great many shortest paths, and a label is one of them: the exact share tells how well a model
copies the rule that chose it, the valid and the shortest share how well it solves mazes.
"""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np

from dataset.format import Metadata
from dataset.maze import GOAL, PATH, START, VOCAB_SIZE, is_path, shortest_path_cells


def maze_rules(folder: Path, metadata: Metadata) -> Callable[[np.ndarray, np.ndarray], dict[str, np.ndarray]]:
    """The function (inputs, preds) -> {"valid": bool [n], "shortest": bool [n]}, tokens [n, seq_len] each.

    valid: the answer is the maze with exactly one path from start to goal on it (`dataset.maze.is_path`);
    shortest: valid, and no path has fewer cells. Raises ValueError where the dataset in `folder` is not of
    square mazes.
    """
    if metadata.vocab_size != VOCAB_SIZE or math.isqrt(metadata.seq_len) ** 2 != metadata.seq_len:
        raise ValueError(
            f"{folder} is no maze dataset: its vocab_size is {metadata.vocab_size}, not {VOCAB_SIZE}, or its "
            f"seq_len, {metadata.seq_len}, is no square; choose the judge of its puzzles"
        )

    def judge(inputs: np.ndarray, preds: np.ndarray) -> dict[str, np.ndarray]:
        is_valid = is_path(inputs, preds)
        path_cells = np.isin(preds, (START, PATH, GOAL)).sum(axis=1)
        return {"valid": is_valid, "shortest": is_valid & (path_cells == shortest_path_cells(inputs))}

    return judge
