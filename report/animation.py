"""A puzzle being solved, as an SVG that moves: the board after each step, and how sure the model is.

The movement is CSS, which also runs where a page shows the file as an image. Where movement is unwanted
(prefers-reduced-motion), and in programs that know none, the last step is shown.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from dataset.drawing import SVG_STYLE, TINT, Board, Paint, paint_cell, svg_file
from evaluation.solving import Answer, Step

_PUZZLE_SECONDS, _STEP_SECONDS, _LAST_SECONDS, _FADE_SECONDS = 1.6, 1.0, 4.0, 0.25
_MARGIN, _BOARD, _GAP, _PANEL, _BARS = 26, 360, 40, 226, 96
_LEFT, _BOTTOM = _MARGIN + _BOARD + _GAP, _MARGIN + _BOARD - 26  # of the panel, and of its bars
_SURE = 0.95  # above, a cell is not in doubt
_LEVELS = 6  # of doubt
_STYLE = f"""{SVG_STYLE}.big{{font-size:30px;font-weight:650;fill:var(--ink)}}
@media(prefers-reduced-motion:reduce){{*{{animation:none!important}}}}
"""


class _Frame(NamedTuple):
    """A board: tokens and doubt [rows, columns], and what the panel says."""

    tokens: np.ndarray
    doubt: np.ndarray
    title: str
    text: str


def draw_animation(answer: Answer) -> str:
    """Draws how an answer came about, from the puzzle to the first step that it does not change after.

    A frame fades in over the frames before it, and draws the cells that differ.
    """
    steps = _shown_steps(answer)
    frames = _frames(answer, steps)
    rows, columns = np.max([frame.tokens.shape for frame in frames], axis=0).tolist()
    size = _BOARD / max(rows, columns)
    left, top = (_MARGIN + (_BOARD - count * size) / 2 for count in (columns, rows))
    board = Board(rows, columns, left, top, size)
    wide = min(_PANEL / len(steps), 34.0)
    drawn = [f'<clipPath id="board"><rect {board.frame} rx="6"/></clipPath>']
    drawn += [f'<rect {board.frame} rx="6" fill="var(--paper)"/>', *_panel(answer, steps, wide)]
    before: dict[tuple[int, int], Paint] = {}
    for number, frame in enumerate(frames):
        paints = {cell: _paint(answer, frame, cell) for cell in np.ndindex(frame.tokens.shape)}
        paints = {cell: paints.get(cell, Paint()) for cell in np.ndindex(rows, columns)}
        changed = {cell: paint for cell, paint in paints.items() if before.get(cell, Paint()) != paint}
        drawn += [f'<g class="f{number}"><g clip-path="url(#board)">', *_cells(board, changed)]
        drawn += ["</g>", *_words(frame)]
        if number:
            high = max(_BARS * steps[number - 1].q_halt, 2)
            drawn.append(_bar(number - 1, wide, high, "accent"))
        before = paints
        drawn.append("</g>")
    if answer.valid is not None:
        color, text = ("good", "the rules hold") if answer.valid else ("bad", "the rules do not hold")
        spot = f'class="left small f{len(steps)}" style="fill:var(--{color})"'
        drawn.append(f'<text x="{_LEFT}" y="{_MARGIN + 84}" {spot}>{text}</text>')
    drawn += board.lines(answer.style.boxes.get(rows * columns))
    return svg_file(
        "\n".join(drawn),
        width=2 * _MARGIN + _BOARD + _GAP + _PANEL,
        height=2 * _MARGIN + _BOARD,
        title=f"a puzzle and the {len(steps)} steps in which a model solves it",
        style=_STYLE + _movement(len(steps)),
    )


def _movement(num_steps: int) -> str:
    """Returns the CSS that lets each step appear in its turn, and stay to the end."""
    whole, lines = _PUZZLE_SECONDS + _STEP_SECONDS * (num_steps - 1) + _LAST_SECONDS, []
    for number in range(num_steps):
        begin = _PUZZLE_SECONDS + _STEP_SECONDS * number
        hidden, seen = (100 * second / whole for second in (begin, begin + _FADE_SECONDS))
        lines.append(
            f".f{number + 1}{{animation:f{number + 1} {whole:g}s linear infinite}}\n"
            f"@keyframes f{number + 1}{{0%,{hidden:.2f}%{{opacity:0}}{seen:.2f}%,100%{{opacity:1}}}}\n"
        )
    return "".join(lines)


def _shown_steps(answer: Answer) -> list[Step]:
    """Returns the steps until the answer stands and the model would stop."""
    steps = answer.steps[: answer.number]
    same = itertools.takewhile(lambda step: np.array_equal(step.grid, answer.grid), reversed(steps))
    first = len(steps) - len(list(same)) + 1
    return steps[: max(first, min(answer.halting_step or len(steps), len(steps)))]


def _frames(answer: Answer, steps: Sequence[Step]) -> list[_Frame]:
    puzzle, cells_of = answer.puzzle.tokens, answer.puzzle.cells_of
    clues, text = puzzle[cells_of(puzzle)], f"{cells_of(puzzle).size} cells"
    if answer.style.marks_new:
        known = sum(not answer.style.is_blank(token) for token in clues.ravel().tolist())
        text = f"{known} of {text} given"
    frames = [_Frame(clues, np.zeros(clues.shape), "puzzle", text)]
    for step in steps:
        sure = f"sure of {(step.confidence >= _SURE).sum()} of {step.confidence.size} cells"
        # In even levels, so that what hardly changes does not move.
        doubt = np.round((1 - step.confidence) * _LEVELS) / _LEVELS
        frames.append(_Frame(step.tokens[cells_of(step.tokens)], doubt, f"step {step.number}", sure))
    return frames


def _paint(answer: Answer, frame: _Frame, cell: tuple[int, int]) -> Paint:
    style, puzzle = answer.style, answer.puzzle.tokens
    is_clue = style.marks_new and not style.is_blank(int(puzzle[answer.puzzle.cells_of(puzzle)][cell]))
    return paint_cell(style, int(frame.tokens[cell]), is_clue=is_clue, doubt=float(frame.doubt[cell]))


def _cells(board: Board, paints: dict[tuple[int, int], Paint]) -> Iterator[str]:
    for cell, paint in paints.items():
        if paint.opacity < 1:
            yield board.ground(*cell, Paint("var(--paper)", 1))
        if paint.opacity:
            yield board.ground(*cell, paint)
        if paint.text:
            yield board.text(*cell, paint)


def _panel(answer: Answer, steps: Sequence[Step], wide: float) -> Iterator[str]:
    """Yields what stands beside the board all the time."""
    if answer.style.marks_new:
        swatch = f'x="{_LEFT}" y="{_MARGIN + 104}" width="13" height="13" rx="2"'
        yield f'<rect {swatch} fill="var(--ring)" fill-opacity="{TINT / 2:g}"/>'
        yield f'<text x="{_LEFT + 20}" y="{_MARGIN + 115}" class="left small">in doubt</text>'
    top = _BOTTOM - _BARS
    yield f'<text x="{_LEFT}" y="{top - 32}" class="left small">probability of being right,</text>'
    yield f'<text x="{_LEFT}" y="{top - 15}" class="left small">as the model sees it</text>'
    for number, step in enumerate(steps):
        yield _bar(number, wide, _BARS, "clue")
        if number in (0, len(steps) - 1) or len(steps) <= 8:
            middle = _LEFT + number * wide + wide / 2 - 1.5
            yield f'<text x="{middle:.4g}" y="{_BOTTOM + 16}" class="small">{step.number}</text>'


def _words(frame: _Frame) -> Iterator[str]:
    yield f'<rect x="{_LEFT}" y="{_MARGIN}" width="{_PANEL}" height="66" fill="var(--raised)"/>'
    yield f'<text x="{_LEFT}" y="{_MARGIN + 32}" class="left big">{frame.title}</text>'
    yield f'<text x="{_LEFT}" y="{_MARGIN + 58}" class="left small">{frame.text}</text>'


def _bar(number: int, wide: float, high: float, color: str) -> str:
    spot = f'x="{_LEFT + number * wide:.4g}" width="{wide - 3:.4g}" rx="2"'
    return f'<rect {spot} y="{_BOTTOM - high:.4g}" height="{high:.4g}" fill="var(--{color})"/>'
