"""Builds a dataset: python -m dataset.build sudoku|maze|arc|pairs|reasoning_gym --help."""

import sys

from dataset.build import BUILDERS, build_dataset

if __name__ == "__main__":
    kind, *arguments = sys.argv[1:] or ["--help"]
    if kind not in BUILDERS:
        sys.exit(
            f"build: error: name what to build, one of {', '.join(BUILDERS)}, then its options (or --help)"
        )
    build_dataset(kind, arguments)
