"""Generates ARC-like tasks with small grids and rules of five families.

A task has one rule, three demonstrations and two tests. Color 0 is always the background. Augmentation does
not exchange color 0, so the variants are valid tasks, too. Invariant: every output follows from its input by
the rule, and differs from the input. No two tasks share an input. All rules of the family that explain the
demonstrations give the same test outputs. The same seed gives the same tasks. A larger count only adds tasks.
"""

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from dataset.kinds.arc.tasks import NUM_COLORS, Pair, Task, grid_bytes
from dataset.randomness import BitStream, random_below, random_orders

SMALLEST, LARGEST = 3, 7  # rows and columns of a grid
NUM_DEMONSTRATIONS, NUM_TESTS = 3, 2

_STREAM = 2  # stream of random bits; `variants` uses the lower numbers
_NUM_TRIES = 10_000  # before giving up; a few are enough
_COLORS = range(1, NUM_COLORS)
_ALONG, _DOWN = [(0, 1)], [(1, 0)]
_DIAGONALS = [(1, 1), (1, -1)]
_STEPS = {"rows": _ALONG, "columns": _DOWN, "both": _ALONG + _DOWN, "diagonals": _DIAGONALS}
_LAYOUTS = ("row", "column", "diagonal")


class Family(NamedTuple):
    """A family of rules for generated tasks. The rules differ only in their parameters.

    Attributes:
        rules: Parameters of each rule. Example: [("left-right",), ("top-bottom",), ...] for the family
            "mirror".
        draw_input: Function (`_Draw`, *parameters) -> random input grid, uint8 [rows, columns]. The caller
            does not use a grid that the rule leaves unchanged.
        answer: Function (input grid, *parameters) -> output grid, uint8 [rows, columns].
    """

    rules: list[tuple]
    draw_input: Callable[..., np.ndarray]
    answer: Callable[..., np.ndarray]

    def explains(self, rule: tuple, pairs: Sequence[Pair]) -> bool:
        return all(np.array_equal(self.answer(pair.input, *rule), pair.output) for pair in pairs)


class _Draw:
    """Makes the random choices for one generated task. The choices depend only on `seed` and `index`."""

    def __init__(self, seed: int, index: int):
        self._bits = BitStream(seed, stream=_STREAM)
        self._bits.seek(index)

    def between(self, least: int, most: int) -> int:
        return least + int(random_below(self._bits.read(1), most - least + 1)[0])

    def choose(self, items: Sequence) -> Any:
        return items[self.between(0, len(items) - 1)]

    def sample(self, items: Sequence, count: int) -> list:
        return [items[index] for index in random_orders(self._bits.read(len(items)))[:count]]

    def ground(self, *, least: int = SMALLEST, most: int = LARGEST) -> np.ndarray:
        return np.zeros([self.between(least, most) for _ in range(2)], np.uint8)


def generate_tasks(count: int, *, subset: str, seed: int) -> list[tuple[Task, tuple]]:
    """Generates `count` ARC-like tasks. Returns (task, parameters of its rule) for each.

    The families take turns. A family repeats a rule only after it has used all its rules. subset: Value of
    `Task.subset`, such as "evaluation".
    """
    generated = []
    seen: set[bytes] = set()  # inputs
    unused = {name: list(family.rules) for name, family in FAMILIES.items()}
    for index in range(count):
        task_number, family_index = divmod(index, len(FAMILIES))
        family_name, draw = list(FAMILIES)[family_index], _Draw(seed, index)
        rule = draw.choose(unused[family_name] or FAMILIES[family_name].rules)
        unused[family_name] = [other for other in unused[family_name] if other != rule]
        pairs = _draw_pairs(FAMILIES[family_name], rule, draw, seen)
        seen.update(grid_bytes(pair.input) for pair in pairs)
        demonstrations, tests = pairs[:NUM_DEMONSTRATIONS], pairs[NUM_DEMONSTRATIONS:]
        generated.append(
            (Task(f"{family_name}_{task_number}", subset, "generated", demonstrations, tests), rule)
        )
    return generated


