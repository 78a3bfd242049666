"""The model at work on test puzzles: what it answers after each step, as the page draws it and sums it up."""

import base64
import dataclasses
import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from checkpointing.pretrained import find_checkpoint, load_trained_model
from dataset.description import read_info
from dataset.drawing import crop
from dataset.format import IGNORE_LABEL_ID, Dataset
from dataset.kinds.kind import Style, to_grid
from dataset.loader import Batch, choose_rows, names_of, original_rows, read_rows
from dataset.mixture import open_datasets
from evaluation.trace import Trace, record_trace
from models import HaltingModel
from models.compilation import eager_blocks
from parallel.process_group import choose_device, set_cpu_threads

MAX_PICTURES_BYTES = 3_500_000  # of a page's 5 MB, as it holds them


@dataclasses.dataclass(frozen=True)
class Thinking:
    """What a model thought of test puzzles, one after the other.

    kind         of puzzle, such as "sudoku"; None where it is none that is known
    set_names    [n], of the sets that they are from
    rows         int64 [n], their places in these sets
    names        [n], of their puzzle identifiers, where the dataset names them; else empty texts
    inputs       int32 [n, seq_len]
    labels       int32 [n, seq_len], IGNORE_LABEL_ID where a cell counts nowhere
    num_puzzles  how many examples could have been chosen: those that are no variants of others
    has_variants whether there are such others
    checkpoint   where the model is from
    """

    kind: str | None
    look: Style
    vocab_size: int
    set_names: list[str]
    rows: np.ndarray
    names: list[str]
    inputs: np.ndarray
    labels: np.ndarray
    thoughts: Trace
    num_puzzles: int
    has_variants: bool
    checkpoint: Path

    @property
    def is_wrong(self) -> np.ndarray:
        """Whether each cell of each answer differs from its label: bool [n, steps, seq_len]."""
        labels = self.labels[:, None]
        return (self.thoughts.preds != labels) & (labels != IGNORE_LABEL_ID)

    @property
    def is_right(self) -> np.ndarray:
        """Whether each answer is right in all cells: bool [n, steps]."""
        return ~self.is_wrong.any(axis=2)

    @property
    def has_labels(self) -> np.ndarray:
        return (self.labels != IGNORE_LABEL_ID).any(axis=1)


# --------------------------------------------------------------------------------------------------- thinking


def think_of_run(folder: Path, *, data: Sequence[Path] | None, num_puzzles: int) -> Thinking:
    """Runs the newest model of a run on its test puzzles, or on those of other dataset folders.

    ValueError, one line, where the checkpoint or the data is not there.
    """
    checkpoint = find_checkpoint(folder)
    opened = open_datasets(data or checkpoint.find_data(), splits=("test",), read_everything=False)
    device = choose_device("auto")
    set_cpu_threads("auto")
    model = load_trained_model(checkpoint, opened.metadata).to(device).eval()
    return think(
        model, opened, num_puzzles=num_puzzles, batch_size=checkpoint.global_batch_size, path=checkpoint.path
    )


def think(
    model: HaltingModel, data: Dataset, *, num_puzzles: int, batch_size: int, path: Path, seed: int = 0
) -> Thinking:
    """Runs a model in evaluation mode on test puzzles, evenly chosen among those that are no variants.

    One process is enough. path: of its checkpoint. seed: of the noise, where there is any.
    """
    sets = data.splits["test"].sets
    share = -(-num_puzzles // len(sets))
    columns, thoughts, set_names = [], [], []
    device = next(model.network.parameters()).device
    for name, puzzle_set in sets.items():
        batch = read_rows(data, name, choose_rows(puzzle_set, share))
        set_names += [name] * len(batch.rows)
        columns.append([column.numpy() for column in batch])
        with eager_blocks():
            starts = range(0, len(batch.rows), batch_size)
            for start in tqdm(starts, desc=f"thinking of {name}", leave=False, delay=3):
                part = Batch(*(column[start : start + batch_size] for column in batch)).to(device)
                thoughts.append(record_trace(model, part, seed=seed))
    inputs, labels, identifiers, rows = map(np.concatenate, zip(*columns, strict=True))
    facts = read_info(data.folders, data.metadata)
    return Thinking(
        kind=facts.kind.name if facts.kind else None,
        look=facts.style,
        vocab_size=data.metadata.vocab_size,
        set_names=set_names,
        rows=rows,
        names=names_of(data, set_names, identifiers),
        inputs=inputs,
        labels=labels,
        thoughts=Trace(*map(np.concatenate, zip(*thoughts, strict=True))),
        num_puzzles=sum(len(original_rows(each)) for each in sets.values()),
        has_variants=any(len(original_rows(each)) < each.num_examples for each in sets.values()),
        checkpoint=path,
    )


# ---------------------------------------------------------------------------------------------------- summing


def halting_histogram(thinking: Thinking) -> list[tuple[int, int]]:
    """Counts for each step the puzzles that the Q head stops there: (right ones, wrong ones)."""
    halts = thinking.thoughts.halting_steps
    right = thinking.is_right[np.arange(len(halts)), halts - 1]
    steps = range(1, thinking.thoughts.preds.shape[1] + 1)
    return [(int((right & (halts == k)).sum()), int((~right & (halts == k)).sum())) for k in steps]


def accuracy_after_steps(thinking: Thinking) -> list[float]:
    """Returns the share of labelled puzzles that are right after each step."""
    labelled = thinking.is_right[thinking.has_labels]
    return labelled.mean(axis=0).tolist() if len(labelled) else []


@dataclasses.dataclass(frozen=True)
class Reliability:
    """How well the Q head knows whether an answer is right.

    bins: (mean probability said, share that is right, number of answers) of each tenth that has answers.
    error: the expected calibration error, the mean distance of the two (Guo et al. 2017, equation 3).
    """

    bins: list[tuple[float, float, int]]
    error: float


def reliability(thinking: Thinking, *, num_bins: int = 10) -> Reliability | None:
    """Compares the probability that the Q head gives each answer, sigmoid(q_halt), with how many are right.

    Over the answers after every step; None where no puzzle has a label.
    """
    has_labels = thinking.has_labels
    if not has_labels.any():
        return None
    said = _sigmoid(thinking.thoughts.q_halt[has_labels]).ravel()
    right = thinking.is_right[has_labels].ravel()
    places = np.minimum((said * num_bins).astype(int), num_bins - 1)
    bins = []
    for number in range(num_bins):
        here = places == number
        if here.any():
            bins.append((float(said[here].mean()), float(right[here].mean()), int(here.sum())))
    error = sum(count * abs(mean - share) for mean, share, count in bins) / len(said)
    return Reliability(bins, error)


def _sigmoid(values: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-values.astype(np.float64)))


