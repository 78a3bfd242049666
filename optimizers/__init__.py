"""How the weights move: the dense optimizers, the sparse one of the puzzles, their learning rates."""

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor

from optimizers.adam_atan2 import AdamATan2
from optimizers.muon import Muon
from optimizers.sparse_sign_sgd import SparseSignSGD


def build_optimizers(
    weights: Iterable[Tensor],
    embedding: torch.nn.Module | None,
    *,
    matrices: Collection[Tensor] = (),
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    puzzle_emb_lr: float,
    puzzle_emb_weight_decay: float,
    compiler_options: dict[str, Any] | None = None,
) -> tuple[list[torch.optim.Optimizer], SparseSignSGD | None]:
    """The dense optimizers, and that of the puzzle embeddings where the model has any.

    weights: all dense ones. matrices: those of them that Muon moves; AdamATan2 moves the rest.
    compiler_options: of AdamATan2; None: not compiled.
    """
    by_muon = set(matrices)
    others = [weight for weight in weights if weight not in by_muon]
    options = {"lr": lr, "weight_decay": weight_decay}
    dense = [AdamATan2(others, beta1=beta1, beta2=beta2, compiler_options=compiler_options, **options)]
    if by_muon:
        dense.append(Muon(matrices, **options))
    if embedding is None:
        return dense, None
    return dense, SparseSignSGD(embedding, lr=puzzle_emb_lr, weight_decay=puzzle_emb_weight_decay)
