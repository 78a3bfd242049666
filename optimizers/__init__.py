"""How the weights move: the dense optimizers, the sparse one of the puzzles, their learning rates."""

import torch

from models.network import Network
from optimizers.adam_atan2 import AdamATan2
from optimizers.muon import Muon
from optimizers.sparse_sign_sgd import SparseSignSGD


def build_optimizers(
    network: Network,
    *,
    name: str = "adam_atan2",
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    puzzle_emb_lr: float,
    puzzle_emb_weight_decay: float,
    compiles: bool = False,
) -> tuple[list[torch.optim.Optimizer], SparseSignSGD | None]:
    """The dense optimizers, and that of the puzzle embeddings where the network has any.

    name: adam_atan2 for every dense weight; or muon for the matrices inside the blocks, and adam_atan2 for
    the rest. compiles: of AdamATan2.
    """
    matrices = list(network.block_weights()) if name == "muon" else []
    others = [weight for weight in network.parameters() if weight not in set(matrices)]
    options = {"lr": lr, "weight_decay": weight_decay}
    dense = [AdamATan2(others, beta1=beta1, beta2=beta2, compiles=compiles, **options)]
    if matrices:
        dense.append(Muon(matrices, **options))
    if network.puzzle_emb is None:
        return dense, None
    return dense, SparseSignSGD(network.puzzle_emb, lr=puzzle_emb_lr, weight_decay=puzzle_emb_weight_decay)
