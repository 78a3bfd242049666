"""Names in backticks of docstrings and comments: each `module.name` or `Class.method` exists."""

import importlib
import inspect
import pkgutil
import re

import pytest

import models

_NAME = re.compile(r"`([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+)`")
_SECTIONS = ("arch.", "loss.")  # keys of the config
_MODULES = [importlib.import_module(f"models.{info.name}") for info in pkgutil.iter_modules(models.__path__)]
_CLASSES = {name: each for module in _MODULES for name, each in vars(module).items() if inspect.isclass(each)}


def _exists(name: str) -> bool:
    first, *rest = name.split(".")
    if first in _CLASSES:
        owner = _CLASSES[first]
        return rest[0] in {*dir(owner), *getattr(owner, "__annotations__", ())}
    for length in range(len(rest) + 1, 0, -1):
        try:
            owner = importlib.import_module(".".join(name.split(".")[:length]))
        except ImportError:
            continue
        for part in name.split(".")[length:]:
            if not hasattr(owner, part):
                return False
            owner = getattr(owner, part)
        return True
    return False


@pytest.mark.parametrize("module", _MODULES, ids=lambda module: module.__name__)
def test_names_in_backticks_exist(module):
    names = {name for name in _NAME.findall(inspect.getsource(module)) if not name.startswith(_SECTIONS)}
    assert sorted(name for name in names if not _exists(name)) == []
