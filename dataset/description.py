"""The description of a dataset: all that is needed to read and draw puzzles. Checkpoints contain a copy."""

import dataclasses
import functools
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pydantic

from dataset.augmentations import END, FIRST_SYMBOL, PAD, find_augmentation
from dataset.files import IDENTIFIERS, read_builder, splits_with_several_solutions
from dataset.kinds.kind import FAINT, Kind, Puzzle, Style, kind_of, to_grid
from dataset.metadata import IGNORE_LABEL_ID, JOINER, Dataset, Metadata
from dataset.sets import original_chunks
from runtime.reading import MissingFileError, printable, read_json

Grid = Sequence[Sequence[str]]

_MOST_NAME_BYTES = 2**28  # size limit of identifiers.json: a million variants have long names
_MOST_LISTED = 40  # symbols in a message


@dataclasses.dataclass(frozen=True)
class DatasetInfo:
    """The information that is needed to read and draw the puzzles of a dataset.

    Attributes:
        metadata: Properties of the dataset, such as its vocabulary size.
        builder: Name of the command of `python -m dataset.build` that created the dataset, such as "sudoku".
            None if it is unknown. "" if the dataset mixes folders with different kinds of puzzles.
    """

    metadata: Metadata
    builder: str | None = None

    @functools.cached_property
    def kind(self) -> Kind | None:
        return kind_of(self.metadata, builder=self.builder)

    @property
    def style(self) -> Style:
        if self.vocabulary is not None:
            return self.vocabulary.style
        return self.kind.style if self.kind else Style()  # without a kind, tokens are shown as numbers

    @functools.cached_property
    def vocabulary(self) -> "Vocabulary | None":
        return Vocabulary.of(self.metadata)  # None if the kind of puzzle, such as Sudoku, has the symbols

    def labels_for(self, inputs: np.ndarray, labels: np.ndarray, answers: np.ndarray) -> np.ndarray:
        """Returns the labels to compare answers with: tokens [n, seq_len].

        Some kinds of puzzles, such as coloring, have several right answers. If the rules of such a kind
        accept an answer, the answer replaces the label. In all other cases, the label stays, also if none of
        its cells is scored.

        inputs, labels, answers: Tokens [n, seq_len]. A cell with the label IGNORE_LABEL_ID is not scored.
        """
        if self.kind is None or self.kind.accepts is None:
            return labels
        is_right = self.kind.accepts(inputs, answers) & (labels != IGNORE_LABEL_ID).any(axis=1)
        return np.where(is_right[:, None], answers, labels)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any], *, where: str) -> "DatasetInfo":
        """Creates a `DatasetInfo` from the result of `to_json`. Raises ValueError for invalid values.

        where: Source of the values, such as a file name. The error message starts with it.
        """
        try:
            info = pydantic.TypeAdapter(cls).validate_python(values)
        except pydantic.ValidationError as error:
            first = error.errors()[0]
            raise ValueError(": ".join(map(str, (where, *first["loc"], first["msg"])))) from None
        for mistake in info.metadata.mistakes():
            raise ValueError(f"{where}: {mistake}")
        return info


def read_info(folders: Sequence[Path], metadata: Metadata) -> DatasetInfo:
    """Returns the description of a dataset that consists of one or more folders.

    The file manifest.json of a folder names the command of `python -m dataset.build` that created it, such as
    "sudoku". If all folders name the same command, the description contains this name as `builder`.
    Otherwise, `builder` is the kind of puzzle of all folders, or "" if it differs or is unknown.

    metadata: Properties of the whole dataset, such as its vocabulary size.
    """
    builders = {builder and builder["name"] for builder in map(read_builder, folders)}
    if len(builders) > 1:
        kinds = [kind_of(metadata, builder=builder) for builder in builders]
        names = {kind.name if kind else "" for kind in kinds}
        builders = names if len(names) == 1 else {""}
    return DatasetInfo(metadata, builders.pop())


