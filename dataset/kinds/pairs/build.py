"""Builds a dataset from pairs of grids or texts, of any task.

A source file contains pairs {"input": grid, "output": grid}. The vocabulary consists of all symbols of the
pairs, sorted. Grids lie in a field that is as large as the largest grid. With --symmetries dihedral, the
field is a square. A group of the training split consists of a pair and its variants. Each of them is a puzzle
with one example. If there are several tasks, each task has a puzzle identifier.

Invariant: the training split contains no test puzzle and no variant that equals one, unless the source has
the puzzle in both splits. The same pairs give the same bytes on every machine.
"""

import argparse
import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dataset.augmentations import FIRST_SYMBOL, NUM_DIHEDRAL
from dataset.build.sources import MATERIALIZE, find_source_files
from dataset.build.splits import check_count, make_split
from dataset.build.writing import write_dataset
from dataset.description import Vocabulary, characters
from dataset.kinds.pairs.files import GRIDS, Pair, choose_files, read_pairs
from dataset.metadata import BLANK, SPLITS, Split
from dataset.randomness import name_index, random_below, random_bits, random_orders
from runtime.command_line import integer, matching, recorded, refuse_options, warn
from runtime.reading import printable, sha256_of

_HOLD_OUT, _AUGMENT = 0, 1  # streams of random bits; changed numbers change the datasets
_TEST_FRACTION, _NUM_AUG = 0.1, 100
_MAX_SYMBOLS = 256 - FIRST_SYMBOL  # tokens are bytes
_MAX_CELLS = 10_000
_MOST_NAMED = 10  # maximum number of tasks that are printed


def build(options: argparse.Namespace) -> None:
    needed, output_dir = "its files of pairs", options.output_dir
    files = find_source_files(options.source, choose_files, needed=needed, output_dir=output_dir)
    pairs, others = read_pairs(files, fields=options.fields or GRIDS)
    if options.fields is None:
        del options.fields  # so that older commands give the same manifest
    if others:
        print(printable(f"fields not used: {', '.join(others)}"))
    source = {path.name: sha256_of(path) for path in files}
    write_pairs(pairs, options, builder="pairs", instead={"source": source})


def add_options(parser: argparse.ArgumentParser) -> None:
    source = (
        'a file of pairs. In pairs.jsonl, each line is a pair: {"input": grid, "output": grid}. Pairs of '
        'several tasks also have "task": "name". To choose the split, add "split": "train" or "test". '
        "pairs.json is a list of pairs. pairs.csv, pairs.parquet and pairs.xlsx have these columns. Files "
        "may be .gz. Or a folder with such a file, or with train.jsonl and test.jsonl, or with their shards "
        "(train-00000-of-00002.parquet, ...). Or hf://datasets/OWNER/NAME[@REVISION], a dataset of such "
        "files on the Hugging Face Hub. A grid is a list of rows. A row is a list of symbols, or a text with "
        "one character for each symbol. A text of several lines is a grid. A text of one line, or a list of "
        "integers without rows, is a sequence"
    )
    parser.add_argument("--source", type=Path, required=True, metavar="PATH", help=source)
    fields = "the names of the fields or columns of input and output, such as question,answer"
    two = matching(
        r"([^,]+),([^,]+)",
        "INPUT,OUTPUT, such as question,answer",
        lambda *names: list(names) if names[0] != names[1] else None,
    )
    parser.add_argument("--fields", type=two, metavar="INPUT,OUTPUT", help=fields)
    add_layout_options(parser)


