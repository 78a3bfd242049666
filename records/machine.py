"""Describes the machine of a record, and finds the number format (dtype) of a folder with runs.

The first training in a folder fixes the number format, for all seeds, trainings and evaluations.
"""

from pathlib import Path
from typing import get_args

import torch

from config.files import format_of
from config.schema import PretrainConfig
from distributed.backend import choose_device
from distributed.number_format import choose_format, instruction_set
from distributed.processor import processor_name
from runtime.formats import NumberFormat
from runtime.reading import read_json, read_yaml
from runtime.writing import write_json
from training.run_config import FORMAT_KEY

FORMATS = get_args(NumberFormat)
_FILE = "format.json"
# Run configs in the folder of a rung (with one training, with several), and of a comparison.
_RUN_CONFIGS = ("seed_*/run/config.yaml", "seed_*/training_*/run/config.yaml", "*/*/seed_*/run/config.yaml")


def training_device(config: PretrainConfig, *, processes: int) -> torch.device:
    """Returns the device on which trainings with this config run.

    With several processes, it is the CPU instead of mps. Raises ValueError if the device of the config is
    missing.
    """
    device = choose_device(config.device)
    return torch.device("cpu") if device.type == "mps" and processes > 1 else device


def describe_machine(device: torch.device) -> dict[str, str]:
    """Returns the name of the processor or GPU ("cpu") and its instruction set ("instruction_set").

    Example for a CPU: {"cpu": "AMD EPYC 9454", "instruction_set": "avx512_bf16"}. For a GPU, "cpu" is the
    name of the GPU, and "instruction_set" is "cuda".
    """
    device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name()
    return {"cpu": device_name, "instruction_set": instruction_set(device)}


def find_format(
    folder: Path,
    config: PretrainConfig,
    device: torch.device,
    *,
    requested: NumberFormat | None,
    stored: NumberFormat | None = None,
) -> NumberFormat:
    """Returns the name of the dtype for the trainings in a folder, such as "bfloat16".

    If the folder has trainings, it is their dtype. Otherwise it is `requested`, or the dtype in `config`, or
    else the fast one on this device. Raises ValueError if two of these differ: the dtype of the trainings in
    the folder, `requested`, and the dtype in `config`.

    requested: Value of the option --dtype. None if the option is not set.
    stored: Dtype of earlier results in the folder. If None, it is read from the folder.
    """
    named = None if config.arch.forward_dtype == "auto" else config.arch.forward_dtype
    if requested and named and requested != named:
        raise ValueError(f"--dtype {requested}: the recipe sets {FORMAT_KEY}={named}. Remove --dtype.")
    stored, required = stored or _stored_format(folder), requested or named
    if stored and required and stored != required:
        raise ValueError(
            f"{folder} contains results computed in {stored}, not in {required}. Choose another --folder, or "
            "another --dtype."
        )
    return stored or required or choose_format(device).name


def write_format(folder: Path, number_format: NumberFormat) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / _FILE, {"forward_dtype": number_format})


def _stored_format(folder: Path) -> NumberFormat | None:
    path = folder / _FILE
    if path.exists():
        if (number_format := read_json(path).get("forward_dtype")) not in FORMATS:
            known = " or ".join(FORMATS)
            raise ValueError(f"{path}: forward_dtype={number_format!r} is unknown. Set it to {known}.")
        return number_format
    # Folders of older versions have no format.json.
    found = (config for pattern in _RUN_CONFIGS for config in folder.glob(pattern))
    return next((format_of(read_yaml(config)) for config in found), None)
