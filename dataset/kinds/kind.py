"""The interface of a kind of puzzle: how puzzles are read, drawn and generated.

dataset/kinds/evaluator.py contains the interface of an evaluator.

A new kind is a package in this folder, or a plugin, that defines `KIND`. No other module lists the kinds. The
module `build` in the package of a kind builds its datasets (dataset/build/__init__.py describes the
interface). If a kind needs a new family of transforms, it adds the family to `AUGMENTATIONS` under the name
of the kind. dataset/symmetry.py finds puzzles that are equal up to symmetry only for the families and kinds
that it lists. A dataset can be used without a kind if accuracy is its only metric and its files contain all
variants. This folder does not import torch.
"""

import dataclasses
import importlib
import math
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np

import dataset.kinds
from dataset.kinds.evaluator import Evaluator, RowEvaluator
from dataset.metadata import Metadata, Split
from dataset.sets import PuzzleSet
from runtime.plugins import defined

FAINT = "2"  # the ANSI code of cells that a reader may ignore
_MAX_COLUMNS = 32
_NO_KINDS = ("evaluator", "kind")  # modules in this folder that define no kind

# (inputs, answers), tokens [n, seq_len] each -> whether the rules of the puzzle accept each answer, bool [n].
Rules = Callable[[np.ndarray, np.ndarray], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Style:
    """Describes how grids are drawn in terminals, pictures and HTML pages.

    Attributes:
        symbols: Text of each token, starting with token 0. A token beyond the last text is shown as its
            number.
        ansi: {token: ANSI color codes for a terminal, such as "30;102"}.
        colors: {token: background color of a cell as #rrggbb}, for pictures and HTML pages. Choose a
            different color for each token, because pictures do not draw the symbol of such a token. HTML
            pages draw it only if it contains a capital letter from A to Z. Terminals draw all symbols.
        regions: {number of cells of a grid: index of the region of each cell, row by row}. Example of a
            region: a box of a Sudoku. Pages and pictures draw thicker lines between regions. A terminal has
            lines only if some region is not a rectangle.
        gap: Text between the cells of a row in a terminal. It is not used if the grid is drawn with lines
            between regions.
        marks_new: Whether the cells in which an answer differs from the puzzle are drawn in another color.
        first_of_field: Smallest token that is a symbol of a grid. Set if a grid may be smaller than the token
            array, as in ARC and in datasets with their own symbols. Token `first_of_field` - 1 then marks the
            row below the grid and the column to its right, and smaller tokens are padding. If None, every
            grid fills the token array.
        num_columns: Number of columns of the token array. If None, `to_grid` chooses it.
    """

    symbols: Sequence[str] = ()
    ansi: Mapping[int, str] = dataclasses.field(default_factory=dict)
    colors: Mapping[int, str] = dataclasses.field(default_factory=dict)
    regions: Mapping[int, Sequence[int]] = dataclasses.field(default_factory=dict)
    gap: str = " "
    marks_new: bool = False
    first_of_field: int | None = None
    num_columns: int | None = None

    @property
    def has_areas(self) -> bool:
        return not self.gap

    def symbol(self, token: int) -> str:
        return self.symbols[token] if token < len(self.symbols) else str(token)

    def is_blank(self, token: int) -> bool:
        """Returns whether pictures and HTML pages draw a cell with this token as an empty cell.

        True if the symbol consists of spaces, or if the ANSI code is `FAINT`. Terminals draw the symbol. In a
        puzzle that a user types or pastes, a web page accepts only the first such token after padding.
        """
        is_space = token < len(self.symbols) and not self.symbols[token].strip()
        return is_space or self.ansi.get(token) == FAINT


@dataclasses.dataclass(frozen=True)
class Puzzle:
    """A puzzle that a user wants to solve.

    Attributes:
        tokens: Input, [seq_len]. int32 if `read_symbols` created the puzzle, otherwise uint8.
        vocab_size: Number of different tokens in datasets of such puzzles.
        rules: Function (inputs, answers) -> whether each answer obeys the rules, bool [n]. Both arguments are
            tokens, [n, seq_len]. None if the kind of puzzle has no rules.
        solution: Tokens of the solution, [seq_len]. None if it is not known.
    """

    tokens: np.ndarray
    vocab_size: int
    rules: Rules | None = None
    solution: np.ndarray | None = None
    has_own_rule: ClassVar[bool] = False
    """Whether the rule differs between puzzles, as in ARC, so that each puzzle needs its own embedding."""
    has_many_answers: ClassVar[bool] = False
    """Whether `distinct_answers` collects the different right answers of all samples.

    Set for kinds such as queens, but not for mazes, although a maze may have several right answers. If True,
    all samples of a search model (LDT) run to their end. If False, the first answer ends the search.
    """

    def cells_of(self, tokens: np.ndarray) -> np.ndarray:
        """Returns where the cells of an answer's grid are in `tokens`: int64 [rows, columns].

        Element [r, c] is the index in `tokens` of the cell in row r and column c. In ARC, and in datasets
        with their own symbols, the grid may be smaller than the token array.

        tokens: Answer to the puzzle, [seq_len].
        """
        return to_grid(np.arange(len(tokens)))

    def is_solution(self, tokens: np.ndarray) -> bool:
        """Returns whether an answer [seq_len] shows the same grid as `solution`, which must not be None."""
        cells, right = self.cells_of(tokens), self.cells_of(self.solution)
        return np.array_equal(cells, right) and bool((tokens[cells] == self.solution[right]).all())

    def laid_into(self, seq_len: int) -> "Puzzle":
        """Returns a copy of an ARC puzzle with grids in fields of `seq_len` cells, as the model expects.

        Other kinds of puzzles are returned unchanged. Raises ValueError if a grid is larger than the field.
        """
        return self

    def distinct_answers(self, answers: np.ndarray) -> np.ndarray:
        """Returns the right answers among a model's answers, each of them once: tokens [k, seq_len].

        Only puzzles with `has_many_answers` implement it.

        answers: The model's answers to this puzzle, tokens [n, seq_len].
        """
        raise NotImplementedError

    @property
    def remark(self) -> str | None:
        """A message for the user, such as "this puzzle has 3 solutions". None if there is nothing to say.

        For kinds that search for solutions, such as Sudoku, raises ValueError if the puzzle has no solution.
        """
        return None

    def find_identifier(self, training: Split) -> int | None:
        """Searches the training data for this ARC task. Returns the puzzle identifier of the first match.

        A task of the training data matches if it contains all demonstrations (input-output pairs) of this
        task. Returns None if no task matches, and for all other kinds of puzzles.
        """
        return None

    def draw_demonstrations(self, num_views: int, *, seed: int) -> PuzzleSet | None:
        """Returns the demonstrations (input-output pairs) of this ARC task as training data.

        All examples have the puzzle identifier 1. Returns None for all other kinds of puzzles.

        num_views: Number of copies of the demonstrations. In each copy, the grids have other random positions
        in the field. seed: Seed of the positions.
        """
        return None


def to_grid(cells: np.ndarray, *, num_columns: int | None = None) -> np.ndarray:
    """Reshapes an array [seq_len] to [rows, columns].

    num_columns: Number of columns. If None, the result is a square if possible. If None and seq_len is not a
    square number, the number of columns is the largest divisor of seq_len up to 32.
    """
    if num_columns is not None:
        return cells.reshape(-1, num_columns)
    num_columns = math.isqrt(len(cells))
    if num_columns**2 != len(cells):
        num_columns = next(width for width in range(_MAX_COLUMNS, 0, -1) if len(cells) % width == 0)
    return cells.reshape(-1, num_columns)


def crop(grid: np.ndarray, is_inside: np.ndarray) -> np.ndarray:
    """Returns a copy of the smallest rectangle of a grid that contains all marked cells.

    The copy has shape [0, 0] if no cell is marked. is_inside: The marked cells, bool [rows, columns].
    """
    for axis in (0, 1):
        found = np.flatnonzero(is_inside.any(axis=1 - axis))
        grid = grid.take(range(found[0], found[-1] + 1) if len(found) else [], axis=axis)
    return grid


def read_symbols(
    text: str, symbols: Sequence[str], *, vocab_size: int, rules: Rules | None = None
) -> list[Puzzle]:
    """Parses a puzzle that is written as symbols. Returns a list with this one puzzle.

    Example: with the symbols "_.Q", the text "Q . . ." gives the tokens [2, 1, 1, 1]. If every symbol is one
    character, the spaces are optional. Raises ValueError for an unknown symbol.

    symbols: Symbol of each token, starting with token 0. If empty, the symbol of a token is its number.
    vocab_size: Number of different tokens. Only the first `vocab_size` symbols are used. rules: Rules of the
    puzzle (`Puzzle.rules`).
    """
    names = list(symbols)[:vocab_size] or [str(token) for token in range(vocab_size)]
    token_of = {symbol: token for token, symbol in enumerate(names)}
    cells = text.split()
    if not all(cell in token_of for cell in cells) and all(len(symbol) == 1 for symbol in names):
        cells = [character for character in text if character in token_of or not character.isspace()]
    if unknown := [cell for cell in cells if cell not in token_of]:
        known = " ".join(names) if len(names) <= 40 else f"{' '.join(names[:20])} ... {names[-1]}"
        raise ValueError(f"{unknown[0][:40]!r} is not a symbol of its puzzles: {known}")
    return [Puzzle(np.array([token_of[cell] for cell in cells], np.int32), vocab_size, rules)]


@dataclasses.dataclass(frozen=True)
class Kind:
    """Describes a kind of puzzle, such as Sudoku, to all programs.

    Attributes:
        name: Name of the kind, such as "sudoku". Its module, builder, evaluator and metrics have the same
            name.
        mismatch: Function (metadata of a dataset) -> reason why the dataset cannot be of this kind, or None.
        build_evaluator: Function (dataset folder, metadata) -> evaluator. It raises ValueError if the dataset
            cannot be evaluated. If None, a `RowEvaluator` counts the exact answers and, as `valid`, those
            that `accepts` accepts.
        augmentation: Name in `dataset.augmentations.AUGMENTATIONS` of the transforms that make variants of
            its puzzles. None if the kind has no augmentation.
        style: How its grids are drawn.
        read_puzzles: Function (text) -> list of puzzles. It raises ValueError with a message of one line if a
            puzzle is not valid. If None, texts are parsed with the symbols of `style`, and `accepts` becomes
            `Puzzle.rules`.
        make_up: Function (metadata, count) -> (inputs, answers) of new puzzles, tokens [count, seq_len] each.
            They have the size of the dataset's puzzles. The function returns [] if it cannot generate puzzles
            of this size. None if the kind cannot generate puzzles.
        names_symbols: Whether the symbols of the tokens differ between datasets of this kind. Each dataset
            then lists them in its metadata (`Metadata.symbols`).
        groups: Function (metadata) -> lists of cell indices, or None if it does not know puzzles of this
            size. The cells of one list must have different symbols, such as the cells of a row of a Sudoku.
            Web pages check answers with these lists. None if the kind also has other rules. A web page then
            compares answers with the label, unless share/site/kinds.js has the rules of the kind.
        accepts: Function (inputs, answers) -> whether each answer is right, bool [n]. For kinds such as
            queens, for which an answer that differs from the label may be right. A drawing then marks no cell
            of a right answer as wrong. If None, drawings compare every answer with the label.
            If the builder of the kind passes `several_solutions` to `write_dataset`, evaluations also use the
            evaluator of the kind by default.
        title: Name in headings. If empty, the name with a capital letter.
        plural: Word for several puzzles, such as "mazes".
    """

    name: str
    mismatch: Callable[[Metadata], str | None]
    build_evaluator: Callable[..., Evaluator] | None = None
    augmentation: str | None = None
    style: Style = Style()
    read_puzzles: Callable[[str], list[Puzzle]] | None = None
    make_up: Callable[[Metadata, int], Sequence[np.ndarray]] | None = None
    names_symbols: bool = False
    groups: Callable[[Metadata], Sequence[Sequence[int]] | None] | None = None
    accepts: Rules | None = None
    title: str = ""
    plural: str = "puzzles"

    def evaluator(self, folder: Path, metadata: Metadata) -> Evaluator:
        """Returns a new evaluator. Raises ValueError if the dataset cannot be evaluated."""
        if self.build_evaluator is not None:
            return self.build_evaluator(folder, metadata)
        accepts = self.accepts
        return RowEvaluator(self.name, lambda *cells: {} if accepts is None else {"valid": accepts(*cells)})

    def mismatch_of(self, metadata: Metadata) -> str | None:
        """Returns why a dataset cannot be of this kind, such as "vocab_size is 7, not 6".

        Returns None if the dataset may be of this kind.
        """
        if (metadata.symbols is not None) != self.names_symbols:
            number = "no list" if self.names_symbols else "a list"
            return f"dataset.json contains {number} of symbols (only datasets of pairs have it)"
        return self.mismatch(metadata)


def kind_names() -> list[str]:
    """Returns the names of the kinds of puzzles in this folder and in imported plugins."""
    modules = pkgutil.iter_modules(dataset.kinds.__path__)
    here = [module.name for module in modules if module.name not in _NO_KINDS]
    return here + [kind.name for kind in defined("KIND") if kind.name not in here]


def find_kind(name: str) -> Kind:
    """Returns the kind with this name, one of `kind_names()`. Imports the module of the kind if needed."""
    of_plugins = {kind.name: kind for kind in defined("KIND")}
    return of_plugins.get(name) or importlib.import_module(f"dataset.kinds.{name}").KIND


def kinds_of(metadata: Metadata) -> list[Kind]:
    return [kind for kind in map(find_kind, kind_names()) if kind.mismatch_of(metadata) is None]


def kind_of(metadata: Metadata, *, builder: str | None = None) -> Kind | None:
    """Returns the kind of puzzle of a dataset, or None if it cannot be determined.

    A kind fits a dataset if its `mismatch_of` returns None. Returns the first of these kinds that exists:

    1. The kind with the name of the builder, if it fits.
    2. The only kind that fits.
    3. If several kinds fit, the only one of them that has the dataset's augmentation.

    If `builder` is not None, rules 2 and 3 consider only kinds with `names_symbols`. The reason: the builder
    may belong to a plugin that is not imported, and the sizes of its dataset may fit another kind by chance.

    Example: a 4x4 Sudoku dataset of the public tools also fits the kind maze, so the result is None.

    builder: Name of the builder of the dataset, or None if it is unknown.
    """
    if builder in kind_names() and (kind := find_kind(builder)).mismatch_of(metadata) is None:
        return kind  # without importing the other kinds
    fitting = [kind for kind in kinds_of(metadata) if builder is None or kind.names_symbols]
    if len(fitting) > 1:
        fitting = [kind for kind in fitting if kind.augmentation == metadata.augmentation]
    return fitting[0] if len(fitting) == 1 else None
