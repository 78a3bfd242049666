"""Models: networks, halting, losses. One training step (training/step.py) calls, in this order:

network.sample_randomness  samples random numbers on the host, by default those of exploration
HaltingModel.refill        starts halted slots on new puzzles
objective.divisors         counts that divide parts of the loss (LDT), in place of the number of slots
HaltingModel.forward       calls network.forward, one thinking step, then HaltingModel.halts
objective.losses           computes the loss and the metrics

What to read:

models/trm.py, hrm.py, ...  a network: its thinking step and its gradient. Start here
models/network.py           the base classes of networks: puzzle embedding, output heads
models/halting.py           `HaltingModel`, and the rules by which slots halt
models/objective.py         the loss, its divisor, and the metrics (LDT: models/ldt_objective.py)
models/carry.py             the types State, Reasoning, Prediction, Carry and StepOutput
models/blocks.py            transformer blocks, from models/layers.py
config/arch/<name>.yaml     the keys of a model, with their defaults and meanings
config/arch/shared/         keys that several models have
"""

import importlib

from config.architecture import Architecture, architectures
from dataset.metadata import Metadata
from models.halting import HaltingModel
from models.network import Network
from models.record import record  # noqa: F401
from runtime.plugins import plugin_of


def build_model(arch: Architecture, metadata: Metadata) -> HaltingModel:
    """Builds a model with random initial weights, from torch's global random generator.

    arch: Config of the model. metadata: Description of the dataset, such as its vocabulary size.
    """
    return HaltingModel(network_class(arch.name)(arch, metadata))


def network_class(name: str) -> type[Network]:
    """Returns the network class for the name of a model, such as "trm".

    The class is the variable `NETWORK` of the file models/<name>.py. If a plugin (a Python file of the user)
    defines the model, it is the `NETWORK` of that file.
    """
    plugin = plugin_of("Config", architectures()[name])
    return (plugin or importlib.import_module(f"models.{name}")).NETWORK