def _draw_pairs(family: Family, rule: tuple, draw: _Draw, seen: set[bytes]) -> tuple[Pair, ...]:
    for _ in range(_NUM_TRIES):
        pairs: dict[bytes, Pair] = {}
        while len(pairs) < NUM_DEMONSTRATIONS + NUM_TESTS:
            grid = family.draw_input(draw, *rule)
            pair = Pair(grid, family.answer(grid, *rule))
            does_something = pair.output.size and not np.array_equal(*pair)
            if does_something and (key := grid_bytes(grid)) not in seen:
                pairs[key] = pair
        drawn = tuple(pairs.values())
        demonstrations, tests = drawn[:NUM_DEMONSTRATIONS], drawn[NUM_DEMONSTRATIONS:]
        # Every rule of the family that explains the demonstrations must give the right test outputs.
        differ = len({grid_bytes(pair.output) for pair in demonstrations}) == len(demonstrations)
        if differ and all(
            family.explains(other, tests) for other in family.rules if family.explains(other, demonstrations)
        ):
            return drawn
    raise AssertionError(f"no demonstrations of the rule {rule} determine the test outputs")


def _around(grid: np.ndarray, top: int, left: int, rows: int, columns: int) -> np.ndarray:
    # A view of the rectangle of rows x columns cells, and of all cells that touch it.
    return grid[max(top - 1, 0) : top + rows + 1, max(left - 1, 0) : left + columns + 1]


def _draw_outlines(draw: _Draw, outline: int, *_: Any) -> np.ndarray:
    grid = draw.ground(least=SMALLEST + 1)
    for _ in range(draw.between(1, 4)):
        size = [draw.between(3, length) for length in grid.shape]
        top, left = (draw.between(0, room) for room in np.subtract(grid.shape, size).tolist())
        box = grid[top : top + size[0], left : left + size[1]]
        if not _around(grid, top, left, *size).any():
            box[:] = outline
            box[1:-1, 1:-1] = 0
            if draw.between(0, 2) == 0:
                box[draw.between(1, size[0] - 2), draw.choose((0, -1))] = 0
    return grid


def _fill(grid: np.ndarray, _outline: int, color: int, where: str) -> np.ndarray:
    # Background cells are enclosed if no path from outside the grid reaches them.
    enclosed = np.pad(grid == 0, 1, constant_values=True)
    reached = [(0, 0)]
    while reached:
        row, column = cell = reached.pop()
        if 0 <= row < len(enclosed) and 0 <= column < enclosed.shape[1] and enclosed[cell]:
            enclosed[cell] = False
            reached += [(row + 1, column), (row - 1, column), (row, column + 1), (row, column - 1)]
    is_chosen = enclosed[1:-1, 1:-1] == (where == "inside")
    return np.where((grid == 0) & is_chosen, np.uint8(color), grid)


def _draw_patches(draw: _Draw, first: int, _of_first: int, second: int, _of_second: int) -> np.ndarray:
    grid = draw.ground()
    palette = [first, second, *draw.sample(_COLORS, 1)]
    for _ in range(draw.between(3, 7)):
        top, left = (draw.between(0, length - 1) for length in grid.shape)
        grid[top : top + draw.between(1, 3), left : left + draw.between(1, 3)] = draw.choose(palette)
    return grid


def _recolour(grid: np.ndarray, first: int, of_first: int, second: int, of_second: int) -> np.ndarray:
    becomes = np.arange(NUM_COLORS, dtype=np.uint8)
    becomes[[first, second]] = of_first, of_second
    return becomes[grid]


_MIRRORS = {
    "left-right": lambda grid: grid[:, ::-1],
    "top-bottom": lambda grid: grid[::-1],
    "diagonal": lambda grid: grid.T,
    "other diagonal": lambda grid: grid[::-1, ::-1].T,
    "put right": lambda grid: np.hstack([grid, grid[:, ::-1]]),
    "put left": lambda grid: np.hstack([grid[:, ::-1], grid]),
    "put below": lambda grid: np.vstack([grid, grid[::-1]]),
    "put above": lambda grid: np.vstack([grid[::-1], grid]),
}


