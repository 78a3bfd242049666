"""Models: networks, losses, halting, and compilation.

The network of `arch.name` is `NETWORK` in models/<name>.py.
"""

import dataclasses
import importlib

from config.architecture import Architecture
from dataset.format import Metadata
from models.blocks import Level
from models.carry import Reasoning
from models.halting import HaltingModel
from models.network import Network


def build_model(arch: Architecture, metadata: Metadata) -> HaltingModel:
    """Builds the model of an architecture for a dataset, initialized from torch's global generator."""
    max_steps, eval_max_steps = arch.halt_max_steps, arch.eval_halt_max_steps or arch.halt_max_steps
    eval_reasoning = Reasoning.of_arch(arch, max_steps=eval_max_steps, halts_early=False)
    return HaltingModel(
        network_class(arch.name)(arch, metadata),
        reasoning=Reasoning.of_arch(arch, max_steps=max_steps, halts_early=True),
        eval_reasoning=dataclasses.replace(eval_reasoning, **arch.eval_changes),
    )


def network_class(name: str) -> type[Network]:
    return importlib.import_module(f"models.{name}").NETWORK


def recompute_blocks(model: HaltingModel) -> None:
    """Makes the backward pass recompute the activations of every block from the block's input.

    Needs less memory and more time, and gives the same gradients (arXiv 1604.06174).
    """
    for module in model.modules():
        if isinstance(module, Level):
            module.recomputes_blocks = True
