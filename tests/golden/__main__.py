"""Replays the golden training runs on a device: python -m tests.golden [--device cuda] [--folder PATH]."""

import argparse
import sys
from pathlib import Path

import torch

from tests.golden import find_runs, replay
from tests.ranks import REPOSITORY


def main() -> int:
    """Returns the exit status: 0 where all numbers are those of the public code."""
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__)
    parser.add_argument("--device", default="cpu", help="default: cpu")
    parser.add_argument("--folder", type=Path, default=REPOSITORY.parent / "shared" / "golden")
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    failures = 0
    runs = find_runs(arguments.folder)
    for run in runs:
        try:
            replay(run, device=torch.device(arguments.device))
            print(f"{run.name}: equal")
        except AssertionError as error:
            failures += 1
            print(f"{run.name}: {error}")
    if not runs:
        print(f"there are no golden vectors in {arguments.folder}")
    return 1 if failures or not runs else 0


if __name__ == "__main__":
    sys.exit(main())
