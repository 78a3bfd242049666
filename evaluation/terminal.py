"""Draws an answer as text for a terminal: the puzzle, the answer, and the answer after every step."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from config.programs import Select
from dataset.drawing import GREEN, draw_cells, irregular_regions, side_by_side, symbols_of, without_codes
from dataset.kinds.kind import Style
from evaluation.solving import Answer, Step

_GAP = 3  # columns between drawings
_FAINT, _CHANGED, _GOOD, _BAD = "2", "1;4", "32;1", "31;1"  # ANSI codes
_CERTAIN = 0.9  # if all cells have this confidence, it is not drawn
# (confidence, codes, mark): a cell with less confidence is drawn with the ANSI codes. In puzzles with colored
# areas, it is drawn with the mark.
_DOUBTS = ((0.5, "97;48;5;124", "?"), (0.8, "97;48;5;130", ":"), (0.95, "97;48;5;58", "."))
_RULES: dict[Select, str] = {
    "q_head": "its last answer is the most likely right",
    "q_head_any_step": "its answer at any step is the most likely right",
    "first_to_halt": "the first to halt",
    "vote": "the most frequent answer",
    "residual": "its state changed least in its last steps",
    "rules": "by the rules of the puzzle",
}


def draw_answer(answer: Answer, *, width: int, color: bool) -> str:
    """Draws the puzzle, the answer, and the answer after each thinking step as text.

    width: Number of characters in a line. Grids are placed side by side as long as they fit. A single wide
    grid or a line of text may be longer.
    color: Whether to use ANSI color codes.
    """
    top = [
        _draw_grid("puzzle", answer, answer.puzzle.tokens, color=color),
        _draw_grid("answer", answer, answer.tokens, color=color),
    ]
    if (answer.confidence < _CERTAIN).any():
        top.append(_draw_confidence(answer))
    top.append(["", *_verdict(answer)])
    groups = [list(group) for _, group in itertools.groupby(answer.steps, lambda step: step.grid.tolist())]
    steps = [_draw_group(answer, group, color=color) for group in groups]
    several = answer.distinct if answer.distinct is not None and answer.num_samples > 1 else ()
    found = [
        _draw_grid(f"right answer {number}", answer, tokens, color=color)
        for number, tokens in enumerate(several, 1)
    ]
    drawings = (top, found, steps) if found else (top, steps)
    parts = [
        part.lstrip("\n") if group is top else part for group in drawings for part in _wrap(group, width)
    ]
    text = "\n\n".join(filter(None, [*parts, _legend(answer, groups, color=color)]))
    return text if color else "\n".join(map(str.rstrip, without_codes(text).splitlines()))


def _wrap(drawings: list[list[str]], width: int) -> Iterator[str]:
    row, used = [], 0
    for drawing in drawings:
        needed = max(len(without_codes(line)) for line in drawing) + _GAP
        if row and used + needed - _GAP > width:
            yield side_by_side(row)
            row, used = [], 0
        row.append(drawing)
        used += needed
    yield side_by_side(row)


def _draw_group(answer: Answer, steps: list[Step], *, color: bool) -> list[str]:
    first, last = steps[0], steps[-1]
    title = f"step {first.number}" if last is first else f"steps {first.number} to {last.number}"
    # All steps have the same grid. They differ in confidence, and only the first one changed cells.
    marked = {"confidence": last.confidence, "changed": first.changed}
    drawing = _draw_grid(title, answer, first.tokens, **marked, color=color)
    if answer.is_search:
        return drawing
    values = dict.fromkeys(f"{step.q_halt:.2f}" for step in (first, last))
    return [drawing[0], _coded(f"right: {' to '.join(values)}", _FAINT), *drawing[1:]]


def _draw_grid(
    title: str,
    answer: Answer,
    tokens: np.ndarray,
    *,
    confidence: np.ndarray | None = None,
    changed: np.ndarray | None = None,
    color: bool,
) -> list[str]:
    """Draws tokens as a grid with a title. Returns the lines of text.

    answer: Answer that contains the puzzle and its style.
    tokens: Tokens of the puzzle or of an answer, [seq_len].
    confidence: Probability of each cell, [rows, columns]. With color, cells with a low probability are
    marked. If None, no cell is marked.
    changed: Cells to mark as changed, bool [rows, columns]. If None, no cell is marked.
    color: Whether the caller keeps the ANSI color codes. If False, a character after the cell marks changed
    cells, except in puzzles with colored areas (`style.has_areas`).
    """
    style, puzzle = answer.style, answer.puzzle
    cells = puzzle.cells_of(tokens)
    texts, is_new = symbols_of(style, tokens)[cells], style.marks_new & (tokens != puzzle.tokens)[cells]
    doubts = [_doubt(value) for value in (np.ones(texts.shape) if confidence is None else confidence).flat]
    marks = None if changed is None or color or style.has_areas else np.where(changed, _mark(style), " ")
    codes = np.full(texts.shape, "", object)
    for (cell, token), (doubt, _) in zip(np.ndenumerate(tokens[cells]), doubts, strict=True):
        base = GREEN if is_new[cell] else style.ansi.get(int(token), "")
        code = base if style.has_areas or style.is_blank(int(token)) else doubt or base
        is_changed = changed is not None and changed[cell]
        codes[cell] = ";".join(filter(None, [code, _CHANGED if is_changed else ""]))
    if color and style.has_areas:
        in_doubt = np.array([mark for _, mark in doubts], np.str_).reshape(texts.shape)
        texts = np.where(in_doubt == "", texts, in_doubt)
    regions = irregular_regions(style, cells, len(tokens))
    styles = codes.tolist()
    return draw_cells(title, texts, styles=styles, gap=style.gap, color=True, marks=marks, regions=regions)


def _draw_confidence(answer: Answer) -> list[str]:
    tenths = np.minimum((answer.confidence * 10).astype(int), 9).astype(np.str_)
    codes = [[_doubt(value)[0] or _FAINT for value in row] for row in answer.confidence]
    style, cells = answer.style, answer.puzzle.cells_of(answer.tokens)
    regions = irregular_regions(style, cells, len(answer.tokens))
    return draw_cells("confidence (tenths)", tenths, styles=codes, gap=style.gap, color=True, regions=regions)


def _doubt(confidence: float) -> tuple[str, str]:
    return next(((codes, mark) for below, codes, mark in _DOUBTS if confidence < below), ("", ""))


def _mark(style: Style) -> str:
    return "'" if "*" in style.symbols else "*"


def _coded(text: str, codes: str) -> str:
    return f"\x1b[{codes}m{text}\x1b[0m"


def _verdict(answer: Answer) -> Iterator[str]:
    if not answer.is_decided:
        yield _coded("not decided", _BAD) + f": none of {answer.num_samples} runs found an answer"
        return
    if answer.correct is not None:
        verdict = _coded("correct", _GOOD) if answer.correct else _coded("wrong", _BAD)
        yield f"{verdict}: compared with the solution"
    if answer.valid is not None:
        verdict = _coded("valid", _GOOD) if answer.valid else _coded("not valid", _BAD)
        yield f"{verdict}: the rules of the puzzle {'hold' if answer.valid else 'do not hold'}"
    if answer.puzzle.remark:
        yield answer.puzzle.remark
    if answer.distinct is not None and answer.num_samples > 1:
        yield f"{len(answer.distinct)} different right answers among {answer.num_samples} samples"
    if answer.num_samples > 1:
        yield f"from sample {answer.sample + 1} of {answer.num_samples}: {_RULES[answer.select]}"
    yield f"thinking step {answer.number} of {len(answer.steps)}"
    if not answer.is_search:
        yield f"predicted probability of being right: {answer.q_halt:.2f}"
        least = answer.confidence.min(initial=1)
        yield f"least confidence of a cell: {least:.2f}" if least < _CERTAIN else "confident of every cell"
        after = f"halt after step {answer.halting_step}" if answer.halting_step else "never halt"
        yield f"the model would {after}"


def _legend(answer: Answer, groups: list[list[Step]], *, color: bool) -> str:
    style, parts = answer.style, []
    if not answer.is_search:
        parts.append("right: predicted probability of being right")
    if any(group[0].changed.any() for group in groups) and (color or not style.has_areas):
        parts.append(_coded("changed", _CHANGED) if color else f"{_mark(style)} changed")
    if color:
        seen = {_doubt(value) for group in groups for value in group[-1].confidence.flat}
        doubts = [
            f"{mark} <{below:g}" if style.has_areas else _coded(f" <{below:g} ", codes)
            for below, codes, mark in _DOUBTS
            if (codes, mark) in seen
        ]
        parts += [f"confidence {' '.join(doubts)}"] if doubts else []
    return "   ".join(parts)
