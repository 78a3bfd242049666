"""Builds a Sudoku dataset, from the published CSV files or from puzzles generated here.

Tokens: 0 = pad, 1 = empty, 2 .. n + 1 = the digits 1 .. n. In the training split a group is a puzzle and its
variants, each of them a puzzle with one example. Invariant: every row is a question and a valid answer that
agrees with it; no variant is a test puzzle; the same command gives the same bytes on every machine.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from dataset.command_line import builder_parser, integer, one_line_errors
from dataset.format import Metadata, Split, sha256_of
from dataset.puzzle_set import PuzzleSet
from dataset.randomness import random_orders, random_words
from dataset.sudoku import (
    NUM_MINIMAL_PUZZLES,
    Box,
    Puzzles,
    apply_symmetries,
    draw_symmetries,
    generate_puzzle,
    words_per_symmetry,
)
from dataset.sudoku_csv import read_puzzles, source_files
from dataset.writing import check_output_folder, write_dataset

BOXES = {"2x2": (2, 2), "2x3": (2, 3), "3x3": (3, 3)}

# Streams of random words: a new use takes a new number, as a changed one would change the datasets.
_GENERATE = {"test": 0, "train": 1}
_HOLD_OUT, _SUBSAMPLE, _AUGMENT = 2, 3, 4

_CHUNK_ROWS = 1 << 15
_MAX_REPEATS = 20_000  # generated puzzles in a row that were there already, before giving up


def main(arguments: Sequence[str] | None = None) -> None:
    with one_line_errors("build_sudoku"):
        build(_parse_options(arguments))


def build(options: argparse.Namespace) -> None:
    """Reads or generates the puzzles of both splits, augments the training split and writes the folder."""
    started = time.monotonic()
    box = BOXES[options.box]
    check_output_folder(options.output_dir)
    arguments = {name: value for name, value in vars(options).items() if name != "output_dir"}

    if options.generate is not None:
        train, test = _generate(options.generate, box=box, seed=options.seed)
    else:
        files = source_files(options.source, output_dir=options.output_dir)
        arguments["source"] = {path.name: sha256_of(path) for path in files}
        train, test = _read_source(files, box=box, min_difficulty=options.min_difficulty, seed=options.seed)

    if options.subsample_size is not None:
        train = _subsample(train, options.subsample_size, seed=options.seed)
    num_groups, num_test = len(train), len(test)
    if num_shared := np.count_nonzero(_are_among(train.questions, set(_keys(test.questions)))):
        message = f"{num_shared} puzzles of the training split are in the test split too"
        print(f"build_sudoku: warning: {message}", file=sys.stderr)
    train = _augment(train, options.num_aug, box=box, seed=options.seed, held_out=test)

    splits = {
        "train": _to_split(train, box=box, group_size=1 + options.num_aug),
        "test": _to_split(test, box=box, group_size=1),
    }
    builder = {"module": "dataset.build_sudoku", "arguments": arguments}
    write_dataset(options.output_dir, splits=splits, identifiers=["<blank>"], builder=builder)
    print(f"train: {num_groups} puzzles and {options.num_aug} variants of each, {len(train)} examples")
    print(f"test: {num_test} puzzles")
    print(f"wrote {options.output_dir} in {time.monotonic() - started:.1f} seconds")


# ---------------------------------------------------------------------------------------------------- options


def _parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = builder_parser("dataset.build_sudoku", description=__doc__.partition("\n")[0])
    puzzles = parser.add_mutually_exclusive_group(required=True)
    puzzles.add_argument(
        "--source",
        type=Path,
        metavar="PATH",
        help="a folder with train.csv and test.csv, or one CSV file, of which a tenth (at least 1 puzzle, "
        "chosen by the seed, its repeats dropped) becomes the test split and the rest the training split; "
        ".csv.gz too; columns question, answer and, for --min-difficulty, rating; '.' or '0' is empty",
    )
    puzzles.add_argument(
        "--generate",
        type=integer(at_least=1),
        metavar="N",
        help="generate N training puzzles and N // 10 test puzzles, at least 100, all different and minimal: "
        "one solution, and more than one without any one clue",
    )
    parser.add_argument(
        "--box", choices=BOXES, default="3x3", help="rows x columns of a box; 3x3 makes 9x9 (default)"
    )
    parser.add_argument(
        "--subsample-size",
        type=integer(at_least=1),
        metavar="K",
        help="keep K training puzzles of the source, at random",
    )
    parser.add_argument(
        "--num-aug",
        type=integer(at_least=0),
        default=0,
        metavar="A",
        help="variants of each training puzzle (default 0); the test split has none",
    )
    parser.add_argument(
        "--min-difficulty",
        type=integer(at_least=0),
        metavar="R",
        help="keep source puzzles, of both splits, with rating >= R",
    )
    parser.add_argument(
        "--seed", type=integer(at_least=0), default=0, help="what is drawn at random (default 0)"
    )
    options = parser.parse_args(arguments)
    if options.generate is not None:
        for name in ("subsample_size", "min_difficulty"):
            if getattr(options, name) is not None:
                raise ValueError(f"--{name.replace('_', '-')} is for --source, not for --generate: drop it")
    return options


# ------------------------------------------------------------------------------------------------- generating


def _generate(num_train: int, *, box: Box, seed: int) -> tuple[Puzzles, Puzzles]:
    """The training and the test puzzles, all different: the test split is drawn first."""
    num_test = max(num_train // 10, 100)
    if num_train + num_test > NUM_MINIMAL_PUZZLES.get(box, num_train + num_test):
        raise ValueError(
            f"--generate {num_train} needs {num_train + num_test} different puzzles with the test split, but "
            f"{box[0]}x{box[1]} boxes have only {NUM_MINIMAL_PUZZLES[box]}: ask for fewer, or larger boxes"
        )
    seen: set[bytes] = set()
    test = _generate_split("test", num_test, box=box, seed=seed, seen=seen)
    return _generate_split("train", num_train, box=box, seed=seed, seen=seen), test


def _generate_split(split: str, count: int, *, box: Box, seed: int, seen: set[bytes]) -> Puzzles:
    kept: list[tuple[list[int], list[int]]] = []
    last_index = -1  # of the puzzle kept last
    for index in itertools.count():
        if len(kept) == count:
            break
        question, answer = generate_puzzle(seed, stream=_GENERATE[split], index=index, box=box)
        if bytes(question) not in seen:
            seen.add(bytes(question))
            kept.append((question, answer))
            last_index = index
        elif index - last_index > _MAX_REPEATS:
            raise ValueError(
                f"{box[0]}x{box[1]} boxes gave {len(seen)} puzzles, then no new one: ask for fewer"
            )
    grids = np.array(kept, np.uint8)
    return Puzzles(grids[:, 0], grids[:, 1])


# ---------------------------------------------------------------------------------------------------- reading


def _read_source(
    files: list[Path], *, box: Box, min_difficulty: int | None, seed: int
) -> tuple[Puzzles, Puzzles]:
    """The training and the test puzzles, at least one each."""
    read = [read_puzzles(path, box=box, min_difficulty=min_difficulty) for path in files]
    for path, puzzles in zip(files, read, strict=True):
        if not len(puzzles):
            rated = "" if min_difficulty is None else f" with a rating of at least {min_difficulty}"
            raise ValueError(f"{path} has no puzzle{rated}")
    return (read[0], read[1]) if len(read) == 2 else _hold_out(files[0], read[0], seed=seed)


def _hold_out(path: Path, puzzles: Puzzles, *, seed: int) -> tuple[Puzzles, Puzzles]:
    """Splits the puzzles of one file: a tenth is for testing, and what repeats one of those is dropped."""
    chosen = _choose(len(puzzles), max(len(puzzles) // 10, 1), seed=seed, stream=_HOLD_OUT)
    test = puzzles[chosen]
    train = puzzles[~_are_among(puzzles.questions, set(_keys(test.questions)))]
    if not len(train):
        raise ValueError(
            f"{path} has too few different puzzles to hold out a test split: pass a folder of two files"
        )
    return train, test


def _subsample(train: Puzzles, size: int, *, seed: int) -> Puzzles:
    if size > len(train):
        raise ValueError(f"--subsample-size {size} is more than the {len(train)} training puzzles there are")
    return train[_choose(len(train), size, seed=seed, stream=_SUBSAMPLE)]


def _choose(total: int, count: int, *, seed: int, stream: int) -> np.ndarray:
    """`count` different rows out of `total`, rising."""
    return np.sort(random_orders(random_words(seed, stream=stream, index=0, count=total))[:count])


# ------------------------------------------------------------------------------------------------- augmenting


def _augment(train: Puzzles, num_aug: int, *, box: Box, seed: int, held_out: Puzzles) -> Puzzles:
    """Every puzzle followed by its variants. A variant that is a held-out puzzle gives way to its original.

    That is common with 2x2 boxes, where all minimal puzzles are variants of 36, and unheard of with 3x3.
    """
    num_groups, num_cells = train.questions.shape
    if num_groups * (1 + num_aug) >= 1 << 31:
        raise ValueError(
            f"{num_groups} x {1 + num_aug} puzzles are more than int32 can count: lower --num-aug"
        )
    if not num_aug:
        return train
    forbidden = set(_keys(held_out.questions))
    width = words_per_symmetry(box)
    augmented = Puzzles(*np.empty((2, num_groups, 1 + num_aug, num_cells), np.uint8))
    augmented.questions[:, 0], augmented.answers[:, 0] = train.questions, train.answers
    chunk_groups = max(1, _CHUNK_ROWS // num_aug)
    for start in range(0, num_groups, chunk_groups):
        groups = np.arange(start, min(start + chunk_groups, num_groups))
        words = [random_words(seed, stream=_AUGMENT, index=int(g), count=num_aug * width) for g in groups]
        symmetries = draw_symmetries(np.concatenate(words).reshape(-1, width), box=box)
        originals = train[np.repeat(groups, num_aug)]
        questions = apply_symmetries(originals.questions, symmetries)
        answers = apply_symmetries(originals.answers, symmetries)
        leaked = _are_among(questions, forbidden)
        questions[leaked], answers[leaked] = originals.questions[leaked], originals.answers[leaked]
        augmented.questions[groups, 1:] = questions.reshape(len(groups), num_aug, num_cells)
        augmented.answers[groups, 1:] = answers.reshape(len(groups), num_aug, num_cells)
    return Puzzles(augmented.questions.reshape(-1, num_cells), augmented.answers.reshape(-1, num_cells))


def _keys(questions: np.ndarray) -> Iterator[bytes]:
    """A key for each question: its bytes, less the empty cells at the end."""
    for start in range(0, len(questions), _CHUNK_ROWS):
        chunk = np.ascontiguousarray(questions[start : start + _CHUNK_ROWS])
        yield from chunk.view(f"S{chunk.shape[1]}").ravel().tolist()


def _are_among(questions: np.ndarray, keys: set[bytes]) -> np.ndarray:
    return np.fromiter((key in keys for key in _keys(questions)), bool, len(questions))


def _to_split(puzzles: Puzzles, *, box: Box, group_size: int) -> Split:
    size, num_puzzles = box[0] * box[1], len(puzzles)
    metadata = Metadata(
        pad_id=0,
        ignore_label_id=0,
        blank_identifier_id=0,
        vocab_size=size + 2,
        seq_len=size**2,
        num_puzzle_identifiers=1,
        total_groups=num_puzzles // group_size,
        mean_puzzle_examples=1.0,
        sets=("all",),
        total_puzzles=num_puzzles,
    )
    everything = PuzzleSet(
        inputs=puzzles.questions + np.uint8(1),
        labels=puzzles.answers + np.uint8(1),
        puzzle_identifiers=np.zeros(num_puzzles, np.int32),
        puzzle_indices=np.arange(num_puzzles + 1, dtype=np.int32),
        group_indices=np.arange(0, num_puzzles + 1, group_size, dtype=np.int32),
    )
    return Split(metadata, {"all": everything})


if __name__ == "__main__":
    main()
