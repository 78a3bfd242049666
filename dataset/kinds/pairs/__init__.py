"""The kind `pairs`: tasks of a user. Inputs and outputs are grids or texts with any symbols."""

from pathlib import Path

from dataset.description import read_every_name
from dataset.kinds.evaluator import RowEvaluator
from dataset.kinds.kind import Kind
from dataset.metadata import Metadata


def _build_evaluator(folder: Path, metadata: Metadata) -> RowEvaluator:
    return RowEvaluator("pairs", lambda _inputs, _preds: {}, tasks=read_every_name(folder, metadata))


KIND = Kind(
    name="pairs",
    mismatch=lambda _metadata: None,
    build_evaluator=_build_evaluator,
    augmentation="pairs",
    names_symbols=True,
)
