"""The rules of mazes: shortest paths, the labels of the published mazes, random mazes.

A maze is a square of cells, row by row. An answer is the maze with a path on it. Both are tokens, [count,
cells]. The length of a path is its number of cells, including start and goal.

Many mazes are searched at once. A byte contains the same cell of eight mazes, so a few operations on bytes
do a step of eight searches. Invariant: random mazes depend only on (seed, stream, index) and their settings.
"""

import math
from collections.abc import Iterator

import numpy as np

from dataset.randomness import random_below, random_bits

WALL, OPEN, START, GOAL, PATH = range(1, 6)  # tokens; 0 = pad
CHARACTERS = "# SGo"  # of these tokens, in this order
VOCAB_SIZE = 6

_FULL_WEIGHT_CELLS = 120  # `draw_mazes` explains it
_BATCH_CELLS, _BATCH_MAZES = 1 << 20, 1 << 11  # at most; other numbers give other mazes


def is_path(mazes: np.ndarray, answers: np.ndarray) -> np.ndarray:
    """Returns whether each answer is its maze with exactly one path marked: bool [count].

    The path may be longer than the shortest path. But the path must not touch itself, because the order of
    its cells would then be ambiguous.
    """
    is_marked = (answers == PATH) | (answers == START) | (answers == GOAL)
    # If all other cells are walls, a shortest path visits every marked cell only if it is the only path.
    nothing_else = np.where(is_marked, mazes, WALL)
    return marks_open_cells(mazes, answers) & (shortest_path_cells(nothing_else) == is_marked.sum(axis=1))


def marks_open_cells(mazes: np.ndarray, answers: np.ndarray) -> np.ndarray:
    """Returns whether each answer differs from its maze only by PATH tokens on open cells: bool [count]."""
    return ((answers == mazes) | ((mazes == OPEN) & (answers == PATH))).all(axis=1)


def shortest_path_cells(mazes: np.ndarray) -> np.ndarray:
    """Returns the length of a shortest path in each maze: int64 [count]. It is 0 if there is no path."""
    lengths = np.zeros(len(mazes), np.int64)
    goals = _to_bits((mazes == GOAL).T)[1:-1, 1:-1]
    for num_cells, reached in enumerate(_flood((mazes != WALL).T, (mazes == START).T), 1):
        lengths[_is_anywhere(reached & goals)[: len(mazes)]] = num_cells
    return lengths


def published_answers(mazes: np.ndarray) -> np.ndarray:
    """Returns each maze with the path that the published datasets mark: uint8 [count, cells].

    A breadth-first search from the start, with neighbors in the order down, left, right, up, finds this
    shortest path. Every maze must have a path.
    """
    return np.array([_published_answer(maze) for maze in mazes.tolist()], np.uint8)


def _published_answer(maze: list[int]) -> list[int]:
    size = math.isqrt(len(maze))
    width = size + 1  # walls after each row, above and below: no step leaves the maze
    tokens = [WALL] * width
    for first in range(0, len(maze), size):
        tokens += [*maze[first : first + size], WALL]
    tokens += [WALL] * width
    start, goal = tokens.index(START), tokens.index(GOAL)
    cell_before = {start: start}
    queue = [start]
    for cell in queue:  # grows in the loop
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
    """Yields the cells at distance 0, 1, 2, ... from the starts of many mazes.

    Each item is uint8 [size, size, ceil(count / 8)], one bit for each cell of each maze. Item i + 2
    overwrites the memory of item i. Ends when a distance has no cell in any maze.

    is_open: Whether a cell is not a wall, bool [cells, count]. is_start: Whether it is the start, bool
    [cells, count].
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
    """Packs mazes, bool [cells, count], so that each byte contains the same cell of 8 mazes.

    Returns uint8 [size + 2, size + 2, ceil(count / 8)], where a maze has size x size cells. Each maze has a
    border of zeros.
    """
    size, count = math.isqrt(len(cells)), cells.shape[1]
    bits = np.zeros((size + 2, size + 2, -(-count // 8)), np.uint8)
    bits[1:-1, 1:-1] = np.packbits(cells, axis=1).reshape(size, size, -1)
    return bits


def _is_anywhere(bits: np.ndarray) -> np.ndarray:
    return np.unpackbits(np.bitwise_or.reduce(bits, axis=(0, 1))).astype(bool)


def draw_mazes(
    seed: int, *, stream: int, index: int, size: int, min_path_cells: int, is_perfect: bool = False
) -> np.ndarray:
    """Generates random mazes with a shortest path of at least `min_path_cells` cells.

    Returns tokens, uint8 [n, size * size]. The number n of mazes varies and may be 0.

    seed, stream, index: Together, they determine the random numbers. size: Rows and columns of a maze.
    is_perfect: If True, every maze has exactly one path between any two open cells. If False, each cell is a
    wall with a probability p. p is random for each maze, from 0.3 to 0.5.
    """
    num_cells = size * size
    count = max(min(_BATCH_CELLS // num_cells, _BATCH_MAZES) // 8 * 8, 8)
    bits = random_bits(seed, stream=stream, index=index, count=3 * count + num_cells * count // 4)
    wall_bits, keep_bits, goal_bits = bits[: 3 * count].reshape(3, count)
    # 16 random bits for each cell, its height, from little-endian words on every machine. Low cells become
    # walls.
    heights = bits[3 * count :].astype("<u8", copy=False).view("<u2").reshape(num_cells, count)
    wall_heights = 19_661 + (wall_bits >> np.uint64(48)) * np.uint64(13_107) // np.uint64(65_536)
    is_open = _dig_perfect_mazes(heights) if is_perfect else heights >= wall_heights.astype(np.uint16)

    # The start is the highest cell. This is a random open cell. Of two equal cells, it is the later one.
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
    # The path of nearly all random mazes is too short. At size 30 with 110 cells, as published, 1 in 50,000
    # is long enough. So sample the goal only from the num_far cells that are far enough from the start, and
    # accept the maze with probability num_far / num_open. The accepted mazes have the same distribution as
    # if the goal were sampled from all open cells, and mazes with a short path were discarded. Above size
    # 10, the probability is min(1, num_far / num_open * size * size / 120). The distribution is then nearly
    # the same, and at size 30 this is 7 times as fast.
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
    """Makes mazes without loops by depth-first search. Returns their open cells, bool [cells, count].

    The search first opens the cell with the largest height. Each further step opens a closed cell that
    touches exactly one open cell. Of several such cells, the search opens one beside the most recently opened
    cell that has such a neighbor. Of several neighbors, it opens the one with the largest height.

    heights: Random number of each cell, uint16 [cells, count].
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
        num_dug = sum((neighbor_times > 0).astype(np.int8) for neighbor_times in beside)
        can_be_dug = ((num_dug == 1) & (inside == 0)).reshape(heights.shape)
        since = sum(beside).reshape(heights.shape).astype(np.int64)  # when the one dug neighbor was dug
        keys = np.where(can_be_dug, since << 16 | heights, 0)
    return (inside > 0).reshape(heights.shape)
