"""Reading pairs from files: JSON lines or CSV, plain or compressed.

{"input": grid, "output": grid, "task": "name", "split": "train" or "test"}, the last two only where there are
several tasks, or the split is given. A grid is a list of rows, each a list of symbols (texts or integers) or
one text of a character a symbol; a text alone, or a flat list of symbols, is a sequence, unless the text has
several lines: its rows. In CSV the columns have these names, and a cell that is a grid as JSON is that grid.

Invariant: a `Pair` is whole; its grids are rectangles of printable symbols. Anything else raises ValueError,
one line with the file, the line and the reason.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from config.reading import parse_json, read_lines
from dataset.build.sources import read_columns
from dataset.format import SPLITS

Cells = tuple[tuple[str, ...], ...]

FIELDS = ("input", "output", "task", "split")
_ENDINGS = (".jsonl", ".jsonl.gz", ".csv", ".csv.gz")
_MOST_SHOWN = 20  # characters of a value that is refused


class Pair(NamedTuple):
    """A puzzle as it was read. task, split: "" where none is named. where: the file and the line."""

    input: Cells
    output: Cells
    task: str
    split: str
    where: str


def choose_files(names: Sequence[str]) -> list[str]:
    """Chooses from a folder's names the file of all pairs, or the files of the splits, training first."""
    found = sorted(name for name in names if name.endswith(_ENDINGS))
    of_split = {split: [name for name in found if _stem(name) == split] for split in SPLITS}
    for split, members in of_split.items():
        if len(members) > 1:
            raise ValueError(f"has both {members[0]} and {members[1]}: only one of them can be meant")
        if not members and any(of_split.values()):
            raise ValueError(f"has no {split} file ({split}.jsonl, {split}.csv), but the other split's")
    if any(of_split.values()):
        return [members[0] for members in of_split.values()]
    if len(found) != 1:
        either = "train.jsonl and test.jsonl, or one file of all pairs"
        raise ValueError(f"has {len(found)} files of pairs, not {either} (.csv and .gz too)")
    return found


def _stem(name: str) -> str:
    return name.rpartition("/")[2].partition(".")[0]


def read_pairs(files: Sequence[Path]) -> tuple[list[Pair], list[str]]:
    """Reads all pairs of one file, or of the files of the two splits; and the names of fields not used."""
    pairs, others = [], set()
    for number, path in enumerate(files):
        if not path.name.endswith(_ENDINGS):
            raise ValueError(f"--source {path} is neither a folder nor a file {', '.join(_ENDINGS)}")
        first = len(pairs)
        rows = _csv_rows(path) if ".csv" in path.suffixes else _json_rows(path)
        for line, row in rows:
            try:
                pair = parse_pair(row, where=f"{path}:{line}")
                if len(files) > 1:
                    if pair.split not in ("", SPLITS[number]):
                        raise ValueError(f"its split is {pair.split!r}, but the file's name says otherwise")
                    pair = pair._replace(split=SPLITS[number])
            except ValueError as error:
                raise ValueError(f"{path}:{line}: {error}") from None
            others.update(row.keys() - set(FIELDS))
            pairs.append(pair)
        if len(pairs) == first:
            raise ValueError(f"{path} has no pair")
    for field in ("task", "split"):
        without = [pair.where for pair in pairs if not getattr(pair, field)]
        if 0 < len(without) < len(pairs):
            raise ValueError(
                f"{without[0]}: no {field}, but other pairs name theirs: give it to all or to none"
            )
    return pairs, sorted(others)


def parse_pair(row: dict, *, where: str) -> Pair:
    """Checks one pair. ValueError says what is wrong with it."""
    for field in ("input", "output"):
        if row.get(field) is None:
            raise ValueError(f"no {field}")
    names = {}
    for field in ("task", "split"):
        name = row.get(field)
        name = "" if name is None else name
        if not isinstance(name, str) or not name.isprintable():
            raise ValueError(f"the {field} is {_shown(name)}, not a printable text")
        names[field] = name
    if names["split"] not in ("", *SPLITS):
        raise ValueError(f"the split is {_shown(names['split'])}, neither train nor test")
    grids = [_parse_grid(row[field], field) for field in ("input", "output")]
    return Pair(*grids, names["task"], names["split"], where)


def _parse_grid(value: Any, name: str) -> Cells:
    if isinstance(value, str):
        value = value.strip("\r\n").splitlines()
    if not isinstance(value, list):
        raise ValueError(f"the {name} is {_shown(value)}, neither a grid nor a text")
    if value and not any(isinstance(row, (list, str)) for row in value):
        value = [value]  # a flat list of numbers: a sequence
    rows = []
    for number, row in enumerate(value, 1):
        if not isinstance(row, (list, str)):
            raise ValueError(f"row {number} of the {name} is {_shown(row)}, neither a list nor a text")
        rows.append(tuple(_parse_symbol(cell, name) for cell in row))
    if not rows or not rows[0]:
        raise ValueError(f"the {name} is empty")
    for number, row in enumerate(rows, 1):
        if len(row) != len(rows[0]):
            sizes = f"row {number} has {len(row)} cells, row 1 has {len(rows[0])}"
            raise ValueError(f"the {name} is ragged: {sizes}")
    return tuple(rows)


def _parse_symbol(cell: Any, name: str) -> str:
    if isinstance(cell, bool) or not isinstance(cell, (int, str)) or cell == "":
        raise ValueError(f"the {name} has the cell {_shown(cell)}, neither a text nor an integer")
    symbol = str(cell)
    if not symbol.isprintable() or "\ufffd" in symbol or (len(symbol) > 1 and " " in symbol):
        raise ValueError(f"the {name} has the cell {_shown(cell)}, no printable symbol without spaces")
    return symbol


def _shown(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def _json_rows(path: Path) -> Iterator[tuple[int, dict]]:
    """Yields the number of each line that is not empty, and its object."""
    for line, text in enumerate(read_lines(path), 1):
        if text.strip():
            row = parse_json(text, where=f"{path}:{line}:")
            if not isinstance(row, dict):
                raise ValueError(f'{path}:{line}: no pair, {{"input": grid, "output": grid}}')
            yield line, row


def _csv_rows(path: Path) -> Iterator[tuple[int, dict]]:
    for lines, columns in read_columns(path, ("input", "output"), read_others=True):
        for line, *values in zip(lines, *columns.values(), strict=True):
            row = dict(zip(columns, values, strict=True))
            yield line, row | {field: _json_grid(row[field]) for field in ("input", "output")}


def _json_grid(text: str) -> Any:
    """Parses the JSON of a grid, a list of lists with cells; any other text, such as "[[]]", stays a text."""
    if not text.startswith("["):
        return text
    try:
        value = parse_json(text, where="the cell")
    except ValueError:
        return text
    return value if value and all(isinstance(row, list) and row for row in value) else text
