"""Generates ARC-like tasks of five kinds, with small grids: fill, recolour, mirror, count and connect.

A task is one rule of its kind, drawn with its colours and its other fields, three demonstrations and two
tests. Colour 0 is the ground everywhere, so that the other colours may be exchanged. Invariant: every output
follows from its input by the rule and differs from it; no input occurs twice, in whatever task; and the rules
of the kind that explain all demonstrations give the same answers to the tests. The same seed gives the same
tasks; more tasks begin with the same ones.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np

from dataset.kinds.arc.tasks import NUM_COLORS, Pair, Task, grid_bytes
from dataset.randomness import BitStream, random_below, random_orders

SMALLEST, LARGEST = 3, 7  # rows and columns of a grid
NUM_DEMONSTRATIONS, NUM_TESTS = 3, 2

_STREAM = 2  # of random bits: `variants` has those before it
_NUM_TRIES = 10_000  # before giving up, of a few that are needed
_COLORS = range(1, NUM_COLORS)
_ALONG, _DOWN = [(0, 1)], [(1, 0)]
_DIAGONALS = [(1, 1), (1, -1)]


class _Draw:
    """The random choices of one task."""

    def __init__(self, seed: int, index: int):
        self._bits = BitStream(seed, stream=_STREAM)
        self._bits.seek(index)

    def between(self, least: int, most: int) -> int:
        return least + int(random_below(self._bits.read(1), most - least + 1)[0])

    def choose(self, items: Sequence) -> Any:
        return items[self.between(0, len(items) - 1)]

    def sample(self, items: Sequence, count: int) -> list:
        """Draws `count` different items."""
        return [items[index] for index in random_orders(self._bits.read(len(items)))[:count]]

    def ground(self, *, least: int = SMALLEST, most: int = LARGEST) -> np.ndarray:
        """Draws the shape of a grid, which is all ground."""
        return np.zeros([self.between(least, most) for _ in range(2)], np.uint8)


def _one_of(values: Sequence) -> Any:
    return dataclasses.field(metadata={"values": values})


def _color() -> Any:
    return _one_of(range(1, NUM_COLORS))


class _Rule(Protocol):
    """A rule: a dataclass with fields that are each `_one_of` some values."""

    def is_sound(self) -> bool:
        """Returns whether its fields go together."""
        return True

    def draw_input(self, draw: _Draw) -> np.ndarray:
        """Draws a grid, uint8 [rows, columns], to which the rule may or may not do something."""

    def answer(self, grid: np.ndarray) -> np.ndarray:
        """Returns the output to a grid."""


@functools.cache
def rules_of(kind: type[_Rule]) -> list[_Rule]:
    """Lists all rules of a kind."""
    values = (field.metadata["values"] for field in dataclasses.fields(kind))
    return [rule for rule in itertools.starmap(kind, itertools.product(*values)) if rule.is_sound()]


@dataclasses.dataclass(frozen=True)
class Fill(_Rule):
    """Fills what outlines enclose, or all the ground that they do not; some outlines are open."""

    outline: int = _color()
    color: int = _color()
    where: str = _one_of(("inside", "outside"))

    def is_sound(self) -> bool:
        return self.outline != self.color

    def draw_input(self, draw: _Draw) -> np.ndarray:
        grid = draw.ground(least=SMALLEST + 1)
        for _ in range(draw.between(1, 4)):
            size = [draw.between(3, length) for length in grid.shape]
            top, left = (draw.between(0, room) for room in np.subtract(grid.shape, size).tolist())
            box = grid[top : top + size[0], left : left + size[1]]
            if not _around(grid, top, left, *size).any():
                box[:] = self.outline
                box[1:-1, 1:-1] = 0
                if draw.between(0, 2) == 0:
                    box[draw.between(1, size[0] - 2), draw.choose((0, -1))] = 0
        return grid

    def answer(self, grid: np.ndarray) -> np.ndarray:
        # What a walk over the ground, from beyond the edge, does not reach is enclosed.
        enclosed = np.pad(grid == 0, 1, constant_values=True)
        reached = [(0, 0)]
        while reached:
            row, column = cell = reached.pop()
            if 0 <= row < len(enclosed) and 0 <= column < enclosed.shape[1] and enclosed[cell]:
                enclosed[cell] = False
                reached += [(row + 1, column), (row - 1, column), (row, column + 1), (row, column - 1)]
        is_chosen = enclosed[1:-1, 1:-1] == (self.where == "inside")
        return np.where((grid == 0) & is_chosen, np.uint8(self.color), grid)


@dataclasses.dataclass(frozen=True)
class Recolour(_Rule):
    """Gives two colours others, which may be one another's; the rest stays."""

    first: int = _color()
    of_first: int = _color()
    second: int = _color()
    of_second: int = _color()

    def is_sound(self) -> bool:
        stays = self.first == self.of_first or self.second == self.of_second
        return self.first < self.second and not stays and self.of_first != self.of_second

    def draw_input(self, draw: _Draw) -> np.ndarray:
        grid = draw.ground()
        palette = [self.first, self.second, *draw.sample(_COLORS, 1)]
        for _ in range(draw.between(3, 7)):
            top, left = (draw.between(0, length - 1) for length in grid.shape)
            grid[top : top + draw.between(1, 3), left : left + draw.between(1, 3)] = draw.choose(palette)
        return grid

    def answer(self, grid: np.ndarray) -> np.ndarray:
        becomes = np.arange(NUM_COLORS, dtype=np.uint8)
        becomes[[self.first, self.second]] = self.of_first, self.of_second
        return becomes[grid]


