"""Reading pairs from files: JSON lines, a JSON array, CSV, TSV, plain or compressed, parquet, or Excel.

A pair is {"input": grid, "output": grid, "task": "name", "split": "train" or "test"}. "task" is only needed
if there are several tasks, "split" only if the source divides the pairs. In CSV, parquet and Excel, the
columns have these names. A grid is a list of rows. A row is a list of symbols (texts or integers), or a text
with a character for each symbol. A text with several lines is a grid with these rows. A text of one line, or
a flat list of integers, is a grid of one row. In texts such as "1 2 3", spaces separate the symbols if all
texts with spaces have this form, and no list contains a space. A cell of CSV or Excel that starts with "[" is
a JSON list.

Invariant: both grids of a `Pair` are rectangles of printable symbols. Any other content raises a ValueError
of one line with the file, the line and the reason.
"""

import contextlib
import re
import unicodedata
import zipfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dataset.build.sources import import_package, read_columns
from dataset.description import characters, size_of
from dataset.metadata import SPLITS, is_printable
from runtime.reading import (
    MissingFileError,
    PointerFileError,
    open_regular,
    parse_json,
    printable,
    read_json,
    read_lines,
)

Cells = tuple[tuple[str, ...], ...]

FIELDS = ("input", "output", "task", "split")
GRIDS = FIELDS[:2]
_TABLES = (".jsonl", ".ndjson", ".csv", ".tsv")
_ENDINGS = (*_TABLES, *(f"{ending}.gz" for ending in _TABLES), ".xlsx", ".parquet", ".json", ".json.gz")
# A list as Python or numpy prints it, and an item of one. The time to match grows only with the length.
_BRACKETED = re.compile(r"(?:[\w.]+(?=\())?(\[.*\]|[({](?=.*[,\s]).*[)}])", re.DOTALL)
_PRINTED = re.compile(r"""-?\d+(?:\.\d*)?|'[^']*'|"[^"]*\"""")
_SHARD = re.compile(r"-[0-9]{5}-of-([0-9]{5})")  # train-00000-of-00002, as on the Hub
_MOST_SHOWN, _MOST_FIELDS = 20, 10  # in messages: characters of a value, and names of fields
_ROWS_AT_ONCE = 1 << 12
_MOST_SHEET_BYTES = 1 << 28  # size limit of an Excel file's content after unpacking
_MOST_ROWS = 1 << 20  # of an Excel sheet
_MOST_DIGITS = 15  # Excel stores no more digits of a number
_MOST_CELLS, _MOST_VALUES = 1 << 20, 1 << 27  # of a grid, and of a part of a parquet file


class Pair(NamedTuple):
    """An input grid and its output grid.

    A grid is a tuple of rows. A row is a tuple of symbols, which are texts.

    Attributes:
        task: Name of the task, or "".
        split: "train" or "test", or "" if the source does not divide the pairs.
        where: File and line that contain the pair, for messages.
    """

    input: Cells
    output: Cells
    task: str
    split: str
    where: str


def choose_files(names: Sequence[str]) -> list[str]:
    """Selects the files of a dataset of pairs by their names, training files first.

    A dataset has one training file and one test file, or one file with all pairs. Each may be divided into
    shards, such as train-00000-of-00002.parquet. Raises ValueError for any other combination.

    names: Names of all files in a folder.
    """
    found = sorted(name for name in names if name.endswith(_ENDINGS))
    if any(name.endswith(_ENDINGS[:-2]) for name in found):  # then .json files only describe the data
        found = [name for name in found if not name.endswith(_ENDINGS[-2:])]
    members = defaultdict(list)
    for name in found:
        members[_stem(name)].append(name)
    for shards in members.values():
        _check_pieces(shards)
    if not members.keys() & set(SPLITS):
        if len(members) != 1:
            either = "train.jsonl and test.jsonl, or one file of all pairs"
            raise ValueError(f"has {len(found)} files of pairs, not {either} ({_list_endings()})")
        return found
    for split in SPLITS:
        if split not in members:
            raise ValueError(f"has no {split} file ({split}.jsonl, {split}.csv). Add it.")
    return [name for split in SPLITS for name in members[split]]


def _check_pieces(names: list[str]) -> None:
    first, *others = names
    if not (match := _SHARD.search(first)):
        if others:
            raise ValueError(f"has both {first} and {others[0]}. Remove one of them.")
        return
    num = int(match[1])  # of shards
    if [shard and int(shard[0][1:6]) for shard in map(_SHARD.search, names)] != [*range(num)]:
        raise ValueError(f"has {len(names)} of the {num} shards {printable(first)}, ... All are needed.")


