"""Hydra parses the files of config/ again for every config, a quarter of its time. Tests parse each once."""

import copy
import functools
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from config.files import FOLDER

_load, _parse = OmegaConf.load, functools.cache(OmegaConf.load)


def _load_once(file: Any) -> Any:
    path = Path(getattr(file, "name", file))
    return copy.deepcopy(_parse(path)) if path.is_relative_to(FOLDER) else _load(file)


def parse_once() -> None:
    """Makes this process parse each file of config/ once."""
    OmegaConf.load = _load_once
