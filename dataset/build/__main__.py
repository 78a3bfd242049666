"""Builds a dataset: python -m dataset.build NAME OPTIONS. A NAME is a key of `dataset.build.builders()`."""

import sys
from collections.abc import Sequence

from dataset.build import build_dataset
from runtime.command_line import one_line_errors


def main(arguments: Sequence[str]) -> None:
    kind, *options = arguments or [""]
    with one_line_errors(f"build {kind}" if kind.isidentifier() else "build"):
        build_dataset(kind, options)


if __name__ == "__main__":
    main(sys.argv[1:])
