"""How the weights move: the dense optimizer, the sparse one of the puzzles, their learning rates."""

import torch

from optimizers.adam_atan2 import AdamATan2
from optimizers.sparse_sign_sgd import SparseSignSGD


def build_optimizers(
    model: torch.nn.Module,
    embedding: torch.nn.Module | None,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    puzzle_emb_lr: float,
    puzzle_emb_weight_decay: float,
    compiles: bool = False,
) -> tuple[AdamATan2, SparseSignSGD | None]:
    """The dense optimizer, and that of the puzzle embeddings where the model has any.

    compiles: of the dense one.
    """
    dense = AdamATan2(
        model.parameters(), lr=lr, beta1=beta1, beta2=beta2, weight_decay=weight_decay, compiles=compiles
    )
    if embedding is None:
        return dense, None
    return dense, SparseSignSGD(embedding, lr=puzzle_emb_lr, weight_decay=puzzle_emb_weight_decay)