def _stem(name: str) -> str:
    return _SHARD.sub("", name.rpartition("/")[2].partition(".")[0])


def _list_endings() -> str:
    return ", ".join(ending for ending in _ENDINGS if not ending.endswith(".gz")) + "; .gz too"


def read_pairs(files: Sequence[Path], *, fields: Sequence[str]) -> tuple[list[Pair], list[str]]:
    """Reads all pairs (input grid, output grid) of some files. Returns (pairs, names of unused fields).

    Raises ValueError with file and line if a pair is not valid.

    fields: Names of the input field and the output field in the files, such as ("question", "answer").
    """
    pairs, others, stems = [], set(), {_stem(path.name) for path in files}
    is_space_listed = False
    for path in files:
        if not path.name.endswith(_ENDINGS):
            raise ValueError(f"--source {path} is neither a folder nor a file {_list_endings()}")
        name = path.name.removesuffix(".gz")
        read = next(read for ending, read in _READERS.items() if name.endswith(ending))
        is_table = read in (_csv_rows, _sheet_rows)
        split, num_before = _stem(path.name) if len(stems) > 1 else "", len(pairs)
        for line, row in read(path):
            try:
                if not isinstance(row, dict):
                    raise ValueError('not a pair, {"input": grid, "output": grid}')
                if missing := [field for field in fields if field not in row]:
                    there = ", ".join(printable(str(field))[:_MOST_SHOWN] for field in [*row][:_MOST_FIELDS])
                    hint = "Pass the names of both fields with --fields INPUT,OUTPUT."
                    if is_table:
                        hint += " If the table has no names, add a first row with them."
                    raise ValueError(f"no {missing[0]}, only {there or 'nothing'}. {hint}")
                grids = {
                    ours: _parse_list(row[name], ours, is_cell=is_table)
                    for ours, name in zip(GRIDS, fields, strict=True)
                }
                pair = parse_pair(row | grids, where=f"{path}:{line}")
                is_space_listed |= any(map(_lists_space, grids.values()))
                if split and pair.split not in ("", split):
                    raise ValueError(f"its split is {pair.split!r}, but the file is of the {split} split")
                pairs.append(pair._replace(split=split or pair.split))
            except ValueError as error:
                raise ValueError(f"{path}:{line}: {error}") from None
            others.update(row.keys() - {*FIELDS, *fields})
        if len(pairs) == num_before:
            raise ValueError(f"{path} has no pair")
    for field in ("task", "split"):
        without = [pair.where for pair in pairs if not getattr(pair, field)]
        if 0 < len(without) < len(pairs):
            raise ValueError(
                f"{without[0]}: no {field}, but other pairs have one. Set it for all pairs or for none."
            )
    return pairs if is_space_listed else _without_separators(pairs), sorted(map(printable, others))


def _lists_space(grid: list | str) -> bool:
    # In a list of symbols, a space is a symbol.
    return isinstance(grid, list) and any(isinstance(row, list) and " " in row for row in grid)


def _without_separators(pairs: list[Pair]) -> list[Pair]:
    """Returns the pairs without the spaces between symbols. Prints how many pairs this changes.

    Returns the pairs unchanged if a space may be a symbol. Example: in the row "1 2 3", every second
    character is a space, so spaces only separate symbols. In "1  3", a space may be a symbol.
    """
    with_spaces = [
        grid for pair in pairs for grid in (pair.input, pair.output) if any(" " in row for row in grid)
    ]
    if not with_spaces or not all(map(_has_separators, with_spaces)):
        return pairs
    changed = [pair._replace(input=_stripped(pair.input), output=_stripped(pair.output)) for pair in pairs]
    num_changed = sum(new != pair for new, pair in zip(changed, pairs, strict=True))
    print(f"spaces between symbols are removed in {num_changed} of {len(pairs)} pairs")
    return changed


def _has_separators(grid: Cells) -> bool:
    return all(len(row) > 2 and {*row[1::2]} == {" "} and " " not in row[::2] for row in grid)


def _stripped(grid: Cells) -> Cells:
    return tuple(row[::2] for row in grid) if _has_separators(grid) else grid


