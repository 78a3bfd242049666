"""The symbols of a dataset of somebody's own puzzles: text to tokens, and back.

A grid is a list of rows, a row a list of symbols, a symbol a text of a character or more; a sequence is a
grid of one row. In a text the rows are lines. Symbols of one character stand side by side, longer ones are
parted by spaces. `dataset.json` has the symbols, and the number of columns of the field (`fields`).
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from dataset.fields import END, FIRST_SYMBOL, PAD, lay_out
from dataset.format import Metadata
from dataset.kinds import FAINT, Look
from dataset.question import Question, to_grid

Grid = Sequence[Sequence[str]]

_UNREADABLE = "?"


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

    def read_question(self, text: str) -> "FieldQuestion":
        """Reads a puzzle. ValueError as `parse`."""
        tokens = self.tokens_of(self.parse(text))
        return FieldQuestion(tokens, FIRST_SYMBOL + len(self.symbols), vocabulary=self)

    def tokens_of(self, grid: Grid) -> np.ndarray:
        """Lays a grid into the field: tokens, uint8 [seq_len]. ValueError as `parse`."""
        lengths = [len(row) for row in grid]
        if not lengths or not lengths[0]:
            raise ValueError("the grid is empty")
        for number, length in enumerate(lengths, 1):
            if length != lengths[0]:
                raise ValueError(
                    f"the grid is ragged: row {number} has {length} cells, row 1 has {lengths[0]}"
                )
        if len(lengths) > self.num_rows or lengths[0] > self.num_columns:
            most = f"the dataset has at most {self.num_rows}x{self.num_columns}"
            raise ValueError(f"the grid has {len(lengths)}x{lengths[0]} cells, but {most}")
        numbers = {symbol: number for number, symbol in enumerate(self.symbols)}
        if unknown := [cell for row in grid for cell in row if cell not in numbers]:
            raise ValueError(f"{unknown[0]!r} is no symbol of the dataset ({self.symbols_in_words()})")
        cells = np.array([[numbers[cell] for cell in row] for row in grid], np.uint8)
        return lay_out(cells, num_rows=self.num_rows, num_columns=self.num_columns)

    def grid_of(self, tokens: np.ndarray) -> list[list[str]]:
        """Reads the grid in the top left corner of a field, [seq_len], as far as its first row and column go.

        A cell of it that has no symbol, in a model's answer, is '?'; a field without any is an empty grid.
        """
        texts = (_UNREADABLE, _UNREADABLE, *self.symbols)
        return [[texts[token] for token in row] for row in np.asarray(tokens)[self.cells_of(tokens)].tolist()]

    def cells_of(self, tokens: np.ndarray) -> np.ndarray:
        """Returns which cells of a field [seq_len] make the grid of `grid_of`: int64 [rows, columns]."""
        field = to_grid(np.asarray(tokens), num_columns=self.num_columns)
        lines = (field[:, 0] >= FIRST_SYMBOL, field[0] >= FIRST_SYMBOL)
        num_rows, num_columns = (int(np.r_[line, False].argmin()) for line in lines)
        return np.arange(field.size).reshape(field.shape)[:num_rows, :num_columns]

    def text_of(self, grid: Grid) -> str:
        """Writes a grid as `parse` reads it."""
        return "\n".join((" " if self.parts_by_spaces else "").join(row) for row in grid)

    def symbols_in_words(self, most: int = 40) -> str:
        """Lists the symbols for people, the first `most` of them."""
        words = ["space" if symbol == " " else symbol for symbol in self.symbols]
        more = [f"and {len(words) - most} more"] if len(words) > most else []
        return " ".join(words[:most] + more)

    @property
    def look(self) -> Look:
        """The look of the dataset's grids in a terminal."""
        return Look(
            symbols=("_", "+", *self.symbols),
            styles={PAD: FAINT, END: FAINT},
            gap="" if self.num_rows == 1 and not self.parts_by_spaces else " ",
            marks_new=True,
            first_of_field=FIRST_SYMBOL,
            num_columns=self.num_columns,
        )


@dataclasses.dataclass(frozen=True)
class FieldQuestion(Question):
    """A puzzle in symbols of a dataset's own. vocabulary: the dataset's."""

    vocabulary: Vocabulary | None = None

    def cells_of(self, tokens: np.ndarray) -> np.ndarray:
        """Returns the cells of the answer's grid, which is as large as its end says."""
        return self.vocabulary.cells_of(tokens)
