"""Composes the config from a program's command line with Hydra, and checks it with the schema.

In a run with several processes, rank 0 composes the config and broadcasts it.
"""

import argparse
import contextlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pydantic
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from config.architecture import architectures
from config.files import FOLDER, load_defaults
from config.messages import SEVERAL_RUNS, explain_composition, help_text
from config.published import KEYS, OVERRIDES
from config.schema import Config, validate_config
from config.texts import check_encoding, expand_home, quote_value, quoted, text_keys
from runtime.plugins import choose_words, load_plugins, paths_in
from runtime.writing import Patient

# What to do instead of setting a key of Hydra, by the prefix of the key.
_HYDRA_KEYS = {
    "hydra.searchpath": "Pass --config-dir FOLDER to add a folder of configs",
    "hydra.run": "Set checkpoint_path=FOLDER to choose the run folder",
    "hydra.sweep": SEVERAL_RUNS,
    "hydra/launcher": SEVERAL_RUNS,
    "hydra/sweeper": SEVERAL_RUNS,
    "hydra.job.chdir": "Paths are always relative to the folder in which you start. Remove this key",
    "hydra": "Keys of Hydra have no effect here. Remove this key",
}
_GROUPS = ("arch", "experiment")


def compose_config(
    schema: type[Config],
    arguments: Sequence[str] | None = None,
    *,
    notice: Callable[[str], None] | None = None,
    dry_run: Callable[[Config, int], str] | None = None,
) -> Config | None:
    """Reads the config of a program from its command line, and checks it.

    Args:
        schema: Class of the config, such as PretrainConfig.
        arguments: Arguments of the command line. If None, those of this process.
        notice: Function that is called with a message if the file experiment=NAME is for another model than
            arch=NAME. The message names the values of the file that are ignored, and the values that stay.
        dry_run: Function that estimates what a run with n processes needs, for the option --world-size n.
            `dry_run(config, n)` returns the text to print.

    Returns:
        The config. None after --help and --cfg job, because they only print.

    Raises:
        ValueError: The command line is invalid. The message has one line.
    """
    options = _read_command_line(arguments)
    return _compose_or_show(schema, options, options.overrides, notice, dry_run)


def check_overrides(overrides: Sequence[str]) -> None:
    """Raises ValueError if the overrides are one text instead of a list of texts."""
    if isinstance(overrides, str):
        raise ValueError(f"the overrides are a text, {overrides!r}. Pass a list, such as [{overrides!r}].")


def compose_overrides(schema: type[Config], overrides: Sequence[str]) -> Config:
    """Returns the checked config for command-line arguments such as ["lr=1e-3", "arch=trm"].

    Other keys have their default values. If an argument or value is wrong, raises ValueError with one line.
    """
    return validate_config(schema, compose_values(schema, overrides))


def compose_values(schema: type[Config], overrides: Sequence[str]) -> dict[str, Any]:
    """Returns the config for command-line arguments as a dict. The values are not checked.

    Example: ["lr=1e-3", "arch=trm"] gives {"lr": 0.001, "arch": {"name": "trm", ...}, ...}, with defaults.
    """
    options = _read_command_line(overrides)
    return _values(schema, _compose(schema, options.overrides, options.config_dir))


def config_with(schema: type[Config], **values: Any) -> Config:
    """Returns the default config of a program with some values changed. Does not read a command line.

    If a value is wrong, raises ValueError with one line. PretrainConfig needs a value for `arch`.
    """
    return validate_config(schema, load_defaults(schema.YAML) | values, where=schema.YAML)


def split_command_line(schema: type[Config]) -> tuple[Config, list[str]] | None:
    """Splits the command line of this process into a config and the arguments for another program.

    Returns (config, other arguments). The config gets the arguments `key=value` whose key is a field of
    `schema`. All others, and each --config-dir, are for the other program, and are not checked. Returns None
    after --help and --cfg job, because they only print.
    """
    options, config_overrides = _read_command_line(), []
    others = [f"--config-dir={folder}" for folder in options.config_dir]
    for override in options.overrides:
        (config_overrides if override.partition("=")[0] in schema.model_fields else others).append(override)
    config = _compose_or_show(schema, options, config_overrides)
    return None if config is None else (config, others)


def _compose_or_show(
    schema: type[Config],
    options: argparse.Namespace,
    overrides: Sequence[str],
    notice: Callable[[str], None] | None = None,
    dry_run: Callable[[Config, int], str] | None = None,
) -> Config | None:
    if options.help is not None:
        show(help_text(schema.YAML, options.help, folders=options.config_dir))
        return None
    if options.world_size is not None and not (dry_run and options.cfg and options.world_size > 0):
        raise ValueError(
            "config: --world-size N is for pretrain.py with --cfg job. Use torchrun to start processes."
        )
    composed = _compose(schema, overrides, options.config_dir, notice)
    if options.cfg and not options.world_size:
        show(OmegaConf.to_yaml(composed))
        return None
    config = validate_config(schema, _values(schema, composed))
    if options.world_size:
        show(dry_run(config, options.world_size))
        return None
    return config


