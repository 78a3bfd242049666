"""The command line, composed by Hydra into one of the schema's configs.

Rank 0 alone calls it.
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from config.files import FOLDER, load_defaults
from config.messages import SEVERAL_RUNS, explain_composition, help_text
from config.schema import Config, validate_config

# What the public programs of HRM and TRM call some keys.
_PUBLISHED_KEYS = {"data_paths": "data_path", "eval_save_outputs": "save_outputs"}


def compose_config(schema: type[Config], arguments: Sequence[str] | None = None) -> Config | None:
    """Composes and checks the config that the command line asks for; ValueError, one line, for a mistake.

    arguments: words of the command line; None: all that follow the program's name. Returns None where they
    only ask to be shown something (--help, --cfg job).
    """
    asked = _read_command_line(arguments)
    return _compose_or_show(schema, asked, asked.overrides)


def compose_overrides(schema: type[Config], overrides: Sequence[str]) -> Config:
    """Composes and checks the config that overrides ask for; ValueError, one line, for a mistake."""
    return _validate(schema, _compose(schema, overrides))


def config_with(schema: type[Config], **values: Any) -> Config:
    """Returns the config of a program with these values, else defaults; ValueError, one line, for a mistake.

    Of PretrainConfig the values need an `arch`.
    """
    return validate_config(schema, load_defaults(schema.YAML) | values, where=schema.YAML)


def split_command_line(schema: type[Config]) -> tuple[Config, list[str]] | None:
    """Reads the command line of a program that hands keys which are not its own on to another one.

    Returns its own config, and the overrides that are left, unread. None where the command line only asked
    to be shown something.
    """
    asked, own, others = _read_command_line(), [], []
    for override in asked.overrides:
        (own if override.partition("=")[0] in schema.model_fields else others).append(override)
    config = _compose_or_show(schema, asked, own)
    return None if config is None else (config, others)


def _compose_or_show(
    schema: type[Config], asked: argparse.Namespace, overrides: Sequence[str]
) -> Config | None:
    if asked.help:
        _show(help_text(schema.YAML))
        return None
    composed = _compose(schema, overrides)
    if asked.cfg:
        _show(OmegaConf.to_yaml(composed))
        return None
    return _validate(schema, composed)


def parse_overrides(schema: type[Config], overrides: Sequence[str]) -> list[Override]:
    """Parses overrides by Hydra's grammar."""
    with _one_line_errors(schema):
        return OverridesParser.create().parse_overrides(list(overrides))


def _compose(schema: type[Config], overrides: Sequence[str]) -> DictConfig:
    with _one_line_errors(schema):
        texts, others = _split_off_texts(schema, overrides)
        with initialize_config_dir(str(FOLDER), version_base="1.3"):
            composed = compose(schema.YAML, others)
        composed.merge_with(texts)
    return composed


def _validate(schema: type[Config], composed: DictConfig) -> Config:
    with _one_line_errors(schema):
        values = OmegaConf.to_container(composed, resolve=True)
    return validate_config(schema, values)


def chosen_experiment() -> str | None:
    """Returns the name that the command line gives as experiment=NAME."""
    given = (override.partition("=") for override in _read_command_line().overrides)
    names = [name for key, _, name in given if key == "experiment"]
    return names[-1] if names else None


@contextlib.contextmanager
def _one_line_errors(schema: type[Config]) -> Iterator[None]:
    try:
        yield
    except (HydraException, OmegaConfBaseException, OSError, ValueError) as error:
        raise ValueError(f"config: {explain_composition(schema, error)}") from None


def _read_command_line(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    asked = _CommandLine().parse_intermixed_args(arguments)
    if asked.multirun:
        raise ValueError(f"config: --multirun is refused: {SEVERAL_RUNS}")
    return asked


def _split_off_texts(schema: type[Config], overrides: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Takes keys with free text as value, such as a puzzle, out of what Hydra parses."""
    texts, others = {}, []
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals or key not in getattr(schema, "TEXTS", ()):
            others.append(_PUBLISHED_KEYS.get(key, key) + equals + value)
        elif key in texts:
            raise ValueError(f"{key} is given twice: drop one")
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
        self.add_argument("-m", "--multirun", action="store_true")

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"config: {message}; keys are given as key=value, and --help lists them")


def _show(text: str) -> None:
    try:
        print(text, flush=True)
    except BrokenPipeError:  # nobody reads to the end, as behind `| head`; nor will Python's last flush
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