def _draw_noise(draw: _Draw, way: str) -> np.ndarray:
    grid = draw.ground(most=LARGEST // 2 if way.startswith("put") else LARGEST)
    palette = [0, 0, *draw.sample(_COLORS, 3)]
    for cell in np.ndindex(grid.shape):
        grid[cell] = draw.choose(palette)
    return grid


def _mirror(grid: np.ndarray, way: str) -> np.ndarray:
    return np.ascontiguousarray(_MIRRORS[way](grid))


def _draw_things(draw: _Draw, color: int, *_: Any) -> np.ndarray:
    grid = draw.ground(least=SMALLEST + 2)
    palette = [color, draw.choose(_COLORS)]
    for _ in range(draw.between(4, 16)):
        size = draw.between(1, 2)
        top, left = (draw.between(0, length - size) for length in grid.shape)
        if not _around(grid, top, left, size, size).any():
            grid[top : top + size, left : left + size] = draw.choose(palette)
    return grid


def _count(grid: np.ndarray, color: int, size: int, of_answer: int, layout: str) -> np.ndarray:
    """Returns a grid with one cell of the color `of_answer` for each object of the given color and size.

    color: Color of the objects to count. size: 1 to count single cells, 2 to count blocks of 2 x 2 cells.
    layout: Arrangement of the returned cells: "row", "column" or "diagonal".
    """
    padded = np.pad(grid == color, 1)
    is_first = padded[1:-1, 1:-1] & ~padded[:-2, 1:-1] & ~padded[1:-1, :-2]  # nothing above, nothing left
    num_objects = np.count_nonzero(is_first & (padded[2:, 1:-1] == (size == 2)))
    if layout == "diagonal":
        return np.eye(num_objects, dtype=np.uint8) * np.uint8(of_answer)
    return np.full((1, num_objects) if layout == "row" else (num_objects, 1), of_answer, np.uint8)


def _draw_dots(draw: _Draw, color: int, *_: Any) -> np.ndarray:
    grid = draw.ground(least=SMALLEST + 1)
    palette = [color, color, draw.choose(_COLORS)]
    for _ in range(draw.between(2, 4)):
        step = draw.choose(_ALONG + _DOWN + _DIAGONALS)
        ends = np.array([(0, 0), step]) * draw.between(2, max(grid.shape) - 1)
        ends += [draw.between(0, length - 1) for length in grid.shape]
        is_inside = (ends >= 0).all() and (ends < grid.shape).all()
        if is_inside and not any(_around(grid, *end, 1, 1).any() for end in ends.tolist()):
            grid[tuple(ends.T)] = draw.choose(palette)
    return grid


def _connect(grid: np.ndarray, color: int, of_line: int, ways: str) -> np.ndarray:
    result = grid.copy()
    edged = np.pad(grid, 1, constant_values=NUM_COLORS)  # an edge that is not a color ends every walk
    for start, step in product(np.argwhere(edged == color), _STEPS[ways]):
        cells = [start + step]
        while not edged[tuple(cells[-1])]:
            cells.append(cells[-1] + step)
        if edged[tuple(cells[-1])] == color:
            for row, column in cells[:-1]:
                result[row - 1, column - 1] = of_line
    return result


FAMILIES = {
    "fill": Family(
        [rule for rule in product(_COLORS, _COLORS, ("inside", "outside")) if rule[0] != rule[1]],
        _draw_outlines,
        _fill,
    ),
    "recolour": Family(
        [
            (first, of_first, second, of_second)
            for first, of_first, second, of_second in product(_COLORS, repeat=4)
            if first < second and first != of_first != of_second != second
        ],
        _draw_patches,
        _recolour,
    ),
    "mirror": Family([(way,) for way in _MIRRORS], _draw_noise, _mirror),
    "count": Family([*product(_COLORS, (1, 2), _COLORS, _LAYOUTS)], _draw_things, _count),
    "connect": Family([*product(_COLORS, _COLORS, _STEPS)], _draw_dots, _connect),
}
