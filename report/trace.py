"""Runs a model on test puzzles, and returns its answers after each thinking step, for a report."""

import base64
import dataclasses
import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from checkpointing.finding import find_checkpoint
from checkpointing.loading import load_trained_model
from dataset.description import DatasetInfo, read_info
from dataset.drawing import cells_of, page_style
from dataset.kinds.kind import Style, to_grid
from dataset.loader import choose_rows, names_of, original_rows, read_rows
from dataset.metadata import IGNORE_LABEL_ID, Dataset
from dataset.mixture import open_datasets
from distributed.backend import choose_device, set_cpu_threads
from distributed.number_format import choose_evaluation_format
from distributed.progress import Progress
from evaluation.known import find_match, known_puzzles
from evaluation.trace import Trace, record_trace
from models import HaltingModel
from models.compilation import eager_blocks

MAX_PICTURES_BYTES = 3_500_000  # size in base64; a page should stay below 5 MB
_MOST_OF_SEARCH = 40  # puzzles; each search takes a hundred steps or more
_MOST_CELLS = 6_000_000  # cells over all puzzles and steps; the page then takes about 0.5 GB of memory


@dataclasses.dataclass(frozen=True)
class TracedPuzzles:
    """Test puzzles, and the answers of a model to them after each thinking step.

    info          description of the dataset
    set_names     name of the test set of each puzzle, [n]
    rows          index of each puzzle in its test set, int64 [n]
    names         name of each puzzle, [n]. "" for a puzzle without a name
    inputs        tokens, int32 [n, seq_len]
    labels        tokens of the right answers, int32 [n, seq_len]. Cells with IGNORE_LABEL_ID are not scored.
                  If a puzzle has several right answers and the model's last answer is one of them, the label
                  is the model's last answer
    trace         answers and probabilities after each step (`evaluation.trace.Trace`)
    is_search     whether the model is a search (LDT). With many tokens, its trace has no candidates
    num_puzzles   number of puzzles in the complete test sets. Augmented variants do not count
    has_variants  whether the test sets contain augmented variants of puzzles
    checkpoint    path of the checkpoint
    """

    info: DatasetInfo
    set_names: list[str]
    rows: np.ndarray
    names: list[str]
    inputs: np.ndarray
    labels: np.ndarray
    trace: Trace
    is_search: bool
    num_puzzles: int
    has_variants: bool
    checkpoint: Path

    @property
    def is_wrong(self) -> np.ndarray:
        """Whether a scored cell is wrong after each thinking step: bool [n, steps, seq_len]."""
        labels = self.labels[:, None]
        return (self.trace.preds != labels) & (labels != IGNORE_LABEL_ID)

    @property
    def is_right(self) -> np.ndarray:
        """Whether all scored cells are right after each thinking step: bool [n, steps]."""
        return ~self.is_wrong.any(axis=2)

    @property
    def has_candidates(self) -> bool:
        return self.trace.candidates.shape[2] > 0

    @property
    def has_labels(self) -> np.ndarray:
        return (self.labels != IGNORE_LABEL_ID).any(axis=1)


def trace_of_run(
    folder: Path, *, data: Sequence[Path] | None, num_puzzles: int, device: torch.device | None = None
) -> TracedPuzzles:
    """Runs the model of a run on test puzzles, and returns its answer after each thinking step.

    Raises ValueError if the checkpoint or the data are missing, if the model was trained on another
    vocabulary or another puzzle size, or if it has no embedding for any test puzzle.

    folder: Run folder. Its newest checkpoint is used.
    data: Dataset folders. If None, the data of the run.
    num_puzzles: Approximate number of puzzles. For a search model (LDT), about `_MOST_OF_SEARCH` at most.
    device: Device of the model. If None, this function chooses a GPU if there is one. It then also sets the
    number of CPU threads of this process.
    """
    checkpoint = find_checkpoint(folder)
    opened = open_datasets(data or checkpoint.find_data(), splits=("test",), read_everything=False)
    if device is None:
        set_cpu_threads("auto")
        device = choose_device("auto")
    arch = checkpoint.arch
    forward_dtype = choose_evaluation_format(arch.forward_dtype, device, allowed=arch.formats).name
    match = find_match(checkpoint, opened)
    opened, puzzles, _ = known_puzzles(opened, match, model=str(checkpoint))
    options = {"forward_dtype": forward_dtype, "rows": match and match.rows}
    model = load_trained_model(checkpoint, opened.metadata, **options).to(device).eval()
    options = {"batch_size": checkpoint.global_batch_size, "path": checkpoint.path, "puzzles": puzzles}
    return trace_puzzles(model, opened, num_puzzles=num_puzzles, **options)


