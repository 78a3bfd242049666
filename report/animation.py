"""An animated SVG of a model that solves a puzzle: the grid and the confidence after each step.

The animation uses CSS, so it also runs inside an <img>. With prefers-reduced-motion, or in programs that do
not support CSS animation, the SVG shows the last step.
"""

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jinja2 import Environment, FileSystemLoader

from dataset.drawing import SVG_STYLE, TINT, Paint, SvgGrid, paint_cell, regions_of, svg_file
from evaluation.solving import Answer, Step

_PUZZLE_SECONDS, _STEP_SECONDS, _LAST_SECONDS, _FADE_SECONDS = 1.6, 1.0, 4.0, 0.25
_MARGIN, _BOARD, _GAP, _PANEL = 26, 360, 40, 226
_SURE = 0.95  # minimum confidence at which the model counts as sure of a cell
_LEVELS = 6  # doubt is rounded to multiples of 1 / 6, so that tiny changes are not drawn
_STYLE = f"""{SVG_STYLE}.big{{font-size:30px;font-weight:650;fill:var(--ink)}}
@media(prefers-reduced-motion:reduce){{*{{animation:none!important}}}}
"""


class _Frame(NamedTuple):
    paints: dict[tuple[int, int], Paint]  # look of the cell at (row, column)
    title: str
    text: str
    changes: Sequence[tuple[int, int, Paint]] = ()  # (row, column, look) that differ from the previous frame


def draw_animation(answer: Answer) -> str:
    """Returns an animated SVG file as text: a puzzle, then the answer after each step.

    A step is a thinking step. The last steps are left out if they do not change the answer and the model
    would already have halted.

    answer: The puzzle, and the model's answer to it after each step.
    """
    steps = _shown_steps(answer)
    frames = list(_frames(answer, steps))
    rows, columns = (1 + max(cell[axis] for frame in frames for cell in frame.paints) for axis in (0, 1))
    size = _BOARD / max(rows, columns)
    left, top = (_MARGIN + (_BOARD - count * size) / 2 for count in (columns, rows))
    before: dict[tuple[int, int], Paint] = {}
    for index, frame in enumerate(frames):
        cells = ((cell, frame.paints.get(cell, Paint())) for cell in np.ndindex(rows, columns))
        changes = [(*cell, paint) for cell, paint in cells if paint != before.get(cell, Paint())]
        frames[index], before = frame._replace(changes=changes), frame.paints
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=loader, trim_blocks=True, lstrip_blocks=True)
    content = environment.get_template("animation.svg.jinja").render(
        grid=SvgGrid(rows, columns, left, top, size),
        regions=regions_of(answer.style, rows * columns),
        style=answer.style,
        valid=answer.valid,
        has_probability=not answer.is_search,
        steps=steps,
        frames=frames,
        top=_MARGIN,
        left=_MARGIN + _BOARD + _GAP,
        bottom=_MARGIN + _BOARD - 26,
        wide=min(_PANEL / len(steps), 34.0),
        tint=TINT,
    )
    return svg_file(
        content,
        width=2 * _MARGIN + _BOARD + _GAP + _PANEL,
        height=2 * _MARGIN + _BOARD,
        title=f"a puzzle and the {len(steps)} steps in which a model solves it",
        style=_STYLE + _movement(len(steps)),
    )


def _movement(num_steps: int) -> str:
    total_seconds, lines = _PUZZLE_SECONDS + _STEP_SECONDS * (num_steps - 1) + _LAST_SECONDS, []
    for step in range(num_steps):
        begin = _PUZZLE_SECONDS + _STEP_SECONDS * step
        hidden, seen = (100 * second / total_seconds for second in (begin, begin + _FADE_SECONDS))
        lines.append(
            f".f{step + 1}{{animation:f{step + 1} {total_seconds:g}s linear infinite}}\n"
            f"@keyframes f{step + 1}{{0%,{hidden:.2f}%{{opacity:0}}{seen:.2f}%,100%{{opacity:1}}}}\n"
        )
    return "".join(lines)


def _shown_steps(answer: Answer) -> list[Step]:
    steps = answer.steps[: answer.number]
    same = itertools.takewhile(lambda step: np.array_equal(step.grid, answer.grid), reversed(steps))
    first = len(steps) - len(list(same)) + 1
    # A step that only makes the model stop is shown, too.
    return steps[: max(first, min(answer.halting_step or len(steps), len(steps)))]


def _frames(answer: Answer, steps: Sequence[Step]) -> Iterator[_Frame]:
    puzzle, cells_of, style = answer.puzzle.tokens, answer.puzzle.cells_of, answer.style
    clues = puzzle[cells_of(puzzle)]
    is_known = np.vectorize(lambda token: not style.is_blank(int(token)), otypes=[bool])(clues)

    clue_cells = {cell for cell in np.ndindex(clues.shape) if style.marks_new and is_known[cell]}

    def paints(tokens: np.ndarray, doubt: np.ndarray) -> dict[tuple[int, int], Paint]:
        return {
            cell: paint_cell(
                style,
                int(tokens[cell]),
                is_clue=cell in clue_cells and tokens[cell] == clues[cell],
                doubt=float(doubt[cell]),
            )
            for cell in np.ndindex(tokens.shape)
        }

    text = f"{is_known.sum()} of {clues.size} cells given" if style.marks_new else f"{clues.size} cells"
    yield _Frame(paints(clues, np.zeros(clues.shape)), "puzzle", text)
    for step in steps:
        doubt = np.round((1 - step.confidence) * _LEVELS) / _LEVELS
        text = f"sure of {(step.confidence >= _SURE).sum()} of {step.confidence.size} cells"
        yield _Frame(paints(step.tokens[cells_of(step.tokens)], doubt), f"step {step.number}", text)
