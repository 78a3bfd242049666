"""Checkpoints of the models' public code: what their architectures, keys and tensors are called here."""

import dataclasses
from typing import Any

from torch import Tensor

from config.architecture import Architecture

PUBLISHED_CONFIG = "all_config.yaml"
PUBLISHED_WEIGHTS = "checkpoint"  # what the last step_<N> is called on the Hub


@dataclasses.dataclass(frozen=True)
class _Published:
    """A model of the public code.

    - name: ours, of arch
    - keys: what keys of its arch are called here
    - unread: keys of its arch that its code does not read
    - constants: values that its code has and its arch has not
    - tensors: what its tensors are called here, by the beginnings of their names
    """

    name: str
    keys: dict[str, str] = dataclasses.field(default_factory=dict)
    unread: tuple[str, ...] = ()
    constants: dict[str, Any] = dataclasses.field(default_factory=dict)
    tensors: dict[str, str] = dataclasses.field(default_factory=dict)


_URM = _Published(
    "urm",
    keys={"loops": "halt_max_steps", "num_layers": "L_layers"},
    unread=(
        *("pos_encodings", "attn_dropout", "mlp_dropout", "loop_deltas", "profile", "target_q_update_every"),
        *("eval_interval", "checkpoint_every_eval", "checkpoint_path", "ema", "ema_rate"),
    ),
    constants={"pos_encodings": "rope", "halt_exploration_prob": 0.1},
    tensors={"init_hidden": "H_init", "layers.": "L_level.layers."},
)
_SINGLE_Z = _Published("trm", constants={"single_z": True}, tensors={"L_init": "H_init"})
PUBLISHED = {
    "hrm.hrm_act_v1@HierarchicalReasoningModel_ACTV1": _Published("hrm"),
    "recursive_reasoning.hrm@HierarchicalReasoningModel_ACTV1": _Published("hrm"),
    "recursive_reasoning.trm@TinyRecursiveReasoningModel_ACTV1": _Published("trm"),
    "recursive_reasoning.trm_singlez@TinyRecursiveReasoningModel_ACTV1": _SINGLE_Z,
    "recursive_reasoning.trm_equi@SERRM": _Published(
        "serrm", unread=("H_layers",), tensors={"Z_init": "H_init"}
    ),
    "urm.urm@URM": _URM,
}
_TENSORS = {public.name: public.tensors for public in PUBLISHED.values() if public is not _SINGLE_Z}
_PUBLISHED_PREFIX = "_orig_mod.model.inner."


def translate_config(config: dict[str, Any], *, where: str) -> dict[str, Any]:
    """Translates a public config into our keys; ValueError, one line, where its architecture is not known."""
    arch = config.get("arch")
    if not isinstance(arch, dict) or not isinstance(arch.get("loss"), dict):
        raise ValueError(f"{where} names no architecture: it has no 'arch' with a 'loss'")
    public = PUBLISHED.get(str(arch.get("name")))  # YAML may have anything there
    if public is None:
        known = ", ".join(PUBLISHED)
        raise ValueError(f"{where}: unknown architecture {arch.get('name')!r}; known are: {known}")
    values = {public.keys.get(key, key): value for key, value in arch.items() if key not in public.unread}
    loss = {key: value for key, value in arch["loss"].items() if key != "name"}
    arch = {**public.constants, **values, "name": public.name, "loss": loss}
    return {"data_path": config.get("data_paths"), **config, "arch": arch}


def translate_weights(weights: dict[str, Tensor], arch: Architecture) -> dict[str, Tensor]:
    """Translates the names of tensors. arch: ours."""
    is_single_z = getattr(arch, "single_z", False)
    tensors = _SINGLE_Z.tensors if is_single_z else _TENSORS[arch.name]
    translated = {}
    for name, value in weights.items():
        name = name.removeprefix(_PUBLISHED_PREFIX)
        public = next(filter(name.startswith, tensors), "")
        translated[tensors.get(public, "") + name.removeprefix(public)] = value
    return translated
