"""Models: networks, halting, losses. One training step calls, in this order (training/step.py):

network.sample_randomness     samples random numbers on the host (models/halting.py: exploration)
HaltingModel.refill           starts halted slots on new puzzles (models/halting.py)
HaltingModel.forward          calls network.forward, one thinking step (models/trm.py, models/hrm.py, ...),
                              then HaltingModel.halts, which says which slots halt (models/halting.py)
objective.losses              computes the loss and the metrics (models/objective.py; LDT: models/ldt.py)

Networks are built from models/network.py (embedding of the puzzle, answer), models/blocks.py and
models/layers.py. models/carry.py defines the types State, Reasoning, Prediction, Carry and StepOutput.
config/arch/<name>.yaml lists every key of a model, with its default and its meaning.
"""

import importlib

from config.architecture import Architecture, architectures
from dataset.format import Metadata
from models.blocks import Level
from models.halting import HaltingModel
from models.network import Network
from models.record import record  # noqa: F401
from runtime.plugins import plugin_of


def build_model(arch: Architecture, metadata: Metadata) -> HaltingModel:
    """Builds the model of an architecture for a dataset, initialized from torch's global generator."""
    return HaltingModel(network_class(arch.name)(arch, metadata))


def network_class(name: str) -> type[Network]:
    """Returns `NETWORK` of models/<name>.py, or of the plugin with the model of this name."""
    plugin = plugin_of("Config", architectures()[name])
    return (plugin or importlib.import_module(f"models.{name}")).NETWORK


def recompute_blocks(model: HaltingModel) -> None:
    """Makes the backward pass recompute the activations of every block from the block's input.

    This needs less memory and more time. The gradients are the same (arXiv 1604.06174).
    """
    for module in model.modules():
        if isinstance(module, Level):
            module.recomputes_blocks = True