# --------------------------------------------------------------------------------------------------- pictures


def pictures(thinking: Thinking) -> dict[str, Any]:
    """Makes what the page draws, as JSON can hold it: the look of the grids, and the puzzles, easiest first.

    A puzzle has its cells row by row, of the part that its grid takes of a field: `input`, and for the answer
    `label`, `answers` and `confidences` (percent) after each step. `stays_right_from`: the first step from
    which the answer is right to the end, null where it is wrong at the end; `rated`: what the Q head says
    after each step, in percent.
    """
    look, thoughts = thinking.look, thinking.thoughts
    tokens = range(thinking.vocab_size)
    texts = [look.symbol(token) for token in tokens]
    head = {
        "steps": thoughts.preds.shape[1],
        "num_tokens": thinking.vocab_size,
        "symbols": texts,
        "blanks": [token for token in tokens if look.is_blank(token)],
        "colors": {str(token): color for token, color in look.colors.items()},
        "box": look.boxes.get(thinking.inputs.shape[1]),
        "clues": clue_tokens(thinking),
        "is_field": look.first_of_field is not None,
    }
    wrong_cells, right = thinking.is_wrong.sum(axis=2), thinking.is_right
    from_here = np.flip(np.logical_and.accumulate(np.flip(right, axis=1), axis=1), axis=1)
    settled = np.where(right[:, -1], from_here.argmax(axis=1) + 1, head["steps"] + 1)
    shares = wrong_cells / np.maximum((thinking.labels != IGNORE_LABEL_ID).sum(axis=1), 1)[:, None]
    order = np.lexsort((thinking.rows, shares.mean(axis=1), shares[:, -1], settled))
    rated = np.rint(100 * _sigmoid(thoughts.q_halt)).astype(int)
    puzzles = []
    for place in order.tolist():
        cells = {"input": thinking.inputs[place], "label": thinking.labels[place]}
        has_label, is_right = bool(thinking.has_labels[place]), bool(right[place, -1])
        puzzles.append(
            {
                "set": thinking.set_names[place],
                "row": int(thinking.rows[place]),
                "name": thinking.names[place],
                "halts_at": int(thoughts.halting_steps[place]),
                "stays_right_from": int(settled[place]) if has_label and is_right else None,
                "has_label": has_label,
                "rated": rated[place].tolist(),
                **_cropped(look, **cells, preds=thoughts.preds[place], confidence=thoughts.confidence[place]),
            }
        )
    return head | {"puzzles": puzzles}


def clue_tokens(thinking: Thinking) -> list[int]:
    """Returns the tokens that the answer has wherever the puzzle has them: they are given, not guessed."""
    if thinking.look.first_of_field is not None:  # the answer is another grid
        return []
    counted = thinking.labels != IGNORE_LABEL_ID
    kept = thinking.inputs[counted & (thinking.inputs == thinking.labels)]
    lost = thinking.inputs[counted & (thinking.inputs != thinking.labels)]
    return sorted(set(np.unique(kept).tolist()) - set(np.unique(lost).tolist()))


def _cropped(
    look: Style, *, input: np.ndarray, label: np.ndarray, preds: np.ndarray, confidence: np.ndarray
) -> dict[str, Any]:
    """Returns the cells of the grids, and their numbers of columns; the answers have the label's frame."""
    columns = look.num_columns
    places = to_grid(np.arange(len(input)), num_columns=columns)
    of_input = of_answer = places
    if look.first_of_field is not None:
        of_input = crop(places, to_grid(input >= look.first_of_field, num_columns=columns))
        if (label != IGNORE_LABEL_ID).any():
            of_answer = crop(places, to_grid(label >= look.first_of_field - 1, num_columns=columns))
    percent = np.floor(100 * confidence).astype(int)
    return {
        "input_columns": of_input.shape[1],
        "input": input[of_input.ravel()].tolist(),
        "columns": of_answer.shape[1],
        "label": label[of_answer.ravel()].tolist(),
        "answers": preds[:, of_answer.ravel()].tolist(),
        "confidences": percent[:, of_answer.ravel()].tolist(),
    }


def pack(content: Mapping[str, Any], *, max_bytes: int = MAX_PICTURES_BYTES) -> tuple[str, int]:
    """Packs the pictures as base64 of deflated JSON; returns it and how many puzzles it holds.

    Every second puzzle is left out until it is not longer than max_bytes.
    """
    puzzles = content["puzzles"]
    while True:
        text = json.dumps({**content, "puzzles": puzzles}, separators=(",", ":"))
        packed = base64.b64encode(zlib.compress(text.encode())).decode()
        if len(packed) <= max_bytes or len(puzzles) <= 1:
            return packed, len(puzzles)
        puzzles = puzzles[::2]
