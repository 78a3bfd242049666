"""The interface of a kind of puzzle: how puzzles are read, drawn and generated.

dataset/kinds/evaluator.py contains the interface of its evaluator.

A new kind is a package in this folder, or a plugin, that defines `KIND`. No other file lists it. Its builder
is the module `build` in the package (dataset/build/__init__.py describes the interface). If the kind needs a
new family of transforms, it adds the family to `AUGMENTATIONS` under its name. dataset/symmetry.py finds
equal puzzles up to symmetry only for the families that it lists. A dataset needs no kind if accuracy is its
only metric and all variants are written out. This folder does not import torch.
"""

import dataclasses
import importlib
import math
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import numpy as np

import dataset.kinds
from dataset.format import Metadata, Split
from dataset.kinds.evaluator import Evaluator
from dataset.sets import PuzzleSet
from runtime.plugins import defined

FAINT = "2"  # the ANSI code of cells that a reader may ignore
_MAX_COLUMNS = 32
_NO_KINDS = ("evaluator", "kind")  # modules in this folder that define no kind

# (inputs, answers), tokens [n, seq_len] each -> whether the rules of the puzzle accept each answer, bool [n].
Rules = Callable[[np.ndarray, np.ndarray], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Style:
    """How the grids of a kind of puzzle are drawn, in a terminal and on a page.

    Attributes:
        symbols: Text of each token. A token beyond the last one is shown as its number.
        ansi: {token: ANSI codes}.
        colors: {token: #rrggbb}, the background of a cell on a page.
        regions: {number of cells: number of each cell's region, row by row}. Pages and pictures draw heavier
            lines between regions, such as the boxes of a Sudoku. A terminal has lines only if some region is
            not a rectangle.
        gap: Text between the cells of a row. In a terminal, a row with lines between regions ignores it.
        marks_new: Whether cells of the answer that differ from the puzzle are green.
        first_of_field: Lowest token of a cell, if grids are smaller than the token array (ARC). The token
            below it marks the end of a grid, and only the grid is drawn. If None, a grid fills the array.
        num_columns: Number of columns of the token array. If None, the array is a square or, if that is not
            possible, has up to 32 columns.
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
        """Whether cells are drawn as areas of color, without gaps between them."""
        return not self.gap

    def symbol(self, token: int) -> str:
        """Returns the text that is drawn in a cell with this token."""
        return self.symbols[token] if token < len(self.symbols) else str(token)

    def is_blank(self, token: int) -> bool:
        """Returns whether a cell with this token is drawn empty."""
        is_space = token < len(self.symbols) and not self.symbols[token].strip()
        return is_space or self.ansi.get(token) == FAINT


@dataclasses.dataclass(frozen=True)
class Puzzle:
    """A puzzle that a user wants to solve.

    Attributes:
        tokens: Input, uint8 or int32 [seq_len].
        vocab_size: Number of tokens in datasets of such puzzles.
        rules: Function that checks answers by the rules. None if the kind of puzzle has no rules.
        solution: Tokens of the solution, [seq_len]. None if it is not known.
    """

    tokens: np.ndarray
    vocab_size: int
    rules: Rules | None = None
    solution: np.ndarray | None = None
    has_own_rule: ClassVar[bool] = False
    """Whether the rule differs between puzzles, as in ARC, so that each puzzle needs its own embedding."""
    has_many_answers: ClassVar[bool] = False
    """Whether all samples run to their end, so that `distinct_answers` can collect their right answers."""

    def cells_of(self, tokens: np.ndarray) -> np.ndarray:
        """Finds the grid in an answer, [seq_len]. Returns the indices of its cells: int64 [rows, columns]."""
        return to_grid(np.arange(len(tokens)))

    def is_solution(self, tokens: np.ndarray) -> bool:
        """Returns whether an answer, tokens [seq_len], shows the same grid as the solution.

        The solution must be known.
        """
        cells, right = self.cells_of(tokens), self.cells_of(self.solution)
        return np.array_equal(cells, right) and bool((tokens[cells] == self.solution[right]).all())

    def laid_into(self, seq_len: int) -> "Puzzle":
        """Returns the puzzle with the number of tokens, `seq_len`, that a model expects.

        For ARC, the grids are written into a token array of this size. Raises ValueError if a grid does not
        fit. Other kinds return the puzzle unchanged.
        """
        return self

    def distinct_answers(self, answers: np.ndarray) -> np.ndarray:
        """Returns the different right answers among `answers`, tokens [n, seq_len], if `has_many_answers`."""
        raise NotImplementedError

    @property
    def remark(self) -> str | None:
        """A remark for the user, for example that the puzzle has several solutions, or None.

        Raises ValueError if the puzzle has no solution.
        """
        return None

    def find_identifier(self, training: Split) -> int | None:
        """Returns the identifier of the puzzle embedding that was trained on this puzzle's demonstrations.

        Returns None if there is no such embedding. Only ARC puzzles have demonstrations. training: Training
        split of the model.
        """
        return None

    def draw_demonstrations(self, num_views: int, *, seed: int) -> PuzzleSet | None:
        """Returns `num_views` copies of an ARC puzzle's demonstrations, to train a new puzzle embedding.

        The new embedding has identifier 1. Returns None if the puzzle has no demonstrations. seed: Determines
        the random positions of the grids.
        """
        return None


def to_grid(cells: np.ndarray, *, num_columns: int | None = None) -> np.ndarray:
    """Reshapes an array [seq_len] to [rows, columns].

    If `num_columns` is None, the grid is a square if possible. If it is not possible, the number of columns
    is the largest divisor of seq_len up to 32.
    """
    if num_columns is not None:
        return cells.reshape(-1, num_columns)
    num_columns = math.isqrt(len(cells))
    if num_columns**2 != len(cells):
        num_columns = next(width for width in range(_MAX_COLUMNS, 0, -1) if len(cells) % width == 0)
    return cells.reshape(-1, num_columns)


def crop(grid: np.ndarray, is_inside: np.ndarray) -> np.ndarray:
    """Returns a copy of the smallest rectangle of a grid that contains all marked cells.

    It is empty if no cell is marked. is_inside: The marks, bool [rows, columns].
    """
    for axis in (0, 1):
        found = np.flatnonzero(is_inside.any(axis=1 - axis))
        grid = grid.take(range(found[0], found[-1] + 1) if len(found) else [], axis=axis)
    return grid


def read_symbols(text: str, symbols: Sequence[str], *, vocab_size: int) -> list[Puzzle]:
    """Converts a text of symbols to a puzzle, for any kind. Returns a list of one puzzle.

    Spaces separate the symbols. If every symbol is one character, spaces are optional. Raises ValueError for
    an unknown symbol.

    symbols: Symbol of each token. If empty, the symbol of a token is its number. vocab_size: Number of
    tokens.
    """
    names = list(symbols)[:vocab_size] or [str(token) for token in range(vocab_size)]
    token_of = {symbol: token for token, symbol in enumerate(names)}
    cells = text.split()
    if not all(cell in token_of for cell in cells) and all(len(symbol) == 1 for symbol in names):
        cells = [character for character in text if character in token_of or not character.isspace()]
    if unknown := [cell for cell in cells if cell not in token_of]:
        known = " ".join(names) if len(names) <= 40 else f"{' '.join(names[:20])} ... {names[-1]}"
        raise ValueError(f"{unknown[0][:40]!r} is not a symbol of its puzzles: {known}")
    return [Puzzle(np.array([token_of[cell] for cell in cells], np.int32), vocab_size)]


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of puzzle, such as Sudoku: everything that the other code needs to know about it.

    Attributes:
        name: Name of its module, its builder, its evaluator and its metrics.
        mismatch: Function (metadata) -> reason why a dataset cannot be of this kind, or None.
        build_evaluator: Function (folder, metadata) -> evaluator. It raises ValueError if the dataset cannot
            be evaluated.
        augmentation: Name of its augmentation in `AUGMENTATIONS`. None if it has none.
        style: How its grids are drawn.
        read_puzzles: Function (text) -> puzzles of any size. It raises ValueError, one line, for an invalid
            puzzle. If None, texts are read as the symbols of `style`.
        make_up: Function (metadata, count) -> new puzzles of the dataset's size: inputs and answers, tokens
            [count, seq_len] each. None if the kind cannot generate puzzles.
        names_symbols: Whether its datasets define their symbols (`description.Vocabulary`).
        groups: Function (metadata) -> groups of cells in which all symbols must differ, if the kind has no
            other rules. Pages then check answers. If None, they do not.
        title: Name in headings. If empty, the name with a capital letter.
        plural: Word for several puzzles.
    """

    name: str
    mismatch: Callable[[Metadata], str | None]
    build_evaluator: Callable[..., Evaluator]
    augmentation: str | None = None
    style: Style = Style()
    read_puzzles: Callable[[str], list[Puzzle]] | None = None
    make_up: Callable[[Metadata, int], Sequence[np.ndarray]] | None = None
    names_symbols: bool = False
    groups: Callable[[Metadata], Sequence[Sequence[int]]] | None = None
    title: str = ""
    plural: str = "puzzles"

    def mismatch_of(self, metadata: Metadata) -> str | None:
        """Returns the reason why a dataset with these metadata cannot be of this kind.

        Returns None if it can.
        """
        if (metadata.symbols is not None) != self.names_symbols:
            number = "no list" if self.names_symbols else "a list"
            return f"dataset.json contains {number} of symbols (only datasets of pairs have it)"
        return self.mismatch(metadata)


def kind_names() -> list[str]:
    """Returns the names of all kinds of puzzles: those in this folder and those of imported plugins.

    Imports none of them.
    """
    modules = pkgutil.iter_modules(dataset.kinds.__path__)
    here = [module.name for module in modules if module.name not in _NO_KINDS]
    return here + [kind.name for kind in defined("KIND") if kind.name not in here]


def find_kind(name: str) -> Kind:
    """Returns the kind of puzzle with this name, one of `kind_names`. Imports its module if needed."""
    of_plugins = {kind.name: kind for kind in defined("KIND")}
    return of_plugins.get(name) or importlib.import_module(f"dataset.kinds.{name}").KIND


def kinds_of(metadata: Metadata) -> list[Kind]:
    """Returns all kinds of puzzles that fit the metadata of a dataset."""
    return [kind for kind in map(find_kind, kind_names()) if kind.mismatch_of(metadata) is None]


def kind_of(metadata: Metadata, *, builder: str | None = None) -> Kind | None:
    """Returns the kind of puzzle of a dataset. Returns None if its metadata do not determine the kind.

    The first of these rules that applies:

    - The kind of the builder, if it fits the metadata.
    - The only kind that fits the metadata.
    - Of several kinds that fit: the only one that has the augmentation of the dataset.

    Example: a 4x4 Sudoku dataset of the public tools also fits the kind maze, so the result is None.

    builder: Name of the builder in the manifest of the dataset. None if it is unknown.
    """
    if builder in kind_names() and (kind := find_kind(builder)).mismatch_of(metadata) is None:
        return kind  # without importing the other kinds
    fitting = kinds_of(metadata)
    if len(fitting) > 1:
        fitting = [kind for kind in fitting if kind.augmentation == metadata.augmentation]
    return fitting[0] if len(fitting) == 1 else None
