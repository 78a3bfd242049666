"""The answers of a model to test puzzles after each thinking step, as data for a report."""

import base64
import dataclasses
import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from checkpointing.pretrained import find_checkpoint, load_trained_model
from dataset.description import DatasetInfo, read_info
from dataset.drawing import cells_of, page_style
from dataset.format import IGNORE_LABEL_ID, Dataset
from dataset.kinds.kind import Style, to_grid
from dataset.loader import choose_rows, names_of, original_rows, read_rows
from dataset.mixture import open_datasets
from distributed.number_format import choose_evaluation_format
from distributed.process_group import choose_device, set_cpu_threads
from distributed.progress import Progress
from evaluation.trace import Trace, record_trace
from models import HaltingModel
from models.compilation import eager_blocks
from models.search import Search

MAX_PICTURES_BYTES = 3_500_000  # in base64; a page may have 5 MB
_MOST_OF_SEARCH = 40  # puzzles; each takes a search of a hundred steps or more
_MOST_CELLS = 6_000_000  # of all puzzles and steps: some 0.5 GB while the page is made


@dataclasses.dataclass(frozen=True)
class TracedPuzzles:
    """Test puzzles, and the trace of a model on them: its answers after each thinking step.

    set_names     [n], the test set of each puzzle
    rows          int64 [n], the row of each puzzle in its test set
    names         [n], names of the puzzle identifiers; empty where the dataset has none
    inputs        int32 [n, seq_len]
    labels        int32 [n, seq_len]; IGNORE_LABEL_ID: the cell is not scored
    num_puzzles   number of puzzles in the test sets, not counting variants made by augmentation
    has_variants  whether the test sets have such variants
    """

    info: DatasetInfo
    set_names: list[str]
    rows: np.ndarray
    names: list[str]
    inputs: np.ndarray
    labels: np.ndarray
    trace: Trace
    num_puzzles: int
    has_variants: bool
    checkpoint: Path

    @property
    def is_wrong(self) -> np.ndarray:
        """Returns bool [n, steps, seq_len]: whether a scored cell of the answer differs from its label."""
        labels = self.labels[:, None]
        return (self.trace.preds != labels) & (labels != IGNORE_LABEL_ID)

    @property
    def is_right(self) -> np.ndarray:
        """Returns bool [n, steps]: whether the answer is right in all scored cells."""
        return ~self.is_wrong.any(axis=2)

    @property
    def is_search(self) -> bool:
        return self.trace.candidates.shape[2] > 0

    @property
    def has_labels(self) -> np.ndarray:
        return (self.labels != IGNORE_LABEL_ID).any(axis=1)


def trace_of_run(folder: Path, *, data: Sequence[Path] | None, num_puzzles: int) -> TracedPuzzles:
    """Runs the newest model of a run on its test puzzles. data: other dataset folders to take puzzles from.

    Raises ValueError, one line, where the checkpoint or the data is missing.
    """
    checkpoint = find_checkpoint(folder)
    opened = open_datasets(data or checkpoint.find_data(), splits=("test",), read_everything=False)
    set_cpu_threads("auto")
    device = choose_device("auto")
    forward_dtype = choose_evaluation_format(checkpoint.arch.forward_dtype, device).name
    model = load_trained_model(checkpoint, opened.metadata, forward_dtype=forward_dtype).to(device).eval()
    options = {"batch_size": checkpoint.global_batch_size, "path": checkpoint.path}
    return trace_puzzles(model, opened, num_puzzles=num_puzzles, **options)


