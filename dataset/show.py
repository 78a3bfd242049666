"""Prints puzzles of a dataset, and a model's answers to them, in the terminal.

python -m dataset.show data/demo --index 3
python -m dataset.show data/demo --outputs checkpoints/demo/evaluation/step_100 --count 3
"""

import argparse
import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dataset.description import read_info, read_names
from dataset.drawing import draw, side_by_side
from dataset.files import open_split
from dataset.kinds.kind import find_kind, kind_names
from dataset.metadata import IGNORE_LABEL_ID, SPLITS
from dataset.sets import PuzzleSet
from runtime.command_line import OneLineParser, add_plugin_option, integer, one_line_errors
from runtime.reading import printable, read_arrays, read_json

_NEEDED = ("inputs", "labels", "preds")
_SAVED = f"save_outputs=[{','.join(_NEEDED)}]"


def main(arguments: Sequence[str] | None = None) -> None:
    with one_line_errors("show"):
        show(_parse_options(arguments))


def show(options: argparse.Namespace) -> None:
    data = open_split(options.data, options.split)
    where = f"{options.data} ({options.split} split)"
    if options.set not in data.sets:
        raise ValueError(f"{where} has no set {options.set!r}. Choose --set from {', '.join(data.sets)}.")
    puzzle_set = data.sets[options.set]
    if (options.index or 0) >= puzzle_set.num_examples:
        has = f"Set {options.set!r} of {where} has examples 0 to {puzzle_set.num_examples - 1}."
        raise ValueError(f"--index {options.index} is out of range. {has}")
    info = read_info([options.data], data.metadata)
    if options.kind is not None:
        if options.kind not in kind_names():
            known = f"Choose from {', '.join(kind_names())}. For a kind of yours, add --plugin FILE."
            raise ValueError(f"--kind {options.kind} is not a kind of puzzle. {known}")
        if mismatch := find_kind(options.kind).mismatch_of(data.metadata):
            raise ValueError(f"{options.data} does not have the kind {options.kind}: its {mismatch}.")
        info = dataclasses.replace(info, builder=options.kind)
    style = info.style
    names = read_names(options.data)
    saved, known = None, ""
    if options.outputs is not None:
        mixed = f"{options.data.resolve().name}.{options.set}"  # name of the set in a mixture of folders
        is_mixed = (options.outputs / f"{mixed}__outputs.npz").is_file()
        saved, known = _read_outputs(options.outputs, mixed if is_mixed else options.set)
        if saved["inputs"].shape != (puzzle_set.num_examples, data.metadata.seq_len):
            raise ValueError(f"{options.outputs} has outputs for another dataset than {where}.")

    if options.index is None:  # show one puzzle of each group, not variants of the same puzzle
        rows = puzzle_set.puzzle_indices[puzzle_set.group_indices[:-1]][: options.count].tolist()
    else:
        rows = range(options.index, min(options.index + options.count, puzzle_set.num_examples))
    texts = []
    for row in rows:
        puzzle = int(puzzle_set.puzzle_indices.searchsorted(row, side="right")) - 1
        texts.append(f"{options.split}/{options.set}, example {row}")
        if options.index is not None or puzzle_set.puzzle_identifiers[puzzle]:
            texts.append(_describe(puzzle_set, row, puzzle, names))
        inputs, labels = (tokens[0] for tokens in puzzle_set.read(np.array([row]), np.array([puzzle])))
        labels = np.where(labels < 0, inputs, labels)  # cells that are not scored
        drawings = [draw("puzzle", style, inputs, color=options.color)]
        if saved is not None:
            if not np.array_equal(saved["inputs"][row], inputs):
                raise ValueError(f"{options.outputs} has outputs for other puzzles than {options.data}.")
            preds = saved["preds"][row]
            (right,) = info.labels_for(inputs[None], saved["labels"][row][None], preds[None])
            is_wrong = (preds != right) & (right != IGNORE_LABEL_ID)
            drawings.append(draw("model", style, preds, color=options.color, frame=labels, is_wrong=is_wrong))
        drawings.append(draw("answer", style, labels, color=options.color, is_new=labels != inputs))
        texts.append(side_by_side(drawings) + "\n")
    print("\n".join(texts))
    if saved is not None:
        print(printable(known))


