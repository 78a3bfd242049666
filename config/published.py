"""Translates names of the models' published code and of older versions into today's names."""

from typing import Any, NamedTuple

# {key of a public program: our key}.
KEYS = {
    "data_paths": "data_path",
    "eval_save_outputs": "save_outputs",
    "load_checkpoint": "init_from",
    "data_paths_test": "test_data_path",
}
# {key=value of a public program: our overrides}.
OVERRIDES = {
    "ema=true": ["ema=0.999"],
    "ema=false": ["ema=null"],
    "freeze_weights=true": ["train_only=puzzle_embeddings"],
    "freeze_weights=false": ["train_only=all"],
    "arch=hrm_v1": ["arch=hrm"],
    "arch=transformers_baseline": ["arch=transformer"],
}
# {key that does not exist here: what to set instead}.
HINTS = {
    "ema_rate": "the rate is the value of ema, such as ema=0.999",
    "entity": "set WANDB_ENTITY",
    "min_eval_interval": "set eval_interval",
    "arch.update": "set arch=infiloop for TRM with a gate",
    "arch.single_z": "set arch=trm_singlez for TRM with one state",
}


class _Published(NamedTuple):
    """How to translate the config and the tensors of a model from its authors' published ("public") code."""

    name: str  # value of `arch.name` in this repository, such as "urm"
    keys: dict[str, str] = {}  # {key of `arch` in the public code: key in this repository}
    unread: tuple[str, ...] = ()  # keys in public configs that the public code never reads. They are left out
    constants: dict[str, Any] = {}  # {key in this repository: value that is fixed in the public code}
    tensors: dict[str, str] = {}  # {start of a tensor's name in public checkpoints: start of its name here}


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
        *("norm_type", "residual_scale", "outer_only", "conv_kernel_size", "conv_bias", "eps"),
        *("variational_dropout", "weight_dropout", "softmax_temp", "n_decode_steps", "outlier_quantile"),
        *("normalize_input_injection", "gamma_alpha", "gamma_scale", "expon_scale"),
        *("jacobian_reg", "n_jacobian_samples", "jacobian_eps"),
    ),
    constants={"halt_exploration_prob": 0.0, "eval_L_cycles": 1},
    tensors={"L_optimizer.init_vec": "H_init"},
)
_TRM_SINGLEZ = _Published("trm_singlez", tensors={"L_init": "H_init"})
_SERRM = _Published("serrm", unread=("H_layers",), tensors={"Z_init": "H_init"})
PUBLISHED = {
    "hrm.hrm_act_v1@HierarchicalReasoningModel_ACTV1": _Published("hrm"),
    "recursive_reasoning.hrm@HierarchicalReasoningModel_ACTV1": _Published("hrm"),
    "recursive_reasoning.trm@TinyRecursiveReasoningModel_ACTV1": _Published("trm"),
    "trm.trm@TRM": _Published("trm"),  # in the code of URM
    "recursive_reasoning.trm_singlez@TinyRecursiveReasoningModel_ACTV1": _TRM_SINGLEZ,
    "recursive_reasoning.trm_equi@SERRM": _SERRM,
    "urm.urm@URM": _URM,
    "fixed_point_reasoning.fprm@FixedPointReasoningModel_ACTV1": _FPRM,
}


def translate_config(config: dict[str, Any], *, where: str) -> dict[str, Any]:
    """Translates a config of the models' published code (HRM, TRM, URM, ...) into keys of this repository.

    Returns a copy in which `arch` and `data_path` have the names and values of this repository. Other keys do
    not change. Raises ValueError if the model is unknown, or if `arch` or `arch.loss` is missing.

    where: Name of the config file. The error message starts with it.
    """
    arch = config.get("arch")
    if not isinstance(arch, dict) or not isinstance(arch.get("loss"), dict):
        raise ValueError(
            f"{where} is not a config of the public code: it has no section 'arch' with a 'loss'. Replace it "
            "by the config file that belongs to the checkpoint."
        )
    public = PUBLISHED.get(str(arch.get("name")))  # in a foreign YAML file, it may be of any type
    if public is None:
        known = ", ".join(PUBLISHED)
        raise ValueError(f"{where}: unknown architecture {arch.get('name')!r}. Known architectures: {known}.")
    values = {public.keys.get(key, key): value for key, value in arch.items() if key not in public.unread}
    if values.pop("fixed_init", False):  # FPRM: the noise of the start is one vector for all puzzles
        values |= {"fixed_init_std": values.get("init_noise", 0.0), "init_noise": 0.0}
    loss = {key: value for key, value in arch["loss"].items() if key != "name"}
    arch = {**public.constants, **values, "name": public.name, "loss": loss}
    return {"data_path": config.get("data_paths"), **config, "arch": arch}


def rename_old_keys(arch: dict[str, Any]) -> dict[str, Any]:
    """Returns the config section `arch` of an older version with today's names of models and keys.

    Example: {"name": "trm", "update": "gate", ...} becomes {"name": "infiloop", ...}. Raises ValueError if
    the section has both update=gate and single_z=true, or if it has one of them and the model is not trm.
    """
    has_gate, is_single_z = arch.get("update", "plain") == "gate", bool(arch.get("single_z"))
    values = {key: value for key, value in arch.items() if key not in ("update", "single_z")}
    if not has_gate and not is_single_z:
        return values
    if arch["name"] != "trm" or has_gate == is_single_z:
        raise ValueError(
            "arch.update=gate or arch.single_z=true: only TRM has these keys, and not both. Remove one."
        )
    if is_single_z:
        return values | {"name": "trm_singlez"}
    values.pop("H_layers", None)
    return values | {"name": "infiloop"}
