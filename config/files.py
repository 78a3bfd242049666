"""Configs on disk, as plain YAML: nothing in one is imported or executed."""

from pathlib import Path
from typing import Any

import pydantic
import yaml

from config.schema import Config, validate_config


def config_to_yaml(config: pydantic.BaseModel) -> str:
    return yaml.safe_dump(config.model_dump(), sort_keys=False)


def load_config(schema: type[Config], path: Path) -> Config:
    """The checked config of a file. ValueError where it is missing, no YAML, or not of the schema."""
    return validate_config(schema, load_yaml(path), where=str(path))


def load_yaml(path: Path) -> dict[str, Any]:
    """The values of a file, unchecked. ValueError where it is missing or no YAML mapping."""
    try:
        values = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"{path} is missing") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{path} cannot be read ({error})") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds no config")
    return values
