"""Command lines: parsers and types of options, and one-line messages for errors of the user."""

import argparse
import contextlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from runtime.plugins import choose_words, load_plugins
from runtime.reading import printable
from runtime.writing import Patient, check_working_folder, prepare_streams


@contextlib.contextmanager
def one_line_errors(program: str) -> Iterator[None]:
    """Context manager that prints an error of the user as one line and exits with status 1.

    Errors of the user are ValueError, OSError and MemoryError. Also makes stdin, stdout and stderr safe to
    use. Example: if the reader of stdout ends, as in `program | head`, this is not an error.

    program: Name of the program, with which the line starts.
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
    """ArgumentParser that raises ValueError if an option is wrong, instead of printing the usage.

    module: Name of the module that `python -m` runs, for the help text.
    """

    def __init__(self, module: str, *, description: str, add_help: bool = True):
        super().__init__(
            prog=f"python -m {module}", description=description, allow_abbrev=False, add_help=add_help
        )

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}. Pass --help to list the options.")


class _ImportPlugin(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, value: Any, option: str | None = None) -> None:
        load_plugins([value])


def add_plugin_option(parser: argparse.ArgumentParser) -> None:
    choose_words(has_option=True)
    text = "Python file that adds a model or a kind of puzzle (docs/extend.md); may be repeated"
    hidden = {"default": argparse.SUPPRESS, "dest": argparse.SUPPRESS}
    parser.add_argument("--plugin", action=_ImportPlugin, metavar="FILE", help=text, **hidden)


def import_plugins(arguments: Sequence[str]) -> None:
    """Imports every file that the option --plugin names.

    Call it before building the parser of all options, because a plugin may add choices to them.

    arguments: Command-line arguments. Other options are ignored.
    """
    parser = OneLineParser("", description="", add_help=False)
    add_plugin_option(parser)
    parser.parse_known_args(arguments)


def refuse_options(options: argparse.Namespace, names: Sequence[str], other: str) -> None:
    """Raises ValueError if the user has passed one of the options `names`.

    The default of these options must be None. Any other value means that the user has passed the option.

    names: Attributes of `options`, such as "num_aug" for the option --num-aug. other: Text that completes the
    message "--num-aug is for ...".
    """
    for name in names:
        if getattr(options, name, None) is not None:
            raise ValueError(f"--{name.replace('_', '-')} is for {other}. Remove it.")


def recorded(options: argparse.Namespace, instead: Mapping[str, Any]) -> dict[str, Any]:
    """Returns {option: value} of a dataset builder, without --output-dir, to store them with the dataset.

    options: Parsed command-line options. instead: {option: value} to overwrite or add in the result.
    """
    return {name: value for name, value in vars(options).items() if name != "output_dir"} | dict(instead)


def matching(pattern: str, form: str, convert: Callable[..., Any]) -> Callable[[str], Any]:
    """Returns a function for `type` of argparse.add_argument that checks and converts a text.

    pattern: Regular expression that the whole text must match. form: Description of valid texts, for the
    message "must be ...". convert: Function that gets the groups of the pattern and returns the value. It
    returns None if the text is not valid.
    """

    def parse(text: str) -> Any:
        found = re.fullmatch(pattern, text, re.ASCII)
        if found is None or (value := convert(*found.groups())) is None:
            raise argparse.ArgumentTypeError(f"must be {form}, not {text!r}")
        return value

    return parse


def integer(*, at_least: int, at_most: int = (1 << 64) - 1) -> Callable[[str], int]:
    """Returns a function for `type` of argparse.add_argument that accepts integers in a range.

    The default of `at_most` is the largest seed, 2^64 - 1.
    """
    form = f"an integer from {at_least} to {'2**64 - 1' if at_most == (1 << 64) - 1 else at_most}"
    return matching(r"(\d+)", form, lambda text: int(text) if at_least <= int(text) <= at_most else None)


def number(text: str) -> int | float:
    return float(text) if "." in text else int(text)
