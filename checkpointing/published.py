"""Converts weight files that the public code of a model (the code of its authors) has saved.

config/published.py contains the names of tensors in each public code.
"""

from typing import Any

from torch import Tensor

from config.architecture import Architecture
from config.published import PUBLISHED

PUBLISHED_CONFIGS = ("all_config.yaml", "config.yaml")  # the first that exists is used; URM has the second
PUBLISHED_WEIGHTS = "checkpoint"  # the file name of the last step_<N> on the Hub

_TENSORS = {public.name: public.tensors for public in PUBLISHED.values()}
_WRAPPERS = {"_orig_mod", "module", "model", "inner"}  # prefixes of torch.compile, DDP, loss and halting
_STATE_DICTS = ("model_state_dict", "state_dict")  # keys of the weights, if the file has other content too


def translate_weights(content: Any, arch: Architecture) -> dict[str, Tensor]:
    """Renames the weights in a file that the code of a model's authors has saved.

    Returns {name of the weight in this repository: tensor}. Raises ValueError if the content is not a state
    dict, or if two tensors get the same name.

    content: Content of the file, as `torch.load` returns it.
    """
    weights = content
    if isinstance(content, dict):
        weights = next((content[key] for key in _STATE_DICTS if key in content), content)
    if not isinstance(weights, dict) or not all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in weights.items()
    ):
        raise ValueError("is not a state dict of names and tensors")
    tensors, translated = _TENSORS.get(arch.name, {}), {}
    for name, tensor in weights.items():
        if name.endswith(".mask"):  # a buffer of FPRM, for a dropout that no published run uses
            continue
        name = ".".join(part for part in name.split(".") if part not in _WRAPPERS)
        public = next(filter(name.startswith, tensors), "")
        ours = tensors.get(public, "") + name.removeprefix(public)
        if ours in translated:
            raise ValueError(f"contains {ours!r} twice")
        translated[ours] = tensor
    return translated
