"""Translates checkpoints of the models' public code: names of architectures, keys and tensors into ours."""

import dataclasses
from typing import Any

from torch import Tensor

from config.architecture import Architecture

PUBLISHED_CONFIGS = ("all_config.yaml", "config.yaml")  # the first one that exists; URM has the second
PUBLISHED_WEIGHTS = "checkpoint"  # name on the Hub of the last step_<N>


@dataclasses.dataclass(frozen=True)
class _Published:
    """The translation of one model of the public code.

    - name: of our architecture
    - keys: {public key of `arch`: our key}
    - unread: public keys that the public code does not use
    - constants: {our key: value} of settings that are fixed in the public code
    - tensors: {beginning of a public tensor's name: our beginning}
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
_FPRM = _Published(
    "fprm",
    keys={
        **{"max_iter": "halt_max_steps", "max_iter_eval": "eval_halt_max_steps", "n_backwards_L": "L_cycles"},
        **{"init_std": "init_noise", "stepsize": "damping", "additive_noise_std": "state_noise"},
    },
    unread=(
        *("H_cycles", "L_cycles", "H_layers", "halt_max_steps", "halting_mechanism", "max_iter_dist"),
        *("norm_type", "residual_scale", "outer_only", "conv_kernel_size", "conv_bias", "fixed_init", "eps"),
        *("variational_dropout", "weight_dropout", "softmax_temp", "n_decode_steps", "outlier_quantile"),
        *("normalize_input_injection", "gamma_alpha", "gamma_scale", "expon_scale"),
        *("jacobian_reg", "n_jacobian_samples", "jacobian_eps"),
    ),
    constants={"halt_exploration_prob": 0.0, "eval_L_cycles": 1},
)
PUBLISHED = {
    "hrm.hrm_act_v1@HierarchicalReasoningModel_ACTV1": _Published("hrm"),
    "recursive_reasoning.hrm@HierarchicalReasoningModel_ACTV1": _Published("hrm"),
    "recursive_reasoning.trm@TinyRecursiveReasoningModel_ACTV1": _Published("trm"),
    "trm.trm@TRM": _Published("trm"),  # in the code of URM
    "recursive_reasoning.trm_singlez@TinyRecursiveReasoningModel_ACTV1": _Published(
        "trm_singlez", tensors={"L_init": "H_init"}
    ),
    "recursive_reasoning.trm_equi@SERRM": _Published(
        "serrm", unread=("H_layers",), tensors={"Z_init": "H_init"}
    ),
    "urm.urm@URM": _URM,
    "fixed_point_reasoning.fprm@FixedPointReasoningModel_ACTV1": _FPRM,
}
_TENSORS = {public.name: public.tensors for public in PUBLISHED.values()}
_WRAPPERS = {"_orig_mod", "module", "model", "inner"}  # names of wrappers: torch.compile, DDP, loss, halting
_STATE_DICTS = ("model_state_dict", "state_dict")  # keys of the weights in a file with other content too


def translate_config(config: dict[str, Any], *, where: str) -> dict[str, Any]:
    """Translates a public config into our keys; ValueError for an unknown model. where: for messages."""
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
