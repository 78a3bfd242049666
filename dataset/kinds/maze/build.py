"""Builds a maze dataset, from the published CSV files or from mazes generated here.

A CSV file has the columns question and answer. Each contains a square maze, row by row or in lines. '#' is a
wall, a space is an open cell, S is the start, G is the goal. In the answer, 'o' is a cell of the path. A
group of the training split is a maze. With --aug, the group also contains the 7 rotated and mirrored variants
of the maze. Every maze and every variant is a puzzle with one example.

Invariant: every answer is its maze with one path from S to G. All mazes have the same size. No variant equals
a test maze. The same command gives the same bytes on every machine.
"""

import argparse
import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from dataset.augmentations import NUM_DIHEDRAL
from dataset.build import sources
from dataset.build.generation import draw_distinct
from dataset.build.splits import GENERATE, build_puzzles
from dataset.kinds.maze import TOKEN_OF, rules, to_cells
from runtime.command_line import integer, refuse_options, warn

_SIZE = 30
_MAX_BATCHES = 1000  # batches in a row without a new maze before giving up: about 10 s


def build(options: argparse.Namespace) -> None:
    numbers = np.arange(NUM_DIHEDRAL, dtype=np.uint8)[None, :, None]
    build_puzzles(
        options,
        kind="maze",
        thing="maze",
        augmentation="square",
        vocab_size=rules.VOCAB_SIZE,
        read=functools.partial(_read, column_names=getattr(options, "columns", None)),
        generate=lambda: _generate(options),
        draw_transforms=(lambda num_groups: numbers.repeat(num_groups, axis=0)) if options.aug else None,
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    sources.add_source_options(
        parser,
        thing="maze",
        columns="columns question and answer. '#' (or +, -, |) is a wall, a space (or .) is an open cell, S "
        "is the start, G (or E) is the goal, and 'o' (or X) is a cell of the path. Walls are added to a maze "
        "of several lines that is not a square",
        generated="generate N training mazes and N // 10 (at least 20) test mazes, all different. At the "
        "default size, it generates 10 to 25 mazes a second",
    )
    size, at_least_2 = f"rows and columns of generated mazes (default {_SIZE})", integer(at_least=2)
    parser.add_argument("--size", type=at_least_2, metavar="S", help=size)
    cells = (
        "minimum length of the shortest path of generated mazes, in cells (default 4 * S - 10, as published)"
    )
    parser.add_argument("--min-path-cells", type=at_least_2, metavar="C", help=cells)
    perfect = "generate perfect mazes: exactly one path between any two cells, so each has one answer"
    parser.add_argument("--perfect", action="store_true", default=None, help=perfect)
    parser.add_argument("--num-test", **sources.NUM_TEST)
    parser.add_argument("--subsample-size", **sources.SUBSAMPLE_SIZE)
    aug = "add the 7 rotated and mirrored variants of each training maze; the test split gets none"
    parser.add_argument("--aug", action="store_true", help=aug)
    parser.add_argument("--materialize", **sources.MATERIALIZE)


def check_options(options: argparse.Namespace) -> None:
    if options.generate is None:
        refuse_options(options, ("size", "min_path_cells", "perfect"), "--generate, not for --source")
    else:
        refuse_options(options, ("columns", "subsample_size"), "--source, not for --generate")
        options.num_test = options.num_test or max(options.generate // 10, 20)
        options.size = options.size or _SIZE
        options.min_path_cells = options.min_path_cells or max(4 * options.size - 10, 2)
        if options.min_path_cells > options.size**2:
            cells = f"the {options.size**2} cells of a {options.size}x{options.size} maze"
            raise ValueError(f"--min-path-cells {options.min_path_cells} is more than {cells}. Lower it.")
    if options.materialize and not options.aug:
        raise ValueError("--materialize has no effect without --aug. Remove it, or pass --aug.")


def _generate(options: argparse.Namespace) -> tuple[np.ndarray, np.ndarray]:
    size, least = options.size, options.min_path_cells
    maze = {"size": size, "min_path_cells": least, "is_perfect": bool(options.perfect)}
    drawn = draw_distinct(
        functools.partial(_draw, seed=options.seed, **maze),
        num_train=options.generate,
        num_test=options.num_test,
        max_misses=_MAX_BATCHES,
        refusal=f"random {size}x{size} mazes gave {{count}} with a path of {least} cells or more, "
        "then no new one. Lower --min-path-cells, --generate or --num-test.",
    )
    train, test = (np.stack([mazes[:, 0], rules.published_answers(mazes[:, 0])], axis=1) for mazes in drawn)
    return train, test


def _draw(split: str, index: int, *, seed: int, **maze: int | bool) -> np.ndarray:
    return rules.draw_mazes(seed, stream=GENERATE[split], index=index, **maze)[:, None]


def _read(files: Sequence[Path], *, column_names: str | None) -> list[np.ndarray]:
    """Reads mazes and answers from CSV files.

    Returns tokens, uint8 [n, 2, cells], for each file. Axis 1 is (maze, answer). Warns if any answer is not
    the shortest path that the published datasets mark (`rules.published_answers`).

    column_names: Value of --columns, such as "quiz,solution". If None, the usual names are searched.
    """
    read, num_cells, num_others, names = [], 0, 0, ("question", "answer")
    for path in files:
        parts = []
        for lines, columns in sources.read_columns(path, names, column_names=column_names, is_grid=_is_maze):
            check = functools.partial(sources.expect, path, lines)
            columns = {column: list(map(to_cells, texts)) for column, texts in columns.items()}
            if not num_cells:
                num_cells = len(columns["question"][0])
                is_square = num_cells >= 4 and math.isqrt(num_cells) ** 2 == num_cells
                message = f"the question has {num_cells} cells, which is not a square of at least 2x2"
                check(np.array([is_square]), message)
            parts.append(_parse(columns, num_cells, check))
            num_others += (rules.published_answers(parts[-1][:, 0]) != parts[-1][:, 1]).any(axis=1).sum()
        read.append(np.concatenate(parts or [np.empty((0, 2, num_cells), np.uint8)]))
    if num_others:
        others = (
            f"{num_others} of {sum(map(len, read))} answers are not the path that the published mazes have"
        )
        warn("build maze", f"{others} (breadth-first from S, neighbors in the order down, left, right, up).")
    return read


def _is_maze(text: str) -> bool:
    return len(text) >= 4 and set(to_cells(text)) <= TOKEN_OF.keys()


def _parse(
    columns: dict[str, list[str]], num_cells: int, check: Callable[[np.ndarray, str], None]
) -> np.ndarray:
    form = {"num_cells": num_cells, "remark": " like the first maze. All must have the same size"}
    largest = (rules.GOAL, rules.PATH)
    mazes, answers = sources.parse_grids(columns, check, token_of=TOKEN_OF, largest=largest, **form)
    for token, thing in ((rules.START, "start S"), (rules.GOAL, "goal G")):
        num = np.count_nonzero(mazes == token, axis=1)
        check(num > 0, f"the maze has no {thing}")
        check(num < 2, f"the maze has more than one {thing}")
    check(rules.shortest_path_cells(mazes) > 0, "the maze has no path from S to G")
    contradiction = "the answer contradicts its maze. It must be the maze with 'o' on open cells"
    check(rules.marks_open_cells(mazes, answers), contradiction)
    check(rules.is_path(mazes, answers), "the cells marked 'o' are not exactly one path from S to G")
    return np.stack([mazes, answers], axis=1)
