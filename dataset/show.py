"""Prints puzzles of a dataset, and a model's answers to them, in the terminal.

python -m dataset.show data/demo --index 3
python -m dataset.show data/demo --outputs checkpoints/demo/evaluation/step_100 --count 3
"""

import argparse
import json
import os
import re
import sys
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dataset.command_line import integer, one_line_errors, one_line_parser
from dataset.drawing import draw_input, draw_label, draw_prediction, kind_of, side_by_side
from dataset.format import IGNORE_LABEL_ID, MANIFEST, SPLITS, Split, open_split
from dataset.puzzle_set import PuzzleSet

_NEEDED = ("inputs", "labels", "preds")
_DIHEDRAL_WORDS = (
    "",
    "turned by 90 degrees counterclockwise",
    "turned by 180 degrees",
    "turned by 90 degrees clockwise",
    "mirrored left to right",
    "mirrored top to bottom",
    "transposed",
    "transposed along the other diagonal",
)
_ARC_VARIANT = re.compile(r"\|\|\|t([0-7])\|\|\|(\d{10})$")  # in names as the public tools write them


class Outputs(NamedTuple):
    """What an evaluation saved of one set: arrays [rows, seq_len], of each row, and its metrics."""

    inputs: np.ndarray
    labels: np.ndarray
    preds: np.ndarray
    metrics: dict


def main(arguments: Sequence[str] | None = None) -> None:
    with one_line_errors("show"):
        show(_parse_options(arguments))


def show(options: argparse.Namespace) -> None:
    """Prints what the options ask for. ValueError where it is not there."""
    data = open_split(options.data, options.split)
    where = f"{options.data} ({options.split} split)"
    if options.set not in data.sets:
        raise ValueError(f"{where} has no set {options.set!r}: choose --set from {', '.join(data.sets)}")
    puzzle_set = data.sets[options.set]
    if options.index >= puzzle_set.num_examples:
        last = puzzle_set.num_examples - 1
        raise ValueError(
            f"--index {options.index} is out of range: set {options.set!r} of {where} has 0..{last}"
        )
    names = _identifier_names(options.data)
    outputs = None
    if options.outputs is not None:
        outputs = _read_outputs(options.outputs, options.set)
        if outputs.inputs.shape != (puzzle_set.num_examples, data.metadata.seq_len):
            raise ValueError(f"{options.outputs} has outputs of another dataset than {where}")

    texts = []
    for row in range(options.index, min(options.index + options.count, puzzle_set.num_examples)):
        texts.append(_place_in_words(options, puzzle_set, row, names))
        texts.append(_grids(options, data, puzzle_set, row, outputs) + "\n")
    print("\n".join(texts))
    if outputs is not None:
        print(_accuracy_in_words(outputs.metrics))


def _parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = one_line_parser("dataset.show", description=__doc__.partition("\n")[0])
    parser.add_argument("data", type=Path, metavar="DATA", help="folder of a dataset")
    parser.add_argument("--split", choices=SPLITS, help="default train, and test with --outputs")
    parser.add_argument("--set", default="all", help="which set of the split (default all)")
    parser.add_argument(
        "--index", type=integer(at_least=0), default=0, help="which example of the set, from 0 (default 0)"
    )
    parser.add_argument("--count", type=integer(at_least=1), default=1, help="how many examples (default 1)")
    parser.add_argument(
        "--outputs",
        type=Path,
        metavar="FOLDER",
        help="also what a model answered, wrong cells marked: the output_dir of evaluate.py with "
        f"save_outputs=[{','.join(_NEEDED)}]",
    )
    parser.add_argument(
        "--color",
        choices=("auto", "always", "never"),
        default="auto",
        help="default auto: on a terminal, unless NO_COLOR is set",
    )
    options = parser.parse_args(arguments)
    options.split = options.split or ("train" if options.outputs is None else "test")
    if options.color == "auto":
        options.color = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    else:
        options.color = options.color == "always"
    return options


# ---------------------------------------------------------------------------------------------------- reading


def _identifier_names(folder: Path) -> list[str]:
    """Empty where the dataset has none."""
    path = folder / "identifiers.json"
    try:
        names = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error})") from None
    return [str(name) for name in names] if isinstance(names, list) else []


