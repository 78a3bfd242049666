"""What a record says about the machine, and the number format of a folder with runs.

The first training in a folder fixes the number format, for all seeds, trainings and evaluations.
"""

from pathlib import Path
from typing import get_args

import torch

from config.files import format_of
from config.schema import PretrainConfig
from distributed.number_format import NumberFormat, choose_format, instruction_set
from distributed.process_group import choose_device
from distributed.processor import processor_name
from runtime.reading import read_json, read_yaml
from runtime.writing import write_json
from training.run_config import FORMAT_KEY

FORMATS = get_args(NumberFormat)
_FILE = "format.json"
# Run configs in a folder of a rung (one training, several), and of a comparison.
_RUN_CONFIGS = ("seed_*/run/config.yaml", "seed_*/training_*/run/config.yaml", "*/*/seed_*/run/config.yaml")


def training_device(config: PretrainConfig, *, processes: int) -> torch.device:
    """Returns the device of the trainings. Raises ValueError if it is missing."""
    device = choose_device(config.device)
    return torch.device("cpu") if device.type == "mps" and processes > 1 else device


def describe_machine(device: torch.device) -> dict[str, str]:
    """Returns the processor (key `cpu`, the GPU for CUDA) and its instruction set."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name()
    return {"cpu": name, "instruction_set": instruction_set(device)}


def find_format(
    folder: Path,
    config: PretrainConfig,
    device: torch.device,
    *,
    given: NumberFormat | None,
    stored: NumberFormat | None = None,
) -> NumberFormat:
    """Returns the number format of a folder: the one that it began with, else `given`, else the rule's.

    config: Config of a training. If it names a number format, this counts as given. given: Value of --dtype.
    stored: The number format of results in the folder. If None, files of the folder tell it. Raises
    ValueError if two formats are asked for, or if the folder has another format than the one asked for.
    """
    named = None if config.arch.forward_dtype == "auto" else config.arch.forward_dtype
    if given and named and given != named:
        raise ValueError(f"--dtype {given}: the recipe sets {FORMAT_KEY}={named}. Remove --dtype.")
    stored, asked = stored or _stored_format(folder), given or named
    if stored and asked and stored != asked:
        raise ValueError(
            f"{folder} contains results in {stored}, not in {asked}. Choose another --folder or format."
        )
    return stored or asked or choose_format(device).name


def write_format(folder: Path, name: NumberFormat) -> None:
    """Writes the number format of a folder, before its first training."""
    write_json(folder / _FILE, {"forward_dtype": name})


def _stored_format(folder: Path) -> NumberFormat | None:
    """Returns the number format that a folder began with; None for a folder without trainings.

    A folder of an earlier version has runs and no format file. Its runs have one format, mostly bfloat16.
    """
    path = folder / _FILE
    if path.exists():
        if (name := read_json(path).get("forward_dtype")) not in FORMATS:
            raise ValueError(f"{path}: forward_dtype={name!r}. Set it to {' or '.join(FORMATS)}.")
        return name
    found = (config for pattern in _RUN_CONFIGS for config in folder.glob(pattern))
    return next((format_of(read_yaml(config)) for config in found), None)
