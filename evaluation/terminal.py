"""An answer in a terminal: the puzzle, its answer, and every step, side by side as wide as the screen is."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterator

import numpy as np

from dataset.drawing import GREEN, draw_cells, side_by_side, symbols_of, width_of
from dataset.kinds.kind import Style
from evaluation.solving import Answer, Step

_GAP = 3  # columns between drawings
_FAINT, _CHANGED, _STOP = "2", "1;4", "7"  # ANSI codes
# What a cell looks like of which the model is less sure than ...: its background, or what stands in its place
# where colours are taken.
_DOUBTS = ((0.5, "97;48;5;124", "?"), (0.8, "97;48;5;130", ":"), (0.95, "97;48;5;58", "."))


def draw_answer(answer: Answer, *, width: int, color: bool) -> str:
    """Draws an answer in lines of `width` columns, where its grids are not wider themselves.

    color: whether with ANSI codes.
    """
    top = [
        _draw_puzzle(answer, color=color),
        _draw_step("answer", answer, answer.step, color=color),
        _draw_confidence(answer, color=color),
        ["", *_verdict(answer, color=color)],
    ]
    steps = [_draw_group(answer, group, color=color) for group in group_steps(answer.steps)]
    parts = [
        *(part.lstrip("\n") for part in _side_by_side(top, width)),
        _halting_values(answer, width),
        *_side_by_side(steps, width),
    ]
    return "\n\n".join([*parts, _legend(answer.look, color=color)])


def group_steps(steps: list[Step]) -> Iterator[list[Step]]:
    """Yields the steps, those together that have the same grid, one after the other."""
    group: list[Step] = []
    for step in steps:
        if group and not np.array_equal(step.grid, group[0].grid):
            yield group
            group = []
        group.append(step)
    yield group


def _side_by_side(drawings: list[list[str]], width: int) -> Iterator[str]:
    """Yields rows of drawings, as many side by side as there is room for."""
    row: list[list[str]] = []
    used = 0
    for drawing in drawings:
        needed = max(map(width_of, drawing)) + _GAP
        if row and used + needed - _GAP > width:
            yield side_by_side(row)
            row, used = [], 0
        row.append(drawing)
        used += needed
    yield side_by_side(row)


def _draw_puzzle(answer: Answer, *, color: bool) -> list[str]:
    tokens, look = answer.question.tokens, answer.look
    cells = answer.question.cells_of(tokens)
    styles = [[look.ansi.get(int(token), "") for token in row] for row in tokens[cells]]
    return draw_cells("puzzle", symbols_of(look, tokens)[cells], styles=styles, gap=look.gap, color=color)


def _draw_group(answer: Answer, steps: list[Step], *, color: bool) -> list[str]:
    """Draws the grid that some steps have in common, as the first of them made it."""
    first, last = steps[0], steps[-1]
    title = f"step {first.number}" if first is last else f"steps {first.number}-{last.number}"
    values = [f"{step.q_halt:.2f}" for step in (first, last)]
    halting = "q " + "-".join(dict.fromkeys(values))
    if answer.halting_step in range(first.number, last.number + 1):
        halting += f" stop@{answer.halting_step}" if len(steps) > 1 else " stop"
        halting = f"\x1b[{_STOP}m{halting}\x1b[0m" if color else halting
    elif color:
        halting = f"\x1b[{_FAINT}m{halting}\x1b[0m"
    marked = {"confidence": last.confidence, "changed": first.changed}
    drawing = _draw_step(title, answer, first, **marked, color=color)
    return [drawing[0], halting, *drawing[1:]]


def _draw_step(
    title: str,
    answer: Answer,
    step: Step,
    *,
    confidence: np.ndarray | None = None,
    changed: np.ndarray | None = None,
    color: bool,
) -> list[str]:
    """Draws the grid of a step; where they are given, with what is in doubt and what changed."""
    look, texts, cells = answer.look, step.grid, answer.question.cells_of(step.tokens)
    is_new = (step.tokens != answer.question.tokens)[cells]
    has_areas, marks = _has_areas(look), None
    confidence = np.ones(texts.shape) if confidence is None else confidence
    if changed is None:
        changed = np.zeros_like(is_new)
    elif not color and not has_areas:
        marks = np.where(changed, "*", " ")

    def style_of(place: tuple[int, int]) -> str:
        base = (
            GREEN if look.marks_new and is_new[place] else look.ansi.get(int(step.tokens[cells[place]]), "")
        )
        doubt = "" if has_areas else _doubt(confidence[place])[0]
        return ";".join(filter(None, [doubt or base, _CHANGED if changed[place] else ""]))

    styles = np.full(texts.shape, "", object)
    for place in np.ndindex(texts.shape):
        styles[place] = style_of(place)
    if color and has_areas:
        doubts = np.array([_doubt(value)[1] for value in confidence.flat], np.str_).reshape(texts.shape)
        texts = np.where(doubts == "", texts, doubts)
    return draw_cells(title, texts, styles=styles.tolist(), gap=look.gap, color=color, marks=marks)


def _draw_confidence(answer: Answer, *, color: bool) -> list[str]:
    """Draws how sure the answer's cells are, in tenths."""
    tenths = np.minimum((answer.confidence * 10).astype(int), 9).astype(np.str_)
    styles = [[_doubt(value)[0] or _FAINT for value in row] for row in answer.confidence]
    return draw_cells("sure (tenths)", tenths, styles=styles, gap=answer.look.gap, color=color)