def add_layout_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that all builders of pairs share, such as --test-fraction and --symmetries."""
    fraction = (
        f"fraction of each task's inputs to hold out for testing, at least one, selected by the seed "
        f"(default {_TEST_FRACTION}); only if the source is not divided into splits"
    )
    share = matching(
        r"(\d*\.?\d+(?:e-\d+)?)",
        "a number between 0 and 1",
        lambda text: float(text) if 0 < float(text) < 1 else None,
    )
    parser.add_argument("--test-fraction", type=share, metavar="F", help=fraction)
    size = "leave out pairs with a larger grid (default: the size of the largest grid)"
    sizes = matching(
        r"([1-9]\d{0,4})x([1-9]\d{0,4})",
        "ROWSxCOLUMNS, such as 8x8",
        lambda *numbers: tuple(map(int, numbers)),
    )
    parser.add_argument("--max-size", type=sizes, metavar="ROWSxCOLUMNS", help=size)
    symmetries = (
        "make variants of the training pairs by changing input and output alike: dihedral (rotate and "
        "mirror), symbols (exchange symbols), or dihedral,symbols"
    )
    names = matching(
        r"((?:(?:dihedral|symbols),)*(?:dihedral|symbols))",
        "dihedral, symbols or dihedral,symbols",
        lambda text: tuple(sorted(set(text.split(",")))),
    )
    parser.add_argument("--symmetries", type=names, default=(), metavar="NAMES", help=symmetries)
    fixed = 'symbols that are not exchanged, such as "#."; separate longer symbols by spaces'
    parser.add_argument("--fixed-symbols", metavar="SYMBOLS", help=fixed)
    num_aug = (
        f"number of random variants of each training pair, with --symmetries symbols (default {_NUM_AUG}); "
        f"--symmetries dihedral makes all {NUM_DIHEDRAL - 1} variants"
    )
    parser.add_argument("--num-aug", type=integer(at_least=1), metavar="A", help=num_aug)
    parser.add_argument("--materialize", **MATERIALIZE)


def check_options(options: argparse.Namespace) -> None:
    if "symbols" not in options.symmetries:
        refuse_options(options, ("fixed_symbols", "num_aug"), "--symmetries with symbols")
    elif options.num_aug is None:
        options.num_aug = _NUM_AUG
    if options.materialize and not options.symmetries:
        raise ValueError("--materialize has no effect without --symmetries. Remove it, or pass --symmetries.")


def write_pairs(
    pairs: list[Pair], options: argparse.Namespace, *, builder: str, instead: dict[str, Any]
) -> None:
    """Writes a dataset of pairs (input grid, output grid), with training and test split.

    options: Parsed command line. builder: Name of the builder. instead: {option: value} to record in
    manifest.json in place of the passed values. Example: hashes of the source files in place of their paths.
    """
    pairs = _fitting(pairs, options.max_size)
    splits = _split(pairs, options.test_fraction, seed=options.seed)
    _warn_of_odd_pairs(splits, f"build {builder}")
    vocabulary = _vocabulary(pairs, is_square="dihedral" in options.symmetries)
    names = sorted({pair.task for pair in pairs})
    tasks = names if len(names) > 1 else []
    identifier_of = {task: identifier for identifier, task in enumerate(tasks, 1)}

    def lay_out(members: list[Pair], **augmented: Any) -> Split:
        return make_split(
            np.array([[vocabulary.tokens_of(grid) for grid in pair[:2]] for pair in members]),
            identifiers=np.array([identifier_of.get(pair.task, 0) for pair in members]),
            vocab_size=FIRST_SYMBOL + len(vocabulary.symbols),
            num_identifiers=1 + len(tasks),
            symbols=vocabulary.symbols,
            num_columns=vocabulary.num_columns,
            **augmented,
        )

    test = lay_out(splits["test"])
    train = lay_out(
        splits["train"],
        augmentation="pairs",
        transforms=_draw_transforms(len(splits["train"]), vocabulary, options)
        if options.symmetries
        else None,
        held_out=test,
        materialize=options.materialize,
    )
    write_dataset(
        options.output_dir,
        splits={"train": train, "test": test},
        identifiers=[BLANK, *tasks],
        builder={"name": builder, "arguments": recorded(options, instead)},
    )
    _print_summary(pairs, vocabulary, tasks)
    num_examples, num_pairs = train.sets["all"].num_examples, len(splits["train"])
    variants = f" and {num_examples // num_pairs - 1} variants of each, {num_examples} examples"
    print(f"train: {num_pairs} pairs{variants if options.symmetries else ''}")
    print(f"test: {len(splits['test'])} pairs")


def _fitting(pairs: list[Pair], max_size: tuple[int, int] | None) -> list[Pair]:
    distinct = list({pair[:4]: pair for pair in reversed(pairs)}.values())[::-1]
    if num_repeats := len(pairs) - len(distinct):
        print(f"repeated pairs, used once: {num_repeats}")
    if max_size is None:
        return distinct
    fitting = [pair for pair in distinct if all(map(int.__le__, _size_of([pair]), max_size))]
    if not fitting:
        raise ValueError(f"--max-size {max_size[0]}x{max_size[1]}: no pair is so small.")
    if num_larger := len(distinct) - len(fitting):
        print(f"pairs larger than {max_size[0]}x{max_size[1]}, left out: {num_larger}")
    return fitting


def _size_of(pairs: Sequence[Pair]) -> tuple[int, int]:
    grids = [grid for pair in pairs for grid in (pair.input, pair.output)]
    return max(map(len, grids)), max(len(grid[0]) for grid in grids)


def _split(pairs: list[Pair], fraction: float | None, *, seed: int) -> dict[str, list[Pair]]:
    """Divides pairs into {"train": pairs, "test": pairs}.

    If the pairs have no split, random inputs of each task are selected. All pairs with these inputs become
    test pairs. Raises ValueError if a split would be empty.

    fraction: Fraction of each task's inputs to select. If None, 0.1. Must be None if the pairs have a split.
    If a task has several inputs, at least one is selected, and at least one is not. If a task has only one
    input, none is selected.
    """
    if any(pair.split for pair in pairs):
        if fraction is not None:
            raise ValueError("--test-fraction: the source is already divided into splits. Remove it.")
        splits = {split: [pair for pair in pairs if pair.split == split] for split in SPLITS}
        if empty := [split for split in SPLITS if not splits[split]]:
            raise ValueError(f"the source has no pair for its {empty[0]} split.")
        return splits
    inputs = defaultdict(dict)  # {task: different inputs, in order, as keys}
    for pair in pairs:
        inputs[pair.task][pair.input] = None
    held_out = set()
    for task, different in inputs.items():
        bits = random_bits(seed, stream=_HOLD_OUT, index=name_index(task), count=len(different))
        count = min(max(round((fraction or _TEST_FRACTION) * len(different)), 1), len(different) - 1)
        keys = list(different)
        held_out.update((task, keys[row]) for row in random_orders(bits)[:count])
    if not held_out:
        raise ValueError(
            "no task has two different inputs, so no pair can be held out for testing. Add pairs, or set the "
            "split of each."
        )
    splits = {split: [] for split in SPLITS}
    for pair in pairs:
        splits["test" if (pair.task, pair.input) in held_out else "train"].append(pair)
    return splits


def _warn_of_odd_pairs(splits: dict[str, list[Pair]], program: str) -> None:
    pairs = splits["train"] + splits["test"]

    def warn_of(odd: list[Pair], text: str) -> None:
        if odd:
            warn(program, f"{len(odd)} of {len(pairs)} pairs {text} (the first: {odd[0].where})")

    warn_of([pair for pair in pairs if pair.input == pair.output], "have an output equal to their input")
    tested = {(pair.task, pair.input) for pair in splits["test"]}
    is_leak = [pair for pair in splits["train"] if (pair.task, pair.input) in tested]
    warn_of(is_leak, "are for training, but their inputs are also in the test split")
    num_outputs = Counter(answer[:2] for answer in {(pair.task, pair.input, pair.output) for pair in pairs})
    doubtful = [pair for pair in pairs if num_outputs[pair.task, pair.input] > 1]
    warn_of(doubtful, "have an input with several outputs, so no model can get all of them right")


def _vocabulary(pairs: list[Pair], *, is_square: bool) -> Vocabulary:
    found = {cell for pair in pairs for grid in pair[:2] for row in grid for cell in row}
    if len(found) > _MAX_SYMBOLS:
        raise ValueError(f"the pairs have {len(found)} different symbols. The maximum is {_MAX_SYMBOLS}.")
    num_rows, num_columns = _size_of(pairs)
    if is_square:
        if num_rows == 1:
            raise ValueError("--symmetries dihedral has no effect on sequences. Remove it.")
        num_rows = num_columns = max(num_rows, num_columns)
    if num_rows * num_columns > _MAX_CELLS:
        largest = next(pair for pair in pairs if max(_size_of([pair])) == max(num_rows, num_columns))
        size = f"the largest grids need {num_rows}x{num_columns} cells, and the maximum is {_MAX_CELLS}"
        raise ValueError(f"{size} (the first: {largest.where}). Leave some out with --max-size.")

    def order(symbol: str) -> tuple:
        is_integer = re.fullmatch(r"-?[0-9]{1,18}", symbol) is not None
        return (0, int(symbol), symbol) if is_integer else (1, 0, symbol)

    return Vocabulary(tuple(sorted(found, key=order)), num_rows, num_columns)


def _draw_transforms(num_pairs: int, vocabulary: Vocabulary, options: argparse.Namespace) -> np.ndarray:
    """Samples transforms of each pair: uint8 [pairs, 1 + variants, 1 + symbols].

    A transform is a dihedral number, then the new index of each symbol. The first transform of each pair
    changes nothing.
    """
    num_symbols = len(vocabulary.symbols)
    exchanges = "symbols" in options.symmetries
    num_variants = options.num_aug if exchanges else NUM_DIHEDRAL - 1
    check_count(num_pairs, 1 + num_variants)
    transforms = np.zeros((num_pairs, 1 + num_variants, 1 + num_symbols), np.uint8)
    transforms[:, :, 1:] = np.arange(num_symbols)
    if not exchanges:
        transforms[:, :, 0] = np.arange(NUM_DIHEDRAL)
        return transforms
    free = free_symbols(vocabulary, options.fixed_symbols)
    for index, variants in enumerate(transforms[:, 1:]):
        bits = random_bits(
            options.seed, stream=_AUGMENT, index=index, count=num_variants * (1 + len(free))
        ).reshape(num_variants, 1 + len(free))
        if "dihedral" in options.symmetries:
            variants[:, 0] = random_below(bits[:, 0], NUM_DIHEDRAL)
        variants[:, 1 + free] = free[random_orders(bits[:, 1:])]
    return transforms


def free_symbols(vocabulary: Vocabulary, fixed: str | None) -> np.ndarray:
    """Returns the indices of the symbols that augmentation may exchange: int64 [n].

    Raises ValueError if a fixed symbol is unknown, or if fewer than two symbols may be exchanged.

    fixed: Value of --fixed-symbols, such as "#.": the symbols that must stay. None if all may be exchanged.
    """
    named = characters(fixed or "")  # as the symbols of the files
    named = "".join(named).split() if vocabulary.parts_by_spaces else named
    if unknown := [symbol for symbol in named if symbol not in vocabulary.symbols]:
        there = f"the symbols are {vocabulary.list_symbols()}"
        raise ValueError(f"--fixed-symbols {fixed!r}: {unknown[0]!r} is in no pair ({there}).")
    free = [index for index, symbol in enumerate(vocabulary.symbols) if symbol not in named]
    if len(free) < 2:
        raise ValueError(
            "--symmetries symbols needs at least two symbols that are not fixed, to exchange them."
        )
    return np.array(free)


def _print_summary(pairs: list[Pair], vocabulary: Vocabulary, tasks: list[str]) -> None:
    shapes = {(len(grid), len(grid[0])) for pair in pairs for grid in pair[:2]}
    field = f"{vocabulary.num_rows}x{vocabulary.num_columns}"
    print(f"symbols ({len(vocabulary.symbols)}): {vocabulary.list_symbols()}")
    if shapes == {(vocabulary.num_rows, vocabulary.num_columns)}:
        print(f"grids: all {field}")
    else:
        smallest, largest = ("x".join(map(str, map(of, *shapes))) for of in (min, max))
        sizes = f"{len(shapes)} sizes from {smallest} to {largest}"
        print(f"grids: {sizes}, each in a field of {field} cells, with end tokens below and right of it")
    if tasks:
        num_pairs = Counter(pair.task for pair in pairs)
        named = ", ".join(f"{task} ({num_pairs[task]})" for task in itertools.islice(tasks, _MOST_NAMED))
        more = f" and {len(tasks) - _MOST_NAMED} more" if len(tasks) > _MOST_NAMED else ""
        print(f"tasks ({len(tasks)}), each with a puzzle identifier: {named}{more}")
