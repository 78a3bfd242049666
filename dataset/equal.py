"""Finds examples, also of different datasets, that are the same puzzle. It compares hashes of 8 bytes.

The hash of an example depends on the tokens of the input, but not on their dtype or on the label. If a
dataset has several puzzle identifiers, such as the tasks of a pairs dataset, the hash also depends on the
name of the identifier.

In ARC, an example is a pair of an input grid and an answer grid. The hash depends on both grids, but not on
the task or on the positions of the grids in the field. The demonstrations of a test task may be training
examples. Its test pairs must not be training examples.

Only the originals (the first puzzle of each group) are hashed. The variants are not read.

Checkpoints contain hashes (`Trained`). If the hash function changes, the hashes in earlier checkpoints become
useless.
"""

import dataclasses
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError

from dataset.augmentations import FIRST_SYMBOL, find_augmentation
from dataset.description import read_info, read_names
from dataset.files import load_metadata
from dataset.metadata import BLANK, Dataset
from dataset.sets import ConcatenatedSet, PuzzleSet
from runtime.reading import MissingFileError, read_bytes

UNKNOWN = 0  # hash of an ARC pair without an answer. It is equal to no other example

_MOST_HASHES = 100_000  # in a file. Of more examples, the file contains a sample
_MOST_BYTES = 8 * _MOST_HASHES + 4096
_FIELD = 30  # rows and columns of the largest ARC grid
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # of splitmix64


def hash_examples(data: PuzzleSet | ConcatenatedSet, split: str, folders: Sequence[Path]) -> np.ndarray:
    """Returns a hash of each example of the originals, in the order of the set: uint64 [n].

    split: "train" or "test". folders: All folders of the dataset.
    """
    parts = ((part, split, folders[index]) for index, part in data.parts)
    return np.concatenate([compared.hash() for part in parts for compared in read_compared(*part)])


class Compared(NamedTuple):
    """The data of several examples that decide whether two examples are equal.

    Attributes:
        tokens: Tokens of the inputs, [n, length]. In ARC: grids of inputs and answers, uint8 [n, 1800] (30 x
            30 cells each).
        names: Hash of the name of each example's puzzle identifier, uint64 [n]. 0 if it has no name. None in
            ARC, where names do not matter.
        is_known: Whether the answer is known, bool [n]. True except in ARC, where test answers may be
            unknown.
    """

    tokens: np.ndarray
    names: np.ndarray | None
    is_known: np.ndarray

    def hash(self, hash_tokens: Callable[[np.ndarray], np.ndarray] | None = None) -> np.ndarray:
        """Returns a hash of each example: uint64 [n]. If its answer is not known, the hash is `UNKNOWN`.

        hash_tokens: Function (tokens [n, length]) -> hash of each row, uint64 [n]. Default: `hash_rows`.
        """
        hashes = (hash_tokens or hash_rows)(self.tokens)
        hashes = hashes if self.names is None else mix(hashes ^ self.names)
        return np.where(self.is_known, hashes, np.uint64(UNKNOWN))


def read_compared(data: PuzzleSet, split: str, folder: Path) -> Iterator[Compared]:
    """Yields the data that decide which examples of a set are equal, as one `Compared` for each chunk.

    Augmented variants are left out.

    split: Split of the set, such as "test". folder: Folder of the dataset.
    """
    metadata = load_metadata(folder, split)
    kind = read_info([folder], metadata).kind
    family = find_augmentation(kind.augmentation) if kind else None
    if family is not None and family.has_translations:
        for inputs, labels, _ in data.originals():
            grids, answers = _cut_out(inputs), _cut_out(labels)
            yield Compared(np.hstack([grids, answers]), None, answers.any(axis=1))
        return
    names = read_names(folder) if metadata.num_puzzle_identifiers > 1 else []
    names = names if len(names) == metadata.num_puzzle_identifiers else []
    of_name = np.array([_hash_name(name) for name in names] or [0], np.uint64)
    dtype = np.uint8 if metadata.vocab_size <= 256 else np.dtype("<u4")
    for inputs, _, puzzles in data.originals():
        identifiers = data.puzzle_identifiers[puzzles] if names else np.zeros(len(puzzles), np.int64)
        tokens = inputs.astype(dtype, copy=False)
        yield Compared(tokens, of_name[identifiers], np.ones(len(tokens), bool))


def _hash_name(name: str) -> int:
    named = "" if name == BLANK else name
    return int.from_bytes(hashlib.blake2b(named.encode(), digest_size=8).digest(), "little") if named else 0