def parse_grid(grid: Any, name: str, *, symbols: Sequence[str]) -> Cells:
    """Converts a text, or a list of rows, to a grid: a tuple of rows, which are tuples of symbols.

    Removes spaces that separate symbols, as in "1 2 3", unless a space is in `symbols` or in a row that is a
    list. Raises ValueError if the value is not a grid.

    name: What the message calls the value. symbols: Symbols of the dataset. Only a space in it matters: the
    grid may also contain other symbols.
    """
    cells = _parse_grid(grid, name)
    return cells if " " in symbols or _lists_space(grid) else _stripped(cells)


def parse_pair(row: dict, *, where: str) -> Pair:
    """Converts a dict {"input": ..., "output": ...} from a file to a pair.

    The dict may also contain "task" and "split". Raises ValueError if "input" or "output" is missing, or if
    any of the four values is not valid.

    where: File and line of the dict. The pair stores this text for messages.
    """
    for field in GRIDS:
        if row.get(field) is None:
            raise ValueError(f"no {field}")
    names = {}
    for field in ("task", "split"):
        text = row.get(field)
        text = "" if text is None else text
        if not isinstance(text, str) or not text.isprintable():
            raise ValueError(f"the {field} is {_shown(text)}, not a printable text")
        names[field] = text
    if names["split"] not in ("", *SPLITS):
        raise ValueError(f"the split is {_shown(names['split'])}, neither train nor test")
    grids = [_parse_grid(row[field], field) for field in GRIDS]
    return Pair(*grids, names["task"], names["split"], where)


def _parse_grid(grid: Any, field: str) -> Cells:
    if isinstance(grid, str):
        grid = grid.strip("\r\n").splitlines()
    if isinstance(grid, int | float) and not isinstance(grid, bool):
        raise ValueError(f'the {field} is {_shown(grid)}, a number. Write it as a text, "{_shown(grid)}".')
    if not isinstance(grid, list):
        raise ValueError(f"the {field} is {_shown(grid)}, neither a grid nor a text")
    if len(grid) + sum(len(row) for row in grid if isinstance(row, (list, str))) > _MOST_CELLS:
        raise ValueError(f"the {field} has more than {_MOST_CELLS:,} cells")
    if grid and not any(isinstance(row, (list, str)) for row in grid):
        grid = [grid]  # a flat list of integers is a sequence
    rows = []
    for row_number, row in enumerate(grid, 1):
        if not isinstance(row, (list, str)):
            raise ValueError(f"row {row_number} of the {field} is {_shown(row)}, neither a list nor a text")
        cells = characters(row) if isinstance(row, str) else row
        rows.append(tuple(_parse_symbol(cell, field) for cell in cells))
    size_of(rows, f"the {field}")
    return tuple(rows)


def _parse_symbol(cell: Any, field: str) -> str:
    if isinstance(cell, bool) or not isinstance(cell, (int, str)) or cell == "":
        raise ValueError(f"the {field} has the cell {_shown(cell)}, neither a text nor an integer")
    symbol = unicodedata.normalize("NFC", str(cell))
    if not is_printable(symbol) or "\ufffd" in symbol or (len(symbol) > 1 and " " in symbol):
        raise ValueError(f"the {field} has the cell {_shown(cell)}, not a printable symbol without spaces")
    return symbol


