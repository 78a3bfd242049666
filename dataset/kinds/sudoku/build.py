"""Builds a Sudoku dataset, from CSV files, from lists of puzzles, or from puzzles generated here.

A CSV file has the columns question and answer, with n * n cells row by row. If it has no answers, the builder
solves the puzzles. With --min-difficulty, a CSV file also needs the column rating, a number. A group of the
training split consists of a puzzle and its variants. Each of them has one example. With --easier, each has a
second example with more clues.

Invariant: every answer is valid and agrees with its question. No variant equals a test puzzle. The same
command gives the same bytes on every machine.
"""

import argparse
import functools
import itertools
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from dataset.build import sources
from dataset.build.generation import draw_distinct
from dataset.build.splits import GENERATE, build_puzzles, check_count
from dataset.kinds.sudoku import generate, rules
from dataset.kinds.sudoku.symmetries import draw_symmetries
from dataset.kinds.sudoku.texts import EMPTY_CELLS, SYMBOLS, in_symbols, is_grid_of, read_grids
from dataset.randomness import BitStream, random_bits
from runtime.command_line import integer, matching, number, refuse_options
from runtime.reading import read_lines

_AUGMENT, _EASIER = 4, 5  # streams of random bits; `build.splits` uses the lower numbers
_HARDER = {"test": 7, "train": 8}
_MAX_REPEATS = 20_000  # generated puzzles in a row that are not new before giving up
_MAX_TOO_EASY = 1000  # the same with --min-difficulty, where each takes a second
_CLUES = matching(
    r"(\d+)-(\d+)",
    "MIN-MAX, such as 32-40",
    lambda least, most: (int(least), int(most)) if 0 < int(least) <= int(most) else None,
)
_DIGIT_OF = dict.fromkeys(EMPTY_CELLS, 0) | {symbol: digit for digit, symbol in enumerate(SYMBOLS, 1)}


def add_options(parser: argparse.ArgumentParser) -> None:
    sources.add_source_options(
        parser,
        thing="puzzle",
        columns="columns question, answer and, for --min-difficulty, rating. The column names of the public "
        "datasets are known too. '.' or '0' is an empty cell. Files .txt, .sdm, .sdk and .ss are lists of "
        "puzzles without answers",
        generated="generate N training puzzles and N // 10 (at least 100) test puzzles. All are different "
        "and minimal: if any one clue is removed, a puzzle has several solutions. Puzzles larger than 9x9 "
        "may have clues that are not needed. A core makes 50 9x9 puzzles a second. A 16x16 takes 1 s, a "
        "25x25 10 s (less with --clues)",
    )
    box = "rows x columns of a box; 3x3 makes 9x9 (default)"
    parser.add_argument("--box", choices=rules.BOXES, default="3x3", help=box)
    clues = "generate easier puzzles with MIN to MAX clues: minimal puzzles with clues added"
    parser.add_argument("--clues", type=_CLUES, metavar="MIN-MAX", help=clues)
    easier = "add to each training puzzle an easier example with MIN to MAX clues; use it for hard puzzles"
    parser.add_argument("--easier", type=_CLUES, metavar="MIN-MAX", help=easier)
    parser.add_argument("--num-test", **sources.NUM_TEST)
    parser.add_argument("--subsample-size", **sources.SUBSAMPLE_SIZE)
    count = integer(at_least=0)
    num_aug = "number of variants of each training puzzle (default 0); the test split gets none"
    parser.add_argument("--num-aug", type=count, default=0, metavar="A", help=num_aug)
    parser.add_argument("--materialize", **sources.MATERIALIZE)
    difficulty = (
        "keep only puzzles with rating >= R, in both splits. With --source, the rating is a column. With "
        "--generate, it is the number of guesses of the solver (dataset.kinds.sudoku.rules.find_solutions). "
        "Clues are exchanged until a puzzle has it. Such puzzles may have clues that are not needed, and no "
        "two have the same solution. With R = 30, a core needs 1 to 2 s for a 9x9 puzzle"
    )
    rating = matching(r"(\d+(?:\.\d+)?)", "a number", number)
    parser.add_argument("--min-difficulty", type=rating, metavar="R", help=difficulty)