def hash_rows(tokens: np.ndarray) -> np.ndarray:
    """Returns a hash of each row of an array [n, length]: uint64 [n].

    tokens: uint8 or little-endian integers.
    """
    row_bytes = np.ascontiguousarray(tokens).view(np.uint8)
    num, length = row_bytes.shape
    padded = np.zeros((num, -(-length // 8) * 8), np.uint8)
    padded[:, :length] = row_bytes
    hashes = np.full(num, length, np.uint64)
    for word in padded.view("<u8").T:
        hashes = mix(hashes ^ word)
    return hashes


def mix(hashes: np.ndarray) -> np.ndarray:
    """Scrambles the bits of each integer, as the random generator splitmix64 does: uint64 [n].

    Different integers stay different.
    """
    hashes = hashes + np.uint64(0x9E3779B97F4A7C15)
    for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
        hashes ^= hashes >> np.uint64(shift)
        hashes *= np.uint64(multiplier)
    return hashes ^ (hashes >> np.uint64(31))


def _cut_out(tokens: np.ndarray) -> np.ndarray:
    # Moves each grid to the top left of a 30 x 30 array, so that its position in the field does not matter.
    size = math.isqrt(tokens.shape[1])
    fields = tokens.reshape(-1, size, size)
    is_cell = fields >= FIRST_SYMBOL
    top, left = is_cell.any(axis=2).argmax(axis=1), is_cell.any(axis=1).argmax(axis=1)
    rows, columns = ((first[:, None] + np.arange(size)) % size for first in (top, left))
    moved = fields[np.arange(len(fields))[:, None, None], rows[:, :, None], columns[:, None, :]]
    grids = np.zeros((len(fields), *[max(size, _FIELD)] * 2), np.uint8)
    grids[:, :size, :size] = np.where(moved >= FIRST_SYMBOL, moved, 0)
    return grids.reshape(len(fields), -1)


def hash_training(data: Dataset) -> dict[str, np.ndarray]:
    """Returns the hash of each example of the originals: {name of the training set: uint64 [n]}."""
    sets = data.splits["train"].sets
    return {name: hash_examples(training_set, "train", data.folders) for name, training_set in sets.items()}


def join_repeats(
    data: Dataset, hashes: Mapping[str, np.ndarray], held_out: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Returns a copy of `held_out` in which groups with equal examples have equal values.

    This prevents training on an example that is also used for validation. Example: if group 0 has an example
    in common with group 2, and group 2 has another one in common with group 5, all three get the value of
    group 0, the first of them.

    hashes: {name of a training set: hash of each example of the originals, uint64 [n]}, from `hash_training`.
    held_out: {name of a training set: bool [num_groups]}. True for groups that are held out for validation.
    """
    sets = data.splits["train"].sets
    sizes = np.concatenate([_original_sizes(training_set) for training_set in sets.values()])
    groups = np.arange(len(sizes)).repeat(sizes)
    hashed = np.concatenate([hashes[name] for name in sets])
    groups, hashed = groups[hashed != UNKNOWN], hashed[hashed != UNKNOWN]
    different, examples = np.unique(hashed, return_inverse=True)
    firsts, before = np.arange(len(sizes)), None  # the first group that is connected to each group
    while before is None or not np.array_equal(firsts, before):
        before, first_of_example = firsts, np.full(len(different), len(sizes))
        np.minimum.at(first_of_example, examples, firsts[groups])
        firsts = firsts.copy()
        np.minimum.at(firsts, groups, first_of_example[examples])
        firsts = firsts[firsts]
    sides = np.concatenate([held_out[name] for name in sets])[firsts]
    ends = np.cumsum([len(held_out[name]) for name in sets])
    return dict(zip(sets, np.split(sides, ends[:-1]), strict=True))


def trained_in_folders(
    data: Dataset, hashes: Mapping[str, np.ndarray], held_out: Mapping[str, np.ndarray]
) -> dict[int, np.ndarray]:
    """Returns the hashes of the examples that are trained on: {index of the dataset folder: uint64 [n]}.

    hashes: {name of a training set: hash of each example of the originals, uint64 [n]}, from `hash_training`.
    held_out: {name of a training set: bool [num_groups]}. True for groups that are not trained on. A set
    that is not in `held_out` is trained on completely.
    """
    found: dict[int, list[np.ndarray]] = {folder: [] for folder in range(len(data.folders))}
    for name, training_set in data.splits["train"].sets.items():
        groups = np.arange(len(training_set.folder_of_group)).repeat(_original_sizes(training_set))
        is_trained = ~held_out[name][groups] if name in held_out else np.ones(len(groups), bool)
        for folder in np.unique(training_set.folder_of_group).tolist():
            found[folder].append(hashes[name][is_trained & (training_set.folder_of_group[groups] == folder)])
    return {folder: np.concatenate(parts) for folder, parts in found.items() if parts}


def _original_sizes(data: PuzzleSet | ConcatenatedSet) -> np.ndarray:
    # The number of examples of each group's original puzzle: [num_groups].
    return np.diff(data.puzzle_indices)[np.asarray(data.group_indices[:-1], np.int64)]


@dataclasses.dataclass(frozen=True)
class Trained:
    """The examples that a model was trained on, as hashes. Checkpoints contain them.

    Attributes:
        hashes: Hashes, uint64 [n], ascending and distinct.
        rate: Fraction of all examples that `hashes` contains, a power of 2. If it is less than 1, only hashes
            below rate * 2^64 are stored.
        is_complete: False if the model was also trained on other examples that are unknown, because training
            started from a checkpoint that does not contain them.
    """

    hashes: np.ndarray
    rate: float = 1.0
    is_complete: bool = True

    @staticmethod
    def of(hashes: Sequence[np.ndarray], *, is_complete: bool = True) -> "Trained":
        """Creates a `Trained` from arrays of hashes, uint64 [n] each. Leaves out repeats and `UNKNOWN`."""
        found = np.sort(np.concatenate([np.zeros(1, np.uint64), *hashes]))  # UNKNOWN is always the first
        return Trained(found[1:][found[1:] != found[:-1]], is_complete=is_complete)

    def sample(self, rate: float) -> "Trained":
        """Returns a `Trained` that stores only about the fraction `rate` of all examples.

        If `self.rate` is not greater than `rate`, returns `self`. rate: Power of 2, such as 0.5.
        """
        if rate >= self.rate:
            return self
        return dataclasses.replace(self, hashes=self.hashes[self.hashes < _limit(rate)], rate=rate)

    def join(self, other: "Trained | None") -> "Trained":
        """Returns a `Trained` with the training examples of both `self` and `other`.

        If `other` is None, returns `self`. Also returns `self` if its rate is 1, `other` is complete, and
        `self` contains all hashes that `other` stores. Otherwise, the result has the smaller `rate` of the
        two, and it is complete if both are complete.
        """
        if other is None or (other.is_complete and self.rate == 1 and self.contains(other.hashes).all()):
            return self
        sampled, other_sampled = self.sample(other.rate), other.sample(self.rate)
        is_complete = self.is_complete and other.is_complete
        joined = Trained.of([sampled.hashes, other_sampled.hashes], is_complete=is_complete)
        return dataclasses.replace(joined, rate=sampled.rate)

    def contains(self, hashes: np.ndarray) -> np.ndarray:
        """Returns whether each of these hashes belongs to a training example: bool [n].

        True is always right. False may be wrong if only a sample of the training examples is stored (see
        `covers`), or if `is_complete` is False.

        hashes: Hashes of any examples, uint64 [n].
        """
        found = np.append(self.hashes, np.uint64(UNKNOWN))
        return (found[self.hashes.searchsorted(hashes)] == hashes) & (hashes != UNKNOWN)

    def covers(self, hashes: np.ndarray) -> np.ndarray:
        """Returns for each hash whether it would be stored if its example were trained on: bool [n].

        `UNKNOWN` is never stored. If `rate` is less than 1, only hashes below rate * 2^64 are stored.

        hashes: Hashes of any examples, uint64 [n].
        """
        is_known = hashes != UNKNOWN
        return is_known if self.rate == 1 else is_known & (hashes < _limit(self.rate))

    def to_bytes(self) -> bytes:
        """Returns the content of trained_on.safetensors: the arrays "hashes", "rate" and "is_complete".

        If there are more than 100,000 hashes, only a sample of them is stored.
        """
        sample = self
        while len(sample.hashes) > _MOST_HASHES:
            sample = sample.sample(sample.rate / 2)
        tensors = {"hashes": sample.hashes, "rate": np.float64(sample.rate)}
        tensors["is_complete"] = np.bool_(self.is_complete)
        return safetensors.numpy.save({name: np.asarray(value) for name, value in tensors.items()})


def read_trained(path: Path) -> Trained | None:
    """Reads a file that contains the result of `Trained.to_bytes`.

    Returns None if the file is missing. Raises ValueError if it is damaged.
    """
    advice = "Delete it. The training puzzles are then hashed again, if their dataset has not changed."
    try:
        content = read_bytes(path, most=_MOST_BYTES)
        tensors = safetensors.numpy.load(content)
        hashes, rate, is_complete = (tensors.pop(name) for name in ("hashes", "rate", "is_complete"))
        found = Trained(hashes, float(rate), bool(is_complete))
        is_valid = not tensors and hashes.dtype == np.uint64 and hashes.ndim == 1 and rate.dtype == np.float64
        is_valid &= 0 < found.rate <= 1 and math.frexp(found.rate)[0] == 0.5
        is_valid = is_valid and bool((hashes[1:] > hashes[:-1]).all() and found.covers(hashes).all())
    except MissingFileError:
        return None
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error}). {advice}") from None
    if not is_valid:
        raise ValueError(f"{path} does not contain valid hashes of training puzzles. {advice}")
    return found


def _limit(rate: float) -> np.uint64:
    return np.uint64(int(rate * 2**64))
