"""Generates pairs of three new kinds of puzzles, as examples of a user's own task. Each has one answer.

    python -m tests.own_tasks light_up 4000 > data/light_up.jsonl

- light_up: Place lamps (*) that light all free cells along rows and columns. No lamp may light another one. A
  wall with a number has this number of lamps beside it.
- nonogram: Find the cells of a picture from the lengths of the runs of "#" in each row and column.
- slide: Slide all stones (o) in the direction of the arrows until a wall or another stone stops them.
"""

import itertools
import json
import random
import sys
from collections.abc import Callable, Iterator

Rows = list[str]
_SIZE = 5


def light_up(generator: random.Random, size: int = _SIZE) -> tuple[Rows, Rows]:
    """Generates a puzzle with exactly one answer. Returns (puzzle, answer), each as the texts of its rows."""
    cells = list(itertools.product(range(size), repeat=2))
    while True:
        walls = {cell for cell in cells if generator.random() < 0.3}
        free = [cell for cell in cells if cell not in walls]
        seen = {cell: {cell, *_seen(cell, walls, size)} for cell in free}
        lamps: set[tuple[int, int]] = set()
        for cell in generator.sample(free, len(free)):  # lights every cell: the last one lights itself
            if not lamps & seen[cell]:
                lamps.add(cell)
        numbers = {wall: len(lamps & {*_beside(wall)}) for wall in walls if generator.random() < 0.8}
        if len(list(itertools.islice(_solve_lamps(free, seen, numbers), 2))) == 1:
            board = dict.fromkeys(free, ".") | dict.fromkeys(walls, "#")
            board |= {wall: str(number) for wall, number in numbers.items()}
            answer = board | dict.fromkeys(lamps, "*")
            return _rows(board, size), _rows(answer, size)


def _beside(cell: tuple[int, int]) -> list[tuple[int, int]]:
    row, column = cell
    return [(row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1)]


def _seen(cell: tuple[int, int], walls: set[tuple[int, int]], size: int) -> Iterator[tuple[int, int]]:
    """Yields the other cells that the light of a lamp in `cell` reaches."""
    for down, right in ((0, 1), (1, 0), (0, -1), (-1, 0)):
        row, column = cell[0] + down, cell[1] + right
        while 0 <= row < size and 0 <= column < size and (row, column) not in walls:
            yield row, column
            row, column = row + down, column + right


def _solve_lamps(free, seen, numbers, lamps=frozenset()) -> Iterator[frozenset]:
    """Yields all right sets of lamps that contain `lamps`.

    Each call tries all lamps that can light the first dark cell. free: Cells without a wall. seen: {free
    cell: cells that light from it reaches, and the cell}. numbers: {numbered wall: number}.
    """
    if any(len(lamps & {*_beside(wall)}) > number for wall, number in numbers.items()):
        return
    dark = next((cell for cell in free if not lamps & seen[cell]), None)
    if dark is None:
        if all(len(lamps & {*_beside(wall)}) == number for wall, number in numbers.items()):
            yield lamps
        return
    found = set()
    for cell in seen[dark]:
        if not lamps & seen[cell]:
            for answer in _solve_lamps(free, seen, numbers, lamps | {cell}):
                if answer not in found:
                    found.add(answer)
                    yield answer


_RUNS = {
    line: [len(run) for run in "".join(line).split(".") if run]
    for line in itertools.product("#.", repeat=_SIZE)
}
_LINES = {tuple(runs): [line for line in _RUNS if _RUNS[line] == runs] for runs in _RUNS.values()}


def nonogram(generator: random.Random) -> tuple[Rows, Rows]:
    """Generates a picture that its runs determine. Returns (puzzle, answer), each as the texts of its rows.

    The lengths of the runs are left of the rows and above the columns.
    """
    while True:
        picture = [tuple(generator.choice("##.") for _ in range(_SIZE)) for _ in range(_SIZE)]
        rows = [tuple(_RUNS[row]) for row in picture]
        columns = [tuple(_RUNS[column]) for column in zip(*picture, strict=True)]
        pictures = itertools.product(*(_LINES[row] for row in rows))
        fits = (
            each for each in pictures if [tuple(_RUNS[line]) for line in zip(*each, strict=True)] == columns
        )
        if len(list(itertools.islice(fits, 2))) == 1:
            above = ["---" + "".join(each) for each in zip(*map(_clues, columns), strict=True)]
            return [
                [*above, *(_clues(runs) + "." * _SIZE for runs in rows)],
                [*above, *(_clues(runs) + "".join(row) for runs, row in zip(rows, picture, strict=True))],
            ]


def _clues(runs: tuple[int, ...]) -> str:
    return "".join(map(str, runs)).rjust(3, "-")


def slide(generator: random.Random, size: int = 8) -> tuple[Rows, Rows]:
    """Generates a board of walls, stones and arrows of one direction. Returns (puzzle, answer) as rows."""
    arrow, backwards, turned = generator.choice([(">", 1, 0), ("<", 0, 0), ("v", 1, 1), ("^", 0, 1)])
    rows = ["".join(generator.choices("#o" + arrow, (2, 4, 6), k=size)) for _ in range(size)]
    rows[0] = arrow + rows[0][1:]  # or nothing says whereto
    lines = list(map("".join, zip(*rows, strict=True))) if turned else rows
    options = {"key": "o".__eq__, "reverse": not backwards}
    slid = ["#".join("".join(sorted(part, **options)) for part in line.split("#")) for line in lines]
    return rows, list(map("".join, zip(*slid, strict=True))) if turned else slid


def _rows(board: dict[tuple[int, int], str], size: int) -> Rows:
    return ["".join(board[row, column] for column in range(size)) for row in range(size)]


PUZZLES: dict[str, Callable[[random.Random], tuple[Rows, Rows]]] = {
    "light_up": light_up,
    "nonogram": nonogram,
    "slide": slide,
}


def main(name: str, count: str = "4000") -> None:
    generator = random.Random(0)
    for _ in range(int(count)):
        question, answer = PUZZLES[name](generator)
        print(json.dumps({"input": question, "output": answer}))


if __name__ == "__main__":
    main(*sys.argv[1:])
