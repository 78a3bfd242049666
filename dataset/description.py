"""The description of a dataset, by which its puzzles are read and drawn; each checkpoint keeps a copy."""

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pydantic

from config.reading import MissingFileError, printable, read_json
from dataset.augmentations import AUGMENTATIONS, END, FIRST_SYMBOL, PAD
from dataset.format import IDENTIFIERS, Dataset, Metadata, read_builder
from dataset.kinds.kind import FAINT, Kind, Puzzle, Style, kind_of, to_grid
from dataset.sets import rows_of

Grid = Sequence[Sequence[str]]

_MOST_NAME_BYTES = 2**28  # of a file: a million variants have long names
_CHUNK_PUZZLES = 1 << 14


@dataclasses.dataclass(frozen=True)
class DatasetInfo:
    """The description of a dataset, or of a mixture.

    builder: its builder's name, None where no manifest says so, or where a mixture has several.
    """

    metadata: Metadata
    builder: str | None = None

    @functools.cached_property
    def kind(self) -> Kind | None:
        return kind_of(self.metadata, builder=self.builder)

    @property
    def style(self) -> Style:
        """The style of its grids; numbers for tokens where it is of no kind."""
        if self.vocabulary is not None:
            return self.vocabulary.style
        return self.kind.style if self.kind else Style()

    @functools.cached_property
    def vocabulary(self) -> "Vocabulary | None":
        """The symbols that the dataset brings, None where its kind has them."""
        return Vocabulary.of(self.metadata)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any], *, where: str) -> "DatasetInfo":
        """Reads what a checkpoint says of its data. ValueError, which begins with `where`, for a mistake."""
        try:
            info = pydantic.TypeAdapter(cls).validate_python(values)
        except pydantic.ValidationError as error:
            first = error.errors()[0]
            raise ValueError(": ".join(map(str, (where, *first["loc"], first["msg"])))) from None
        for mistake in info.metadata.mistakes():
            raise ValueError(f"{where}: {mistake}")
        return info


def read_info(folders: Sequence[Path], metadata: Metadata) -> DatasetInfo:
    """Describes the dataset in one folder, or the mixture of several. metadata: of the whole."""
    builders = {builder and builder["name"] for builder in map(read_builder, folders)}
    return DatasetInfo(metadata, builders.pop() if len(builders) == 1 else None)


