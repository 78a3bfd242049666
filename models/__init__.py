"""Models: networks, halting, losses. One training step calls, in this order (training/step.py):

network.sample_randomness     random numbers of the step that the host draws (models/halting.py: exploration)
HaltingModel.refill           starts halted slots on new puzzles (models/halting.py)
HaltingModel.forward          network.forward, one thinking step (models/trm.py, models/hrm.py, ...),
                              then HaltingModel.halts, which slots halt (models/halting.py)
objective.losses              the loss and the metrics (models/objective.py)

A network is built from models/network.py (reads the puzzle, gives the answer), models/blocks.py and
models/layers.py. models/carry.py has the types: State, Reasoning, Prediction, Carry, StepOutput.
config/arch/<name>.yaml has every key of a model, with its default and its meaning.
"""

import importlib

from config.architecture import Architecture, architectures
from dataset.format import Metadata
from models.blocks import Level
from models.halting import HaltingModel
from models.network import Network
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

    Needs less memory and more time, and gives the same gradients (arXiv 1604.06174).
    """
    for module in model.modules():
        if isinstance(module, Level):
            module.recomputes_blocks = True
