"""A puzzle being solved, as an SVG that moves: the board after each step, and how sure the model is.

The movement is CSS, which also runs where a page shows the file as an image. Where movement is unwanted
(prefers-reduced-motion), and in programs that know none, the last step is shown.
"""

import itertools
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from dataset.drawing import SVG_STYLE, TINT, Board, Paint, paint_cell, svg_file
from dataset.kinds.kind import Style
from evaluation.solving import Answer, Step

_PUZZLE_SECONDS, _STEP_SECONDS, _LAST_SECONDS, _FADE_SECONDS = 1.6, 1.0, 4.0, 0.25
_MARGIN, _BOARD, _GAP, _PANEL, _BARS = 26, 360, 40, 226, 96
_SURE = 0.95  # above, a cell is not in doubt
_LEVELS = 6  # of doubt
_STYLE = f"""{SVG_STYLE}.big{{font-size:30px;font-weight:650;fill:var(--ink)}}
@media(prefers-reduced-motion:reduce){{*{{animation:none!important}}}}
"""


class _Frame(NamedTuple):
    """A board: tokens and confidence [rows, columns], what the panel says, and for how long."""

    tokens: np.ndarray
    confidence: np.ndarray
    title: str
    text: str
    seconds: float


def draw_animation(answer: Answer) -> str:
    """Draws how an answer came about, from the puzzle to the first step that it does not change after."""
    steps = _shown_steps(answer)
    frames = _frames(answer, steps)
    movie = _Movie([frame.seconds for frame in frames])
    board = "\n".join([*_board(answer, frames, movie), *_panel(answer, frames, steps, movie)])
    return svg_file(
        board,
        width=2 * _MARGIN + _BOARD + _GAP + _PANEL,
        height=2 * _MARGIN + _BOARD,
        title=f"a puzzle and the {len(steps)} steps in which a model solves it",
        style=_STYLE + movie.style(),
    )


def _shown_steps(answer: Answer) -> list[Step]:
    """Returns the steps until the answer stands and the model would stop."""
    steps = answer.steps[: answer.number]
    same = itertools.takewhile(lambda step: np.array_equal(step.grid, answer.grid), reversed(steps))
    first = len(steps) - len(list(same)) + 1
    return steps[: max(first, min(answer.halting_step or len(steps), len(steps)))]


def _frames(answer: Answer, steps: Sequence[Step]) -> list[_Frame]:
    puzzle, cells_of = answer.puzzle.tokens, answer.puzzle.cells_of
    clues = puzzle[cells_of(puzzle)]
    frames = [_Frame(clues, np.ones(clues.shape), "puzzle", _count(clues, answer.style), _PUZZLE_SECONDS)]
    for step in steps:
        tokens = step.tokens[cells_of(step.tokens)]
        sure = f"sure of {(step.confidence >= _SURE).sum()} of {step.confidence.size} cells"
        frames.append(_Frame(tokens, step.confidence, f"step {step.number}", sure, _STEP_SECONDS))
    frames[-1] = frames[-1]._replace(seconds=_LAST_SECONDS)
    return frames


def _count(tokens: np.ndarray, style: Style) -> str:
    known = sum(not style.is_blank(token) for token in tokens.ravel().tolist())
    return f"{known} of {tokens.size} cells given" if style.marks_new else f"{tokens.size} cells"


class _Movie:
    """The frames of an endless movie: makes elements visible from one of them up to another."""

    def __init__(self, seconds: Sequence[float]):
        self._ends = list(itertools.accumulate(seconds))
        self._used: set[tuple[int, int]] = set()

    def __len__(self) -> int:
        return len(self._ends)

    def during(self, begin: int, end: int) -> str:
        """Returns the attribute of an element that is seen in the frames begin .. end - 1."""
        if (begin, end) == (0, len(self)):
            return ""
        self._used.add((begin, end))
        return f' class="f{begin}-{end}"'

    def runs(self, values: Sequence[Hashable]) -> Iterator[tuple[Hashable, str]]:
        """Yields each value of neighbouring frames that are equal, with the attribute `during` them."""
        begin = 0
        for value, group in itertools.groupby(values):
            end = begin + len(list(group))
            yield value, self.during(begin, end)
            begin = end

    def style(self) -> str:
        """Returns the CSS of all attributes."""
        whole = self._ends[-1]
        lines = []
        for begin, end in sorted(self._used):
            name, is_last = f"f{begin}-{end}", end == len(self)
            stops = [(0, 0 if begin else 1)]
            if begin:
                stops += [(self._ends[begin - 1], 0), (self._ends[begin - 1] + _FADE_SECONDS, 1)]
            stops.append((self._ends[end - 1], 1))
            if not is_last:
                stops += [(self._ends[end - 1] + _FADE_SECONDS, 0), (whole, 0)]
            stops = "".join(f"{100 * second / whole:.2f}%{{opacity:{value}}}" for second, value in stops)
            lines.append(
                f".{name}{{opacity:{int(is_last)};animation:{name} {whole:g}s linear infinite}}\n"
                f"@keyframes {name}{{{stops}}}\n"
            )
        return "".join(lines)


