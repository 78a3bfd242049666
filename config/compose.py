"""The command line, composed by Hydra into one of the schema's configs.

Called by rank 0 alone; takes no torch.
"""

import os
import re
import sys

os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # Hydra then raises what it would print and exit on

import hydra
from hydra.errors import HydraException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from config.migration import rename_keys, rename_override
from config.schema import Config, explain_unknown_key, validate_config


def compose_config(schema: type[Config], *, config_name: str) -> Config | None:
    """The config that the command line asks for.

    None where it only asked to be shown something (--help, --cfg job).

    Raises ValueError, one line, for every mistake in it.
    """
    if {"-m", "--multirun"} & set(sys.argv[1:]):
        raise ValueError("config: --multirun is not supported: start one run after the other")
    composed, arguments = [], sys.argv

    @hydra.main(version_base="1.3", config_path=".", config_name=config_name)
    def keep(config) -> None:
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
        raise ValueError(f"config: {_explain(schema, error)}") from None
    finally:
        sys.argv = arguments
    return validate_config(schema, rename_keys(values[0])) if values else None


def _explain(schema: type[Config], error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines()]
    if unknown := re.match(r"Could not override '(.+)'", lines[0]):
        return explain_unknown_key(schema, unknown[1])
    if "Available options in" in str(error):
        options = lines[
            lines.index(next(line for line in lines if line.startswith("Available options in"))) + 1 :
        ]
        names = options[: options.index("Config search path:")]
        return f"{lines[0].rpartition(': ')[2]}; there are: {', '.join(names)}"
    if isinstance(error, OmegaConfBaseException) and error.full_key:
        return f"{error.full_key}: {lines[0]}"
    if isinstance(error, OverrideParseException):
        return f"cannot read {error.override!r} ({lines[0]}); overrides are written key=value"
    return lines[0]
