"""How the weights move: the dense optimizers, the sparse one of the puzzles, their learning rates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from optimizers.adam_atan2 import AdamATan2
from optimizers.adamw import AdamW
from optimizers.muon import Muon
from optimizers.puzzle_table import SparseSignSGD
from parallel.division import Division
from parallel.row_owners import RowOwners
from parallel.shards import tensor_of

if TYPE_CHECKING:
    from config.schema import PretrainConfig


def build_optimizers(
    config: PretrainConfig,
    division: Division,
    embedding: torch.nn.Module | None,
    *,
    matrices: frozenset[str],
    owners: RowOwners | None = None,
    compiler_options: dict[str, Any] | None = None,
) -> tuple[list[torch.optim.Optimizer], SparseSignSGD | None]:
    """Builds the optimizers of the dense weights, and that of the puzzle embedding where the model has one.

    Learning rates are set before every step. A checkpoint holds every tensor in `state`,
    so that these must exist from the start.

    division: what of the dense weights this rank updates.
    matrices: names of the matrices inside the blocks, which `optimizer=muon` moves; AdamATan2 moves the rest.
    owners: of the embedding's rows, where each lives on one rank alone. compiler_options: of AdamATan2; None:
    not compiled.
    """
    dense = _dense_optimizers(config, division, matrices, compiler_options)
    if embedding is None:
        return dense, None
    options = {"lr": config.puzzle_emb_lr, "weight_decay": config.puzzle_emb_weight_decay}
    return dense, SparseSignSGD(embedding, owners=owners, **options)


def _dense_optimizers(
    config: PretrainConfig,
    division: Division,
    matrices: frozenset[str],
    compiler_options: dict[str, Any] | None,
) -> list[torch.optim.Optimizer]:
    options = {"lr": config.lr, "weight_decay": config.weight_decay}
    adam_options = {"beta1": config.beta1, "beta2": config.beta2, **options}
    if config.optimizer == "adamw":
        return [AdamW(map(tensor_of, division.parts.values()), **adam_options)]
    if config.optimizer == "adam_atan2":
        return [AdamATan2(division, compiler_options=compiler_options, **adam_options)]
    names = [name for name in division.parts if name not in matrices]
    return [
        AdamATan2(division, names, compiler_options=compiler_options, **adam_options),
        Muon([tensor_of(part) for name, part in division.parts.items() if name in matrices], **options),
    ]
