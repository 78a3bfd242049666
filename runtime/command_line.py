"""Command lines: parsers and types of options, and one-line messages for errors of the user."""

import argparse
import contextlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from runtime.plugins import load_plugins
from runtime.reading import printable
from runtime.writing import Patient, check_working_folder, prepare_streams


@contextlib.contextmanager
def one_line_errors(program: str) -> Iterator[None]:
    """Context manager for a program that turns errors of the user into one line on stderr.

    After a ValueError, OSError or MemoryError, prints "<program>: error: <message>" and exits with status 1.
    Also makes stdin, stdout and stderr safe to use.
    """
    prepare_streams()
    try:
        check_working_folder()
        with contextlib.redirect_stdout(Patient(sys.stdout)):
            yield
            sys.stdout.flush()
    except (ValueError, OSError, MemoryError) as error:
        sys.exit(printable(f"{program}: error: {' '.join(str(error).splitlines()) or 'out of memory'}"))


def warn(program: str, text: str) -> None:
    with contextlib.suppress(OSError):
        print(printable(f"{program}: warning: {text}"), file=sys.stderr)


class OneLineParser(argparse.ArgumentParser):
    """An argparse parser for `python -m MODULE`. For a wrong option it raises ValueError, without the usage.

    module: Name of the module, for the help.
    """

    def __init__(self, module: str, *, description: str, add_help: bool = True):
        super().__init__(
            prog=f"python -m {module}", description=description, allow_abbrev=False, add_help=add_help
        )

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}. Pass --help to list the options.")


class _ImportPlugin(argparse.Action):
    """Argparse action of --plugin: imports the file as soon as the option is parsed. Stores nothing."""

    def __call__(self, parser: Any, namespace: Any, value: Any, option: str | None = None) -> None:
        load_plugins([value])


def add_plugin_option(parser: argparse.ArgumentParser) -> None:
    """Adds the option --plugin FILE, which imports the file and may be repeated."""
    text = "Python file that adds a model or a kind of puzzle (docs/extend.md); may be repeated"
    hidden = {"default": argparse.SUPPRESS, "dest": argparse.SUPPRESS}
    parser.add_argument("--plugin", action=_ImportPlugin, metavar="FILE", help=text, **hidden)


def import_plugins(arguments: Sequence[str]) -> None:
    """Imports every file that --plugin names in the command-line arguments.

    Call it before the parser of all options is built, because a plugin may add choices to its options.
    """
    parser = OneLineParser("", description="", add_help=False)
    add_plugin_option(parser)
    parser.parse_known_args(arguments)


def refuse_options(options: argparse.Namespace, names: Sequence[str], other: str) -> None:
    """Raises ValueError if the user passed one of the options `names` (their value is not None).

    names: Names of attributes, such as "num_aug" for --num-aug. other: What the options are for, for the
    message "--num-aug is for <other>. Remove it."
    """
    for name in names:
        if getattr(options, name, None) is not None:
            raise ValueError(f"--{name.replace('_', '-')} is for {other}. Remove it.")


def recorded(options: argparse.Namespace, instead: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of a builder to store in its dataset's manifest file, as {name: value}.

    output_dir is left out. instead: {name: value} to overwrite or add.
    """
    return {name: value for name, value in vars(options).items() if name != "output_dir"} | dict(instead)


def matching(pattern: str, form: str, convert: Callable[..., Any]) -> Callable[[str], Any]:
    """Returns an argparse `type` that checks a text against a regular expression and converts it.

    pattern: Regular expression that the whole text must match. form: Description of valid texts, for the
    message "must be <form>". convert: Function (groups of the pattern) -> value. It returns None if the text
    is not valid.
    """

    def parse(text: str) -> Any:
        found = re.fullmatch(pattern, text, re.ASCII)
        if found is None or (value := convert(*found.groups())) is None:
            raise argparse.ArgumentTypeError(f"must be {form}, not {text!r}")
        return value

    return parse


def integer(*, at_least: int, at_most: int = (1 << 64) - 1) -> Callable[[str], int]:
    """Returns an argparse `type` for integers from `at_least` to `at_most`.

    The default maximum, 2^64 - 1, is the largest seed.
    """
    form = f"an integer from {at_least} to {'2**64 - 1' if at_most == (1 << 64) - 1 else at_most}"
    return matching(r"(\d+)", form, lambda text: int(text) if at_least <= int(text) <= at_most else None)


def number(text: str) -> int | float:
    """Converts the text of a number: "3" to int 3, "0.3" to float 0.3."""
    return float(text) if "." in text else int(text)
