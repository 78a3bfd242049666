"""The interface of a kind of puzzle: how puzzles are read, checked, drawn and generated.

A new kind is a package in this folder, or a plugin, that defines `KIND`. No other file lists it. Its builder
is the module `build` in the package (dataset/build/__init__.py has the interface). A family of transforms
of its own is added to `AUGMENTATIONS` under the name of the kind. Puzzles without rules, for which accuracy
is enough, and variants that are written out, need no kind. Nothing here imports torch.
"""

import dataclasses
import importlib
import math
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np

import dataset.kinds
from dataset.format import IGNORE_LABEL_ID, Metadata, Split
from dataset.sets import PuzzleSet
from runtime.plugins import defined
from runtime.writing import write_json

FAINT = "2"  # the ANSI code of cells that a reader may ignore
SUBMISSION_FILE, TASKS_FILE = "submission.json", "tasks.json"
_MAX_COLUMNS = 32

# Inputs and answers, tokens [n, seq_len] each -> which answers the rules of the puzzle accept: bool [n].
Rules = Callable[[np.ndarray, np.ndarray], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Style:
    """The style of a kind's grids, in a terminal and on a page.

    symbols         {token: text}; a token beyond the last one shows as its number
    ansi            {token: ANSI codes}
    colors          {token: #rrggbb}, the background of a cell on a page
    regions         {number of cells: the number of each cell's region, row by row}. Pictures and pages have
                    heavier lines between regions, such as the boxes of a Sudoku
    gap             text between the cells of a row
    marks_new       whether a cell of the answer that differs from the puzzle is green
    first_of_field  for grids in a field (ARC): the lowest token of a cell; the token below ends the grid, and
                    only the grid is drawn. None: a grid fills the whole array
    num_columns     of the token array; None: it is a square or, if that cannot be, has up to 32 columns
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
        """Returns whether cells are drawn as areas of colour, without gaps."""
        return not self.gap

    def symbol(self, token: int) -> str:
        """Returns the text of a cell with this token."""
        return self.symbols[token] if token < len(self.symbols) else str(token)

    def is_blank(self, token: int) -> bool:
        """Returns whether a cell with this token shows nothing."""
        is_space = token < len(self.symbols) and not self.symbols[token].strip()
        return is_space or self.ansi.get(token) == FAINT


@dataclasses.dataclass(frozen=True)
class Puzzle:
    """A puzzle without its answer, as a person gives it.

    tokens      uint8 or int32 [seq_len]
    vocab_size  number of tokens in datasets of such puzzles
    rules       None where the kind has none
    solution    tokens [seq_len]; None where the text has none
    """

    tokens: np.ndarray
    vocab_size: int
    rules: Rules | None = None
    solution: np.ndarray | None = None
    has_own_rule: ClassVar[bool] = False
    """Whether demonstrations give the rule, as in ARC, so that a model needs its own puzzle embedding."""

    def cells_of(self, tokens: np.ndarray) -> np.ndarray:
        """Returns which cells of an answer [seq_len] make its grid: indices, int64 [rows, columns]."""
        return to_grid(np.arange(len(tokens)))

    def is_solution(self, tokens: np.ndarray) -> bool:
        """Returns whether an answer, tokens [seq_len], has the grid of the solution."""
        cells, right = self.cells_of(tokens), self.cells_of(self.solution)
        return np.array_equal(cells, right) and bool((tokens[cells] == self.solution[right]).all())

    def laid_into(self, seq_len: int) -> "Puzzle":
        """Returns the puzzle in a field of `seq_len` cells; itself if puzzles of this kind fill all cells.

        ValueError where a grid is larger than the field.
        """
        return self

    @property
    def remark(self) -> str | None:
        """Returns a remark for people, such as that the puzzle has several solutions; None: nothing to say.

        ValueError where the puzzle has no solution.
        """
        return None

    def find_identifier(self, training: Split) -> int | None:
        """Returns the identifier that was trained on this puzzle's demonstrations; None without one."""
        return None

    def draw_demonstrations(self, num_views: int, *, seed: int) -> PuzzleSet | None:
        """Lays all demonstrations out `num_views` times, to train identifier 1; None for a kind without."""
        return None


def to_grid(cells: np.ndarray, *, num_columns: int | None = None) -> np.ndarray:
    """Reshapes [seq_len] to [rows, columns]; by default a square or, if it is none, up to 32 columns."""
    if num_columns is not None:
        return cells.reshape(-1, num_columns)
    num_columns = math.isqrt(len(cells))
    if num_columns**2 != len(cells):
        num_columns = next(number for number in range(_MAX_COLUMNS, 0, -1) if len(cells) % number == 0)
    return cells.reshape(-1, num_columns)


def crop(grid: np.ndarray, is_inside: np.ndarray) -> np.ndarray:
    """Cuts the smallest rectangle with all cells where `is_inside`, bool [rows, columns], out of a grid."""
    for axis in (0, 1):
        found = np.flatnonzero(is_inside.any(axis=1 - axis))
        grid = grid.take(range(found[0], found[-1] + 1) if len(found) else [], axis=axis)
    return grid


def read_symbols(text: str, symbols: Sequence[str], *, vocab_size: int) -> list[Puzzle]:
    """Reads a puzzle of any kind from its symbols, separated by spaces or, if all are characters, by nothing.

    symbols: by token; if empty, a token is its number. ValueError where a symbol is unknown.
    """
    names = list(symbols)[:vocab_size] or [str(token) for token in range(vocab_size)]
    token_of = {name: token for token, name in enumerate(names)}
    cells = text.split()
    if not all(cell in token_of for cell in cells) and all(len(name) == 1 for name in names):
        cells = [character for character in text if character in token_of or not character.isspace()]
    if unknown := [cell for cell in cells if cell not in token_of]:
        known = " ".join(names) if len(names) <= 40 else f"{' '.join(names[:20])} ... {names[-1]}"
        raise ValueError(f"{unknown[0][:40]!r} is no symbol of its puzzles: {known}")
    return [Puzzle(np.array([token_of[cell] for cell in cells], np.int32), vocab_size)]


class Answers(NamedTuple):
    """A model's answers to one batch of examples, without padding; n may be 0.

    inputs              int32 [n, seq_len]
    labels              int32 [n, seq_len]: IGNORE_LABEL_ID where a cell counts nowhere
    puzzle_identifiers  int32 [n]
    preds               uint8 or int32 [n, seq_len]: the token that the model finds likeliest
    q_halt              float32 [n]: logits of being right
    """

    inputs: np.ndarray
    labels: np.ndarray
    puzzle_identifiers: np.ndarray
    preds: np.ndarray
    q_halt: np.ndarray


class Evaluator(Protocol):
    """The interface of an evaluator: metrics of one kind of puzzle on one dataset folder."""

    samples_vote: bool
    """Whether `add` wants all sampled answers to an example, which vote, or only the selected one."""

    def add(self, set_name: str, answers: Answers) -> None:
        """Adds the answers to one batch of a set."""

    def are_valid(self, inputs: np.ndarray, preds: np.ndarray) -> np.ndarray | None:
        """Checks answers by the rules of the puzzles alone, without a label: bool [n].

        None where the kind has no rules. inputs, preds: tokens [n, seq_len].
        """

    def partial(self) -> Any:
        """Returns what this rank has added, in a form that can be pickled, for `metrics` on rank 0."""

    def metrics(self, partials: Sequence[Any]) -> dict[str, dict[str, float]]:
        """Returns {set: {"<kind>/<metric>": value}}, from the `partial` of every rank.

        Shares are fractions of `<kind>/count` examples. A set without data is left out.
        """

    def write(self, folder: Path) -> None:
        """Writes the evaluator's files, if there are any, into the folder; to be called after `metrics`."""


class RowEvaluator:
    """An evaluator that checks each labelled example alone, and counts those that pass.

    The check `exact` is that all scored cells are right; a kind adds others, such as `valid`.
    """

    samples_vote = False

    def __init__(
        self,
        kind: str,
        check: Callable[[np.ndarray, np.ndarray], dict[str, np.ndarray]],
        *,
        tasks: Sequence[str] = (),
    ):
        """Takes the kind's checks: (inputs, preds), tokens [n, seq_len] -> {name: which pass, bool [n]}.

        The check `valid` means right by the rules. tasks: names of the puzzle identifiers, to write the
        shares of each into a file; empty: no such file.
        """
        self._kind, self._check, self._tasks = kind, check, tasks
        # (set, check): examples of each task that pass, on this rank and on all; all pass "count".
        self._passed: dict[tuple[str, str], np.ndarray] = {}
        self._total: dict[tuple[str, str], np.ndarray] = {}

    def add(self, set_name: str, answers: Answers) -> None:
        counts = answers.labels != IGNORE_LABEL_ID
        is_exact = ((answers.preds == answers.labels) | ~counts).all(axis=1)
        checks = {"exact": is_exact, **self._check(answers.inputs, answers.preds), "count": True}
        tasks = answers.puzzle_identifiers if self._tasks else np.zeros_like(answers.puzzle_identifiers)
        has_label, num_tasks = counts.any(axis=1), max(len(self._tasks), 1)
        for name, is_passed in checks.items():
            passed = np.bincount(tasks[has_label & is_passed], minlength=num_tasks)
            self._passed[set_name, name] = self._passed.get((set_name, name), 0) + passed

    def are_valid(self, inputs: np.ndarray, preds: np.ndarray) -> np.ndarray | None:
        return self._check(inputs, preds).get("valid")

    def partial(self) -> dict[tuple[str, str], np.ndarray]:
        return self._passed

    def metrics(self, partials: Sequence[dict[tuple[str, str], np.ndarray]]) -> dict[str, dict[str, float]]:
        self._total = {}
        for part in partials:
            for key, passed in part.items():
                self._total[key] = self._total.get(key, 0) + passed
        return {
            set_name: {f"{self._kind}/{name}": value for name, value in self._shares(set_name).items()}
            for set_name in self._sets()
        }

    def _sets(self) -> list[str]:
        return [set_name for (set_name, name), rows in self._total.items() if name == "count" and rows.any()]

    def _shares(self, set_name: str, tasks: int | slice = slice(None)) -> dict[str, float]:
        """Returns {"<check>_accuracy": share that passes, "count": examples} of a set, or of some tasks."""
        of_set = {
            name: int(rows[tasks].sum()) for (own, name), rows in self._total.items() if own == set_name
        }
        count = of_set.pop("count")
        return {f"{name}_accuracy": number / count for name, number in of_set.items()} | {"count": count}

    def write(self, folder: Path) -> None:
        """Writes `tasks.json`, {set: {task: {"exact_accuracy": ..., "count": ...}}}, for several tasks."""
        if len(self._tasks) < 2:
            return
        tasks = {
            set_name: {
                self._tasks[task]: self._shares(set_name, task)
                for task in self._total[set_name, "count"].nonzero()[0]
            }
            for set_name in self._sets()
        }
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / TASKS_FILE, tasks)


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of puzzle: all that the rest of the program asks about it.

    name             of its module, its builder, its evaluator and its metrics
    title            the name in headings; empty: the name with a capital
    plural           what several puzzles are called
    mismatch         metadata -> why a dataset is not of this kind; None: it may be
    build_evaluator  (folder, metadata) -> evaluator. ValueError where the dataset cannot be evaluated
    augmentation     the name of its transforms in `AUGMENTATIONS`
    style            of its grids
    read_puzzles     text -> puzzles of any size; ValueError, one line, for a bad one. None: texts are symbols
    make_up          (metadata, count) -> new puzzles of the dataset's size: inputs and answers, tokens
                     [count, seq_len] each; None: cannot be generated
    names_symbols    whether its datasets define symbols of their own (`description.Vocabulary`)
    groups           metadata -> groups of cells whose symbols must differ, if these are all of the rules. A
                     page then checks answers. None: the rules are others, or unknown
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
        """Returns why a dataset is not of this kind; None where it may be."""
        if (metadata.symbols is not None) != self.names_symbols:
            return "tokens have no symbols of their own" if self.names_symbols else "symbols are its own"
        return self.mismatch(metadata)