def trace_puzzles(
    model: HaltingModel,
    data: Dataset,
    *,
    num_puzzles: int,
    batch_size: int,
    path: Path,
    seed: int = 0,
    puzzles: Mapping[str, np.ndarray] | None = None,
) -> TracedPuzzles:
    """Runs a model on test puzzles, and returns its answer after each thinking step.

    Every puzzle gets all thinking steps that an evaluation allows (arch.eval_halt_max_steps, or
    arch.halt_max_steps if that is not set), even if the model would halt earlier. The puzzles are evenly
    spaced in the test sets, without augmented variants.

    num_puzzles: Number of puzzles. Each test set gets an equal part, rounded up. A larger number than
    `_MOST_OF_SEARCH` counts as that number for a search model (LDT). If the answers after all steps need too
    much memory, the number is smaller.
    batch_size: Number of puzzles that the model solves at a time.
    path: Path of the checkpoint. It is only stored in the result.
    seed: Seed of the random noise of the model.
    puzzles: {test set: indices of the puzzles to choose from, int64 [n]}. If None, all puzzles.
    """
    sets = data.splits["test"].sets
    if model.network.is_search:
        num_puzzles = min(num_puzzles, _MOST_OF_SEARCH)
    cells = model.eval_reasoning("max").max_steps * data.metadata.seq_len
    num_puzzles = max(1, min(num_puzzles, _MOST_CELLS // cells))
    columns, traces, set_names = [], [], []
    device = next(model.network.parameters()).device
    for set_name, puzzle_set in sets.items():
        chosen = choose_rows(puzzle_set, -(-num_puzzles // len(sets)), puzzles and puzzles[set_name])
        batch = read_rows(data, set_name, chosen)
        set_names += [set_name] * len(batch.rows)
        columns.append([column.numpy() for column in batch if column is not None])
        starts = range(0, len(batch.rows), batch_size)
        bar = Progress(iterable=starts, desc=f"solving {set_name}", unit="batches", leave=False, delay=3)
        with eager_blocks():
            for start in bar:
                part = batch.select(slice(start, start + batch_size)).to(device)
                traces.append(record_trace(model, part, seed=seed))
    inputs, labels, identifiers, rows = map(np.concatenate, zip(*columns, strict=True))
    trace = Trace(*map(np.concatenate, zip(*traces, strict=True)))
    info = read_info(data.folders, data.metadata)
    return TracedPuzzles(
        info=info,
        set_names=set_names,
        rows=rows,
        names=names_of(data, set_names, identifiers),
        inputs=inputs,
        labels=info.labels_for(inputs, labels, trace.preds[:, -1]),
        trace=trace,
        is_search=model.network.is_search,
        num_puzzles=sum(len(original_rows(test_set)) for test_set in sets.values()),
        has_variants=any(len(original_rows(test_set)) < test_set.num_examples for test_set in sets.values()),
        checkpoint=path,
    )


def halting_histogram(puzzles: TracedPuzzles) -> tuple[list[int], list[int]]:
    """Counts the puzzles for which the model would halt after 1, 2, ... thinking steps.

    Returns (right, wrong), two lists of counts. `right` counts the puzzles with a right answer in the step of
    halting, `wrong` those with a wrong answer. If the model would never halt, the puzzle counts in the last
    step. Puzzles without a label do not count.
    """
    halts, num_steps = puzzles.trace.halting_steps, puzzles.trace.preds.shape[1]
    is_right = puzzles.is_right[np.arange(len(halts)), halts - 1]
    labelled = puzzles.has_labels
    counted = (labelled & is_right, labelled & ~is_right)
    right, wrong = (np.bincount(halts[of] - 1, minlength=num_steps) for of in counted)
    return right.tolist(), wrong.tolist()


def accuracy_after_steps(puzzles: TracedPuzzles) -> list[float]:
    """Returns the fraction of right answers after 1, 2, ... thinking steps.

    Puzzles without a label do not count. If no puzzle has a label, the list is empty.
    """
    labelled = puzzles.is_right[puzzles.has_labels]
    return labelled.mean(axis=0).tolist() if len(labelled) else []


def reliability(
    puzzles: TracedPuzzles, *, num_bins: int = 10
) -> tuple[list[tuple[float, float, int]], float] | None:
    """Compares how sure the model is with how often its answers are right (calibration).

    Answers with similar predicted probabilities of being right form a bin. Returns (bins, expected
    calibration error of Guo et al. 2017). A bin is (mean probability, fraction of right answers, number of
    answers). Returns None if no puzzle has a label. Also returns None for a search (LDT), because it predicts
    no probability.
    """
    if puzzles.is_search or not puzzles.has_labels.any():
        return None
    predicted = _sigmoid(puzzles.trace.q_halt[puzzles.has_labels]).ravel()
    is_right = puzzles.is_right[puzzles.has_labels].ravel()
    indices = np.minimum((predicted * num_bins).astype(int), num_bins - 1)
    bins = [
        (float(predicted[of].mean()), float(is_right[of].mean()), int(of.sum()))
        for of in (indices == bin_index for bin_index in range(num_bins))
        if of.any()
    ]
    error = sum(count * abs(mean - share) for mean, share, count in bins) / len(predicted)
    return bins, error


def _sigmoid(values: np.ndarray) -> np.ndarray:
    return np.nan_to_num(1 / (1 + np.exp(-values.astype(np.float64))))  # NaN becomes 0


def picture_data(puzzles: TracedPuzzles) -> dict[str, Any]:
    """Returns the data for drawing the puzzles on the page: {"puzzles": list, ...} for JSON.

    Puzzles that the model solves in fewer thinking steps come first. The keys of a puzzle are, among others:

    input, label      list of tokens
    halts_at          number of the step after which the model would halt. null if it would never halt
    answers           for each step, a list of tokens
    confidences       for each step, the confidence in each cell: a list of integers from 0 to 100
    stays_right_from  the first step (from 1) from which the answer stays right. null if the last answer is
                      wrong or the puzzle has no label
    is_undecided      whether a search model (LDT) ended without an answer
    rated             for each step, from 0 to 100: the predicted probability that the answer is right. For a
                      search model: the percentage of cells with at most one possible token. With more than 31
                      tokens: 100 if the search is solved, otherwise 0
    candidates        only for a search model with at most 31 tokens: for each step, a list of bit masks of
                      possible tokens
    guesses           for each step, the index of the cell that a search model guesses. Negative: no guess
    """
    style, trace, steps = puzzles.info.style, puzzles.trace, puzzles.trace.preds.shape[1]
    head = page_style(style, puzzles.info.metadata) | {"steps": steps, "clues": clue_tokens(puzzles)}
    head |= {"is_search": puzzles.is_search, "has_candidates": puzzles.has_candidates}
    is_undecided = puzzles.is_search & ~trace.wants_to_halt.any(axis=1)
    right, has_labels = puzzles.is_right, puzzles.has_labels
    stays_right = np.flip(np.logical_and.accumulate(np.flip(right, axis=1), axis=1), axis=1)
    settled = np.where(right[:, -1], stays_right.argmax(axis=1) + 1, steps + 1)
    num_cells = np.maximum((puzzles.labels != IGNORE_LABEL_ID).sum(axis=1), 1)
    shares = puzzles.is_wrong.sum(axis=2) / num_cells[:, None]
    rated = _sigmoid(trace.q_halt)
    if puzzles.has_candidates:
        rated = (trace.candidates & (trace.candidates - 1) == 0).mean(axis=2)
    elif puzzles.is_search:
        rated = trace.wants_to_halt
    rated = np.rint(100 * rated).astype(int)
    order = np.lexsort((puzzles.rows, shares.mean(axis=1), shares[:, -1], settled))
    drawn = [
        {
            "set": puzzles.set_names[index],
            "row": int(puzzles.rows[index]),
            "name": puzzles.names[index],
            "halts_at": int(trace.halting_steps[index]) if trace.wants_to_halt[index].any() else None,
            "stays_right_from": int(settled[index]) if has_labels[index] and right[index, -1] else None,
            "has_label": bool(has_labels[index]),
            "is_undecided": bool(is_undecided[index]),
            "rated": rated[index].tolist(),
            **_grids(style, puzzles.inputs[index], puzzles.labels[index], trace, index),
        }
        for index in order.tolist()
    ]
    return head | {"puzzles": drawn}


def clue_tokens(puzzles: TracedPuzzles) -> list[int]:
    """Returns token values that a right answer never changes, such as the wall of a maze.

    If a scored cell of the input has such a value, the same cell of the label has it too, in all puzzles.
    Returns [] if the label of a puzzle has another size than its input, as in ARC.
    """
    is_counted, is_same = puzzles.labels != IGNORE_LABEL_ID, puzzles.inputs == puzzles.labels
    if (first := puzzles.info.style.first_of_field) is not None:
        if ((puzzles.inputs >= first) != (puzzles.labels >= first)).any():  # the answer has another shape
            return []
        is_counted &= puzzles.inputs >= first
    unchanged, changed = (set(puzzles.inputs[is_counted & of].tolist()) for of in (is_same, ~is_same))
    return sorted(unchanged - changed)


def _grids(style: Style, tokens: np.ndarray, label: np.ndarray, trace: Trace, index: int) -> dict[str, Any]:
    of_input, of_answer = cells_of(style, tokens), cells_of(style, label, frame=label)
    if (label == IGNORE_LABEL_ID).all():
        of_answer = to_grid(np.arange(len(label)), num_columns=style.num_columns)
    cells = of_answer.ravel()
    position = {cell: place for place, cell in enumerate(cells.tolist())}
    return {
        "input_columns": of_input.shape[1],
        "input": tokens[of_input.ravel()].tolist(),
        "columns": of_answer.shape[1],
        "label": label[cells].tolist(),
        "answers": trace.preds[index][:, cells].tolist(),
        "confidences": np.floor(100 * np.nan_to_num(trace.confidence[index][:, cells])).astype(int).tolist(),
        "candidates": trace.candidates[index][:, cells if trace.candidates.size else []].tolist(),
        "guesses": [position.get(cell, cell) for cell in trace.guesses[index].tolist()],
    }


def pack(content: Mapping[str, Any], *, max_bytes: int = MAX_PICTURES_BYTES) -> tuple[str, int]:
    """Compresses the data for drawing puzzles. Returns (base64 text, number of puzzles in it).

    If the text is longer than `max_bytes`, leaves out every second puzzle, until the text is short enough or
    only one puzzle is left.

    content: {"puzzles": list, ...}, from `picture_data`.
    """
    puzzles = content["puzzles"]
    while True:
        text = json.dumps({**content, "puzzles": puzzles}, separators=(",", ":"))
        packed = base64.b64encode(zlib.compress(text.encode())).decode()
        if len(packed) <= max_bytes or len(puzzles) <= 1:
            return packed, len(puzzles)
        puzzles = puzzles[::2]