def _board(answer: Answer, frames: Sequence[_Frame], movie: _Movie) -> Iterator[str]:
    rows, columns = np.max([frame.tokens.shape for frame in frames], axis=0).tolist()
    size = _BOARD / max(rows, columns)
    left, top = (_MARGIN + (_BOARD - count * size) / 2 for count in (columns, rows))
    board = Board(rows, columns, left, top, size)
    yield f'<clipPath id="board"><rect {board.frame} rx="6"/></clipPath><g clip-path="url(#board)">'
    yield f'<rect {board.frame} fill="var(--paper)"/>'
    for cell in np.ndindex(rows, columns):
        paints = [_paint(answer, frame, cell, is_first=frame is frames[0]) for frame in frames]
        for paint, seen in movie.runs([paint._replace(text="", kind="") for paint in paints]):
            if paint.opacity:
                yield f"<g{seen}>{board.ground(*cell, paint)}</g>"
        for paint, seen in movie.runs([Paint(text=paint.text, kind=paint.kind) for paint in paints]):
            if paint.text:
                yield f"<g{seen}>{board.text(*cell, paint)}</g>"
    yield "</g>"
    yield from board.lines(answer.style.boxes.get(rows * columns))


def _paint(answer: Answer, frame: _Frame, cell: tuple[int, int], *, is_first: bool) -> Paint:
    if not all(index < size for index, size in zip(cell, frame.tokens.shape, strict=True)):
        return Paint()
    style, puzzle = answer.style, answer.puzzle.tokens
    # Doubt in even levels, so that what hardly changes does not move.
    doubt = 0.0 if is_first else round((1 - float(frame.confidence[cell])) * _LEVELS) / _LEVELS
    is_clue = style.marks_new and not style.is_blank(int(puzzle[answer.puzzle.cells_of(puzzle)][cell]))
    return paint_cell(style, int(frame.tokens[cell]), is_clue=is_clue, doubt=doubt)


def _panel(answer: Answer, frames: Sequence[_Frame], steps: Sequence[Step], movie: _Movie) -> Iterator[str]:
    """Yields what stands beside the board: the step, and a bar for each of how right the model feels."""
    left, bottom = _MARGIN + _BOARD + _GAP, _MARGIN + _BOARD
    for name, down, kind in (("title", 32, "big"), ("text", 58, "small")):
        for text, seen in movie.runs([getattr(frame, name) for frame in frames]):
            yield f'<g{seen}><text x="{left}" y="{_MARGIN + down}" class="left {kind}">{text}</text></g>'
    if answer.valid is not None:
        color, text = ("good", "the rules hold") if answer.valid else ("bad", "the rules do not hold")
        seen, spot = movie.during(len(movie) - 1, len(movie)), f'x="{left}" y="{_MARGIN + 84}"'
        yield f'<g{seen}><text {spot} class="left small" style="fill:var(--{color})">{text}</text></g>'
    if answer.style.marks_new:
        swatch = f'x="{left}" y="{_MARGIN + 104}" width="13" height="13" rx="2"'
        yield f'<rect {swatch} fill="var(--ring)" fill-opacity="{TINT / 2:g}"/>'
        yield f'<text x="{left + 20}" y="{_MARGIN + 115}" class="left small">in doubt</text>'
    top = bottom - 26 - _BARS
    yield f'<text x="{left}" y="{top - 32}" class="left small">probability of being right,</text>'
    yield f'<text x="{left}" y="{top - 15}" class="left small">as the model sees it</text>'
    wide = min(_PANEL / len(steps), 34.0)
    for number, step in enumerate(steps):
        x, high = left + number * wide, max(_BARS * step.q_halt, 2)
        spot = f'x="{x:.4g}" width="{wide - 3:.4g}" rx="2"'
        yield f'<rect {spot} y="{top}" height="{_BARS}" fill="var(--clue)"/>'
        bar = f'<rect {spot} y="{bottom - 26 - high:.4g}" height="{high:.4g}" fill="var(--accent)"/>'
        yield f"<g{movie.during(number + 1, len(movie))}>{bar}</g>"
        if number in (0, len(steps) - 1) or len(steps) <= 8:
            middle = f'x="{x + wide / 2 - 1.5:.4g}" y="{bottom - 10}"'
            yield f'<text {middle} class="small">{step.number}</text>'
