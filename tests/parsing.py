"""Reads and merges each config file once. Without this module, Hydra repeats both for every config."""

import dataclasses
import functools
import pickle
from pathlib import Path
from typing import Any

import hydra
from hydra._internal import config_loader_impl
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.defaults_list import DefaultsList, Overrides
from omegaconf import DictConfig, OmegaConf

from config.files import FOLDER

_FOLDERS = (str(FOLDER), str(Path(hydra.__file__).parent))
_SOURCES = ("hydra.conf", str(FOLDER), "")  # the last one is that of Hydra's schemas
_load = OmegaConf.load
_list_files = config_loader_impl.create_defaults_list
_merge = ConfigLoaderImpl._compose_config_from_defaults_list
_listed: dict[str, DefaultsList] = {}
_merged: dict[str, bytes] = {}  # pickle copies a config in a tenth of the time of copy.deepcopy


@functools.cache
def _parse(path: str) -> bytes:
    return pickle.dumps(_load(path))


def _load_once(file: Any) -> Any:
    path = str(getattr(file, "name", file))
    return pickle.loads(_parse(path)) if path.startswith(_FOLDERS) else _load(file)


def _has_other_folders(repo: Any) -> bool:
    """Whether configs may also come from a folder of a test, which may change its files."""
    return any(source.path not in _SOURCES for source in repo.get_sources())


def _list_files_once(repo: Any, config_name: str, overrides_list: list, **options: bool) -> DefaultsList:
    """Lists the files of a config. Only overrides that choose a file, such as arch=trm, change the list."""
    values = Overrides(repo, overrides_list).config_overrides
    choices = [override.input_line for override in overrides_list if override not in values]
    key = repr((config_name, choices, options))
    if _has_other_folders(repo):
        return _list_files(repo, config_name, overrides_list, **options)
    if key not in _listed:
        _listed[key] = _list_files(repo, config_name, overrides_list, **options)
    return dataclasses.replace(_listed[key], config_overrides=values)


def _merge_once(loader: ConfigLoaderImpl, defaults: list, repo: Any) -> DictConfig:
    """Merges the files of a config. The values of the command line are merged later."""
    if _has_other_folders(repo):
        return _merge(loader, defaults, repo)
    key = repr(defaults)
    if key not in _merged:
        _merged[key] = pickle.dumps(_merge(loader, defaults, repo))
    return pickle.loads(_merged[key])


def parse_once() -> None:
    """Makes this process read and merge each file of config/ and of Hydra once."""
    OmegaConf.load = _load_once
    config_loader_impl.create_defaults_list = _list_files_once
    ConfigLoaderImpl._compose_config_from_defaults_list = _merge_once
