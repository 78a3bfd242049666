"""Square mazes with one start and one goal.

Tokens: 0 = pad, then '#', space, S, G and 'o' as 1 .. 5. A maze, unless it is a perfect one,
has a great many shortest paths, and a label is one of them: the exact share tells how well a model copies the
rule that chose it, the valid and the shortest share how well it solves mazes.
"""

import math

import numpy as np

from dataset.format import Metadata
from dataset.kinds.kind import Kind, Puzzle, RowEvaluator, Style
from dataset.kinds.maze import rules

_TOKEN_OF = {
    character: token for token, character in enumerate(rules.CHARACTERS[: rules.GOAL], rules.WALL)
} | {".": rules.OPEN}


def _mismatch(metadata: Metadata) -> str | None:
    if metadata.vocab_size != rules.VOCAB_SIZE:
        return f"vocab_size is {metadata.vocab_size}, not {rules.VOCAB_SIZE}"
    if math.isqrt(metadata.seq_len) ** 2 != metadata.seq_len:
        return f"seq_len, {metadata.seq_len}, is no square"
    return None


def check_answers(inputs: np.ndarray, preds: np.ndarray) -> dict[str, np.ndarray]:
    """valid: whether the answer is the maze with exactly one path from start to goal on it (`is_path`);
    shortest: valid, and no path has fewer cells. Tokens [n, seq_len] -> bool [n].
    """
    is_valid = rules.is_path(inputs, preds)
    path_cells = np.isin(preds, (rules.START, rules.PATH, rules.GOAL)).sum(axis=1)
    return {"valid": is_valid, "shortest": is_valid & (path_cells == rules.shortest_path_cells(inputs))}


def read_puzzles(text: str) -> list[Puzzle]:
    """Reads one maze: a line for each row, or all rows in one line, of '#', space (or '.'), S and G.

    Open cells at the end of a row may be missing, as editors drop spaces there.
    """
    rows = text.removesuffix("\n").split("\n")
    side = len(rows)
    if side == 1 and len(text) >= 4 and math.isqrt(len(rows[0])) ** 2 == len(rows[0]):
        side = math.isqrt(len(rows[0]))
        rows = [rows[0][first : first + side] for first in range(0, side * side, side)]
    rows = [row.rstrip("\r") for row in rows]
    for number, row in enumerate(rows, 1):
        if unknown := next((cell for cell in row if cell not in _TOKEN_OF), None):
            raise ValueError(
                f"row {number} of the maze has {unknown!r}: its cells are '#', ' ' (or '.'), S and G"
            )
    if (longest := max(map(len, rows))) > side or side < 2:
        raise ValueError(
            f"the maze has {side} rows, the longest of {longest} cells: it must be a square, at least 2x2"
        )
    cells = "".join(row.ljust(side) for row in rows)
    for character, thing in (("S", "start S"), ("G", "goal G")):
        if (count := cells.count(character)) != 1:
            raise ValueError(f"the maze has {'no' if not count else 'more than one'} {thing}")
    tokens = np.array([_TOKEN_OF[cell] for cell in cells], np.uint8)
    if not rules.shortest_path_cells(tokens[None])[0]:
        raise ValueError("the maze has no path from S to G")
    return [Puzzle(tokens, vocab_size=rules.VOCAB_SIZE, rules=rules.is_path)]


KIND = Kind(
    name="maze",
    mismatch=_mismatch,
    build_evaluator=lambda _folder, _metadata: RowEvaluator("maze", check_answers),
    augmentation="square",
    style=Style(
        symbols="_" + rules.CHARACTERS,
        ansi={rules.WALL: "90;100", rules.START: "30;102", rules.GOAL: "30;101", rules.PATH: "30;103"},
        colors={rules.WALL: "#4a5160", rules.START: "#3f9d6b", rules.GOAL: "#d1574c", rules.PATH: "#e3b341"},
        gap="",
    ),
    read_puzzles=read_puzzles,
)
