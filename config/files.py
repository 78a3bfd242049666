"""Configs on disk, as plain YAML: nothing in one is imported or executed."""

from pathlib import Path
from typing import Any

import pydantic
import yaml
from omegaconf import DictConfig, OmegaConf

FOLDER = Path(__file__).parent


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
        raise ValueError(f"{path} cannot be read ({error})") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds no config")
    return values


def load_defaults(name: str) -> dict[str, Any]:
    """Reads the values of a YAML file of this folder, such as arch/hrm; of pretrain all but its `arch`."""
    values = OmegaConf.to_container(_load(FOLDER / f"{name}.yaml"), resolve=True)
    values.pop("hydra", None)
    return values


def _load(path: Path) -> DictConfig:
    """Loads a file over those that its defaults list puts into the same place."""
    values = OmegaConf.load(path)
    bases = [
        name for name in values.pop("defaults", []) if isinstance(name, str) and name.endswith("@_here_")
    ]
    paths = [path.parent / f"{name.removesuffix('@_here_')}.yaml" for name in bases]
    return OmegaConf.merge(*map(_load, paths), values)