def parse_overrides(schema: type[Config], overrides: Sequence[str]) -> list[Override]:
    """Parses command-line arguments such as "lr=1e-3" or "lr=1e-3,2e-3" into Hydra's `Override` objects.

    A single value of a key of type str stays a str, even if it looks like a number. If an argument cannot be
    parsed, raises ValueError with one line.
    """
    parser, parsed = OverridesParser.create(), []
    with _one_line_errors(schema):
        for override in overrides:
            translated = _translate(schema, override)
            with contextlib.suppress(HydraException):  # an unquoted path may not fit the grammar
                if parser.parse_override(override).is_sweep_override():
                    translated = [override]
            parsed += parser.parse_overrides(translated)
    return parsed


def _compose(
    schema: type[Config],
    overrides: Sequence[str],
    config_dirs: Sequence[str],
    notice: Callable[[str], None] | None = None,
) -> DictConfig:
    with _one_line_errors(schema):
        chosen_keys = [override.lstrip("+").partition("=")[0] for override in overrides]
        if twice := [key for key in schema.VERBATIM if chosen_keys.count(key) > 1]:
            raise ValueError(f"{twice[0]} is set twice. Remove one.")
        translated = [text for override in overrides for text in _translate(schema, override)]
        folders = [quoted(str(Path(folder).resolve(strict=True))) for folder in config_dirs]
        translated += [f"hydra.searchpath=[{','.join(folders)}]"] if folders else []
        with initialize_config_dir(str(FOLDER), version_base="1.3"):
            try:
                composed = compose(schema.YAML, translated)
            except HydraException:  # the message about an unknown key names the keys of plugins
                of_plugins = [text for text in translated if text.startswith("plugins=")]
                _load_plugins_of(OmegaConf.to_container(compose(schema.YAML, of_plugins)))
                raise
            if set(_GROUPS) <= set(chosen_keys):
                # Without arch.KEY=VALUE, because the model of the experiment may not have KEY.
                others = [text for text in translated if not text.lstrip("+").startswith(("arch=", "arch."))]
                if (usual := compose(schema.YAML, others).arch.name) != composed.arch.name:
                    _load_plugins_of(OmegaConf.to_container(composed))
                    of_arch = [text for text in translated if text.startswith(("arch=", "hydra."))]
                    defaults = OmegaConf.to_container(compose(schema.YAML, of_arch).arch, resolve=True)
                    text = _leave_out_of_experiment(composed, set(chosen_keys), defaults, usual=usual)
                    if notice and text:
                        notice(text)
    return composed


def _leave_out_of_experiment(
    composed: DictConfig, chosen_keys: set[str], defaults: dict[str, Any], *, usual: str
) -> str:
    """Replaces values of an experiment that the chosen model does not accept by the model's defaults.

    An experiment is a YAML file of settings for one model. With `arch=NAME`, the user may choose another
    model, which may lack a key `arch.*` of the experiment or refuse its value. If the chosen model has no
    default for a value, the value is removed. Returns a line that names the values that are replaced or
    removed, and the values of the experiment that stay.

    composed: Config of the run, changed in place. chosen_keys: Keys of the command line, which do not change.
    defaults: Default `arch` values of the chosen model.
    usual: Name of the model that the experiment is for.
    """
    name, arch = composed.arch.name, OmegaConf.to_container(composed.arch, resolve=True)
    schema = architectures().get(name)
    if schema is None:  # `validate_config` says so
        return ""
    chosen = {key.split(".")[1] for key in chosen_keys if key.startswith("arch.")}
    preset_keys = [key for key in arch if key not in chosen and arch[key] != defaults.get(key)]

    def without(keys: Iterable[str]) -> dict[str, Any]:
        remaining = {key: value for key, value in arch.items() if key not in keys}
        return remaining | {key: defaults[key] for key in keys if key in defaults}

    left_out: list[str] = []
    while (wrong := _wrong_keys(schema, without(left_out))) is not None:
        more = [key for key in preset_keys if key in wrong and key not in left_out]
        if not more:  # one value contradicts defaults of the chosen arch
            more = [key for key in preset_keys if _wrong_keys(schema, without([*left_out, key])) is None][:1]
        if not more:
            break
        left_out += more
    with open_dict(composed):
        composed.arch = without(left_out)
    stay = [key for key in preset_keys if key not in left_out and key in schema.model_fields]
    text = f"the experiment is for arch={usual}, not {name}."
    for label, keys in (("Ignored values", left_out), ("Values that stay", stay)):
        text += f" {label}: {', '.join(f'arch.{key}={arch[key]}' for key in keys)}." if keys else ""
    return text