def _shown(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def _parse_list(value: Any, field: str, *, is_cell: bool) -> Any:
    """Returns the value of a field. If it is a table cell with the text of a JSON list, returns this list.

    Raises ValueError for a text that looks like a list in another notation, such as "[1 2]".

    field: "input" or "output", for messages. is_cell: Whether the value is a cell of a CSV or Excel table. If
    False, the text of a JSON list also raises ValueError, because the file could contain the list itself.
    """
    if not isinstance(value, str):
        return value
    text = value.strip()
    if is_cell and text.startswith("["):
        try:
            return parse_json(text, where="it")
        except ValueError:
            remedy = 'A cell that starts with "[" must be a JSON list. If it is a text, use a .jsonl file.'
            raise ValueError(f"the {field} is {_shown(value)}. {remedy}") from None
    found = _BRACKETED.fullmatch(text)
    items = [item for item in re.split(r"[\s,:()[\]{}]+", found[1] if found else "") if item]
    if items and all(map(_PRINTED.fullmatch, items)):
        raise ValueError(f"the {field} is {_shown(value)}, a list within a text. Write the list itself.")
    return value


def _json_rows(path: Path) -> Iterator[tuple[int, Any]]:
    for line, text in enumerate(read_lines(path), 1):
        if text.strip():
            yield line, parse_json(text, where=f"{path}:{line}:")


def _array_rows(path: Path) -> Iterator[tuple[int, Any]]:
    if not isinstance(items := read_json(path), list):
        raise ValueError(f"{path} is not a list of pairs")
    return enumerate(items, 1)


def _csv_rows(path: Path) -> Iterator[tuple[int, dict]]:
    for lines, columns in read_columns(path, (), read_others=True):
        for line, *values in zip(lines, *columns.values(), strict=True):
            yield line, dict(zip(columns, values, strict=True))


def _sheet_rows(path: Path) -> Iterator[tuple[int, dict]]:
    openpyxl = import_package("openpyxl", needed_by=path)
    with _one_error(path, "Excel"), open_regular(path) as opened:
        with zipfile.ZipFile(opened) as parts:
            if sum(part.file_size for part in parts.infolist()) > _MOST_SHEET_BYTES:
                raise ValueError(
                    f"its content has more than {_MOST_SHEET_BYTES:,} bytes. Divide it into several files"
                )
        book = openpyxl.load_workbook(opened, read_only=True, data_only=True)
        if others := book.sheetnames[1:]:
            print(f"{path}: sheets not used: {', '.join(map(printable, others))}")
        sheet = book.worksheets[0]
        sheet.reset_dimensions()  # the size in the file may be wrong; without it, rows end at their last cell
        rows = enumerate(sheet.iter_rows(values_only=True), 1)
        header = next(rows, (1, ()))[1]
        names = {column: str(name) for column, name in enumerate(header) if name is not None}
        if len({*names.values()}) < len(names):
            raise ValueError("two columns have the same name")
        for line, row in rows:
            if line > _MOST_ROWS:  # the number of a row is free, and a file of any size may have a huge one
                raise ValueError(f"it has a row after row {_MOST_ROWS:,}, the last row of a sheet")
            if any(cell is not None for cell in row):
                cells = {name: row[at] if at < len(row) else None for at, name in names.items()}
                yield line, {name: _text_of(cell, f"{path}:{line}") for name, cell in cells.items()}


@contextlib.contextmanager
def _one_error(path: Path, form: str) -> Iterator[None]:
    try:
        yield
    except (MissingFileError, PointerFileError):
        raise
    except Exception as error:  # the parser raises almost anything on damaged bytes
        if str(error).startswith(f"{path}:"):
            raise
        raise ValueError(f"{path} cannot be read as {form} ({' '.join(str(error).split())})") from None


def _text_of(cell: Any, where: str) -> str:
    """Returns the text of an Excel cell, "" if it is empty.

    Raises ValueError if the cell is neither a text nor an integer of up to 15 digits.
    """
    if isinstance(cell, float) and cell.is_integer() and abs(cell) < 10**_MOST_DIGITS:
        cell = int(cell)
    if cell is None or isinstance(cell, str):
        return cell or ""
    if isinstance(cell, bool) or not isinstance(cell, int) or len(str(abs(cell))) > _MOST_DIGITS:
        advice = "Excel has changed what was typed. Format the column as text, and type it again."
        raise ValueError(f"{where}: the cell is {_shown(cell)}, a {type(cell).__name__}. {advice}")
    return str(cell)


def _parquet_rows(path: Path) -> Iterator[tuple[int, dict]]:
    parquet = import_package("pyarrow.parquet", needed_by=path)
    row_number = 0
    with _one_error(path, "parquet"), open_regular(path) as opened:
        fields = parquet.read_schema(opened)
        texts = [field.name for field in fields if str(field.type) in ("string", "large_string")]
        if repeated := [column for column in fields.names if fields.names.count(column) > 1]:
            raise ValueError(f"two columns are named {printable(repeated[0])!r}")
        file = parquet.ParquetFile(opened, read_dictionary=texts)  # equal texts are stored once
        groups = [file.metadata.row_group(index) for index in range(file.num_row_groups)]
        counts = [group.column(index).num_values for group in groups for index in range(group.num_columns)]
        if max(counts, default=0) > _MOST_VALUES:
            raise ValueError(f"a row group has more than {_MOST_VALUES:,} values. Write smaller row groups")
        for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE):
            for row in range(batch.num_rows):
                row_number += 1
                yield row_number, {column: batch[column][row].as_py() for column in fields.names}


_READERS = {
    **{".csv": _csv_rows, ".tsv": _csv_rows, ".jsonl": _json_rows, ".json": _array_rows},
    **{".ndjson": _json_rows, ".parquet": _parquet_rows, ".xlsx": _sheet_rows},
}
