"""Draws a model's answers to a few test puzzles: puzzle, answers after some thinking steps, solution.

A wrong cell is red. If the kind of puzzle gives its token a color, the cell is crossed out instead.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from html import escape

import numpy as np

from dataset.drawing import SVG_STYLE, SvgGrid, cells_of, paint_cell, regions_of, svg_file
from dataset.format import IGNORE_LABEL_ID
from dataset.kinds.kind import Style
from dataset.loader import choose_rows, read_rows
from evaluation.trace import Trace, record_trace
from models.compilation import eager_blocks
from training.data import RunData
from training.state import TrainState

_MOST_STEPS = 64  # maximum number of thinking steps, because recipes of LDT and FPRM allow a thousand
_GRIDS = 7  # maximum number of grids in a row: the puzzle, answers after 5 steps, the solution
_GRID, _GAP, _TITLE = 160, 16, 34  # units of the SVG


def think_of_puzzles(state: TrainState, data: RunData, *, count: int) -> Callable[[], str]:
    """Runs the model on `count` puzzles of the first test set. All ranks call it.

    Returns a function that draws the answers and returns them as HTML.
    """
    set_name, puzzle_set = next(iter(data.dataset.splits["test"].sets.items()))
    batch = read_rows(data.dataset, set_name, choose_rows(puzzle_set, count))
    state.table.fetch(batch.puzzle_identifiers.to(state.carry.steps.device))
    model, was_training = state.model, state.model.training
    model.eval()
    try:
        with eager_blocks():
            on_device = batch.to(state.carry.steps.device)
            trace = record_trace(model, on_device, max_steps=_MOST_STEPS)
    finally:
        model.train(was_training)
    names = [f"{set_name}, example {row}" for row in batch.rows.tolist()]
    style = data.info_of(data.dataset.origin(set_name).folder).style
    return functools.partial(draw_thoughts, style, batch.inputs.numpy(), batch.labels.numpy(), trace, names)


def shown_steps(num_steps: int) -> list[int]:
    """Returns the thinking steps to draw, from 1: all of a few, or powers of two and the last one."""
    if num_steps <= _GRIDS - 2:
        return list(range(1, num_steps + 1))
    powers = [2**exponent for exponent in range(num_steps.bit_length()) if 2**exponent < num_steps]
    return [*powers[: _GRIDS - 3], num_steps]


def draw_thoughts(
    style: Style, inputs: np.ndarray, labels: np.ndarray, trace: Trace, names: Sequence[str]
) -> str:
    """Returns HTML with a caption and a row of grids for each puzzle.

    inputs, labels: Tokens [n, seq_len]. A cell with the label IGNORE_LABEL_ID is never marked as wrong.
    names: Captions.
    """
    steps, drawn = shown_steps(trace.preds.shape[1]), []
    for number, (puzzle, label, name) in enumerate(zip(inputs, labels, names, strict=True)):
        is_counted = label != IGNORE_LABEL_ID
        solution = np.where(is_counted, label, puzzle)
        grids = {f"step {step}": trace.preds[number, step - 1] for step in steps}
        grids = {"puzzle": puzzle, **grids, "solution": solution}
        cells = cells_of(style, solution, frame=solution)
        grid = SvgGrid(*cells.shape, _GAP, _TITLE, _GRID / max(*cells.shape, 1))
        content = []
        for title, tokens in grids.items():
            content.append(f'<text x="{grid.left}" y="{_TITLE - 12}" class="left small">{title}</text>')
            is_wrong = is_counted & (tokens != label) & (title != "puzzle")
            content += _draw_grid(grid, style, tokens[cells], puzzle[cells], is_wrong[cells])
            grid = dataclasses.replace(grid, left=grid.left + _GRID + _GAP)
        height = _TITLE + grid.rows * grid.size + _GAP
        svg = svg_file("\n".join(content), width=grid.left, height=height, title=name, style=SVG_STYLE)
        drawn.append(f"<p>{escape(name)}: {_in_words(label, trace, number)}</p>\n{svg}")
    return "\n".join(drawn)


def _draw_grid(
    grid: SvgGrid, style: Style, tokens: np.ndarray, puzzle: np.ndarray, is_wrong: np.ndarray
) -> Iterator[str]:
    for cell in np.ndindex(tokens.shape):
        token = int(tokens[cell])
        is_given = token == puzzle[cell] and not style.is_blank(token)
        paint = paint_cell(style, token, is_clue=style.marks_new and is_given)
        has_color = token in style.colors
        if is_wrong[cell] and not has_color:
            paint = paint._replace(ground="var(--bad)", opacity=0.45)
        yield grid.ground(*cell, paint)
        if paint.text:
            yield grid.text(*cell, paint)
        if is_wrong[cell] and has_color:  # because the color shows the model's answer
            yield grid.cross(*cell)
    yield from grid.lines(regions_of(style, tokens.size))


def _in_words(label: np.ndarray, trace: Trace, number: int) -> str:
    """Returns a phrase that says after which step the answer was right, and when the model would halt."""
    is_right = ((trace.preds[number] == label) | (label == IGNORE_LABEL_ID)).all(axis=-1)
    last = f"right after step {is_right.argmax() + 1}" if is_right.any() else "never right"
    if is_right.any() and not is_right[-1]:
        last += ", wrong in the end"
    if not trace.wants_to_halt[number].any():
        return f"{last}; would not halt in {len(is_right)} steps"
    return f"{last}; would halt after step {trace.halting_steps[number]}"
