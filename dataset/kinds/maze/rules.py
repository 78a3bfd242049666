"""Mazes themselves: their rules, shortest paths, the labels of the published mazes, random mazes.

A maze is a square of cells, row by row; an answer is the maze with a path on it. Both are tokens, uint8
[count, cells]. The length of a path is the number of its cells, start and goal included.

Many mazes are searched side by side: each cell has one bit for each maze, so that a step into all directions
in eight mazes is a few operations on bytes. Invariant: everything random is a function of (seed, stream,
index) (`randomness`).
"""

import math
from collections.abc import Iterator

import numpy as np

from dataset.randomness import random_below, random_bits

WALL, OPEN, START, GOAL, PATH = range(1, 6)  # tokens; 0 = pad
CHARACTERS = "# SGo"  # of these tokens, in this order
VOCAB_SIZE = 6

_FULL_WEIGHT_CELLS = 120  # see draw_mazes
_BATCH_CELLS, _BATCH_MAZES = 1 << 20, 1 << 11  # at most; other numbers give other mazes


def is_path(mazes: np.ndarray, answers: np.ndarray) -> np.ndarray:
    """Whether each answer is its maze with exactly one path from start to goal on it: bool [count].

    Walls, start and goal are where they were, every marked cell is on the path, and the path does not run
    beside itself, as nobody could tell then in which order it goes. It need not be the shortest.
    answers: any tokens of any integer dtype.
    """
    is_marked = (answers == PATH) | (answers == START) | (answers == GOAL)
    # With walls everywhere else, a shortest path visits every marked cell only if it is the only path.
    nothing_else = np.where(is_marked, mazes, WALL)
    return marks_open_cells(mazes, answers) & (shortest_path_cells(nothing_else) == is_marked.sum(axis=1))


def marks_open_cells(mazes: np.ndarray, answers: np.ndarray) -> np.ndarray:
    """Returns whether each answer is its maze, with marks on open cells alone: bool [count]."""
    return ((answers == mazes) | ((mazes == OPEN) & (answers == PATH))).all(axis=1)


def shortest_path_cells(mazes: np.ndarray) -> np.ndarray:
    """Finds the length of a shortest path of each maze, 0 where there is none: int64 [count]."""
    lengths = np.zeros(len(mazes), np.int64)
    goals = _to_bits((mazes == GOAL).T)[1:-1, 1:-1]
    for num_cells, reached in enumerate(_flood((mazes != WALL).T, (mazes == START).T), 1):
        lengths[_is_anywhere(reached & goals)[: len(mazes)]] = num_cells
    return lengths


def published_answers(mazes: np.ndarray) -> np.ndarray:
    """Finds, of all shortest paths, mostly millions, the one that the published mazes are labelled with.

    It is found breadth-first from the start, with neighbours in the order down, left, right, up; the first
    cell to discover another is the one before it. Every maze must have a path.
    """
    return np.array([_published_answer(maze) for maze in mazes.tolist()], np.uint8)


def _published_answer(maze: list[int]) -> list[int]:
    size = math.isqrt(len(maze))
    width = size + 1  # a wall ends every row, and one is above and below: no step leaves the maze
    tokens = [WALL] * width
    for first in range(0, len(maze), size):
        tokens += [*maze[first : first + size], WALL]
    tokens += [WALL] * width
    start, goal = tokens.index(START), tokens.index(GOAL)
    cell_before = {start: start}
    queue = [start]
    for cell in queue:  # which grows meanwhile
        if goal in cell_before:
            break
        for other in (cell + width, cell - 1, cell + 1, cell - width):
            if tokens[other] != WALL and other not in cell_before:
                cell_before[other] = cell
                queue.append(other)
    answer, cell = list(maze), cell_before[goal]
    while cell != start:
        row, column = divmod(cell, width)
        answer[(row - 1) * size + column] = PATH
        cell = cell_before[cell]
    return answer


def _flood(is_open: np.ndarray, is_start: np.ndarray) -> Iterator[np.ndarray]:
    """Yields the cells first reached after 0, 1, 2, ... steps, until no maze has more.

    is_open, is_start: bool [cells, count]. Yields bits, uint8 [size, size, count / 8], which the step after
    the next one overwrites.
    """
    front, next_front = _to_bits(is_start), _to_bits(is_start)
    unseen = _to_bits(is_open)[1:-1, 1:-1]
    reached = front[1:-1, 1:-1]
    unseen &= ~reached
    while reached.any():
        yield reached
        reached = next_front[1:-1, 1:-1]
        np.bitwise_or(front[:-2, 1:-1], front[2:, 1:-1], out=reached)
        reached |= front[1:-1, :-2]
        reached |= front[1:-1, 2:]
        reached &= unseen
        unseen ^= reached
        front, next_front = next_front, front


