"""What a dataset is: its splits, and the metadata of a split, such as the vocabulary size.

`dataset.files` opens a dataset and checks it. `dataset.sets` has the arrays of a split.
"""

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from dataset.augmentations import AUGMENTATIONS, FIRST_SYMBOL, find_augmentation
from dataset.sets import PuzzleSet
from runtime.plugins import words_to_add

SPLITS = ("train", "test")
IGNORE_LABEL_ID = -100  # in a batch, the label of a cell that is not scored
BLANK = "<blank>"  # name of identifier 0, which puzzles without an embedding share

_MOST = (1 << 31) - 1  # batches are int32
JOINER = "\u200d"  # zero-width joiner, which makes one emoji of two
_Number = Annotated[int, Field(ge=0, le=_MOST)]
_Size = Annotated[int, Field(ge=1, le=_MOST)]
_Length = Annotated[int, Field(ge=1, le=1 << 20)]  # limited, because the memory for one puzzle grows with it
# Assumed if no dataset is available. Only thousands of the many millions of weights depend on these sizes.
USUAL_SIZES = {"vocab_size": 12, "seq_len": 900, "num_puzzle_identifiers": 1}
_SIZE_OF_ID = {"pad_id": "vocab_size", "blank_identifier_id": "num_puzzle_identifiers"}
_SetName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]


def is_printable(symbol: str) -> bool:
    return symbol.replace(JOINER, "").isprintable()  # str.isprintable rejects joiners


@dataclasses.dataclass(frozen=True)
class Metadata:
    """Properties of the training or test split of a dataset, such as its vocabulary size.

    The file dataset.json of the split stores the properties. Padding has the token `pad_id` and the puzzle
    identifier `blank_identifier_id`. A label of `ignore_label_id` is not scored. `sets` has the names of the
    parts of the split. An evaluation computes the metrics of each set of a test split separately.
    """

    pad_id: _Number
    ignore_label_id: Annotated[int, Field(ge=IGNORE_LABEL_ID, le=_MOST)] | None
    blank_identifier_id: _Number
    vocab_size: _Length
    seq_len: _Length
    num_puzzle_identifiers: _Size
    total_groups: _Number
    mean_puzzle_examples: Annotated[float, Field(ge=0, le=_MOST)]
    sets: Annotated[tuple[_SetName, ...], Field(min_length=1)]
    total_puzzles: _Number | None = None  # only the TRM tools write it
    augmentation: str | None = None  # not in public tools: the family of transforms, in `AUGMENTATIONS`
    symbols: tuple[str, ...] | None = None  # not in public tools: the texts of the tokens 2 and up
    num_columns: _Length | None = None  # not in public tools: columns of the field; set with `symbols`
    # The next three are not in the file. `with_candidates` sets them. candidates: token * vocab_size + label
    # for each pair (input token, label) of a training cell, ascending. An unscored cell has its input as
    # label. The others are properties of the kind's `Augmentation`.
    candidates: tuple[int, ...] | None = None
    may_turn: bool | None = None
    may_permute: bool | None = None

    def mistakes(self) -> Iterator[str]:
        """Yields an error message for each contradiction between the fields."""
        symbols, num_columns = self.symbols, self.num_columns
        for id_field, size_field in _SIZE_OF_ID.items():
            identifier, size = getattr(self, id_field), getattr(self, size_field)
            if identifier >= size:
                yield f"{id_field} is {identifier}, but {size_field} is {size}"
        if len(set(self.sets)) < len(self.sets):
            yield "sets contains a name twice"
        if self.augmentation is not None and find_augmentation(self.augmentation) is None:
            known = ", ".join(AUGMENTATIONS)
            plugin = f"If a plugin adds it, add {words_to_add()}. Otherwise, the file is wrong"
            yield f"augmentation={self.augmentation!r} is not one of {known}. {plugin}"
        if self.augmentation in ("arc", "pairs", "sudoku") and (self.ignore_label_id or 0) >= FIRST_SYMBOL:
            problem = f"augmentation={self.augmentation} exchanges this token. Use null, 0 or 1."
            yield f"ignore_label_id is {self.ignore_label_id}, but {problem}"
        side = math.isqrt(self.seq_len)
        if self.augmentation in ("square", "sudoku") and side**2 != self.seq_len:
            yield f"augmentation={self.augmentation} needs a square, but seq_len is {self.seq_len}"
        elif self.augmentation == "sudoku" and self.vocab_size != FIRST_SYMBOL + side:
            expected = f"a Sudoku of {self.seq_len} cells has {FIRST_SYMBOL + side}"
            yield f"vocab_size is {self.vocab_size}, but {expected}"
        if (symbols is None) != (num_columns is None):
            yield "only one of symbols and num_columns is set"
        elif symbols is not None:
            if len(set(symbols)) < len(symbols) or not all(map(is_printable, symbols)):
                yield "symbols contains a text twice, or a text that is not printable"
            if len(symbols) > 256 - FIRST_SYMBOL:
                yield f"{len(symbols)} symbols, more than the {256 - FIRST_SYMBOL} that fit into a byte"
            if len(symbols) != self.vocab_size - FIRST_SYMBOL:
                yield f"{len(symbols)} symbols do not match vocab_size {self.vocab_size}"
            if self.seq_len % num_columns:
                yield f"seq_len {self.seq_len} is not a multiple of num_columns {num_columns}"


