"""Command lines in this folder: a mistake is one line on stderr, and a builder has written nothing."""

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn


@contextlib.contextmanager
def one_line_errors(program: str) -> Iterator[None]:
    """Ends the program with one line where a person, or the machine, is at fault."""
    try:
        yield
    except (ValueError, OSError, MemoryError) as error:
        sys.exit(f"{program}: error: {' '.join(str(error).splitlines()) or 'out of memory'}")


def warn(program: str, text: str) -> None:
    print(f"{program}: warning: {text}", file=sys.stderr)


class OneLineParser(argparse.ArgumentParser):
    """A parser of the options of a module for which a mistake is a ValueError, one line without the usage."""

    def __init__(self, module: str, *, description: str):
        super().__init__(prog=f"python -m {module}", description=description, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (--help lists the options)")


def builder_parser(kind: str, *, description: str) -> argparse.ArgumentParser:
    """Makes a parser with --output-dir and --seed, which every builder has."""
    parser, output_dir = (
        OneLineParser(f"dataset.build {kind}", description=description),
        "replaced if built before",
    )
    parser.add_argument("--output-dir", type=Path, required=True, metavar="FOLDER", help=output_dir)
    seed = "what is drawn at random (default 0)"
    parser.add_argument("--seed", type=integer(at_least=0), default=0, help=seed)
    return parser


def refuse_options(options: argparse.Namespace, names: Sequence[str], other: str) -> None:
    """Raises ValueError where one of the options `names` was given, which are for `other`."""
    for name in names:
        if getattr(options, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')} is for {other}: drop it")


def integer(*, at_least: int) -> Callable[[str], int]:
    """Makes the type of an option that is an integer below 2**64, such as a seed of Philox."""

    def parse(text: str) -> int:
        if not text.isdecimal() or not at_least <= int(text) < 1 << 64:
            raise argparse.ArgumentTypeError(f"must be an integer from {at_least} to 2**64 - 1, not {text!r}")
        return int(text)

    return parse
