"""The command line, composed by Hydra into one of the schema's configs.

Called by rank 0 alone; takes no torch.
"""

import os
import sys

os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # Hydra then raises what it would print and exit on

import hydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from config.files import rename_keys, rename_override
from config.help import help_text
from config.messages import explain_composition
from config.schema import Config, validate_config


def compose_config(schema: type[Config]) -> Config | None:
    """Composes and checks the config that the command line asks for; ValueError, one line, for a mistake.

    Returns None where the command line only asked to be shown something (--help, --cfg job).
    """
    arguments = sys.argv
    if {"-h", "--help"} & set(arguments[1:]):
        try:
            print(help_text(schema.YAML), flush=True)
        except BrokenPipeError:  # nobody reads to the end, as behind `| head`; nor will Python's last flush
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return None
    if {"-m", "--multirun"} & set(arguments[1:]):
        raise ValueError("config: --multirun is not supported: start one run after the other")
    composed = []

    @hydra.main(version_base="1.3", config_path=".", config_name=schema.YAML)
    def keep(config: DictConfig) -> None:
        composed.append(config)

    try:
        sys.argv = [arguments[0], *map(rename_override, arguments[1:])]  # which Hydra reads
        keep()
        values = [OmegaConf.to_container(config, resolve=True) for config in composed]
    except SystemExit as error:
        if error.code:
            raise
        return None
    except (HydraException, OmegaConfBaseException, OSError) as error:
        raise ValueError(f"config: {explain_composition(schema, error)}") from None
    finally:
        sys.argv = arguments
    return validate_config(schema, rename_keys(values[0])) if values else None