def columns_of(metadata: Metadata, *, needed_by: str) -> int:
    """Returns the number of columns of the grids of a dataset.

    If the metadata do not contain the number, returns the square root of seq_len, the number of cells. Raises
    ValueError if seq_len is then not a square.

    needed_by: Name of the config key that needs grids, for the message.
    """
    if metadata.num_columns is not None:
        return metadata.num_columns
    side = math.isqrt(metadata.seq_len)
    if side**2 != metadata.seq_len:
        raise ValueError(
            f"{needed_by} needs a grid, but the dataset has no num_columns, and its seq_len "
            f"{metadata.seq_len} is not a square"
        )
    return side


@dataclasses.dataclass(frozen=True)
class Split:
    metadata: Metadata
    sets: dict[str, PuzzleSet]


def usual_metadata(*, vocab_size: int, seq_len: int, num_puzzle_identifiers: int, **others: Any) -> Metadata:
    """Creates the metadata of a split with one set of puzzles, named "all".

    Token 0 is padding, and labels of 0 are not scored. others: Other fields of `Metadata`.
    """
    usual = {"total_groups": 1, "mean_puzzle_examples": 1.0, "sets": ("all",), **others}
    return Metadata(0, 0, 0, vocab_size, seq_len, num_puzzle_identifiers, **usual)


def one_set_split(puzzles: PuzzleSet, *, vocab_size: int, num_identifiers: int, **others: Any) -> Split:
    """Creates a split from one set of puzzles. The set gets the name "all".

    num_identifiers: Number of puzzle identifiers in the dataset. others: Other fields of `Metadata`.
    """
    num_puzzles = len(puzzles.puzzle_identifiers)
    metadata = usual_metadata(
        vocab_size=vocab_size,
        seq_len=puzzles.inputs.shape[1],
        num_puzzle_identifiers=num_identifiers,
        total_groups=len(puzzles.group_indices) - 1,
        mean_puzzle_examples=puzzles.num_examples / num_puzzles,
        total_puzzles=num_puzzles,
        augmentation=puzzles.augmentation,
        **others,
    )
    return Split(metadata, {"all": puzzles})


class Origin(NamedTuple):
    """The dataset folder that a test set comes from, if several folders are mixed.

    Attributes:
        folder: Dataset folder.
        set_name: Name of the test set in this folder.
        first_identifier: Number that the mixture adds to each puzzle identifier of this folder, so that the
            identifiers of different folders differ.
    """

    folder: Path
    set_name: str
    first_identifier: int


@dataclasses.dataclass(frozen=True)
class Dataset:
    """An opened dataset: one folder, or a mixture of several folders.

    Attributes:
        folders: Paths of the folders.
        splits: The opened splits, as {"train" or "test": split}.
        origins: {name of a test set: its `Origin`} for a mixture. Empty for one folder.
    """

    folders: tuple[Path, ...]
    splits: dict[str, Split]
    origins: dict[str, Origin] = dataclasses.field(default_factory=dict)

    def origin(self, set_name: str) -> Origin:
        return self.origins[set_name] if self.origins else Origin(self.folders[0], set_name, 0)

    def test_set(self, folder: Path, set_name: str) -> str:
        """Returns the name that the test set `set_name` of a folder has in this dataset.

        In a mixture of folders, this is "arc.all" for the set "all" of the folder "arc". If this dataset has
        only one folder, this is `set_name`.
        """
        names = (name for name, origin in self.origins.items() if origin[:2] == (folder, set_name))
        return next(names, set_name)

    @property
    def metadata(self) -> Metadata:
        # What this says about tokens and puzzle identifiers is equal in all splits.
        return next(iter(self.splits.values())).metadata
