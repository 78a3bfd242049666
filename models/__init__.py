"""The networks, the halting around them, and their losses. Every architecture that `arch.name` may name is
listed here.
"""

import torch

from models.halting import HaltingModel
from models.hrm import HRM
from models.layers import Block

NETWORKS = {"hrm": HRM}


def build_model(arch, *, vocab_size: int, seq_len: int, num_puzzle_identifiers: int) -> HaltingModel:
    """The model of a config's `arch` for the facts of a dataset, on the CPU, drawn from torch's global
    generator.
    """
    network = NETWORKS[arch.name](
        arch, vocab_size=vocab_size, seq_len=seq_len, num_puzzle_identifiers=num_puzzle_identifiers
    )
    return HaltingModel(network, halt_max_steps=arch.halt_max_steps)


def should_compile(choice: bool | str, device: torch.device) -> bool:
    """`compile=auto` compiles on CUDA, where it pays off within minutes."""
    return device.type == "cuda" if choice == "auto" else bool(choice)


def compile_blocks(model: HaltingModel) -> None:
    """torch.compile of the blocks, in place: one small graph that all levels and cycles share. Names stay as
    they are.
    """
    for module in model.modules():
        if isinstance(module, Block):
            module.compile()