def _doubt(confidence: float) -> tuple[str, str]:
    """Returns style and mark of a cell that sure; both empty where there is no doubt."""
    return next(((style, mark) for below, style, mark in _DOUBTS if confidence < below), ("", ""))


def _has_areas(look: Style) -> bool:
    """Whether grids of this look are areas of colour, without gaps."""
    return not look.gap


def _verdict(answer: Answer, *, color: bool) -> Iterator[str]:
    """Yields what is to be said of the answer."""

    def say(good: bool, text: str) -> str:
        return f"\x1b[{'32;1' if good else '31;1'}m{text}\x1b[0m" if color else text

    if answer.correct is not None:
        yield say(answer.correct, "correct" if answer.correct else "wrong") + ": compared with the solution"
    if answer.valid is not None:
        rules = "the rules of the puzzle hold" if answer.valid else "the rules of the puzzle do not hold"
        yield say(answer.valid, "valid" if answer.valid else "not valid") + f": {rules}"
    run = ""
    if answer.num_samples > 1:
        run = f"run {answer.sample + 1} of {answer.num_samples} ({answer.select}), "
    halting = f"would halt after step {answer.halting_step}" if answer.halting_step else "would never halt"
    yield f"{run}step {answer.number} of {len(answer.steps)}"
    least = f", least sure cell {answer.confidence.min():.2f}" if answer.confidence.size else ""
    yield f"halting value {answer.q_halt:.2f}{least}"
    yield f"the model {halting}"


def _halting_values(answer: Answer, width: int) -> str:
    """Lists the halting value after each step."""
    values = [f"{step.q_halt:.2f}".removeprefix("0").replace("1.00", "1.0") for step in answer.steps]
    runs = [(value, len(list(run))) for value, run in itertools.groupby(values)]
    text = " ".join(value if count == 1 else f"{value}(x{count})" for value, count in runs)
    return textwrap.fill(f"halting values: {text}", width, subsequent_indent=" " * 16)


def _legend(look: Style, *, color: bool) -> str:
    """Explains the marks of the steps."""
    if not color:
        changed = "" if _has_areas(look) else "; * changed"
        return f"q: halting value; stop: where the model would halt{changed}"
    doubts = [
        f"{mark} <{below:g}" if _has_areas(look) else f"\x1b[{style}m <{below:g} \x1b[0m"
        for below, style, mark in _DOUBTS
    ]
    return f"q: halting value   \x1b[{_CHANGED}mchanged\x1b[0m   sure {' '.join(doubts)}"