def with_candidates(data: Dataset) -> Dataset:
    """Returns a copy of a dataset. In its training split, the metadata have three more fields, for LDT.

    Reads the originals of all training puzzles. If the manifest of a folder says that training puzzles have
    several right answers, reads all training examples of this folder instead. The model LDT needs these
    fields:

    - `candidates`: input * vocab_size + label for each pair (input token, label) that occurs in a cell,
      ascending. For an unscored cell, such as the padding beside a small grid, the input stands in for the
      label. Examples without a scored cell are left out.
    - `may_turn`: whether LDT may rotate and mirror the puzzles (`Augmentation.may_turn`)
    - `may_permute`: whether LDT may permute the values of the puzzles, such as the digits of a Sudoku
    """
    metadata, found = data.metadata, set()
    parts = [pair for puzzle_set in data.splits["train"].sets.values() for pair in puzzle_set.parts]
    for folder, part in parts:
        has_several = "train" in splits_with_several_solutions(data.folders[folder])
        for rows, puzzles in part.chunks() if has_several else original_chunks(part):
            inputs, labels = part.read(rows, puzzles)
            is_scored = labels != metadata.ignore_label_id
            labels = np.where(is_scored, labels, inputs)
            pairs = inputs.astype(np.int64) * metadata.vocab_size + labels
            found.update(np.unique(pairs[is_scored.any(axis=1)]))
    kind = read_info(data.folders, metadata).kind
    family = find_augmentation(kind.augmentation) if kind else None
    metadata = dataclasses.replace(
        metadata,
        candidates=tuple(map(int, sorted(found))),
        may_turn=family is not None and family.may_turn,
        may_permute=family is not None and family.may_permute,
    )
    train = dataclasses.replace(data.splits["train"], metadata=metadata)
    return dataclasses.replace(data, splits={**data.splits, "train": train})


def read_names(folder: Path) -> list[str]:
    """Returns the names of the puzzles of a dataset folder, in the order of the puzzle identifiers.

    Example: ["<blank>", "0a938d79"]. Returns [] if the file identifiers.json is missing or contains other
    JSON than a list. Raises ValueError if the file cannot be read or is not JSON.
    """
    try:
        names = read_json(folder / IDENTIFIERS, most=_MOST_NAME_BYTES)
    except MissingFileError:
        return []
    return [printable(str(name)) for name in names] if isinstance(names, list) else []


def read_every_name(folder: Path, metadata: Metadata) -> list[str]:
    """Returns the name of each puzzle identifier of a dataset folder, in order.

    Raises ValueError if identifiers.json does not contain exactly one name for each identifier.
    """
    names, num = read_names(folder), metadata.num_puzzle_identifiers
    if len(names) != num:
        path = folder / IDENTIFIERS
        raise ValueError(f"{path} does not contain the names of {num} identifiers. Build the dataset again.")
    return names


# --------------------------------------------------------------------------------------- symbols of a dataset
#
# A dataset may define symbols for its puzzles. A grid is a list of rows. A row is a list of symbols. A symbol
# is a text of at least one character. A sequence is a grid of one row. In a text, each line is a row. Spaces
# separate the symbols of a row, unless every symbol has one character. A grid lies in a field, a token array
# of fixed size (`augmentations`).


