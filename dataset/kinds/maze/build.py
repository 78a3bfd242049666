"""Builds a maze dataset, from the published CSV files or from mazes generated here.

Tokens: 0 = pad, then '#', space, S, G and 'o' as 1 .. 5. With --aug a group of the training split is a maze
and its 7 reflections and rotations, made when they are read, unless --materialize has them written out; each
is a puzzle with one example. Invariant: every answer is one path from S to G; no variant is a test maze: one
that would be gives way to its original; the same command gives the same bytes on every machine.
"""

import argparse
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from dataset.command_line import builder_parser, integer, one_line_errors, refuse_options, warn
from dataset.kinds.maze.rows import read_mazes
from dataset.kinds.maze.rules import VOCAB_SIZE, draw_mazes, published_answers
from dataset.pairs import GENERATE, Pairs, add_source_options, draw_distinct, load_pairs, write_pairs
from dataset.symmetries import NUM_DIHEDRAL

_SIZE = 30
_MAX_BATCHES = 1000  # of random mazes without a new one to keep, before giving up: about 10 seconds


def main(arguments: Sequence[str] | None = None) -> None:
    with one_line_errors("build_maze"):
        build(_parse_options(arguments))


def build(options: argparse.Namespace) -> None:
    """Reads or generates the mazes of both splits, augments the training split and writes the folder."""
    started = time.monotonic()
    train, test, arguments = load_pairs(
        options, program="build_maze", thing="maze", read=_read, generate=lambda: _generate(options)
    )
    augmented = {}
    if options.aug:
        transforms = np.arange(NUM_DIHEDRAL, dtype=np.uint8)[None, :, None].repeat(len(train), axis=0)
        augmented = {"augmentation": "square", "transforms": transforms}
    builder = {"module": "dataset.build_maze", "arguments": arguments}
    num_examples = write_pairs(options, train, test, builder=builder, vocab_size=VOCAB_SIZE, **augmented)
    size = math.isqrt(train.questions.shape[1])
    print(f"train: {len(train)} mazes of {size}x{size}, {num_examples} examples")
    print(f"test: {len(test)} mazes")
    print(f"wrote {options.output_dir} in {time.monotonic() - started:.1f} seconds")


def _read(files: list[Path]) -> list[Pairs]:
    """Reads the mazes of each file; warns of labels that are right by another rule than the published."""
    read = read_mazes(files)
    num_others = 0
    for pairs in filter(len, read):
        is_other = (published_answers(pairs.questions) != pairs.answers).any(axis=1)
        num_others += np.count_nonzero(is_other)
    if num_others:
        others = f"{num_others} of {sum(map(len, read))} answers are not the published shortest path"
        warn("build_maze", f"{others} (breadth-first from S, neighbours in the order down, left, right, up)")
    return read


# ---------------------------------------------------------------------------------------------------- options


def _parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = builder_parser("dataset.build_maze", description=__doc__.partition("\n")[0])
    add_source_options(
        parser,
        thing="maze",
        columns="columns question and answer: '#', space, S, G, and 'o' on the path",
        generated="generate N training mazes and N // 10 test mazes, at least 20, all different; those of "
        "the default size at 10 to 25 a second",
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


def _generate(options: argparse.Namespace) -> tuple[Pairs, Pairs]:
    """Generates the training and the test mazes."""
    size, min_path_cells = options.size, options.min_path_cells

    def draw(split: str, index: int) -> Iterator[np.ndarray]:
        stream = GENERATE[split]
        mazes = draw_mazes(options.seed, stream=stream, index=index, size=size, min_path_cells=min_path_cells)
        yield from mazes[:, None]

    train, test = draw_distinct(
        draw,
        num_train=options.generate,
        num_test=max(options.generate // 10, 20),
        max_misses=_MAX_BATCHES,
        refusal=f"random {size}x{size} mazes gave {{count}} with a path of {min_path_cells} cells or more, "
        "then no new one: lower --min-path-cells, or ask for fewer",
    )
    return Pairs(train[:, 0], published_answers(train[:, 0])), Pairs(
        test[:, 0], published_answers(test[:, 0])
    )
