"""Writes a trained model to weights/NAME: config, model card, and weights in the smallest safe dtype.

The weights are rounded to the smallest dtype that does not change any cell of the answers to some test
puzzles. The answers are compared twice: with a forward pass in float32, and in the model's forward_dtype. LDT
searches at random and may find no answer. For LDT, only puzzles with an answer before and after rounding are
compared. A dtype with which LDT answers over 5 % fewer puzzles is not used.
"""

import argparse
import re
from collections.abc import Sequence

import numpy as np
import torch

from checkpointing.files import SHARED_WEIGHTS_FILE
from checkpointing.finding import SHIPPED, Checkpoint, find_checkpoint
from checkpointing.loading import load_trained_model, load_weights
from dataset.build.writing import check_output_folder, replaced_folder
from dataset.metadata import Dataset
from dataset.mixture import open_datasets
from dataset.sets import ConcatenatedSet, PuzzleSet
from evaluation.passes import evaluate_split
from runtime.command_line import OneLineParser, add_plugin_option, integer, one_line_errors
from share.push import is_shared, round_weights, write_files

_DTYPES = (torch.float8_e4m3fn, torch.float16)  # tried in this order, before float32
_LEAST_ANSWERED = 0.95  # a search is random, so rounding may leave a few other puzzles without an answer


def main(arguments: Sequence[str] | None = None) -> None:
    with one_line_errors("share keep"):
        keep(_parse_options(arguments))


def _parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = OneLineParser("share keep", description=__doc__.partition("\n")[0])
    add_plugin_option(parser)
    run = "run folder (newest checkpoint), <run folder>/best, or <run folder>/step_<N>"
    parser.add_argument("run", metavar="RUN", help=run)
    parser.add_argument("name", metavar="NAME", help="name of the model. checkpoint=NAME loads it")
    data_path = "dataset folder that the card and config.json name (default: data_path of the run)"
    parser.add_argument("--data-path", metavar="PATH", help=data_path)
    count = "number of evenly spaced test puzzles per set to compare (default: 1000)"
    parser.add_argument("--count", type=integer(at_least=1), default=1000, metavar="N", help=count)
    return parser.parse_args(arguments)


def keep(options: argparse.Namespace) -> None:
    """Writes the weights, config and model card of a run into the folder weights/NAME.

    If the function raises ValueError, nothing is written.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.+-]*", options.name):
        raise ValueError(
            f"NAME {options.name!r} is not a valid folder name. Use letters, digits and _.+- only."
        )
    by_keep = {"is_made": is_shared, "maker": "share keep", "key": "NAME"}
    destination = check_output_folder(SHIPPED / options.name, **by_keep)
    checkpoint = find_checkpoint(options.run)
    if options.data_path and len(checkpoint.data_paths) > 1:
        raise ValueError(
            f"--data-path names one folder, but {options.run} has {len(checkpoint.data_paths)}. Remove it."
        )
    data = open_datasets(checkpoint.find_data(), splits=("test",), read_everything=False)
    dtype = choose_dtype(checkpoint, data, count=options.count)
    with replaced_folder(destination) as folder:
        settings = {"license": "apache-2.0", "dtype": dtype, "data_path": options.data_path}
        write_files(folder, checkpoint, options.name, **settings)
    size = (destination / SHARED_WEIGHTS_FILE).stat().st_size / 1e6
    print(f"wrote {destination}: {size:.2f} MB of {dtype}. To load it, set checkpoint={options.name}.")


def choose_dtype(checkpoint: Checkpoint, data: Dataset, *, count: int) -> torch.dtype:
    """Returns the first of float8_e4m3fn and float16 that passes a test. If neither passes, returns float32.

    A dtype fails if weights rounded to it change any answer, or if there is no answer to compare. For a
    search model (LDT), only puzzles with an answer before and after rounding are compared, and a dtype also
    fails if the rounded weights answer less than 95 % as many puzzles. The test runs twice: in float32, and
    in the model's forward_dtype. Prints how many answers change.

    count: Number of puzzles of each test set to compare.
    """
    formats = ["float32", checkpoint.arch.forward_dtype]
    expected = [answer(checkpoint, data, torch.float32, name, count=count) for name in formats]
    for dtype in _DTYPES:
        for forward_dtype, answers in zip(formats, expected, strict=True):
            found = answer(checkpoint, data, dtype, forward_dtype, count=count)
            both = [puzzle for puzzle in answers if puzzle in found]
            changed = sum((found[puzzle] != answers[puzzle]).any() for puzzle in both)
            print(f"weights in {dtype} change {changed} of {len(both)} answers, computed in {forward_dtype}")
            is_weaker = not both or len(found) < _LEAST_ANSWERED * len(answers)
            if is_weaker:
                print(f"weights in {dtype} answer {len(found)} puzzles, {len(answers)} before")
            if changed or is_weaker:
                break
        else:
            return dtype
    return torch.float32


def answer(
    checkpoint: Checkpoint, data: Dataset, dtype: torch.dtype, forward_dtype: str, *, count: int
) -> dict[tuple[str, int], np.ndarray]:
    """Returns the model's answers to test puzzles, with weights rounded to `dtype`.

    The answers are {(test set, i): tokens [seq_len]}. i is the index of an example among the evaluated
    examples of this set. Examples to which a search model (LDT) finds no answer are left out.

    forward_dtype: Dtype of the computation.
    count: Number of puzzles of each test set, evenly spaced.
    """
    model = load_trained_model(checkpoint, data.metadata, forward_dtype=forward_dtype)
    weights = load_weights(checkpoint)  # not yet rounded to forward_dtype, unlike the weights in `model`
    model.network.load_state_dict(round_weights(weights, dtype))
    sets = data.splits["test"].sets
    results = evaluate_split(
        model,
        data,
        global_batch_size=checkpoint.global_batch_size,
        outputs=["preds", "q_halt_logits"],
        puzzles={name: choose_puzzles(puzzle_set, count) for name, puzzle_set in sets.items()},
    )
    return {
        (set_name, index): tokens
        for set_name, result in results.items()
        for index, tokens in enumerate(result.outputs["preds"])
        if not model.network.is_search or result.outputs["q_halt_logits"][index] > 0
    }


def choose_puzzles(puzzle_set: PuzzleSet | ConcatenatedSet, count: int) -> np.ndarray:
    """Returns the indices of up to `count` evenly spaced puzzles of a test set, ascending int64 [n]."""
    num_puzzles = len(puzzle_set.puzzle_identifiers)
    count = min(count, num_puzzles)
    return np.arange(count) * num_puzzles // count
