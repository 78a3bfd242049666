"""Prints how far our numbers are from those of the public implementations.

python -m tests.golden [--device cuda] [--folder PATH]
"""

import argparse
import sys
from pathlib import Path

import torch

from tests.golden import GOLDEN, Differences, expected, find_runs, ldt, replay

_QUANTITIES = ("loss", "gradients", "outputs", "weights", "state", "solver")
_HEAD = """\
Each row trains as the public code did, from its weights, on its batches: the largest difference of all
training steps. Loss, norm of the gradients and state (what is kept between thinking steps) are relative,
outputs are of the first step, weights of the last. The public code computed in float32, which rounds to 6e-8.
"""


def main() -> int:
    """Returns the exit status: 0 if all numbers are close to those of the public code, otherwise 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cpu", help="default: cpu")
    parser.add_argument("--folder", type=Path, default=GOLDEN, help="default: tests/golden")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # as the public code
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    device, num_runs, failures = torch.device(arguments.device), 0, []
    print(_HEAD)
    print(f"{'model':<10}{'steps':>7}" + "".join(f"{name:>11}" for name in _QUANTITIES))
    for run in find_runs(arguments.folder):
        num_runs += 1
        _print_row(run, failures, lambda run=run: replay(run, device=device))
    for run in ldt.find_runs(arguments.folder) if device.type == "cpu" else []:
        num_runs += 1
        _print_row(run, failures, lambda run=run: Differences(ldt.replay(run) | ldt.replay_solver(run)))
    print(*failures, sep="\n")
    if not num_runs:
        print(f"there are no golden vectors in {arguments.folder}")
    return 1 if failures or not num_runs else 0


def _print_row(run: Path, failures: list[str], measure) -> None:
    try:
        seen = measure()
    except AssertionError as error:
        failures.append(str(error))
        seen = {}
    cells = (f"{seen[name]:>11.1e}" if name in seen else f"{'':>11}" for name in _QUANTITIES)
    verdict = "" if seen else "  differs, see below"
    print(f"{run.name:<10}{len(expected(run)['train']):>7}{''.join(cells)}{verdict}".rstrip(), flush=True)


if __name__ == "__main__":
    sys.exit(main())
