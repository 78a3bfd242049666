"""3-coloring of graphs: give each node one of three colors, so that no edge joins two nodes of one color.

A graph with n nodes is an n x n grid. Cell (i, j) says whether an edge joins the nodes i and j, and cell
(i, i) is node i. The answer repeats the edges and has the colors of the nodes. Only the nodes of an answer
count. Tokens: 0 = pad, 1 = no edge, 2 = edge, 3 = open node, 4 to 6 = the colors. Answers that differ only
by an exchange of colors count as one answer. To compare answers, colors are renamed in order of first use.
"""

import functools
import math

import numpy as np

from dataset.augmentations import rename_by_first_use
from dataset.kinds.kind import FAINT, Kind, Puzzle, Style
from dataset.many_answers import (
    AnswerRules,
    ManyAnswersEvaluator,
    count_consistent,
    find_consistent,
    read_square,
)
from dataset.metadata import Metadata

SIZES = range(3, 11)  # 10 nodes have 9842 colorings
NO_EDGE, EDGE, OPEN = 1, 2, 3  # tokens
COLORS = (4, 5, 6)
VOCAB_SIZE = 7
_SYMBOLS = "_.#?RGB"


def _mismatch(metadata: Metadata) -> str | None:
    if metadata.vocab_size != VOCAB_SIZE:
        return f"vocab_size is {metadata.vocab_size}, not {VOCAB_SIZE}"
    size = math.isqrt(metadata.seq_len)
    if size**2 != metadata.seq_len or size not in SIZES:
        return f"seq_len, {metadata.seq_len}, is not that of a graph of {SIZES[0]} to {SIZES[-1]} nodes"
    return None


@functools.cache
def all_colorings(num_nodes: int) -> np.ndarray:
    """Returns all ways to color nodes with up to 3 colors: tokens, uint8 [n, num_nodes].

    Two colorings that only exchange colors count as one. Edges are ignored, so neighbors may have the same
    color.
    """
    colorings = [[]]
    for _ in range(num_nodes):
        colorings = [[*colors, new] for colors in colorings for new in COLORS[: len(set(colors)) + 1]]
    return np.array(colorings, np.uint8)


def make_inputs(edges: np.ndarray, num_nodes: int) -> np.ndarray:
    """Converts graphs to the tokens of puzzles: uint8 [n, num_nodes * num_nodes].

    edges: Whether an edge joins each pair of nodes, bool [n, pairs]. The pairs are in the order of
    np.triu_indices(num_nodes, 1).
    """
    grids = np.full((len(edges), num_nodes, num_nodes), OPEN, np.uint8)
    first, second = np.triu_indices(num_nodes, 1)
    grids[:, first, second] = grids[:, second, first] = np.where(edges, EDGE, NO_EDGE)
    return grids.reshape(len(edges), -1)


def _edges(inputs: np.ndarray) -> np.ndarray:
    size = math.isqrt(inputs.shape[1])
    first, second = np.triu_indices(size, 1)
    return inputs.reshape(-1, size, size)[:, first, second] == EDGE


def _nodes(tokens: np.ndarray) -> np.ndarray:
    return tokens[:, :: math.isqrt(tokens.shape[1]) + 1]


def _same_color(nodes: np.ndarray) -> np.ndarray:
    first, second = np.triu_indices(nodes.shape[1], 1)
    return nodes[:, first] == nodes[:, second]


def count_conflicts(inputs: np.ndarray, answers: np.ndarray) -> np.ndarray:
    """Counts the edges that join two nodes of the same color: int64 [n].

    The count is -1 if any node has no color. inputs, answers: Graphs and answers, tokens [n, cells].
    """
    nodes = _nodes(answers)
    conflicts = (_edges(inputs) & _same_color(nodes)).sum(axis=1)
    return np.where(np.isin(nodes, COLORS).all(axis=1), conflicts, -1)


def to_standard(inputs: np.ndarray, answers: np.ndarray) -> np.ndarray:
    standard = inputs.astype(np.uint8)
    _nodes(standard)[:] = rename_by_first_use(_nodes(answers), COLORS)
    return standard


def find_answers(inputs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    colorings = all_colorings(math.isqrt(inputs.shape[1]))
    indices, counts = find_consistent(_edges(inputs), _same_color(colorings))
    answers = inputs.astype(np.uint8).repeat(counts, axis=0)
    _nodes(answers)[:] = colorings[indices]
    return answers, counts


def count_answers(inputs: np.ndarray) -> np.ndarray:
    return count_consistent(_edges(inputs), _same_color(all_colorings(math.isqrt(inputs.shape[1]))))


RULES = AnswerRules(
    are_valid=lambda inputs, answers: count_conflicts(inputs, answers) == 0,
    to_standard=to_standard,
    count_answers=count_answers,
    count_conflicts=count_conflicts,
    count_rules=lambda inputs: _edges(inputs).sum(axis=1),
)


def read_puzzles(text: str) -> list[Puzzle]:
    """Reads one graph from a text. Returns a list with one puzzle.

    The text is the adjacency matrix of the graph: '?' on the diagonal, '#' for an edge and '.' for no edge.
    Raises ValueError if the matrix is not square and symmetric, or has another size than 3 to 10 nodes.
    """
    puzzles = read_square(text, _SYMBOLS, sizes=SIZES, answer_rules=RULES)
    tokens = puzzles[0].tokens[None]
    if not np.array_equal(make_inputs(_edges(tokens), math.isqrt(tokens.shape[1])), tokens):
        raise ValueError(
            "the grid is not a graph. Write '?' on the diagonal, and '#' or '.' on both sides of it alike."
        )
    return puzzles


KIND = Kind(
    name="coloring",
    mismatch=_mismatch,
    build_evaluator=lambda _folder, _metadata: ManyAnswersEvaluator("coloring", RULES),
    style=Style(
        symbols=_SYMBOLS,
        ansi={0: FAINT, NO_EDGE: FAINT, COLORS[0]: "30;101", COLORS[1]: "30;102", COLORS[2]: "30;104"},
        colors={COLORS[0]: "#d1574c", COLORS[1]: "#3f9d6b", COLORS[2]: "#4c7bd1"},
    ),
    read_puzzles=read_puzzles,
    accepts=RULES.are_valid,
    plural="graphs",
)