def _wrong_keys(schema: type[pydantic.BaseModel], values: dict[str, Any]) -> list[str] | None:
    # The result is None if all values are right, and [] if only their combination is wrong.
    try:
        schema.model_validate(values)
    except pydantic.ValidationError as error:
        return [str(mistake["loc"][0]) for mistake in error.errors() if mistake["loc"]]
    return None


def _values(schema: type[Config], composed: DictConfig) -> dict[str, Any]:
    choose_words(has_option=False)
    with _one_line_errors(schema):
        if "${oc.env" in str(OmegaConf.to_container(composed)):  # an environment variable may be a secret
            raise ValueError(
                "oc.env is not allowed, because configs are logged. Let the shell replace $NAME."
            )
        values = OmegaConf.to_container(composed, resolve=True)
        for key in values.keys() & (text_keys(schema) | {"curriculum"}) - set(schema.VERBATIM):
            values[key] = expand_home(key, values[key])
        _load_plugins_of(values)
    return values


def _load_plugins_of(values: dict[str, Any]) -> None:
    load_plugins(expand_home("plugins", paths_in(values)))


def chosen_experiment(arguments: Sequence[str] | None = None) -> str | None:
    """Returns NAME of the command-line argument experiment=NAME. Without this argument, returns None.

    arguments: Command-line arguments. If None, those of this process.
    """
    parts = (override.partition("=") for override in _read_command_line(arguments).overrides)
    names = [name for key, _, name in parts if key == "experiment"]
    return names[-1] if names else None


@contextlib.contextmanager
def _one_line_errors(schema: type[Config]) -> Iterator[None]:
    try:
        yield
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, OSError, ValueError) as error:
        raise ValueError(f"config: {explain_composition(schema, error)}") from None


def _read_command_line(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    arguments = sys.argv[1:] if arguments is None else arguments
    check_overrides(arguments)
    for argument in arguments:
        check_encoding(argument)
    options = _CommandLine().parse_intermixed_args(arguments)
    if options.multirun:
        raise ValueError(f"config: --multirun is not supported. {SEVERAL_RUNS}.")
    return options


def _translate(schema: type[Config], override: str) -> list[str]:
    """Translates a command-line argument such as "lr=1e-3" into one or several arguments for Hydra.

    Adds quotes to a value that is a text. Also translates keys of the published code of HRM, TRM and URM:
    "load_checkpoint=a" becomes "init_from='a'". Raises ValueError for a setting of Hydra itself, and if the
    value of `arch` or `experiment` is a mapping instead of a name.
    """
    typed, equals, value = override.partition("=")
    key = KEYS.get(typed.lstrip("+"), typed.lstrip("+"))
    if re.match(r"~?hydra\b", key):
        instead = next(text for start, text in _HYDRA_KEYS.items() if key.lstrip("~").startswith(start))
        raise ValueError(f"{override} is not supported. {instead}.")
    if published := OVERRIDES.get(f"{key}={value.lower()}"):
        return published
    if key in _GROUPS and value.startswith("{"):
        name, keys = ("trm", ", such as arch.hidden_size=64") if key == "arch" else ("demo", "")
        raise ValueError(
            f"{override}: {key} must be a name, such as {key}={name}, not a mapping. Set each key "
            f"separately{keys}."
        )
    if equals and key in schema.VERBATIM:
        return [f"{key}={quoted(value)}"]
    if equals and (key in text_keys(schema) or (key in _GROUPS and value)):
        return [f"{key}={quote_value(value)}"]
    return [override.replace(typed.lstrip("+"), key, 1)]


class _CommandLine(argparse.ArgumentParser):
    """Parser of the command line: key=value texts, and a few options such as --help."""

    def __init__(self) -> None:
        super().__init__(add_help=False, allow_abbrev=False)
        self.add_argument("overrides", nargs="*")
        self.add_argument("-h", "--help", nargs="?", const="")
        self.add_argument("-c", "--cfg", choices=["job"])
        self.add_argument("--world-size", type=int, metavar="N")
        self.add_argument("-m", "--multirun", action="store_true")
        self.add_argument("-cd", "--config-dir", action="append", default=[], metavar="FOLDER")

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"config: {message}. Set keys with key=value. Run --help for a list.")


def show(text: str) -> None:
    """Prints a text on stdout. If stdout cannot be written, raises ValueError.

    If stdout is a pipe and its reader has ended, as in `... | head`, nothing is raised.
    """
    try:
        print(text, file=Patient(sys.stdout), flush=True)
    except OSError as error:
        raise ValueError(f"standard output cannot be written ({error.strerror})") from None