def kind_names() -> list[str]:
    """Lists the kinds in this folder, without importing them, and those of imported plugins."""
    here = [each.name for each in pkgutil.iter_modules(dataset.kinds.__path__) if each.name != "kind"]
    return here + [kind.name for kind in defined("KIND") if kind.name not in here]


def find_kind(name: str) -> Kind:
    """Returns a kind, one of `kind_names`. Imports it, unless it is of a plugin."""
    of_plugins = {kind.name: kind for kind in defined("KIND")}
    return of_plugins.get(name) or importlib.import_module(f"dataset.kinds.{name}").KIND


def kinds_of(metadata: Metadata) -> list[Kind]:
    """Returns every kind that a dataset may be of, by its metadata alone."""
    return [kind for kind in map(find_kind, kind_names()) if kind.mismatch_of(metadata) is None]


def kind_of(metadata: Metadata, *, builder: str | None = None) -> Kind | None:
    """Returns the kind of a dataset; None where no kind fits its metadata.

    Of several that fit, the kind named `builder` (in the manifest) is chosen, else one with the dataset's
    augmentation, else the first.
    """
    if builder in kind_names() and (kind := find_kind(builder)).mismatch_of(metadata) is None:
        return kind  # and the others need not be imported
    fitting = sorted(kinds_of(metadata), key=lambda kind: kind.augmentation != metadata.augmentation)
    return fitting[0] if fitting else None
