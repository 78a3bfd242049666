"""Reads configs as plain YAML, without importing or executing anything."""

import functools
import re
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from config.architecture import architectures
from config.published import rename_old_keys
from runtime.writing import to_yaml

FOLDER = Path(__file__).parent
# A file in the list `defaults` of a YAML file: "  - shared/token # comment" or "defaults: [trm, _self_]".
_OTHER_FILE = re.compile(r"^(?:  - |defaults: *\[ *)(?!_self_)([\w/]+)(?= *(?:#.*|[,\]].*)?$)", re.MULTILINE)
_FORMER_FORMAT = "bfloat16"  # the default of `arch.forward_dtype` before there was `auto`


def load_defaults(name: str) -> dict[str, Any]:
    """Returns the values of the file config/<name>.yaml, for example for "evaluate" or "arch/hrm".

    A file may have a list `defaults` with other files, such as "arch/shared/token". Their values are
    included. The values of "pretrain" have no section `arch`, because this section depends on the model.
    """
    return OmegaConf.to_container(_read_defaults(FOLDER / f"{name}.yaml"), resolve=True)


def load_arch_defaults(name: str) -> dict[str, Any]:
    """Returns the values of config/arch/<name>.yaml. For a plugin's model, which has no such file, {}."""
    return load_defaults(f"arch/{name}") if (FOLDER / "arch" / f"{name}.yaml").is_file() else {}


@functools.cache
def _read_defaults(path: Path) -> DictConfig:
    # Read each file once, because parsing takes 20 ms, and every config needs it.
    values = OmegaConf.load(path)
    values.pop("defaults", None)
    return OmegaConf.merge(*map(_read_defaults, other_files(path)), values)


def other_files(path: Path) -> list[Path]:
    """Returns the files in the list `defaults` of a YAML file, such as config/arch/shared/loss.yaml.

    The list may also contain choices, such as `arch: hrm`. These are left out. A name means a file in the
    folder of the YAML file, or otherwise in config/arch. So the file of a plugin's model may name
    `shared/token`.
    """
    names = _OTHER_FILE.findall(path.read_text(encoding="utf-8"))
    files = [[folder / f"{name}.yaml" for folder in (path.parent, FOLDER / "arch")] for name in names]
    return [found[0] for pair in files if (found := list(filter(Path.is_file, pair)))]


def fill_defaults(values: dict[str, Any]) -> dict[str, Any]:
    """Returns a copy of a stored config of pretrain.py, with defaults for missing keys.

    The values are not checked. The config may come from an older version:

    - Old names of models and keys in `arch` are replaced by today's names. Raises ValueError if a model other
      than trm has an old key of trm (update=gate or single_z=true), or if trm has both.
    - A missing key gets its default, except for `data_path`, `arch`, and keys in `arch` of a plugin's model.
    - If `arch.forward_dtype` is missing or "auto", it becomes "bfloat16", the default of older versions.
    - A key that this version does not know is removed if its value is false, null, 0 or empty.
    """
    defaults, arch = load_defaults("pretrain"), values.get("arch")
    del defaults["data_path"]
    if isinstance(arch, dict) and str(arch.get("name")) in architectures():
        arch = rename_old_keys(arch)
        values = values | {"arch": arch}
        if of_arch := load_arch_defaults(arch["name"]):
            defaults["arch"] = of_arch
    filled = _merge(defaults, values)
    if arch and isinstance(arch, dict) and filled["arch"].get("forward_dtype", "auto") == "auto":
        filled["arch"] = filled["arch"] | {"forward_dtype": _FORMER_FORMAT}
    return filled


def format_of(values: dict[str, Any]) -> str:
    """Returns `arch.forward_dtype` of a stored config, "bfloat16" or "float32".

    If the value is missing or "auto", returns "bfloat16". If it is any other value, raises ValueError.
    """
    arch = fill_defaults(values).get("arch")
    name = arch.get("forward_dtype") if isinstance(arch, dict) else None
    if name not in ("bfloat16", "float32"):
        raise ValueError(
            f"stored config of the run: arch.forward_dtype={name!r} is neither bfloat16 nor float32. "
            "Use another run."
        )
    return name


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Converts a nested dict to a flat one: {"arch": {"loss": 1}} becomes {"arch.loss": 1}."""
    flat = {}
    for key, value in values.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def changed_words(values: dict[str, Any], defaults: dict[str, Any]) -> list[str]:
    """Returns the command-line arguments that change the config `defaults` into the config `values`.

    Example: ["lr=0.001", "arch.H_cycles=2"].
    """
    usual = flatten(defaults)
    return [word(key, value) for key, value in flatten(values).items() if value != usual.get(key, ...)]


def word(key: str, value: Any) -> str:
    """Returns a command-line argument such as "samples=[1, 8]"."""
    text = to_yaml(value, default_flow_style=True, width=10**6)
    return f"{key}={text.strip().removesuffix('...').strip()}"


def _merge(defaults: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    merged = defaults | {key: value for key, value in values.items() if key in defaults or value}
    for key in defaults.keys() & values.keys():
        if isinstance(defaults[key], dict) and isinstance(values[key], dict):
            merged[key] = _merge(defaults[key], values[key])
    return merged
