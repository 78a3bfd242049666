"""Sets of puzzles as arrays: `PuzzleSet` for one folder, `ConcatenatedSet` for several.

A materialized set contains the tokens of every variant, as the public HRM and TRM tools write them. Any other
set contains only the tokens of the originals, and a transform for each variant. `read` applies the transform.
Identifiers, offsets and the order of rows are equal in both forms, so a plan for one form is valid for the
other.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence

import numpy as np

from dataset.augmentations import find_augmentation

FIELDS = ("inputs", "labels", "puzzle_identifiers", "puzzle_indices", "group_indices")
_CHUNK_ROWS = 1 << 14


def fields_of(augmentation: str | None) -> tuple[str, ...]:
    """Returns the names of the arrays that store a set of puzzles, such as "inputs".

    augmentation: Name of a family of transforms, such as "sudoku". The set then stores only originals, and
    a variant is computed while the set is read. None if the set stores all variants.
    """
    if augmentation is None:
        return FIELDS
    moves = find_augmentation(augmentation).has_translations
    return (*FIELDS, "transforms", "translations") if moves else (*FIELDS, "transforms")


@dataclasses.dataclass(frozen=True)
class PuzzleSet:
    """A set of puzzles as arrays.

    A puzzle has one or more examples. An example is an input and a label (the right answer). A group is an
    original puzzle and its variants. In training sets of kinds with many right answers, such as queens, a
    group is an input, and its puzzles are the input with each of its answers. If the set was read from a
    folder, the arrays are memory-mapped.

    Attributes:
        inputs, labels: Tokens, any integer dtype [num_examples, seq_len]. If `augmentation` is set, they
            contain only the examples of the original puzzle of each group, and are uint8.
        puzzle_identifiers: [num_puzzles], row of the table of learned embeddings for each puzzle.
        puzzle_indices: [num_puzzles + 1]. Puzzle p has the examples range(*puzzle_indices[p : p + 2]).
        group_indices: [num_groups + 1]. Group g has the puzzles range(*group_indices[g : g + 2]).
        augmentation: Name of the family of transforms that `read` applies to make the variants. If None,
            `inputs` and `labels` contain all variants, and the next two attributes are None.
        transforms: uint8 [num_puzzles, bytes], transform from the original of the group to each puzzle.
        translations: uint8 [num_examples, 2], rows down and columns right by which an ARC grid is moved. None
            for other augmentations.
    """

    inputs: np.ndarray
    labels: np.ndarray
    puzzle_identifiers: np.ndarray
    puzzle_indices: np.ndarray
    group_indices: np.ndarray
    augmentation: str | None = None
    transforms: np.ndarray | None = None
    translations: np.ndarray | None = None

    @property
    def num_examples(self) -> int:
        return int(self.puzzle_indices[-1])

    @property
    def folder_of_group(self) -> np.ndarray:
        # The index of the dataset folder of each group. A `ConcatenatedSet` has several folders.
        return np.zeros(len(self.group_indices) - 1, np.int64)

    @property
    def parts(self) -> "list[tuple[int, PuzzleSet]]":
        return [(0, self)]  # (index of the dataset folder, set). A `ConcatenatedSet` has several

    def originals(self) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Yields the examples of all originals, in chunks.

        Each chunk is a tuple of inputs [n, seq_len], labels [n, seq_len] and the index of each example's
        puzzle, int64 [n].
        """
        for rows, puzzles in original_chunks(self):
            if self.augmentation is not None:  # `inputs` contains the originals
                rows = self._first_original[puzzles] + rows - self.puzzle_indices[puzzles]
            yield self.inputs[rows], self.labels[rows], puzzles

    def read(self, rows: np.ndarray, puzzles: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the inputs and labels of some examples, [n, seq_len] each.

        rows: Indices of the examples, int64 [n]. puzzles: Index of the puzzle of each example, int64 [n].
        """
        if self.augmentation is None:
            return self.inputs[rows], self.labels[rows]
        originals = self._first_original[puzzles] + rows - self.puzzle_indices[puzzles]
        transforms = self.transforms[puzzles]
        translations = None if self.translations is None else self.translations[rows]
        apply = find_augmentation(self.augmentation).apply
        inputs, labels = self.inputs[originals], self.labels[originals]
        return apply(inputs, transforms, translations), apply(labels, transforms, translations)

    @functools.cached_property
    def _first_original(self) -> np.ndarray:
        # The index in `inputs` of the first example of each puzzle's original: int64 [num_puzzles].
        first_puzzles = self.group_indices[:-1]
        sizes = self.puzzle_indices[first_puzzles + 1] - self.puzzle_indices[first_puzzles]
        ends = sizes.cumsum(dtype=np.int64)
        return (ends - sizes).repeat(np.diff(self.group_indices))

    def chunks(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields the examples in chunks, as (index of each example, index of its puzzle), int64 [n] each."""
        for first in range(0, self.num_examples, _CHUNK_ROWS):
            rows = np.arange(first, min(first + _CHUNK_ROWS, self.num_examples))
            yield rows, self.puzzle_indices.searchsorted(rows, side="right") - 1

    def materialize(self) -> "PuzzleSet":
        """Returns a set that stores all variants in `inputs` and `labels`.

        If this set already stores all variants, returns `self`.
        """
        if self.augmentation is None:
            return self
        inputs, labels = (np.empty((self.num_examples, self.inputs.shape[1]), np.uint8) for _ in range(2))
        for rows, puzzles in self.chunks():
            inputs[rows], labels[rows] = self.read(rows, puzzles)
        return PuzzleSet(inputs, labels, self.puzzle_identifiers, self.puzzle_indices, self.group_indices)


class ConcatenatedSet:
    """Concatenation of several sets of puzzles. It can be read like a `PuzzleSet`.

    Args:
        parts: The sets.
        folders: For each set, the index of its dataset folder.
        first_identifiers: For each set, the number to add to its puzzle identifiers.

    Attributes:
        parts: List of (index of the dataset folder, set).
        folder_of_group: Index of the dataset folder of each group, int64 [num_groups].
    """

    def __init__(
        self, parts: Sequence[PuzzleSet], *, folders: Sequence[int], first_identifiers: Sequence[int]
    ):
        self.parts = [*zip(folders, parts, strict=True)]
        self._first_rows = np.cumsum([0, *(part.num_examples for part in parts)])
        self._first_puzzles = np.cumsum([0, *(len(part.puzzle_identifiers) for part in parts)])
        # int64, because files may contain identifiers as bytes, which the sum would overflow.
        identifiers = (np.asarray(part.puzzle_identifiers, np.int64) for part in parts)
        self.puzzle_identifiers = np.concatenate([*map(np.add, identifiers, first_identifiers)])
        self.puzzle_indices = _concatenate_offsets([part.puzzle_indices for part in parts])
        self.group_indices = _concatenate_offsets([part.group_indices for part in parts])
        self.folder_of_group = np.repeat(folders, [len(part.group_indices) - 1 for part in parts])

    @property
    def num_examples(self) -> int:
        return int(self._first_rows[-1])

    def read(self, rows: np.ndarray, puzzles: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        part_of_row = self._first_rows.searchsorted(rows, side="right") - 1
        read = np.empty((2, len(rows), self.parts[0][1].inputs.shape[1]), np.int32)  # the dtypes may differ
        for part in np.unique(part_of_row):
            here = part_of_row == part
            part_rows, part_puzzles = rows[here] - self._first_rows[part], puzzles[here]
            read[:, here] = self.parts[part][1].read(part_rows, part_puzzles - self._first_puzzles[part])
        return read[0], read[1]


def original_chunks(data: PuzzleSet | ConcatenatedSet) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields the examples of the originals in chunks.

    A chunk is a tuple (index of each example, index of its puzzle), int64 [n] each.
    """
    firsts = np.asarray(data.group_indices[:-1], np.int64)
    for puzzles in np.array_split(firsts, -(-len(firsts) // _CHUNK_ROWS)):
        yield rows_of(data.puzzle_indices, puzzles), puzzles.repeat(np.diff(data.puzzle_indices)[puzzles])


def rows_of(puzzle_indices: np.ndarray, puzzles: np.ndarray) -> np.ndarray:
    """Returns the indices of all examples of some puzzles, puzzle after puzzle: int64 [n].

    puzzle_indices: [num_puzzles + 1]. Puzzle p has the examples range(*puzzle_indices[p : p + 2]). puzzles:
    Indices of the puzzles.
    """
    indices = np.asarray(puzzle_indices, np.int64)
    sizes = indices[puzzles + 1] - indices[puzzles]
    begins = sizes.cumsum() - sizes
    return (indices[puzzles] - begins).repeat(sizes) + np.arange(sizes.sum())


def _concatenate_offsets(offsets: Sequence[np.ndarray]) -> np.ndarray:
    lengths = [np.diff(part.astype(np.int64)) for part in offsets]
    return np.concatenate([[0], np.concatenate(lengths).cumsum()])
