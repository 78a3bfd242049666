"""An environment in which packages are absent, for programs that must do without."""

import os
from pathlib import Path

# What a machine with torch and numpy alone lacks.
PACKAGES = (
    *("coolname", "hydra", "huggingface_hub", "matplotlib", "omegaconf", "onnx", "optuna"),
    *("pydantic", "pytest", "safetensors", "tqdm", "wandb", "yaml"),
)
_CODE = """\
import sys
from importlib.machinery import PathFinder


class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in {absent!r} else super().find_spec(name, path, target)


sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
"""


def environment_without(packages: tuple[str, ...], folder: Path) -> dict[str, str]:
    """Returns an environment whose Python, and all Pythons that it starts, find none of the packages."""
    (folder / "sitecustomize.py").write_text(_CODE.format(absent=packages))
    return os.environ | {"PYTHONPATH": str(folder)}