def _builder(folder: Path) -> str | None:
    """The module that made the dataset, where a manifest says so."""
    try:
        return json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["builder"]["module"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _read_outputs(folder: Path, set_name: str) -> Outputs:
    path, metrics = folder / f"{set_name}__outputs.npz", folder / "metrics.json"
    again = f"run evaluate.py with output_dir={folder} save_outputs=[{','.join(_NEEDED)}]"
    try:
        with path.open("rb") as file, np.load(file) as saved:
            if missing := [name for name in _NEEDED if name not in saved]:
                raise ValueError(f"it lacks {', '.join(missing)}")
            arrays = [saved[name] for name in _NEEDED]
        if any(array.ndim != 2 or array.shape != arrays[0].shape for array in arrays):
            raise ValueError("its arrays differ in shape")
    except (OSError, ValueError, EOFError, TypeError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"cannot use {path} ({error}): {again}") from None
    try:
        return Outputs(*arrays, metrics=dict(json.loads(metrics.read_text(encoding="utf-8"))[set_name]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"cannot use {metrics} ({error!r}): {again}") from None


# --------------------------------------------------------------------------------------------------- printing


def _place_in_words(options: argparse.Namespace, puzzle_set: PuzzleSet, row: int, names: list[str]) -> str:
    """Which example it is, and how it was made. All numbers count from 0."""
    puzzle = int(puzzle_set.puzzle_indices.searchsorted(row, side="right")) - 1
    group = int(puzzle_set.group_indices.searchsorted(puzzle, side="right")) - 1
    identifier = int(puzzle_set.puzzle_identifiers[puzzle])
    name = names[identifier] if identifier < len(names) else "without a name"
    first_row, end_row = puzzle_set.puzzle_indices[puzzle : puzzle + 2].tolist()
    first_puzzle, end_puzzle = puzzle_set.group_indices[group : group + 2].tolist()
    lines = (
        f"{options.split}/{options.set}, example {row}",
        f"puzzle {puzzle} (its example {row - first_row} of {end_row - first_row}), "
        f"identifier {identifier}: {name}",
        f"group {group} (its puzzle {puzzle - first_puzzle} of {end_puzzle - first_puzzle})",
        f"augmentation: {_augmentation_in_words(puzzle_set, row, puzzle, name)}",
    )
    return "\n".join(lines)


def _augmentation_in_words(puzzle_set: PuzzleSet, row: int, puzzle: int, name: str) -> str:
    if puzzle_set.augmentation is None:
        if variant := _ARC_VARIANT.search(name):
            return _arc_in_words(int(variant[1]), [int(digit) for digit in variant[2]], [0, 0])
        return "not recorded"
    transform = puzzle_set.transforms[puzzle].tolist()
    if puzzle_set.augmentation == "sudoku":
        return _sudoku_in_words(transform)
    if puzzle_set.augmentation == "arc":
        return _arc_in_words(transform[0], transform[1:], puzzle_set.translations[row].tolist())
    return _DIHEDRAL_WORDS[transform[0]] or "none"


def _sudoku_in_words(transform: list[int]) -> str:
    size = (len(transform) - 1) // 3
    rows, columns, digits = (transform[1 + part * size : 1 + (part + 1) * size] for part in range(3))
    words = []
    for lines, order in (("rows", rows), ("columns", columns)):
        if order != sorted(order):
            words.append(f"{lines} in the order {' '.join(str(line + 1) for line in order)}")
    if transform[0]:
        words.append("transposed")
    if digits != sorted(digits):
        words.append(f"digits {' '.join(map(str, sorted(digits)))} become {' '.join(map(str, digits))}")
    return ", then ".join(words) or "none"


def _arc_in_words(number: int, colors: list[int], translation: list[int]) -> str:
    words = [_DIHEDRAL_WORDS[number]] if number else []
    if changed := [f"{old} becomes {new}" for old, new in enumerate(colors) if old != new]:
        words.append(f"colours: {', '.join(changed)}")
    if any(translation):
        words.append(f"moved {translation[0]} down and {translation[1]} right")
    return "; ".join(words) or "none"


def _grids(
    options: argparse.Namespace, data: Split, puzzle_set: PuzzleSet, row: int, outputs: Outputs | None
) -> str:
    metadata = data.metadata
    kind = kind_of(_builder(options.data), vocab_size=metadata.vocab_size, seq_len=metadata.seq_len)
    puzzles = puzzle_set.puzzle_indices.searchsorted([row], side="right") - 1
    inputs, labels = (tokens[0] for tokens in puzzle_set.read(np.array([row]), puzzles))
    drawings = [draw_input(kind, inputs, color=options.color)]
    if outputs is not None:
        if not np.array_equal(outputs.inputs[row], inputs):
            raise ValueError(f"{options.outputs} has outputs of other puzzles than {options.data}")
        saved, predicted = outputs.labels[row], outputs.preds[row]
        is_wrong = (predicted != saved) & (saved != IGNORE_LABEL_ID)
        drawings.append(draw_prediction(kind, predicted, labels, is_wrong, color=options.color))
    drawings.append(draw_label(kind, labels, inputs, color=options.color))
    return side_by_side(drawings)


def _accuracy_in_words(metrics: dict) -> str:
    if "exact_accuracy" not in metrics:
        return "no labels, so no accuracy"
    return f"exact accuracy {metrics['exact_accuracy']:.4f} on {metrics['count']} held-out puzzles"


if __name__ == "__main__":
    main()
