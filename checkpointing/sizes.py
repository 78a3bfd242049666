"""Infers the sizes of a dataset (vocabulary, sequence length, puzzles) from the shapes of trained weights."""

import torch

from config.architecture import Architecture
from dataset.metadata import usual_metadata
from models import build_model
from models.carry import State

_FIRST, _OTHER = (
    {"num_puzzle_identifiers": 2, "vocab_size": 11, "seq_len": 81},
    {"num_puzzle_identifiers": 5, "vocab_size": 16, "seq_len": 100},  # a square, because grids need one
)


def sizes_in(weights: State, arch: Architecture) -> dict[str, int]:
    """Returns the sizes that a dataset must have for a model with these weights.

    Example: {"num_puzzle_identifiers": 1, "vocab_size": 11, "seq_len": 81}. If no weight has an axis that
    grows with a size, this size is left out. Example: without puzzle embeddings, "num_puzzle_identifiers".
    Raises KeyError if a weight with such an axis is missing.

    weights: {name in the model: full tensor}.
    """
    first, sizes = _shapes_for(arch), {}
    for field, second_size in _OTHER.items():
        more = second_size - _FIRST[field]
        for name, shape in _shapes_for(arch, **{field: second_size}).items():
            growing = [axis for axis, length in enumerate(shape) if length - first[name][axis] == more]
            if growing:
                sizes[field] = weights[name].shape[growing[0]] - first[name][growing[0]] + _FIRST[field]
                break
    return sizes


def _shapes_for(arch: Architecture, **sizes: int) -> dict[str, torch.Size]:
    with torch.device("meta"):
        network = build_model(arch, usual_metadata(**(_FIRST | sizes))).network
    return {name: tensor.shape for name, tensor in network.state_dict().items()}