@dataclasses.dataclass(frozen=True)
class Mirror(_Rule):
    """Mirrors a grid, or puts its mirror image beside it."""

    ways: ClassVar = {
        "left-right": lambda grid: grid[:, ::-1],
        "top-bottom": lambda grid: grid[::-1],
        "diagonal": lambda grid: grid.T,
        "other diagonal": lambda grid: grid[::-1, ::-1].T,
        "put right": lambda grid: np.hstack([grid, grid[:, ::-1]]),
        "put left": lambda grid: np.hstack([grid[:, ::-1], grid]),
        "put below": lambda grid: np.vstack([grid, grid[::-1]]),
        "put above": lambda grid: np.vstack([grid[::-1], grid]),
    }
    way: str = _one_of(tuple(ways))

    def draw_input(self, draw: _Draw) -> np.ndarray:
        grid = draw.ground(most=LARGEST // 2 if self.way.startswith("put") else LARGEST)
        palette = [0, 0, *draw.sample(_COLORS, 3)]
        for cell in np.ndindex(grid.shape):
            grid[cell] = draw.choose(palette)
        return grid

    def answer(self, grid: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(self.ways[self.way](grid))


@dataclasses.dataclass(frozen=True)
class Count(_Rule):
    """Counts the dots, or the blocks of 2 x 2, of one colour: so many cells in a row, or as it is drawn."""

    color: int = _color()
    thing: int = _one_of((1, 2))  # rows and columns
    of_answer: int = _color()
    layout: str = _one_of(("row", "column", "diagonal"))

    def draw_input(self, draw: _Draw) -> np.ndarray:
        grid = draw.ground(least=SMALLEST + 2)
        palette = [self.color, draw.choose(_COLORS)]
        for _ in range(draw.between(4, 16)):
            size = draw.between(1, 2)
            top, left = (draw.between(0, length - size) for length in grid.shape)
            if not _around(grid, top, left, size, size).any():
                grid[top : top + size, left : left + size] = draw.choose(palette)
        return grid

    def answer(self, grid: np.ndarray) -> np.ndarray:
        padded = np.pad(grid == self.color, 1)
        is_first = padded[1:-1, 1:-1] & ~padded[:-2, 1:-1] & ~padded[1:-1, :-2]  # nothing above, nothing left
        number = np.count_nonzero(is_first & (padded[2:, 1:-1] == (self.thing == 2)))
        if self.layout == "diagonal":
            return np.eye(number, dtype=np.uint8) * np.uint8(self.of_answer)
        shape = (1, number) if self.layout == "row" else (number, 1)
        return np.full(shape, self.of_answer, np.uint8)


@dataclasses.dataclass(frozen=True)
class Connect(_Rule):
    """Draws lines between dots of one colour that lie in line; dots of another colour are none of them."""

    color: int = _color()
    of_line: int = _color()
    ways: str = _one_of(("rows", "columns", "both", "diagonals"))
    steps: ClassVar = {"rows": _ALONG, "columns": _DOWN, "both": _ALONG + _DOWN, "diagonals": _DIAGONALS}

    def draw_input(self, draw: _Draw) -> np.ndarray:
        grid = draw.ground(least=SMALLEST + 1)
        palette = [self.color, self.color, draw.choose(_COLORS)]
        for _ in range(draw.between(2, 4)):
            step = draw.choose(_ALONG + _DOWN + _DIAGONALS)
            ends = np.array([(0, 0), step]) * draw.between(2, max(grid.shape) - 1)
            ends += [draw.between(0, length - 1) for length in grid.shape]
            is_inside = (ends >= 0).all() and (ends < grid.shape).all()
            if is_inside and not any(_around(grid, *end, 1, 1).any() for end in ends.tolist()):
                grid[tuple(ends.T)] = draw.choose(palette)
        return grid

    def answer(self, grid: np.ndarray) -> np.ndarray:
        result = grid.copy()
        edged = np.pad(grid, 1, constant_values=NUM_COLORS)  # an edge of no colour stops every walk
        for start in np.argwhere(edged == self.color):
            for step in self.steps[self.ways]:
                cells = [start + step]
                while not edged[tuple(cells[-1])]:
                    cells.append(cells[-1] + step)
                if edged[tuple(cells[-1])] == self.color:
                    for row, column in cells[:-1]:
                        result[row - 1, column - 1] = self.of_line
        return result


KINDS: dict[str, type[_Rule]] = {
    "fill": Fill,
    "recolour": Recolour,
    "mirror": Mirror,
    "count": Count,
    "connect": Connect,
}


class Generated(NamedTuple):
    task: Task
    rule: _Rule


def generate_tasks(count: int, *, subset: str, seed: int) -> list[Generated]:
    """Generates tasks, of each kind as many as of the others (or one more), with their rules.

    As long as a kind has other rules, no two of its tasks have the same.
    """
    generated: list[Generated] = []
    seen: set[bytes] = set()  # inputs
    for index in range(count):
        number, kind_index = divmod(index, len(KINDS))
        (name, kind), draw = list(KINDS.items())[kind_index], _Draw(seed, index)
        used = {rule for _, rule in generated}
        rule = draw.choose([rule for rule in rules_of(kind) if rule not in used] or rules_of(kind))
        pairs = _draw_pairs(rule, draw, seen)
        seen.update(grid_bytes(pair.input) for pair in pairs)
        demonstrations, tests = pairs[:NUM_DEMONSTRATIONS], pairs[NUM_DEMONSTRATIONS:]
        task = Task(f"{name}_{number}", subset, "generated", demonstrations, tests)
        generated.append(Generated(task, rule))
    return generated


def _draw_pairs(rule: _Rule, draw: _Draw, seen: set[bytes]) -> tuple[Pair, ...]:
    """Draws the pairs of a task, demonstrations first, until these decide the tests."""
    for _ in range(_NUM_TRIES):
        pairs: dict[bytes, Pair] = {}
        while len(pairs) < NUM_DEMONSTRATIONS + NUM_TESTS:
            pair = Pair(grid := rule.draw_input(draw), rule.answer(grid))
            does_something = pair.output.size and not np.array_equal(*pair)
            if does_something and (key := grid_bytes(pair.input)) not in seen:
                pairs[key] = pair
        drawn = tuple(pairs.values())
        shown, asked = drawn[:NUM_DEMONSTRATIONS], drawn[NUM_DEMONSTRATIONS:]
        differ = len({grid_bytes(pair.output) for pair in shown}) == len(shown)
        if differ and all(explains(other, asked) for other in rules_of(type(rule)) if explains(other, shown)):
            return drawn
    raise AssertionError(f"{rule} has no decided task")


def explains(rule: _Rule, pairs: Sequence[Pair]) -> bool:
    """Returns whether all outputs follow from their inputs by the rule."""
    return all(np.array_equal(rule.answer(pair.input), pair.output) for pair in pairs)


def _around(grid: np.ndarray, top: int, left: int, rows: int, columns: int) -> np.ndarray:
    """Returns the cells of a rectangle and those that touch it."""
    return grid[max(top - 1, 0) : top + rows + 1, max(left - 1, 0) : left + columns + 1]