def trace_puzzles(
    model: HaltingModel, data: Dataset, *, num_puzzles: int, batch_size: int, path: Path, seed: int = 0
) -> TracedPuzzles:
    """Runs a model in evaluation mode on up to `num_puzzles` test puzzles, evenly spaced, without variants.

    Runs in one process. A model that searches (LDT) gets 40 puzzles at most, as it is slow; of large
    puzzles or many steps fewer fit in memory. path: of the model's checkpoint. seed: of the noise in
    reasoning, if any.
    """
    sets = data.splits["test"].sets
    if isinstance(model.network, Search):
        num_puzzles = min(num_puzzles, _MOST_OF_SEARCH)
    cells = model.eval_reasoning("max").max_steps * data.metadata.seq_len
    num_puzzles = max(1, min(num_puzzles, _MOST_CELLS // cells))
    columns, traces, set_names = [], [], []
    device = next(model.network.parameters()).device
    for name, puzzle_set in sets.items():
        batch = read_rows(data, name, choose_rows(puzzle_set, -(-num_puzzles // len(sets))))
        set_names += [name] * len(batch.rows)
        columns.append([column.numpy() for column in batch])
        starts = range(0, len(batch.rows), batch_size)
        with eager_blocks():
            for start in Progress(
                iterable=starts, desc=f"thinking of {name}", unit="part", leave=False, delay=3
            ):
                part = batch.select(slice(start, start + batch_size)).to(device)
                traces.append(record_trace(model, part, seed=seed))
    inputs, labels, identifiers, rows = map(np.concatenate, zip(*columns, strict=True))
    return TracedPuzzles(
        info=read_info(data.folders, data.metadata),
        set_names=set_names,
        rows=rows,
        names=names_of(data, set_names, identifiers),
        inputs=inputs,
        labels=labels,
        trace=Trace(*map(np.concatenate, zip(*traces, strict=True))),
        num_puzzles=sum(len(original_rows(each)) for each in sets.values()),
        has_variants=any(len(original_rows(each)) < each.num_examples for each in sets.values()),
        checkpoint=path,
    )


def halting_histogram(puzzles: TracedPuzzles) -> tuple[list[int], list[int]]:
    """Returns, for each step, the number of right and of wrong answers, with labels, that halt there."""
    halts, num_steps = puzzles.trace.halting_steps, puzzles.trace.preds.shape[1]
    is_right = puzzles.is_right[np.arange(len(halts)), halts - 1]
    labelled = puzzles.has_labels
    counted = (labelled & is_right, labelled & ~is_right)
    right, wrong = (np.bincount(halts[of] - 1, minlength=num_steps) for of in counted)
    return right.tolist(), wrong.tolist()


def accuracy_after_steps(puzzles: TracedPuzzles) -> list[float]:
    """Returns the share of puzzles with a label that are right after each step."""
    labelled = puzzles.is_right[puzzles.has_labels]
    return labelled.mean(axis=0).tolist() if len(labelled) else []


def reliability(
    puzzles: TracedPuzzles, *, num_bins: int = 10
) -> tuple[list[tuple[float, float, int]], float] | None:
    """Compares sigmoid(q_halt), the Q head's probability of being right, with the share of right answers.

    Bins the answers after all steps by that probability. Returns (mean probability, share right, number of
    answers) for each bin with answers, and the expected calibration error (Guo et al. 2017, equation 3).
    Returns None where no puzzle has a label, and for a search, which has no such probability.
    """
    if puzzles.is_search or not puzzles.has_labels.any():
        return None
    predicted = _sigmoid(puzzles.trace.q_halt[puzzles.has_labels]).ravel()
    is_right = puzzles.is_right[puzzles.has_labels].ravel()
    indices = np.minimum((predicted * num_bins).astype(int), num_bins - 1)
    bins = [
        (float(predicted[of].mean()), float(is_right[of].mean()), int(of.sum()))
        for of in (indices == number for number in range(num_bins))
        if of.any()
    ]
    error = sum(count * abs(mean - share) for mean, share, count in bins) / len(predicted)
    return bins, error


def _sigmoid(values: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-values.astype(np.float64)))


def picture_data(puzzles: TracedPuzzles) -> dict[str, Any]:
    """Returns the data that the page draws, as JSON values: style of the grids, and puzzles, easiest first.

    A puzzle has flat lists of cells: `input`, `label`, and for each step `answers`, `confidences` (percent)
    and, of a search, `candidates` (bit t: token t is possible). `guesses`: for each step the guessed cell, or
    a negative code of `models.search`. `stays_right_from`: the step from which the answer stays right; null:
    wrong at the end. `rated`: percent for each step, sigmoid(q_halt) or, of a search, the decided cells.
    """
    style, trace, steps = puzzles.info.style, puzzles.trace, puzzles.trace.preds.shape[1]
    head = page_style(style, puzzles.info.metadata) | {"steps": steps, "clues": clue_tokens(puzzles)}
    head["is_search"] = puzzles.is_search
    right, has_labels = puzzles.is_right, puzzles.has_labels
    stays_right = np.flip(np.logical_and.accumulate(np.flip(right, axis=1), axis=1), axis=1)
    settled = np.where(right[:, -1], stays_right.argmax(axis=1) + 1, steps + 1)
    num_cells = np.maximum((puzzles.labels != IGNORE_LABEL_ID).sum(axis=1), 1)
    shares = puzzles.is_wrong.sum(axis=2) / num_cells[:, None]
    rated = _sigmoid(trace.q_halt)
    if puzzles.is_search:
        rated = (trace.candidates & (trace.candidates - 1) == 0).mean(axis=2)
    rated = np.rint(100 * rated).astype(int)
    order = np.lexsort((puzzles.rows, shares.mean(axis=1), shares[:, -1], settled))
    drawn = [
        {
            "set": puzzles.set_names[index],
            "row": int(puzzles.rows[index]),
            "name": puzzles.names[index],
            "halts_at": int(trace.halting_steps[index]),
            "stays_right_from": int(settled[index]) if has_labels[index] and right[index, -1] else None,
            "has_label": bool(has_labels[index]),
            "rated": rated[index].tolist(),
            **_grids(style, puzzles.inputs[index], puzzles.labels[index], trace, index),
        }
        for index in order.tolist()
    ]
    return head | {"puzzles": drawn}


def clue_tokens(puzzles: TracedPuzzles) -> list[int]:
    """Returns the tokens that are always clues: where a puzzle has such a token, the label has it too."""
    is_counted, is_same = puzzles.labels != IGNORE_LABEL_ID, puzzles.inputs == puzzles.labels
    if (first := puzzles.info.style.first_of_field) is not None:
        if ((puzzles.inputs >= first) != (puzzles.labels >= first)).any():  # the answer has another shape
            return []
        is_counted &= puzzles.inputs >= first
    kept, lost = (set(puzzles.inputs[is_counted & of].tolist()) for of in (is_same, ~is_same))
    return sorted(kept - lost)


def _grids(style: Style, tokens: np.ndarray, label: np.ndarray, trace: Trace, index: int) -> dict[str, Any]:
    """Returns the grids of puzzle `index` for `picture_data`; answers are cut to the shape of the label."""
    of_input, of_answer = cells_of(style, tokens), cells_of(style, label, frame=label)
    if (label == IGNORE_LABEL_ID).all():
        of_answer = to_grid(np.arange(len(label)), num_columns=style.num_columns)
    cells = of_answer.ravel()
    position = {cell: number for number, cell in enumerate(cells.tolist())}
    return {
        "input_columns": of_input.shape[1],
        "input": tokens[of_input.ravel()].tolist(),
        "columns": of_answer.shape[1],
        "label": label[cells].tolist(),
        "answers": trace.preds[index][:, cells].tolist(),
        "confidences": np.floor(100 * trace.confidence[index][:, cells]).astype(int).tolist(),
        "candidates": trace.candidates[index][:, cells if trace.candidates.size else []].tolist(),
        "guesses": [position.get(cell, cell) for cell in trace.guesses[index].tolist()],
    }


def pack(content: Mapping[str, Any], *, max_bytes: int = MAX_PICTURES_BYTES) -> tuple[str, int]:
    """Packs the result of `picture_data` as base64 of deflated JSON; returns text and number of puzzles.

    Drops every second puzzle until the text fits into `max_bytes`.
    """
    puzzles = content["puzzles"]
    while True:
        text = json.dumps({**content, "puzzles": puzzles}, separators=(",", ":"))
        packed = base64.b64encode(zlib.compress(text.encode())).decode()
        if len(packed) <= max_bytes or len(puzzles) <= 1:
            return packed, len(puzzles)
        puzzles = puzzles[::2]
