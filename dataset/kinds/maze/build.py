"""Builds a maze dataset, from the published CSV files or from mazes generated here.

Tokens: 0 = pad, then '#', space, S, G and 'o' as 1 .. 5. With --aug a group of the training split is a maze
and its 7 reflections and rotations, made when they are read, unless --materialize has them written out; each
is a puzzle with one example. Invariant: every answer is one path from S to G; no variant is a test maze: one
that would be gives way to its original; the same command gives the same bytes on every machine.
"""

import argparse
import itertools
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dataset.command_line import builder_parser, integer, one_line_errors, refuse_options
from dataset.csv_rows import source_files
from dataset.format import sha256_of
from dataset.kinds.maze.rows import read_mazes
from dataset.kinds.maze.rules import VOCAB_SIZE, draw_mazes, published_answers
from dataset.pairs import Pairs, drop_test_leaks, make_split, shared_puzzles_warning, split_files, subsample
from dataset.symmetries import NUM_DIHEDRAL
from dataset.writing import check_output_folder, write_dataset

_SIZE = 30

# Streams of random words: a new use takes a new number, as a changed one would change the datasets.
_GENERATE = {"test": 0, "train": 1}
_HOLD_OUT, _SUBSAMPLE = 2, 3

_MAX_BATCHES = 1000  # of random mazes without a new one to keep, before giving up: about 10 seconds


def main(arguments: Sequence[str] | None = None) -> None:
    with one_line_errors("build_maze"):
        build(_parse_options(arguments))


def build(options: argparse.Namespace) -> None:
    """Reads or generates the mazes of both splits, augments the training split and writes the folder."""
    started = time.monotonic()
    check_output_folder(options.output_dir)
    arguments = {name: value for name, value in vars(options).items() if name != "output_dir"}

    if options.generate is not None:
        train, test = _generate(
            options.generate, size=options.size, min_path_cells=options.min_path_cells, seed=options.seed
        )
    else:
        files = source_files(options.source, output_dir=options.output_dir)
        arguments["source"] = {path.name: sha256_of(path) for path in files}
        train, test = split_files(files, read_mazes(files), kind="maze", seed=options.seed, stream=_HOLD_OUT)
        _warn_of_other_answers(train, test)
    if options.subsample_size is not None:
        train = subsample(train, options.subsample_size, seed=options.seed, stream=_SUBSAMPLE)
    if warning := shared_puzzles_warning(train, test):
        _warn(warning)

    augmented = {}
    if options.aug:
        transforms = np.tile(np.arange(NUM_DIHEDRAL, dtype=np.uint8)[:, None], (len(train), 1, 1))
        drop_test_leaks(train, transforms, augmentation="square", held_out=test)
        augmented = {"augmentation": "square", "transforms": transforms, "materialize": options.materialize}
    splits = {
        "train": make_split(train, vocab_size=VOCAB_SIZE, **augmented),
        "test": make_split(test, vocab_size=VOCAB_SIZE),
    }
    builder = {"module": "dataset.build_maze", "arguments": arguments}
    write_dataset(options.output_dir, splits=splits, identifiers=["<blank>"], builder=builder)
    size = math.isqrt(splits["train"].metadata.seq_len)
    num_examples = splits["train"].sets["all"].num_examples
    print(f"train: {len(train)} mazes of {size}x{size}, {num_examples} examples")
    print(f"test: {len(test)} mazes")
    print(f"wrote {options.output_dir} in {time.monotonic() - started:.1f} seconds")


def _warn_of_other_answers(train: Pairs, test: Pairs) -> None:
    """The published mazes have one of millions of shortest paths: others are right, but of another rule."""
    everything = Pairs.concatenate([train, test])
    is_other = (published_answers(everything.questions) != everything.answers).any(axis=1)
    if num_others := np.count_nonzero(is_other):
        rule = "breadth-first from S, neighbours in the order down, left, right, up"
        _warn(f"{num_others} of {len(everything)} answers are not the published shortest path ({rule})")


