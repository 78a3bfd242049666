"""Pairs of grids or texts, of any task and with symbols of their own: what people bring."""

from pathlib import Path

from dataset.description import read_names
from dataset.format import IDENTIFIERS, Metadata
from dataset.kinds.kind import Kind, RowEvaluator


def _build_evaluator(folder: Path, metadata: Metadata) -> RowEvaluator:
    names, num = read_names(folder), metadata.num_puzzle_identifiers
    if len(names) != num:
        raise ValueError(
            f"{folder / IDENTIFIERS} does not name the {num} identifiers; build the dataset again"
        )
    return RowEvaluator("pairs", lambda _inputs, _preds: {}, tasks=names)


KIND = Kind(
    name="pairs",
    mismatch=lambda _metadata: None,
    build_evaluator=_build_evaluator,
    augmentation="pairs",
    names_symbols=True,
)
