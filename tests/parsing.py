"""Parses each config file once. Without this module, Hydra parses the files again for every config."""

import functools
import pickle
from pathlib import Path
from typing import Any

import hydra
from omegaconf import OmegaConf

from config.files import FOLDER

_FOLDERS = (str(FOLDER), str(Path(hydra.__file__).parent))
_load = OmegaConf.load


@functools.cache
def _parse(path: str) -> bytes:
    return pickle.dumps(_load(path))  # copies a config in a tenth of the time of copy.deepcopy


def _load_once(file: Any) -> Any:
    path = str(getattr(file, "name", file))
    return pickle.loads(_parse(path)) if path.startswith(_FOLDERS) else _load(file)


def parse_once() -> None:
    """Makes this process parse each file of config/ and of Hydra once."""
    OmegaConf.load = _load_once
