"""The kinds of puzzles: all that sets Sudokus, mazes and ARC tasks apart, a module or a package each.

A new kind is a new module or package in this folder that defines `KIND`; it is found by itself. Puzzles that
need no rules of their own (accuracy is enough, variants are written out) need no kind at all. Everything here
runs without torch.
"""

import dataclasses
import functools
import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from dataset.question import Question
from dataset.symmetries import Augmentation

if TYPE_CHECKING:
    from dataset.evaluator import Evaluator
    from dataset.format import Metadata

FAINT = "2"  # the ANSI code of what is not meant to be read


@dataclasses.dataclass(frozen=True)
class Look:
    """The look of a kind's grids, in a terminal and on a page.

    symbols         of the tokens 0, 1, ...; a token beyond them shows as its number
    styles          ANSI codes by token
    colors          #rrggbb by token: the ground of a cell on a page, which has more colours to choose from
    boxes           by number of cells: the rows and columns of the boxes that heavier lines part on a page
    gap             between the cells of a row
    marks_new       whether a cell of the answer that differs from the puzzle is green
    first_of_field  where a grid lies somewhere in a larger field, which is left out: the least token that
                    belongs to the grid; the token before it marks the grid's end
    num_columns     of the field; None: it is a square where it can be one
    """

    symbols: Sequence[str] = ()
    styles: Mapping[int, str] = dataclasses.field(default_factory=dict)
    colors: Mapping[int, str] = dataclasses.field(default_factory=dict)
    boxes: Mapping[int, tuple[int, int]] = dataclasses.field(default_factory=dict)
    gap: str = " "
    marks_new: bool = False
    first_of_field: int | None = None
    num_columns: int | None = None

    def is_blank(self, token: int) -> bool:
        """Tells whether a cell with this token shows nothing that is meant to be read."""
        is_space = token < len(self.symbols) and not self.symbols[token].strip()
        return is_space or self.styles.get(token) == FAINT


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of puzzle.

    name             as in `evaluators=[name]` and in the names of its metrics
    builder          the module that builds such datasets, as their manifests name it
    misfit           metadata -> what shows that a dataset is not of this kind, None where it may be; asked of
                     those whose symbols are their own only if names_symbols
    build_evaluator  folder, metadata, and the options of this kind by keyword -> its evaluator. ValueError
                     where the dataset cannot be evaluated
    augmentations    families of transforms, by the names that `dataset.json` has for them
    look             how its grids are drawn
    read_questions   text -> the puzzles in it, of any size that the kind has. ValueError, one line, where it
                     is no sound puzzle. None: a text of its symbols
    names_symbols    whether its datasets bring symbols of their own, with which they are drawn (`vocabulary`)
    """

    name: str
    builder: str
    misfit: Callable[["Metadata"], str | None]
    build_evaluator: Callable[..., "Evaluator"]
    augmentations: Mapping[str, Augmentation] = dataclasses.field(default_factory=dict)
    look: Look = Look()
    read_questions: Callable[[str], list[Question]] | None = None
    names_symbols: bool = False

    def misfit_of(self, metadata: "Metadata") -> str | None:
        """Says what shows that a dataset is not of this kind, None where it may be."""
        if (metadata.symbols is not None) != self.names_symbols:
            return "tokens have no symbols of their own" if self.names_symbols else "symbols are its own"
        return self.misfit(metadata)


@functools.cache
def all_kinds() -> dict[str, Kind]:
    """Finds every kind in this folder, by name."""
    found = (importlib.import_module(f"{__name__}.{each.name}") for each in pkgutil.iter_modules(__path__))
    return {module.KIND.name: module.KIND for module in found}


@functools.cache
def all_augmentations() -> dict[str, Augmentation]:
    """Collects the augmentations of every kind, by name."""
    return {name: each for kind in all_kinds().values() for name, each in kind.augmentations.items()}


def kinds_of(metadata: "Metadata") -> list[Kind]:
    """Finds every kind that a dataset may be of, by its metadata alone."""
    return [kind for kind in all_kinds().values() if kind.misfit_of(metadata) is None]


def kind_of(metadata: "Metadata", *, builder: str | None = None) -> Kind | None:
    """Finds the kind of a dataset, None where its metadata fits none.

    Of several that it fits it is the one of the builder that the manifest names, else the one whose
    augmentation the dataset has, else the first.
    """
    fitting = kinds_of(metadata)
    fitting.sort(key=lambda kind: (kind.builder != builder, metadata.augmentation not in kind.augmentations))
    return fitting[0] if fitting else None