def _warn(text: str) -> None:
    print(f"build_maze: warning: {text}", file=sys.stderr)


# ---------------------------------------------------------------------------------------------------- options


def _parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = builder_parser("dataset.build_maze", description=__doc__.partition("\n")[0])
    mazes = parser.add_mutually_exclusive_group(required=True)
    mazes.add_argument(
        "--source",
        type=Path,
        metavar="PATH",
        help="a folder with train.csv and test.csv, or one CSV file, of which a tenth (at least 1 maze, "
        "chosen by the seed, its repeats dropped) becomes the test split and the rest the training split; "
        ".csv.gz too; columns question and answer: '#', space, S, G, and 'o' on the path",
    )
    mazes.add_argument(
        "--generate",
        type=integer(at_least=1),
        metavar="N",
        help="generate N training mazes and N // 10 test mazes, at least 20, all different; those of the "
        "default size at 10 to 25 a second",
    )
    parser.add_argument(
        "--size",
        type=integer(at_least=2),
        metavar="S",
        help=f"rows and columns of generated mazes (default {_SIZE})",
    )
    parser.add_argument(
        "--min-path-cells",
        type=integer(at_least=2),
        metavar="C",
        help="cells of the shortest path of generated mazes, S and G included, at least (default 4 * S - 10: "
        "110 for 30x30, as published)",
    )
    parser.add_argument(
        "--subsample-size",
        type=integer(at_least=1),
        metavar="K",
        help="keep K training mazes of the source, at random",
    )
    parser.add_argument(
        "--aug",
        action="store_true",
        help="7 variants of each training maze, turned and mirrored; the test split has none",
    )
    parser.add_argument(
        "--materialize",
        action="store_true",
        help="write all variants out, as the public tools do; else they are made when they are read",
    )
    options = parser.parse_args(arguments)
    if options.generate is None:
        refuse_options(options, ("size", "min_path_cells"), "--generate, not for --source")
    else:
        refuse_options(options, ("subsample_size",), "--source, not for --generate")
        options.size = _SIZE if options.size is None else options.size
        if options.min_path_cells is None:
            options.min_path_cells = max(4 * options.size - 10, 2)
        if options.min_path_cells > options.size**2:
            cells = f"the {options.size**2} cells of a {options.size}x{options.size} maze"
            raise ValueError(f"--min-path-cells {options.min_path_cells} is more than {cells}: lower it")
    if options.materialize and not options.aug:
        raise ValueError("--materialize writes out the variants of --aug: drop it, or add --aug")
    return options


# ------------------------------------------------------------------------------------------------- generating


def _generate(num_train: int, *, size: int, min_path_cells: int, seed: int) -> tuple[Pairs, Pairs]:
    """The training and the test mazes, all different: the test split is drawn first."""
    seen: set[bytes] = set()
    counts = {"test": max(num_train // 10, 20), "train": num_train}
    mazes = {}
    for split, count in counts.items():
        mazes[split] = _generate_split(
            split, count, size=size, min_path_cells=min_path_cells, seed=seed, seen=seen
        )
    return mazes["train"], mazes["test"]


def _generate_split(
    split: str, count: int, *, size: int, min_path_cells: int, seed: int, seen: set[bytes]
) -> Pairs:
    kept: list[np.ndarray] = []
    last_index = -1  # of the batch with the maze kept last
    for index in itertools.count():
        if len(kept) >= count:
            break
        for maze in draw_mazes(
            seed, stream=_GENERATE[split], index=index, size=size, min_path_cells=min_path_cells
        ):
            if maze.tobytes() not in seen and len(kept) < count:
                seen.add(maze.tobytes())
                kept.append(maze)
                last_index = index
        if index - last_index >= _MAX_BATCHES:
            raise ValueError(
                f"random {size}x{size} mazes gave {len(seen)} with a path of {min_path_cells} cells or more, "
                "then no new one: lower --min-path-cells, or ask for fewer"
            )
    mazes = np.stack(kept)
    return Pairs(mazes, published_answers(mazes))