def characters(text: str) -> list[str]:
    """Splits a text into characters as readers see them, after Unicode normalization (NFC).

    Combining marks, variation selectors and zero-width joiners are not characters of their own. Example: an
    emoji with U+FE0F is one character.
    """
    found: list[str] = []
    for point in unicodedata.normalize("NFC", text):
        if found and (point == JOINER or unicodedata.category(point)[0] == "M" or found[-1][-1] == JOINER):
            found[-1] += point
        else:
            found.append(point)
    return found


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """Converts puzzles between text and tokens, for a dataset that defines its own symbols.

    A grid is a list of rows, and a row is a list of symbols. A grid may be smaller than the token array that
    contains it. Token 0 is padding. Token 1 fills the row below the grid and the column to its right, if the
    array has room for them.

    Attributes:
        symbols: Texts of the tokens 2, 3, ...
        num_rows: Number of rows of the token array.
        num_columns: Number of columns of the token array.
    """

    symbols: tuple[str, ...]
    num_rows: int
    num_columns: int

    @staticmethod
    def of(metadata: Metadata) -> "Vocabulary | None":
        """Returns the vocabulary of a dataset, or None if its metadata define no symbols."""
        if metadata.symbols is None:
            return None
        return Vocabulary(metadata.symbols, metadata.seq_len // metadata.num_columns, metadata.num_columns)

    @property
    def parts_by_spaces(self) -> bool:
        # Symbols of one character need no separators.
        return any(len(characters(symbol)) > 1 for symbol in self.symbols)

    def parse(self, text: str) -> list[list[str]]:
        """Converts a text to a grid. Each line is a row.

        If some symbol has several characters, spaces separate the symbols of a row. If every symbol has one
        character and none is a space, spaces separate rows, as line breaks do. Raises ValueError if the grid
        is empty, has an unknown symbol or rows of unequal length, or is larger than the token array
        (`num_rows` x `num_columns`).
        """
        text = "".join(characters(text))  # normalized, as the symbols are
        lines = text.strip("\r\n").splitlines()
        if not self.parts_by_spaces and " " not in self.symbols:
            lines = text.split()  # rows may also be separated by spaces
        grid = [line.split() if self.parts_by_spaces else characters(line) for line in lines]
        self.tokens_of(grid)
        return grid

    def read_puzzle(self, text: str) -> "FieldPuzzle":
        tokens = self.tokens_of(self.parse(text))
        return FieldPuzzle(tokens, FIRST_SYMBOL + len(self.symbols), vocabulary=self)

    def tokens_of(self, grid: Grid) -> np.ndarray:
        """Converts a grid of symbols to tokens: uint8 [seq_len].

        The grid is at the top left of the token array (`num_rows` x `num_columns`). The row below it and the
        column to its right become token 1 if the array has room for them. All other cells become token 0
        (padding). Raises ValueError if the grid is empty, has an unknown symbol or rows of unequal length, or
        is larger than the token array.
        """
        rows, columns = size_of(grid, "the grid")
        if rows > self.num_rows or columns > self.num_columns:
            most = f"the dataset has at most {self.num_rows}x{self.num_columns}"
            raise ValueError(f"the grid has {rows}x{columns} cells, but {most}")
        index_of = {symbol: index for index, symbol in enumerate(self.symbols)}
        if unknown := [cell for row in grid for cell in row if cell not in index_of]:
            raise ValueError(
                f"{unknown[0]!r} is not a symbol of the dataset. Use only {self.list_symbols()}."
            )
        cells = np.array([[index_of[cell] for cell in row] for row in grid], np.uint8)
        return lay_out(cells, num_rows=self.num_rows, num_columns=self.num_columns)

    def cells_of(self, tokens: np.ndarray) -> np.ndarray:
        """Returns the indices of the cells of the grid in a token array [seq_len]: int64 [rows, columns].

        The grid starts at the top left. Its first row and its first column end before the first token that is
        not a symbol (padding or an end mark).
        """
        field = to_grid(np.asarray(tokens), num_columns=self.num_columns)
        lines = (field[:, 0] >= FIRST_SYMBOL, field[0] >= FIRST_SYMBOL)
        num_rows, num_columns = (int(np.r_[line, False].argmin()) for line in lines)
        return np.arange(field.size).reshape(field.shape)[:num_rows, :num_columns]

    def list_symbols(self) -> str:
        """Returns the symbols as a text, such as "# . S and 2 more"."""
        names = ["space" if symbol == " " else symbol for symbol in self.symbols]
        more = [f"and {len(names) - _MOST_LISTED} more"] if len(names) > _MOST_LISTED else []
        return " ".join(names[:_MOST_LISTED] + more)

    @property
    def style(self) -> Style:
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
    """A puzzle that is written with the symbols of its dataset, such as "#"."""

    vocabulary: Vocabulary | None = None

    def cells_of(self, tokens: np.ndarray) -> np.ndarray:
        return self.vocabulary.cells_of(tokens)


def size_of(rows: Sequence[Sequence], name: str) -> tuple[int, int]:
    """Returns (number of rows, number of columns) of a grid.

    Raises ValueError if the grid is empty, or if its rows have different lengths. name: What the message
    calls the grid.
    """
    lengths = [len(row) for row in rows]
    if not lengths or not lengths[0]:
        raise ValueError(f"{name} is empty")
    for row_number, length in enumerate(lengths, 1):
        if length != lengths[0]:
            raise ValueError(f"{name} is ragged: row {row_number} has {length} cells, row 1 has {lengths[0]}")
    return len(lengths), lengths[0]


def lay_out(grid: np.ndarray, *, num_rows: int, num_columns: int) -> np.ndarray:
    """Converts a grid of symbol indices to tokens: uint8 [num_rows * num_columns].

    The grid is at the top left of the token array. The symbols 0, 1, ... become the tokens 2, 3, ... The row
    below the grid and the column to its right become END (1), if the array has room for them. All other cells
    become PAD (0).

    grid: Index of the symbol of each cell, from 0, [rows, columns].
    """
    rows, columns = grid.shape
    tokens = np.full((num_rows, num_columns), PAD, np.uint8)
    tokens[: rows + 1, :columns] = END
    tokens[:rows, : columns + 1] = END
    tokens[:rows, :columns] = grid + FIRST_SYMBOL
    return tokens.ravel()
