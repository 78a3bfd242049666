"""Square mazes with one start and one goal.

Tokens: 0 = pad, then '#', space, S, G and 'o' (the path) as 1 .. 5. A maze with loops may have many shortest
paths. The label is one of them. So the metric `exact` measures whether a model has learned the rule that
selects the label. The metrics `valid` and `shortest` measure whether the model solves mazes.
"""

import itertools
import math

import numpy as np

from dataset.kinds.evaluator import RowEvaluator
from dataset.kinds.kind import Kind, Puzzle, Style
from dataset.kinds.maze import rules
from dataset.metadata import Metadata

TOKEN_OF = {character: token for token, character in enumerate(rules.CHARACTERS, rules.WALL)}
TOKEN_OF |= dict.fromkeys("+-|", rules.WALL) | {".": rules.OPEN, "E": rules.GOAL, "X": rules.PATH}

_MADE_UP = 4  # a stream of random bits; builders use the lower numbers


def _mismatch(metadata: Metadata) -> str | None:
    if metadata.vocab_size != rules.VOCAB_SIZE:
        return f"vocab_size is {metadata.vocab_size}, not {rules.VOCAB_SIZE}"
    if math.isqrt(metadata.seq_len) ** 2 != metadata.seq_len:
        return f"seq_len, {metadata.seq_len}, is not a square"
    return None


def check_answers(inputs: np.ndarray, preds: np.ndarray) -> dict[str, np.ndarray]:
    """Checks by the rules whether answers to mazes are right. Returns {check: bool [n]}.

    An answer is "valid" if it equals the maze, except for marked open cells, and if the marked cells form
    exactly one path from start to goal. A valid answer is "shortest" if no path is shorter.

    inputs, preds: Mazes and answers, tokens [n, seq_len].
    """
    is_valid = rules.is_path(inputs, preds)
    path_cells = np.isin(preds, (rules.START, rules.PATH, rules.GOAL)).sum(axis=1)
    return {"valid": is_valid, "shortest": is_valid & (path_cells == rules.shortest_path_cells(inputs))}


def to_cells(text: str) -> str:
    """Converts the text of a maze to a text of its cells, row by row.

    If the text has only one line with cells, this line contains all rows. Otherwise, each line is a row,
    except for empty lines above or below a square. Editors remove spaces at the end of a line. So if the rows
    differ in length, open cells are appended to all rows, until they have the length of the longest row, and
    at least as many cells as there are rows. Then walls are added on the right or below, until the maze is a
    square.
    """
    rows = text.splitlines()
    if sum(map(bool, rows)) < 2:
        return "".join(rows)
    # Drop empty lines around a square. Other empty lines are rows of open cells without their spaces.
    for end in (-1, 0):
        while not rows[end] and len(rows) > max(map(len, rows)):
            rows.pop(end)
    width = max(map(len, rows))
    if any(len(row) < width for row in rows):
        width = max(width, len(rows))
    wall = rules.CHARACTERS[0]
    side = max(width, len(rows))
    return "".join(row.ljust(width).ljust(side, wall) for row in rows).ljust(side * side, wall)


def read_puzzles(text: str) -> list[Puzzle]:
    """Reads a maze from a text: one line for each row, or all rows in one line.

    '#', '+', '-' and '|' are walls. Space and '.' are open cells. S is the start. G or E is the goal. Returns
    a list that contains only this maze. Raises ValueError if the maze is not valid.
    """
    for row_number, row in enumerate(text.splitlines(), 1):
        if unknown := next((cell for cell in row if TOKEN_OF.get(cell, rules.PATH) == rules.PATH), None):
            raise ValueError(
                f"row {row_number} of the maze has {unknown!r}. Use '#', ' ' (or '.'), S and G (or E)."
            )
    cells = to_cells(text)
    if len(cells) < 4 or math.isqrt(len(cells)) ** 2 != len(cells):
        raise ValueError(f"the maze has one line of {len(cells)} cells. Pass one line for each row.")
    tokens = np.array([TOKEN_OF[cell] for cell in cells], np.uint8)
    for token, thing in ((rules.START, "start S"), (rules.GOAL, "goal G")):
        if (count := np.count_nonzero(tokens == token)) != 1:
            raise ValueError(f"the maze has {'no' if not count else 'more than one'} {thing}")
    if not rules.shortest_path_cells(tokens[None])[0]:
        raise ValueError("the maze has no path from S to G.")
    return [Puzzle(tokens, vocab_size=rules.VOCAB_SIZE, rules=rules.is_path)]


def _make_up(metadata: Metadata, count: int) -> tuple[np.ndarray, np.ndarray]:
    size = math.isqrt(metadata.seq_len)
    mazes = np.empty((0, size**2), np.uint8)
    drawn = {"size": size, "min_path_cells": 2 * size, "is_perfect": True}  # perfect: only one answer each
    for index in itertools.count():
        if len(mazes) >= count:
            return mazes[:count], rules.published_answers(mazes[:count])
        mazes = np.concatenate([mazes, rules.draw_mazes(0, stream=_MADE_UP, index=index, **drawn)])


KIND = Kind(
    name="maze",
    mismatch=_mismatch,
    build_evaluator=lambda _folder, _metadata: RowEvaluator("maze", check_answers),
    plural="mazes",
    augmentation="square",
    style=Style(
        symbols="_" + rules.CHARACTERS,
        ansi={rules.WALL: "90;100", rules.START: "30;102", rules.GOAL: "30;101", rules.PATH: "30;103"},
        colors={rules.WALL: "#4a5160", rules.START: "#3f9d6b", rules.GOAL: "#d1574c", rules.PATH: "#e3b341"},
        gap="",
    ),
    read_puzzles=read_puzzles,
    make_up=_make_up,
)
