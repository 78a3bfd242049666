"""Builds a dataset: python -m dataset.build NAME OPTIONS, with a name of `BUILDERS`."""

import sys
from collections.abc import Sequence

from dataset.build import BUILDERS, build_dataset
from dataset.build.command_line import one_line_errors


def main(arguments: Sequence[str]) -> None:
    if not arguments or arguments[0] not in BUILDERS:
        sys.exit(
            f"build: error: name what to build, one of {', '.join(BUILDERS)}, then its options or --help"
        )
    with one_line_errors(f"build {arguments[0]}"):
        build_dataset(arguments[0], arguments[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
