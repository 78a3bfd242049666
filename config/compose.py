"""The command line, composed by Hydra into one of the schema's configs.

Called by rank 0 alone; takes no torch.
"""

import argparse
import os
import sys
from typing import NoReturn

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from config.files import FOLDER, rename_keys, rename_override
from config.help import help_text
from config.messages import explain_composition
from config.schema import Config, validate_config


def compose_config(schema: type[Config]) -> Config | None:
    """Composes and checks the config that the command line asks for; ValueError, one line, for a mistake.

    Returns None where the command line only asked to be shown something (--help, --cfg job).
    """
    asked = _CommandLine().parse_intermixed_args()
    if asked.help:
        _show(help_text(schema.YAML))
        return None
    try:
        texts, overrides = _split_off_texts(schema, asked.overrides)
        with initialize_config_dir(str(FOLDER), version_base="1.3"):
            composed = compose(schema.YAML, [rename_override(override) for override in overrides])
        composed.merge_with(texts)
        if asked.cfg:
            _show(OmegaConf.to_yaml(composed))
            return None
        values = OmegaConf.to_container(composed, resolve=True)
    except (HydraException, OmegaConfBaseException, OSError) as error:
        raise ValueError(f"config: {explain_composition(schema, error)}") from None
    return validate_config(schema, rename_keys(values))


def chosen_experiment() -> str | None:
    """Returns the name that the command line gives as experiment=NAME."""
    given = (override.partition("=") for override in _CommandLine().parse_intermixed_args().overrides)
    names = [name for key, _, name in given if key == "experiment"]
    return names[-1] if names else None


def _split_off_texts(schema: type[Config], overrides: list[str]) -> tuple[dict[str, str], list[str]]:
    """Takes the keys whose values are any text, such as a puzzle, out of what Hydra parses."""
    texts, others = {}, []
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals or key not in getattr(schema, "TEXTS", ()):
            others.append(override)
        elif key in texts:
            raise ValueError(f"config: {key} is given twice: drop one")
        else:
            texts[key] = value
    return texts, others


class _CommandLine(argparse.ArgumentParser):
    """The few options beside the keys of the config."""

    def __init__(self) -> None:
        super().__init__(add_help=False, allow_abbrev=False)
        self.add_argument("overrides", nargs="*")
        self.add_argument("-h", "--help", action="store_true")
        self.add_argument("-c", "--cfg", choices=["job"])

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"config: {message}; keys are given as key=value, and --help lists them")


def _show(text: str) -> None:
    try:
        print(text, flush=True)
    except BrokenPipeError:  # nobody reads to the end, as behind `| head`; nor will Python's last flush
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
