"""Builders of datasets: python -m dataset.build sudoku --help."""

import importlib
from collections.abc import Sequence

BUILDERS = {
    "arc": "dataset.kinds.arc.build",
    "maze": "dataset.kinds.maze.build",
    "pairs": "dataset.kinds.pairs.build",
    "reasoning_gym": "dataset.kinds.pairs.reasoning_gym",
    "sudoku": "dataset.kinds.sudoku.build",
}


def build_dataset(kind: str, arguments: Sequence[str]) -> None:
    """Builds a dataset as `python -m dataset.build KIND ARGUMENTS` does."""
    importlib.import_module(BUILDERS[kind]).main(arguments)
