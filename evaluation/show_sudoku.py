"""Prints Sudoku puzzles beside a model's answers, from the outputs that an evaluation saved.

python -m evaluation.show_sudoku <evaluation folder> [--set all] [--count 3]
"""

import argparse
import json
import math
import sys
from pathlib import Path

import numpy as np

from evaluation.report import METRICS_FILE

_NEEDED = ("inputs", "labels", "preds")
_FIRST_DIGIT_TOKEN = 2  # 0 = pad, 1 = empty


def puzzle_to_text(puzzle: np.ndarray, answer: np.ndarray, predicted: np.ndarray) -> str:
    """Three grids side by side: puzzle, prediction (wrong cells marked), answer. Tokens, [cells] each."""
    size = math.isqrt(len(puzzle))
    lines = [f"{'puzzle':<{2 * size + 2}}{'model':<{3 * size + 2}}answer"]
    for row in range(size):
        cells = range(row * size, (row + 1) * size)
        given = " ".join(_digit(puzzle[cell]) for cell in cells)
        wrong = ["x" if predicted[cell] != answer[cell] else " " for cell in cells]
        found = " ".join(_digit(predicted[cell]) + mark for cell, mark in zip(cells, wrong, strict=True))
        right = " ".join(_digit(answer[cell]) for cell in cells)
        lines.append(f"{given}   {found}  {right}")
    return "\n".join(lines)


def _digit(token: int) -> str:
    return str(token - _FIRST_DIGIT_TOKEN + 1) if token >= _FIRST_DIGIT_TOKEN else "."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="output_dir of evaluate.py")
    parser.add_argument("--set", default="all", help="which set of the dataset (default all)")
    parser.add_argument("--count", type=int, default=3, help="how many puzzles (default 3)")
    options = parser.parse_args()
    try:
        with np.load(options.folder / f"{options.set}__outputs.npz") as arrays:
            inputs, labels, predicted = (arrays[name].astype(int) for name in _NEEDED)
        metrics = json.loads((options.folder / METRICS_FILE).read_text())[options.set]
    except (OSError, KeyError, ValueError) as error:
        needed = ",".join(_NEEDED)
        sys.exit(f"error: {options.folder} lacks {error}: run evaluate.py with eval_save_outputs=[{needed}]")
    for row in range(min(options.count, len(inputs))):
        print(puzzle_to_text(inputs[row], labels[row], predicted[row]), end="\n\n")
    print(f"exact accuracy {metrics['exact_accuracy']:.4f} on {metrics['count']} held-out puzzles")


if __name__ == "__main__":
    main()
