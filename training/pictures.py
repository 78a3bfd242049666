"""Draws a model's answers to a few test puzzles: puzzle, answers after some thinking steps, solution.

A wrong cell is red. If the token in the cell has its own color, as in ARC, the cell is crossed out instead.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

import numpy as np

from dataset.drawing import (
    SVG_STYLE,
    Paint,
    SvgGrid,
    cells_of,
    light_colors,
    paint_cell,
    regions_of,
    svg_file,
)
from dataset.kinds.kind import Style
from dataset.loader import choose_rows, read_rows
from dataset.metadata import IGNORE_LABEL_ID
from evaluation.trace import Trace, record_trace
from models.compilation import eager_blocks
from training.data import RunData
from training.state import TrainState

_MOST_STEPS = 64  # maximum number of thinking steps, because recipes of LDT and FPRM allow a thousand
_GRIDS = 7  # maximum number of grids in a row: the puzzle, answers after 5 steps, the solution
_GRID, _GAP, _TITLE = 160, 16, 34  # units of the SVG, pixels of the image


def think_of_puzzles(state: TrainState, data: RunData, *, count: int) -> "Thoughts":
    """Runs the model on up to `count` examples of the first test set, without variants. All ranks call it.

    Returns the answers after each thinking step (call of the model), of at most 64 steps.
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
    info, inputs = data.infos[data.dataset.origin(set_name).folder], batch.inputs.numpy()
    labels = info.labels_for(inputs, batch.labels.numpy(), trace.preds[:, -1])
    return Thoughts(info.style, inputs, labels, trace, names)


def shown_steps(num_steps: int) -> list[int]:
    """Selects at most five thinking steps (calls of the model) to draw, from 1 to `num_steps`.

    Examples: [1, 2, 3] for 3 steps, and [1, 2, 4, 8, 16] for 16 steps.
    """
    if num_steps <= _GRIDS - 2:
        return list(range(1, num_steps + 1))
    powers = [2**exponent for exponent in range(num_steps.bit_length()) if 2**exponent < num_steps]
    return [*powers[: _GRIDS - 3], num_steps]


class _Grid(NamedTuple):
    title: str
    paints: list[list[Paint]]
    is_crossed: np.ndarray  # bool [rows, columns]


