"""Reads checkpoints of the models' public code. `config.published` has the names."""

from typing import Any

from torch import Tensor

from config.architecture import Architecture
from config.published import PUBLISHED

PUBLISHED_CONFIGS = ("all_config.yaml", "config.yaml")  # the first one that exists; URM has the second
PUBLISHED_WEIGHTS = "checkpoint"  # name on the Hub of the last step_<N>


_TENSORS = {public.name: public.tensors for public in PUBLISHED.values()}
_WRAPPERS = {"_orig_mod", "module", "model", "inner"}  # names of wrappers: torch.compile, DDP, loss, halting
_STATE_DICTS = ("model_state_dict", "state_dict")  # keys of the weights in a file with other content too


def translate_weights(content: Any, arch: Architecture) -> dict[str, Tensor]:
    """Returns {our name: tensor} from the content of a public file of weights. arch: translated already.

    Raises ValueError if the content is no state dict, or two tensors get the same name.
    """
    if isinstance(content, dict):
        weights = next((content[key] for key in _STATE_DICTS if key in content), content)
    if not isinstance(content, dict) or not isinstance(weights, dict) or not _are_tensors(weights):
        raise ValueError("is no state dict: it must hold names and tensors")
    tensors, translated = _TENSORS.get(arch.name, {}), {}
    for name, value in weights.items():
        if name.endswith(".mask"):  # a buffer of FPRM, for a kind of dropout that no published run uses
            continue
        name = ".".join(part for part in name.split(".") if part not in _WRAPPERS)
        public = next(filter(name.startswith, tensors), "")
        ours = tensors.get(public, "") + name.removeprefix(public)
        if ours in translated:
            raise ValueError(f"holds {ours!r} twice")
        translated[ours] = value
    return translated


def _are_tensors(weights: dict[Any, Any]) -> bool:
    return all(isinstance(name, str) and isinstance(value, Tensor) for name, value in weights.items())
