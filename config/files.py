"""Configs on disk, as plain YAML, those of earlier versions and of the public programs too.

Nothing in one is imported or executed.
"""

from pathlib import Path
from typing import Any

import pydantic
import yaml
from omegaconf import DictConfig, OmegaConf

from config.architecture import architectures

FOLDER = Path(__file__).parent

_NEW_NAMES = {
    "data_paths": "data_path",
    "dry_run": "sanity_check",
    "eval_halting": "halting",
    "eval_raw": "raw",
    "eval_save_outputs": "save_outputs",
}
# Keys that some earlier version, or some public program, does not have. A run without them does what config/
# says: who changes one of these defaults there writes here what it was.
_ADDED = (
    *("curriculum", "optimizer", "lr_scaling", "puzzle_emb_lr_scaling", "lr_reference_batch_size", "ema"),
    *("ema_bias_correction", "validation_fraction"),
    *("init_from", "train_only", "grad_clip_norm", "sync_dtype"),
    *("local_steps", "outer_lr", "outer_momentum"),
    *("optimizer_sharding", "puzzle_emb_sharding"),
    *("wandb_group", "wandb_log_checkpoints", "wandb_log_puzzles", "report"),
)
_ADDED_TO_ARCH = (
    *("gradient_cycles", "no_ACT_continue", "q_target", "mlp_t", "conv", "puzzle_emb_len", "forward_dtype"),
    *(
        "rope_theta",
        "rms_norm_eps",
        "init_noise",
        "state_noise",
        "damping",
        "single_z",
        "eval_halt_max_steps",
    ),
)
_ADDED_TO_LOSS = ("label_smoothing", "halting_weight", "supervision_decay")


def config_to_yaml(config: pydantic.BaseModel) -> str:
    """Writes a config as the text that a run folder and its checkpoints hold."""
    return yaml.safe_dump(config.model_dump(), sort_keys=False)


def load_yaml(path: Path) -> dict[str, Any]:
    """Reads the values of a file, unchecked. ValueError where it is missing or no YAML mapping."""
    try:
        values = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"{path} is missing") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())  # YAML tells it in several lines
        raise ValueError(f"{path} cannot be read ({reason})") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds no config")
    return values


def load_defaults(name: str) -> dict[str, Any]:
    """Reads the values of a YAML file of this folder, such as arch/hrm; of pretrain all but its `arch`."""
    return OmegaConf.to_container(_load(FOLDER / f"{name}.yaml"), resolve=True)


def _load(path: Path) -> DictConfig:
    """Loads a file over those that its defaults list puts into the same place."""
    values = OmegaConf.load(path)
    bases = [name for name in values.pop("defaults", []) if str(name).endswith("@_here_")]
    paths = [path.parent / f"{name.removesuffix('@_here_')}.yaml" for name in bases]
    return OmegaConf.merge(*map(_load, paths), values)


def rename_override(override: str) -> str:
    """Returns an argument of the command line with the key's present name: eval_raw=true -> raw=true."""
    key, equals, value = override.partition("=")
    return _NEW_NAMES.get(key, key) + equals + value


def rename_keys(values: dict[str, Any]) -> dict[str, Any]:
    """Returns the values under the present names of their keys; one under an old name wins."""
    renamed = {_NEW_NAMES[key]: value for key, value in values.items() if key in _NEW_NAMES}
    return {key: value for key, value in values.items() if key not in _NEW_NAMES} | renamed


def migrate(values: dict[str, Any]) -> dict[str, Any]:
    """Returns an earlier config with the keys of the present schema, unchecked."""
    values = _complete(rename_keys(values), load_defaults("pretrain"), _ADDED)
    if isinstance(values["curriculum"], list):
        stages = [{"share": None, **stage} for stage in values["curriculum"] if isinstance(stage, dict)]
        values = values | {"curriculum": stages}
    arch = values.get("arch")
    if not isinstance(arch, dict) or arch.get("name") not in architectures():
        return values
    defaults = load_defaults(f"arch/{arch['name']}")
    arch = _complete(arch, defaults, _ADDED_TO_ARCH)
    if isinstance(arch.get("loss"), dict):
        arch["loss"] = _complete(arch["loss"], defaults["loss"], _ADDED_TO_LOSS)
    return values | {"arch": arch}


def _complete(values: dict[str, Any], defaults: dict[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    """Adds what the defaults say of those keys that the values lack."""
    return {key: defaults[key] for key in keys if key in defaults} | values