@dataclasses.dataclass(frozen=True)
class Thoughts:
    """The answers of a model to n puzzles, after every thinking step (call of the model).

    Attributes:
        style: How the grids are drawn.
        inputs: Tokens of the puzzles [n, seq_len].
        labels: Tokens of the right answers [n, seq_len]. A cell with the label IGNORE_LABEL_ID is never
            marked as wrong.
        trace: The model's answers after each thinking step.
        names: Names of the puzzles, such as "all, example 3".
    """

    style: Style
    inputs: np.ndarray
    labels: np.ndarray
    trace: Trace
    names: Sequence[str]

    def html(self) -> str:
        """Returns HTML with a caption and an SVG picture for each puzzle.

        The picture shows the puzzle, some answers and the solution side by side.
        """
        drawn = []
        for index, name in enumerate(self.names):
            grids, regions = self._grids(index)
            grid, content = SvgGrid(*grids[0].is_crossed.shape, _GAP, _TITLE, _cell_size(grids[0])), []
            for title, paints, is_crossed in grids:
                content.append(f'<text x="{grid.left}" y="{_TITLE - 12}" class="left small">{title}</text>')
                for cell, crossed in np.ndenumerate(is_crossed):
                    paint = paints[cell[0]][cell[1]]
                    content.append(grid.ground(*cell, paint))
                    content += [grid.text(*cell, paint)] if paint.text else []
                    content += [grid.cross(*cell)] if crossed else []
                content += grid.lines(regions)
                grid = dataclasses.replace(grid, left=grid.left + _GRID + _GAP)
            height = _TITLE + grid.rows * grid.size + _GAP
            svg = svg_file("\n".join(content), width=grid.left, height=height, title=name, style=SVG_STYLE)
            drawn.append(f"<p>{escape(name)}: {_in_words(self.labels[index], self.trace, index)}</p>\n{svg}")
        return "\n".join(drawn)

    def images(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yields (name, image as uint8 [height, width, 3]) of each puzzle. Needs the package pillow."""
        from PIL import Image, ImageColor, ImageDraw, ImageFont

        colors = light_colors()
        for puzzle_index, name in enumerate(self.names):
            grids, regions = self._grids(puzzle_index)
            (rows, columns), size = grids[0].is_crossed.shape, _cell_size(grids[0])
            digit_font = ImageFont.load_default(max(size / 2, 1))  # smaller ones cannot be drawn
            numbers = (
                np.zeros((rows, columns), int) if regions is None else np.reshape(regions, (rows, columns))
            )
            shape = len(grids) * (_GRID + _GAP) + _GAP, round(2 * _TITLE + rows * size + _GAP)
            image = Image.new("RGB", shape, colors["var(--raised)"])
            draw, font = ImageDraw.Draw(image, "RGBA"), ImageFont.load_default(13)
            caption = f"{name}: {_in_words(self.labels[puzzle_index], self.trace, puzzle_index)}"
            draw.text((_GAP, _TITLE / 2), caption, colors["var(--ink)"], font, anchor="lm")
            for index, (title, paints, is_crossed) in enumerate(grids):
                left, top = _GAP + index * (_GRID + _GAP), 2 * _TITLE
                draw.text((left, top - 12), title, colors["var(--muted)"], font, anchor="lm")
                for (row, column), crossed in np.ndenumerate(is_crossed):
                    paint, x, y = paints[row][column], left + column * size, top + row * size
                    box, ink = (x, y, x + size, y + size), colors["var(--ink)"]
                    ground = ImageColor.getrgb(colors.get(paint.ground, paint.ground))
                    draw.rectangle(box, (*ground, round(255 * paint.opacity)), colors["var(--line)"])
                    if paint.text:
                        ink = colors["var(--accent)"] if paint.kind == "own" else ink
                        middle = x + size / 2, y + size / 2
                        draw.text(middle, paint.text, ink, digit_font, anchor="mm")
                    for ends in [(box[:2], box[2:]), ((x, y + size), (x + size, y))] if crossed else []:
                        draw.line(ends, "white", 3)
                        draw.line(ends, "black", 1)
                    if row and numbers[row, column] != numbers[row - 1, column]:
                        draw.line((x, y, x + size, y), colors["var(--box)"], 2)
                    if column and numbers[row, column] != numbers[row, column - 1]:
                        draw.line((x, y, x, y + size), colors["var(--box)"], 2)
                frame = (left, top, left + columns * size, top + rows * size)
                draw.rectangle(frame, None, colors["var(--box)"], 2)
            yield name, np.asarray(image)

    def _grids(self, index: int) -> tuple[list[_Grid], list[int] | None]:
        """Returns the grids to draw for a puzzle, and for each cell the index of its region.

        The grids are the puzzle, some answers and the solution, if it is known. A region is, for example, a
        box of a Sudoku. If the puzzle has no regions, the second value is None. index: Index of the puzzle.
        """
        style, puzzle, label = self.style, self.inputs[index], self.labels[index]
        is_counted = label != IGNORE_LABEL_ID
        solution = np.where(is_counted, label, puzzle)
        cells = cells_of(style, solution, frame=solution)
        steps = shown_steps(self.trace.preds.shape[1])
        answers = {f"step {step}": self.trace.preds[index, step - 1] for step in steps}
        drawn = []
        known = {"solution": solution} if is_counted.any() else {}
        for title, tokens in ({"puzzle": puzzle} | answers | known).items():
            is_wrong = is_counted & (tokens != label) & (title != "puzzle")
            is_colored = np.isin(
                tokens, [*style.colors]
            )  # a cross keeps the color of the model's answer visible
            paints = [
                [_paint(style, int(tokens[cell]), int(puzzle[cell]), is_wrong[cell]) for cell in row]
                for row in cells.tolist()
            ]
            drawn.append(_Grid(title, paints, (is_wrong & is_colored)[cells]))
        return drawn, regions_of(style, cells.size)


def _cell_size(grid: _Grid) -> float:
    return _GRID / max(*grid.is_crossed.shape, 1)


def _paint(style: Style, token: int, input_token: int, is_wrong: bool) -> Paint:
    is_clue = style.marks_new and token == input_token and not style.is_blank(token)
    paint = paint_cell(style, token, is_clue=is_clue)
    is_red = is_wrong and token not in style.colors
    return paint._replace(ground="var(--bad)", opacity=0.45) if is_red else paint


def _in_words(label: np.ndarray, trace: Trace, index: int) -> str:
    # Example: "right after step 3; would halt after step 4".
    is_right = ((trace.preds[index] == label) | (label == IGNORE_LABEL_ID)).all(axis=-1)
    last = f"right after step {is_right.argmax() + 1}" if is_right.any() else "never right"
    if (label == IGNORE_LABEL_ID).all():
        last = "no label"
    elif is_right.any() and not is_right[-1]:
        last += ", wrong in the end"
    if not trace.wants_to_halt[index].any():
        return f"{last}; would not halt in {len(is_right)} steps"
    return f"{last}; would halt after step {trace.halting_steps[index]}"
