"""The networks, the halting around them, and their losses.

Every architecture that `arch.name` may name is listed here.
"""

from typing import Protocol

from models.halting import HaltingModel
from models.hrm import HRM
from models.layers import Level
from models.transformer import Transformer
from models.trm import TRM

NETWORKS = {"hrm": HRM, "trm": TRM, "transformer": Transformer}


class Facts(Protocol):
    """What a model takes from the data: a dataset's `Metadata` has it."""

    vocab_size: int
    seq_len: int
    num_puzzle_identifiers: int


def build_model(arch, facts: Facts) -> HaltingModel:
    """The model of a config's `arch` for a dataset, on the CPU, drawn from torch's global generator."""
    network = NETWORKS[arch.name](
        arch,
        vocab_size=facts.vocab_size,
        seq_len=facts.seq_len,
        num_puzzle_identifiers=facts.num_puzzle_identifiers,
    )
    return HaltingModel(
        network,
        halt_max_steps=arch.halt_max_steps,
        no_ACT_continue=arch.no_ACT_continue,
        q_target=arch.q_target,
    )


def recompute_blocks(model: HaltingModel) -> None:
    """From now on keeps only each block's input for the backward pass, which computes the rest once more.

    Less memory, more time, the same gradients (arXiv 1604.06174).
    """
    for module in model.modules():
        if isinstance(module, Level):
            module.recomputes_blocks = True