def _parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = OneLineParser("dataset.show", description=__doc__.partition("\n")[0])
    add_plugin_option(parser)
    parser.add_argument("data", type=Path, metavar="DATA", help="dataset folder")
    kind = "kind of puzzle, if the dataset does not determine it: tokens are then shown as numbers"
    parser.add_argument("--kind", help=kind)
    parser.add_argument("--split", choices=SPLITS, help="split (default train; with --outputs test)")
    parser.add_argument("--set", default="all", help="set of the split (default all)")
    index = "index of the first example, from 0 (default: show one example of each group)"
    parser.add_argument("--index", type=integer(at_least=0), help=index)
    count = "number of examples (default 1)"
    parser.add_argument("--count", type=integer(at_least=1), default=1, help=count)
    outputs = (
        "also show a model's answers, with wrong cells marked. FOLDER is the output_dir of an evaluation "
        f"with {_SAVED}"
    )
    parser.add_argument("--outputs", type=Path, metavar="FOLDER", help=outputs)
    colors, color = ("auto", "always", "never"), "auto (default): on a terminal, unless NO_COLOR is set"
    parser.add_argument("--color", choices=colors, default="auto", help=color)
    options = parser.parse_args(arguments)
    options.split = options.split or ("train" if options.outputs is None else "test")
    may_color = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    options.color = options.color == "always" or (options.color == "auto" and may_color)
    return options


def _read_outputs(folder: Path, set_name: str) -> tuple[dict[str, np.ndarray], str]:
    """Reads the answers of a model that an evaluation has saved in `folder`.

    Returns ({"inputs", "labels" and "preds": array [examples, seq_len]}, text with the accuracy). Raises
    ValueError if the files are missing or not valid.
    """
    try:
        saved = read_arrays(folder / f"{set_name}__outputs.npz", _NEEDED)
        arrays = dict(zip(_NEEDED, saved, strict=True))
        if any(array.ndim != 2 or array.shape != arrays["inputs"].shape for array in arrays.values()):
            raise ValueError("the arrays differ in shape")
        if any(array.dtype.kind not in "iu" for array in saved):
            raise ValueError("the arrays do not contain integers")
        metrics = dict(read_json(folder / "metrics.json")[set_name])
        known = "no labels, so no accuracy"
        if "exact_accuracy" in metrics:
            known = "exact accuracy {exact_accuracy:.4f} on {count} held-out puzzles".format(**metrics)
        return arrays, known
    except (ValueError, KeyError, TypeError) as error:
        again = f"Run evaluate.py with output_dir={folder} {_SAVED}."
        raise ValueError(f"cannot use the outputs in {folder} ({error!r}). {again}") from None


def _describe(puzzle_set: PuzzleSet, row: int, puzzle: int, names: list[str]) -> str:
    group = int(puzzle_set.group_indices.searchsorted(puzzle, side="right")) - 1
    identifier = int(puzzle_set.puzzle_identifiers[puzzle])
    name = names[identifier] if identifier < len(names) else "without a name"
    first_row, end_row = puzzle_set.puzzle_indices[puzzle : puzzle + 2].tolist()
    first_puzzle, end_puzzle = puzzle_set.group_indices[group : group + 2].tolist()
    return (
        f"example {row - first_row} of {end_row - first_row} in puzzle {puzzle}, "
        f"identifier {identifier}: {name}\n"
        f"puzzle {puzzle - first_puzzle} of {end_puzzle - first_puzzle} in group {group}"
    )


if __name__ == "__main__":
    main()