def check_options(options: argparse.Namespace) -> None:
    if options.generate is not None:
        refuse_options(options, ("columns", "subsample_size"), "--source, not for --generate")
        if options.clues and options.min_difficulty is not None:
            raise ValueError("--clues makes easier puzzles, --min-difficulty harder ones. Remove one.")
        options.num_test = options.num_test or max(options.generate // 10, 100)
    else:
        refuse_options(options, ("clues",), "--generate, not for --source")
    size = math.prod(rules.BOXES[options.box])
    for option in ("clues", "easier"):
        if (clues := getattr(options, option)) and clues[1] > size**2:
            raise ValueError(f"--{option}: a {size}x{size} grid has only {size**2} cells, not {clues[1]}.")
    if options.materialize and not options.num_aug:
        raise ValueError("--materialize has no effect without --num-aug. Remove it, or pass --num-aug.")


def build(options: argparse.Namespace) -> None:
    box, seed, least, clues = rules.BOXES[options.box], options.seed, options.min_difficulty, options.easier
    numbers = {"num_aug": options.num_aug, "num_examples": 2 if clues else 1}
    draw_transforms = functools.partial(_draw_transforms, **numbers, box=box, seed=seed)
    build_puzzles(
        options,
        kind="sudoku",
        thing="puzzle" if least is None else f"puzzle with a rating of at least {least}",
        vocab_size=box[0] * box[1] + 2,
        augmentation="sudoku",
        read=functools.partial(_read_files, box=box, options=options),
        generate=lambda: _generate(options, box=box),
        make_easier=functools.partial(_make_easier, clues=clues, seed=seed) if clues else None,
        draw_transforms=draw_transforms if options.num_aug else None,
        has_several=functools.partial(_has_several_solutions, box=box),
    )


def _generate(options: argparse.Namespace, *, box: rules.Box) -> tuple[np.ndarray, np.ndarray]:
    num_train, num_test, clues = options.generate, options.num_test, options.clues
    boxes = f"{box[0]}x{box[1]} boxes"
    if clues is None and num_train + num_test > generate.NUM_MINIMAL_PUZZLES.get(box, num_train + num_test):
        raise ValueError(
            f"--generate {num_train} needs {num_train + num_test} different puzzles (with the test split), "
            f"but {boxes} have only {generate.NUM_MINIMAL_PUZZLES[box]}. Lower --generate or --num-test, "
            "or choose a larger --box."
        )
    least, few, more = options.min_difficulty, boxes, ""
    if clues is not None:
        few, more = f"{boxes} with {clues[0]} to {clues[1]} clues", ", or raise --clues"
    if least is not None:
        few, more = f"{boxes} with --min-difficulty {least:g}", ", or lower --min-difficulty"
    train, test = draw_distinct(
        functools.partial(_draw, seed=options.seed, box=box, clues=clues, least=least),
        num_train=num_train,
        num_test=num_test,
        max_misses=(_MAX_REPEATS if least is None else _MAX_TOO_EASY) + 1,
        refusal=f"{few} gave {{count}} puzzles, then no new one. Lower --generate or --num-test{more}.",
        distinct_part=0 if least is None else 1,
    )
    if least is not None:
        for split, puzzles in (("train", train), ("test", test)):
            ratings = [rules.find_solutions(puzzle, box=box)[1] for puzzle in puzzles[:, 0].tolist()]
            quantiles = np.quantile(ratings, [0, 0.1, 0.5, 0.9, 1], method="lower").tolist()
            words = "least {}, tenth {}, median {}, nine tenths {}, most {}".format(*quantiles)
            print(f"{split}: guesses of the solver: {words}")
    return train + np.uint8(1), test + np.uint8(1)


def _has_several_solutions(tokens: np.ndarray, *, box: rules.Box) -> bool:
    try:
        return rules.count_solutions((tokens - 1).tolist(), box=box) > 1
    except rules.TooHardError:
        return False  # counting takes too long


def _draw(
    split: str,
    index: int,
    *,
    seed: int,
    box: rules.Box,
    clues: tuple[int, int] | None,
    least: float | None,
) -> list[np.ndarray]:
    clue_range = None if clues is None else range(clues[0], clues[1] + 1)
    puzzle = generate.generate_puzzle(seed, stream=GENERATE[split], index=index, box=box, clues=clue_range)
    if puzzle is not None and least is not None:
        bits = BitStream(seed, stream=_HARDER[split])
        bits.seek(index)
        question, grid = puzzle
        harder = generate.make_harder(question, grid, box=box, least=least, bits=bits)
        puzzle = None if harder is None else (harder, grid)
    return [] if puzzle is None else [np.array(puzzle, np.uint8)]


def _make_easier(train: np.ndarray, *, clues: tuple[int, int], seed: int) -> np.ndarray:
    """Returns the inputs of training pairs with random clues added: uint8 [n, cells].

    train: Pairs (puzzle, solution), tokens [n, 2, cells]. clues: Minimum and maximum number of clues of a new
    input. An input that already has more clues than the maximum is not changed.
    """
    numbers, inputs = range(clues[0], clues[1] + 1), train[:, 0].copy()
    for index, pair in enumerate(train - 1):
        bits = random_bits(seed, stream=_EASIER, index=index, count=1 + train.shape[2])
        if (easier := generate.with_more_clues(*pair.tolist(), clues=numbers, bits=bits)) is not None:
            inputs[index] = np.add(easier, 1)
    return inputs


def _draw_transforms(
    num_groups: int, *, num_aug: int, num_examples: int, box: rules.Box, seed: int
) -> np.ndarray:
    """Samples the transforms of each puzzle's variants: uint8 [num_groups, 1 + num_aug, bytes].

    The first transform of each puzzle changes nothing. Raises ValueError if the split would have too many
    examples.

    num_groups: Number of puzzles. num_aug: Number of variants of each puzzle. num_examples: Number of
    examples of each puzzle. box: Numbers of rows and columns of a box.
    """
    check_count(num_groups, 1 + num_aug, num_examples)
    lines = np.arange(box[0] * box[1])
    transforms = np.empty((num_groups, 1 + num_aug, 1 + 3 * len(lines)), np.uint8)
    transforms[:, 0] = [0, *lines, *lines, *(lines + 1)]
    for group in range(num_groups):
        transforms[group, 1:] = draw_symmetries(seed, stream=_AUGMENT, index=group, count=num_aug, box=box)
    return transforms


def _read_files(files: Sequence[Path], *, box: rules.Box, options: argparse.Namespace) -> list[np.ndarray]:
    if hasattr(options, "columns") and not any(map(sources.is_table, files)):
        raise ValueError(f"{files[0]} is a list of puzzles without columns. Remove --columns.")
    return [_read(path, box=box, options=options) for path in files]


def _read(path: Path, *, box: rules.Box, options: argparse.Namespace) -> np.ndarray:
    names, size = ["question", "answer"], box[0] * box[1]
    least, num_solved = options.min_difficulty, 0
    if least is not None:
        names.append("rating")
    read = [np.empty((0, 2, size**2), np.uint8)]
    for lines, columns in _tables(
        path, names, num_cells=size**2, column_names=getattr(options, "columns", None)
    ):
        check = functools.partial(sources.expect, path, lines)
        remark = f". Check --box {box[0]}x{box[1]}"
        form = {"num_cells": size**2, "token_of": _DIGIT_OF, "remark": remark}
        texts = {name: columns[name] for name in names[:2] if name in columns}
        questions, *parsed = sources.parse_grids(texts, check, largest=[size] * len(texts), **form)
        if parsed:
            (answers,) = parsed
        else:
            numbered = zip(lines, questions.tolist(), strict=True)
            solved = [_solve(question, box=box, where=f"{path}:{line}") for line, question in numbered]
            answers = np.array(solved, np.uint8)
            num_solved += len(answers)
        check((answers > 0).all(axis=1), "the answer has an empty cell")
        check(rules.are_solved(answers, box=box), "the answer repeats a digit in a row, a column or a box")
        agrees = ((questions == 0) | (questions == answers)).all(axis=1)
        check(agrees, "the answer contradicts the question")
        pairs = np.stack([questions, answers], axis=1) + np.uint8(1)
        if least is not None:
            ratings = columns["rating"]
            are_numbers = [re.fullmatch(r"\s*-?\d+(\.\d*)?\s*", text) is not None for text in ratings]
            check(np.array(are_numbers), "the rating is not a number")
            pairs = pairs[np.array([float(text) >= least for text in ratings])]
        read.append(pairs)
    if num_solved:
        print(f"{path}: {num_solved} puzzles without an answer were solved")
    return np.concatenate(read)


def _tables(
    path: Path, names: Sequence[str], *, num_cells: int, column_names: str | None
) -> Iterator[tuple[Sequence[int], dict[str, list[str]]]]:
    """Reads a CSV file, or a text file with Sudokus. Yields (line numbers, {column: texts}) in chunks.

    A chunk of puzzles without answers has no column "answer".

    names: Columns to read, ["question", "answer"] and maybe "rating". column_names: Value of --columns: the
    names of these columns in the CSV file, separated by commas. If None, the usual names are searched.
    """
    if sources.is_table(path):
        is_grid = functools.partial(is_grid_of, num_cells=num_cells)
        tables = sources.read_columns(
            path, names, column_names=column_names, optional=["answer"], is_grid=is_grid
        )
        for lines, columns in tables:
            grids = [columns[column] for column in names[:2] if column in columns]
            if num_cells > 81 or any(len(text) != num_cells for grid in grids for text in grid):
                rows = [in_symbols(*row, num_cells=num_cells) for row in zip(*grids, strict=True)]
                columns |= dict(zip(names, zip(*rows, strict=True), strict=False))
            yield lines, columns
        return
    if names[2:]:
        raise ValueError(f"{path} is a list of puzzles without ratings. Remove --min-difficulty.")
    try:
        grids = read_grids("".join(read_lines(path)))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    for has_answer, some in itertools.groupby(grids, key=lambda grid: grid.answer is not None):
        lines, questions, answers = zip(*some, strict=True)
        yield lines, {"question": questions} | ({"answer": answers} if has_answer else {})


def _solve(question: list[int], *, box: rules.Box, where: str) -> list[int]:
    try:
        solutions, _ = rules.find_solutions(question, box=box)
    except rules.TooHardError as error:
        raise ValueError(f"{where}: {error}") from None
    if len(solutions) != 1:
        raise ValueError(f"{where}: the puzzle has {'several solutions' if solutions else 'no solution'}.")
    return solutions[0]