def with_candidates(data: Dataset) -> Dataset:
    """Returns the dataset with what `Metadata` finds in the training data; reads all original puzzles."""
    metadata, found = data.metadata, set()
    for each in data.splits["train"].sets.values():
        puzzles = np.asarray(each.group_indices[:-1], np.int64)
        for part in np.array_split(puzzles, -(-len(puzzles) // _CHUNK_PUZZLES)):
            rows = rows_of(each.puzzle_indices, part)
            inputs, labels = each.read(rows, part.repeat(np.diff(each.puzzle_indices)[part]))
            counted = labels != metadata.ignore_label_id
            found.update(np.unique(inputs[counted].astype(np.int64) * metadata.vocab_size + labels[counted]))
    kind = read_info(data.folders, metadata).kind
    family = AUGMENTATIONS.get(kind.augmentation) if kind else None
    may = {name: family is not None and getattr(family, name) for name in ("may_turn", "may_permute")}
    metadata = dataclasses.replace(metadata, candidates=tuple(map(int, sorted(found))), **may)
    train = dataclasses.replace(data.splits["train"], metadata=metadata)
    return dataclasses.replace(data, splits={**data.splits, "train": train})


def read_names(folder: Path) -> list[str]:
    """Reads the name of each puzzle identifier; empty where the dataset has none."""
    try:
        names = read_json(folder / IDENTIFIERS, most=_MOST_NAME_BYTES)
    except MissingFileError:
        return []
    return [printable(str(name)) for name in names] if isinstance(names, list) else []


def read_every_name(folder: Path, metadata: Metadata) -> list[str]:
    """Reads the names of all puzzle identifiers. ValueError unless each has one."""
    names, num = read_names(folder), metadata.num_puzzle_identifiers
    if len(names) != num:
        path = folder / IDENTIFIERS
        raise ValueError(f"{path} does not name the {num} identifiers; build the dataset again")
    return names


# ----------------------------------------------------------------------------------------------- own symbols
#
# Symbols of somebody's own puzzles. A grid is a list of rows, a row a list of symbols, a symbol a text of a
# character or more; a sequence is a grid of one row. In a text the rows are lines; symbols of one character
# stand side by side, longer ones are parted by spaces. Grids are laid into fields (`augmentations`).


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """The symbols of the tokens 2 and up, and the field that grids are laid into."""

    symbols: tuple[str, ...]
    num_rows: int
    num_columns: int

    @staticmethod
    def of(metadata: Metadata) -> "Vocabulary | None":
        """Returns the vocabulary that a dataset names, None where it names none."""
        if metadata.symbols is None:
            return None
        return Vocabulary(metadata.symbols, metadata.seq_len // metadata.num_columns, metadata.num_columns)

    @property
    def parts_by_spaces(self) -> bool:
        """Whether spaces part the cells of a row."""
        return any(len(symbol) > 1 for symbol in self.symbols)

    def parse(self, text: str) -> list[list[str]]:
        """Parses a text into a grid. Where no symbol has a space, spaces part the rows of a single line too.

        ValueError where it does not fit: an unknown symbol, rows of unequal length, more than the field.
        """
        lines = text.strip("\r\n").splitlines()
        if not self.parts_by_spaces and " " not in self.symbols:
            lines = text.split()
        grid = [line.split() if self.parts_by_spaces else list(line) for line in lines]
        self.tokens_of(grid)
        return grid

    def read_puzzle(self, text: str) -> "FieldPuzzle":
        """Reads a puzzle. ValueError as `parse`."""
        tokens = self.tokens_of(self.parse(text))
        return FieldPuzzle(tokens, FIRST_SYMBOL + len(self.symbols), vocabulary=self)

    def tokens_of(self, grid: Grid) -> np.ndarray:
        """Lays a grid into the field: tokens, uint8 [seq_len]. ValueError as `parse`."""
        rows, columns = size_of(grid, "the grid")
        if rows > self.num_rows or columns > self.num_columns:
            most = f"the dataset has at most {self.num_rows}x{self.num_columns}"
            raise ValueError(f"the grid has {rows}x{columns} cells, but {most}")
        numbers = {symbol: number for number, symbol in enumerate(self.symbols)}
        if unknown := [cell for row in grid for cell in row if cell not in numbers]:
            raise ValueError(f"{unknown[0]!r} is no symbol of the dataset ({self.list_symbols()})")
        cells = np.array([[numbers[cell] for cell in row] for row in grid], np.uint8)
        return lay_out(cells, num_rows=self.num_rows, num_columns=self.num_columns)

    def cells_of(self, tokens: np.ndarray) -> np.ndarray:
        """Returns the cells that make the grid in the top left corner of a field, tokens [seq_len].

        int64 [rows, columns], as far as its first row and column go; a field without any is an empty grid.
        """
        field = to_grid(np.asarray(tokens), num_columns=self.num_columns)
        lines = (field[:, 0] >= FIRST_SYMBOL, field[0] >= FIRST_SYMBOL)
        num_rows, num_columns = (int(np.r_[line, False].argmin()) for line in lines)
        return np.arange(field.size).reshape(field.shape)[:num_rows, :num_columns]

    def list_symbols(self, most: int = 40) -> str:
        """Lists the symbols for people, the first `most` of them."""
        names = ["space" if symbol == " " else symbol for symbol in self.symbols]
        more = [f"and {len(names) - most} more"] if len(names) > most else []
        return " ".join(names[:most] + more)

    @property
    def style(self) -> Style:
        """The style of the dataset's grids."""
        return Style(
            symbols=("_", "+", *self.symbols),
            ansi={PAD: FAINT, END: FAINT},
            gap="" if self.num_rows == 1 and not self.parts_by_spaces else " ",
            marks_new=True,
            first_of_field=FIRST_SYMBOL,
            num_columns=self.num_columns,
        )


@dataclasses.dataclass(frozen=True)
class FieldPuzzle(Puzzle):
    """A puzzle in symbols of a dataset's own. vocabulary: the dataset's."""

    vocabulary: Vocabulary | None = None

    def cells_of(self, tokens: np.ndarray) -> np.ndarray:
        """Returns the cells of the answer's grid, which is as large as its end says."""
        return self.vocabulary.cells_of(tokens)


def size_of(rows: Sequence[Sequence], name: str) -> tuple[int, int]:
    """Returns the rows and columns of a grid. ValueError, which begins with its name, where it is none."""
    lengths = [len(row) for row in rows]
    if not lengths or not lengths[0]:
        raise ValueError(f"{name} is empty")
    for number, length in enumerate(lengths, 1):
        if length != lengths[0]:
            raise ValueError(f"{name} is ragged: row {number} has {length} cells, row 1 has {lengths[0]}")
    return len(lengths), lengths[0]


def lay_out(grid: np.ndarray, *, num_rows: int, num_columns: int) -> np.ndarray:
    """Lays a grid of symbols, counted from 0, in the top left corner of a field: tokens, uint8 [cells]."""
    rows, columns = grid.shape
    tokens = np.full((num_rows, num_columns), PAD, np.uint8)
    tokens[: rows + 1, :columns] = END
    tokens[:rows, : columns + 1] = END
    tokens[:rows, :columns] = grid + FIRST_SYMBOL
    return tokens.ravel()
