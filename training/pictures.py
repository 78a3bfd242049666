"""Pictures of what a model thinks of a puzzle: the puzzle, the answer after some of the steps, the solution.

Colours are those of the kind's look; a wrong cell is red, or crossed out where it has a colour. Needs pillow,
which is imported when first drawn.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from config.schema import PretrainConfig
from dataset.facts import read_facts
from dataset.format import IGNORE_LABEL_ID, load_metadata
from dataset.kinds import FAINT, Kind, Look
from dataset.plan import EvaluationPlan
from dataset.puzzles import PuzzleDataset
from dataset.show import GREEN, WRONG, cells_of, symbols_of
from evaluation.test_time import build_draw
from evaluation.thinking import Thoughts, record_thoughts
from models.compilation import eager_blocks
from training.data import RunData, set_cycles
from training.evaluation import evaluated_weights
from training.state import TrainState

_GRIDS = 7  # at most: the puzzle, 5 steps, the solution
_TITLE, _GAP = 18, 12  # pixels
_WIDTH, _CELL = 190, (6, 26)  # pixels of a grid, and of a cell, at least and at most
_READABLE = 12  # pixels of a cell that has room for its symbol
_PAPER, _INK, _FAINT_INK, _LINE = (255, 255, 255), (32, 32, 32), (190, 190, 190), (216, 216, 216)
# Of the ANSI codes 30 to 37 and 90 to 97, and as backgrounds 40 to 47 and 100 to 107, as xterm has them.
_ANSI = (
    *((0, 0, 0), (205, 0, 0), (0, 140, 0), (205, 205, 0), (0, 0, 238), (205, 0, 205), (0, 205, 205)),
    *((229, 229, 229), (127, 127, 127), (255, 110, 110), (110, 225, 110), (255, 225, 90), (92, 92, 255)),
    *((255, 0, 255), (0, 255, 255), (255, 255, 255)),
)
_CUBE = (0, 95, 135, 175, 215, 255)  # of the 256 colours


class Picture(NamedTuple):
    """pixels: uint8 [height, width, 3]. caption: what a person reads below."""

    pixels: np.ndarray
    caption: str


def draw_puzzles(config: PretrainConfig, state: TrainState, data: RunData, *, count: int) -> list[Picture]:
    """Draws what the model thinks of some test puzzles after each step: of the first test set, evenly spaced.

    One rank is enough: nothing is communicated. With EMA the averages think.
    """
    (set_name, puzzle_set), *_ = data.dataset.splits["test"].sets.items()
    groups = np.linspace(0, len(puzzle_set.group_indices) - 2, count).astype(np.int64)
    puzzles = puzzle_set.group_indices[np.unique(groups)]
    plan = EvaluationPlan(
        {set_name: puzzle_set}, global_batch_size=count, only_first_batches=True, puzzles={set_name: puzzles}
    )
    dataset = PuzzleDataset(data.dataset.folders, "test", plan, rank=0, world_size=1)
    _, batch = next(iter(dataset))
    model, was_training = state.model, state.model.training
    set_cycles(model, data.plan.main, config.arch)
    model.eval()
    try:
        with evaluated_weights(state), eager_blocks():
            batch = batch.to(state.carry.steps.device)
            thoughts = record_thoughts(model, batch, draw=build_draw(model, seed=0))
    finally:
        model.train(was_training)
    real = batch.is_real.cpu().numpy()
    inputs, labels, rows = (tensor.cpu().numpy()[real] for tensor in (batch.inputs, batch.labels, batch.rows))
    names = [f"{set_name}, example {row}" for row in rows]
    thoughts = Thoughts(*(values[real] for values in thoughts))
    kind = kind_of_folder(data.dataset.origin(set_name).folder)
    return draw_thoughts(kind.look if kind else Look(), inputs, labels, thoughts, names)


def kind_of_folder(folder: Path) -> Kind | None:
    """Finds the kind of a dataset folder's puzzles; None where they fit none."""
    return read_facts([folder], load_metadata(folder, "test")).kind


def shown_steps(num_steps: int) -> list[int]:
    """Chooses the steps, from 1, that are drawn: all of a few, else powers of two and the last."""
    if num_steps <= _GRIDS - 2:
        return list(range(1, num_steps + 1))
    powers = [2**exponent for exponent in range(num_steps.bit_length()) if 2**exponent < num_steps]
    return [*powers[: _GRIDS - 3], num_steps]


def draw_thoughts(
    look: Look, inputs: np.ndarray, labels: np.ndarray, thoughts: Thoughts, names: Sequence[str]
) -> list[Picture]:
    """Draws one picture for each puzzle, all of one size. ValueError where pillow is missing.

    inputs, labels: tokens [n, seq_len], IGNORE_LABEL_ID where a label counts nowhere. names: of the puzzles.
    """
    try:
        from PIL import Image, ImageDraw, ImageFont
    except ImportError:
        raise ValueError("pillow is missing: pip install -r requirements-extra.txt") from None

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
                ink, paper = _colors(look.styles.get(token, ""))
                is_colored = paper != _PAPER
                if not is_colored and (is_wrong[place] or is_new[place]):
                    ink, paper = _colors(WRONG if is_wrong[place] else GREEN)
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


def _colors(style: str) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Returns the colours of text and paper of ANSI codes such as 30;102 or 38;5;16;48;5;220."""
    ink, paper = _INK, _PAPER
    codes = iter(map(int, style.split(";")) if style else ())
    for code in codes:
        if code in (38, 48):
            next(codes)  # 5: one of 256
            color = _indexed(next(codes))
            ink, paper = (color, paper) if code == 38 else (ink, color)
        elif str(code) == FAINT:
            ink = _FAINT_INK
        elif 30 <= code < 38 or 90 <= code < 98:
            ink = _ANSI[code - 30 if code < 38 else code - 82]
        elif 40 <= code < 48 or 100 <= code < 108:
            paper = _ANSI[code - 40 if code < 48 else code - 92]
    return ink, paper


def _contrast(color: tuple[int, int, int]) -> tuple[int, int, int]:
    """Returns black or white, whichever is seen better on a colour."""
    return _INK if np.dot(color, (0.3, 0.6, 0.1)) > 128 else _PAPER


def _indexed(number: int) -> tuple[int, int, int]:
    if number < 16:
        return _ANSI[number]
    if number >= 232:
        return (8 + 10 * (number - 232),) * 3
    red, rest = divmod(number - 16, 36)
    return _CUBE[red], _CUBE[rest // 6], _CUBE[rest % 6]