def _to_bits(cells: np.ndarray) -> np.ndarray:
    """Packs bool [size * size, count] into uint8 [size + 2, size + 2, count / 8]: bits of mazes, 0 around."""
    size, count = math.isqrt(len(cells)), cells.shape[1]
    bits = np.zeros((size + 2, size + 2, -(-count // 8)), np.uint8)
    bits[1:-1, 1:-1] = np.packbits(cells, axis=1).reshape(size, size, -1)
    return bits


def _is_anywhere(bits: np.ndarray) -> np.ndarray:
    """Whether each maze has a bit: bool [count, rounded up to 8]."""
    return np.unpackbits(np.bitwise_or.reduce(bits, axis=(0, 1))).astype(bool)


def draw_mazes(
    seed: int, *, stream: int, index: int, size: int, min_path_cells: int, is_perfect: bool = False
) -> np.ndarray:
    """Draws some random mazes with a shortest path of at least `min_path_cells`: uint8 [any number, cells].

    Each cell is a wall with the same probability, which is drawn from 0.3 to 0.5 for each maze; start and
    goal are any two open cells. is_perfect: there is one path between any two cells (`_dig_perfect_mazes`).

    Nearly all mazes with loops have too short a path (all but 1 in 50,000 with size 30 and 110 cells, the
    published mazes). So the goal is drawn among the cells that are far enough from the start, and the maze
    kept in proportion to their share of the open cells, which comes to the same. Only, a share of more than
    120 / (size * size) counts no more than that: with size 30 it is 7 times as fast, and up to size 10 it
    makes no difference.
    """
    num_cells = size * size
    count = max(min(_BATCH_CELLS // num_cells, _BATCH_MAZES) // 8 * 8, 8)
    bits = random_bits(seed, stream=stream, index=index, count=3 * count + num_cells * count // 4)
    wall_bits, keep_bits, goal_bits = bits[: 3 * count].reshape(3, count)
    # A height of 16 bits for each cell, of a word the lowest first on every machine; what is low is wall.
    heights = bits[3 * count :].astype("<u8", copy=False).view("<u2").reshape(num_cells, count)
    wall_heights = 19_661 + (wall_bits >> np.uint64(48)) * np.uint64(13_107) // np.uint64(65_536)
    is_open = _dig_perfect_mazes(heights) if is_perfect else heights >= wall_heights.astype(np.uint16)

    # The highest of the open cells is any of them, whichever they are. (Of two as high, the later one.)
    starts = np.zeros(count, np.int64)
    highest = np.flatnonzero(heights == heights.max(axis=0))
    starts[highest % count] = highest // count
    is_start = np.zeros_like(is_open)
    is_start[starts, np.arange(count)] = True
    far = np.zeros((size, size, count // 8), np.uint8)
    for num_path_cells, reached in enumerate(_flood(is_open, is_start), 1):
        if num_path_cells >= min_path_cells:
            far |= reached

    found = np.flatnonzero(_is_anywhere(far))
    is_far = (far.reshape(num_cells, -1)[:, found // 8] >> (7 - found % 8) & 1).astype(bool).T
    is_open = is_open[:, found].T
    num_far, num_open = np.count_nonzero(is_far, axis=1), np.count_nonzero(is_open, axis=1)
    weights = num_far * max(num_cells, _FULL_WEIGHT_CELLS)
    is_kept = random_below(keep_bits[found], num_open * _FULL_WEIGHT_CELLS) < weights
    found, is_far, is_open, num_far = found[is_kept], is_far[is_kept], is_open[is_kept], num_far[is_kept]

    mazes = np.where(is_open, np.uint8(OPEN), np.uint8(WALL))
    rows = np.arange(len(mazes))
    mazes[rows, starts[found]] = START
    choices = num_far.cumsum() - num_far + random_below(goal_bits[found], num_far)
    mazes[rows, np.flatnonzero(is_far)[choices] % num_cells] = GOAL
    return mazes


def _dig_perfect_mazes(heights: np.ndarray) -> np.ndarray:
    """Digs mazes without a loop: bool [cells, count].

    A maze begins with its highest cell. The next one touches the cell that was dug last and no other dug
    cell; the highest of several. Without one, the search goes back to the cell dug before, and so on: depth
    first, which makes long corridors. heights: uint16 [cells, count].
    """
    size, count = math.isqrt(len(heights)), heights.shape[1]
    times = np.zeros((size + 2, size + 2, count), np.int32)  # when each cell was dug; 0: a wall
    inside, mazes = times[1:-1, 1:-1], np.arange(count)
    keys = heights.astype(np.int64)
    for time in range(1, len(heights) + 1):
        cells = keys.argmax(axis=0)
        is_dug = keys[cells, mazes] > 0
        if not is_dug.any():
            break
        rows, columns = np.divmod(cells[is_dug], size)
        inside[rows, columns, mazes[is_dug]] = time
        beside = (times[:-2, 1:-1], times[2:, 1:-1], times[1:-1, :-2], times[1:-1, 2:])
        num_dug = sum((each > 0).astype(np.int8) for each in beside)
        can_be_dug = ((num_dug == 1) & (inside == 0)).reshape(heights.shape)
        since = sum(beside).reshape(heights.shape).astype(np.int64)  # of the one cell beside that is dug
        keys = np.where(can_be_dug, since << 16 | heights, 0)
    return (inside > 0).reshape(heights.shape)
