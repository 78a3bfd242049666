"""Pictures of what a model thinks of a puzzle: the puzzle, the answer after some of the steps, the solution.

Colours are those of the kind's look; a wrong cell is red, or crossed out where it has a colour. Needs pillow,
which is imported when first drawn.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from config.schema import PretrainConfig
from dataset.description import read_info
from dataset.format import IGNORE_LABEL_ID, load_metadata
from dataset.kinds.kind import Style
from dataset.loader import Batch, choose_rows, read_rows
from dataset.show import cells_of, symbols_of
from evaluation.test_time import build_draw
from evaluation.trace import Thoughts, record_thoughts
from models.compilation import eager_blocks
from parallel.process_group import is_main
from training.data import RunData, set_cycles
from training.state import TrainState

_GRIDS = 7  # at most: the puzzle, 5 steps, the solution
_TITLE, _GAP = 18, 12  # pixels
_WIDTH, _CELL = 190, (6, 26)  # pixels of a grid, and of a cell, at least and at most
_READABLE = 12  # pixels of a cell that has room for its symbol
_PAPER, _INK, _FAINT_INK, _LINE = (255, 255, 255), (32, 32, 32), (190, 190, 190), (216, 216, 216)
_WRONG, _NEW_INK = (205, 0, 0), (0, 140, 0)

Color = tuple[int, int, int]


class Picture(NamedTuple):
    """pixels: uint8 [height, width, 3]. caption: what a person reads below."""

    pixels: np.ndarray
    caption: str


def fetch_shown_rows(state: TrainState, data: RunData, *, count: int) -> None:
    """Fetches the rows that `draw_puzzles` needs to rank 0, where others have them; all ranks call it."""
    if state.owners is not None:
        identifiers = _shown_rows(data, count).puzzle_identifiers.to(state.carry.steps.device)
        state.owners.fetch_many(identifiers if is_main() else identifiers[:0])


def draw_puzzles(config: PretrainConfig, state: TrainState, data: RunData, *, count: int) -> list[Picture]:
    """Draws what the model thinks of some test puzzles after each step: of the first test set, evenly spaced.

    One rank is enough: nothing is communicated. The rows of the puzzles have been fetched
    (`fetch_shown_rows`).
    """
    set_name = next(iter(data.dataset.splits["test"].sets))
    batch = _shown_rows(data, count)
    model, was_training = state.model, state.model.training
    set_cycles(model, data.plan.main, config.arch)
    model.eval()
    try:
        with eager_blocks():
            shown = batch.to(state.carry.steps.device)
            thoughts = record_thoughts(model, shown, draw=build_draw(model, seed=0))
    finally:
        model.train(was_training)
    names = [f"{set_name}, example {row}" for row in batch.rows.tolist()]
    folder = data.dataset.origin(set_name).folder
    look = read_info([folder], load_metadata(folder, "test")).style
    return draw_thoughts(look, batch.inputs.numpy(), batch.labels.numpy(), thoughts, names)


def _shown_rows(data: RunData, count: int) -> Batch:
    set_name, puzzle_set = next(iter(data.dataset.splits["test"].sets.items()))
    return read_rows(data.dataset, set_name, choose_rows(puzzle_set, count))


def shown_steps(num_steps: int) -> list[int]:
    """Chooses the steps, from 1, that are drawn: all of a few, else powers of two and the last."""
    if num_steps <= _GRIDS - 2:
        return list(range(1, num_steps + 1))
    powers = [2**exponent for exponent in range(num_steps.bit_length()) if 2**exponent < num_steps]
    return [*powers[: _GRIDS - 3], num_steps]


def draw_thoughts(
    look: Style, inputs: np.ndarray, labels: np.ndarray, thoughts: Thoughts, names: Sequence[str]
) -> list[Picture]:
    """Draws one picture for each puzzle, all of one size. ValueError where pillow is missing.

    inputs, labels: tokens [n, seq_len], IGNORE_LABEL_ID where a label counts nowhere. names: of the puzzles.
    """
    try:
        from PIL import Image, ImageDraw, ImageFont
    except ImportError:
        raise ValueError("pillow is missing: pip install pillow") from None

    steps = shown_steps(thoughts.preds.shape[1])
    solutions = np.where(labels == IGNORE_LABEL_ID, inputs, labels)
    layouts = [cells_of(look, answer, frame=answer) for answer in solutions]
    num_rows, num_columns = (max(cells.shape[axis] for cells in layouts) for axis in (0, 1))
    cell = int(np.clip(_WIDTH // max(num_columns, 1), *_CELL))
    font, title_font = (ImageFont.load_default(size) for size in (max(cell * 0.62, 8), 12))
    size = ((2 + len(steps)) * (num_columns * cell + _GAP) + _GAP, _TITLE + num_rows * cell + _GAP)
    is_counted = labels != IGNORE_LABEL_ID

    def draw(number: int) -> Picture:
        image = Image.new("RGB", size, _PAPER)
        pen = ImageDraw.Draw(image)
        answers = thoughts.preds[number, [step - 1 for step in steps]]
        grids = [("puzzle", inputs[number])]
        grids += [(f"step {step}", answer) for step, answer in zip(steps, answers, strict=True)]
        grids.append(("solution", solutions[number]))
        left = _GAP
        for title, tokens in grids:
            symbols = symbols_of(look, tokens)
            pen.text((left, 2), title, _INK, title_font)
            is_answer = title.startswith("step")
            is_wrong = is_answer & is_counted[number] & (tokens != labels[number])
            is_new = look.marks_new & (title != "puzzle") & (tokens != inputs[number])
            for (row, column), place in np.ndenumerate(layouts[number]):
                x, y, token = left + column * cell, _TITLE + row * cell, int(tokens[place])
                paper = _ground(look, token)
                is_colored = paper != _PAPER
                ink = _FAINT_INK if look.is_blank(token) else _contrast(paper)
                if not is_colored and is_wrong[place]:
                    ink, paper = _PAPER, _WRONG
                elif not is_colored and is_new[place]:
                    ink = _NEW_INK
                pen.rectangle((x, y, x + cell, y + cell), fill=paper, outline=_LINE)
                if is_colored and is_wrong[place]:  # its colour says what the answer is
                    pen.line((x + 1, y + 1, x + cell - 1, y + cell - 1), _contrast(paper))
                    pen.line((x + 1, y + cell - 1, x + cell - 1, y + 1), _contrast(paper))
                if cell >= _READABLE and look.gap:
                    pen.text((x + cell / 2, y + cell / 2), symbols[place], ink, font, anchor="mm")
            left += num_columns * cell + _GAP
        return Picture(np.asarray(image), f"{names[number]}: {_in_words(labels[number], number)}")

    def _in_words(label: np.ndarray, number: int) -> str:
        is_right = ((thoughts.preds[number] == label) | (label == IGNORE_LABEL_ID)).all(axis=-1)
        last = f"right after step {is_right.argmax() + 1}" if is_right.any() else "never right"
        if is_right.any() and not is_right[-1]:
            last += ", wrong in the end"
        return f"{last}; would halt after step {thoughts.halting_steps[number]}"

    return [draw(number) for number in range(len(inputs))]


def _ground(look: Style, token: int) -> Color:
    """Returns the colour of a cell, white where the look has none."""
    return tuple(bytes.fromhex(look.colors.get(token, "#ffffff")[1:]))


def _contrast(color: Color) -> Color:
    """Returns black or white, whichever is seen better on a colour."""
    return _INK if np.dot(color, (0.3, 0.6, 0.1)) > 128 else _PAPER
