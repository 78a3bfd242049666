"""Variants of an ARC task: other puzzles by the same rule, turned, mirrored and in other colours.

A variant is a transform of the family `arc` (`symmetries`), applied to every pair of the task. Two variants
are the same puzzle where their pairs are the same, in whatever order. Invariant: no two that
`draw_transforms` returns are, nor is one the original; and what is drawn depends on the seed and the task's
id alone, so that other tasks may come and go, and more variants begin with the same.
"""

import functools
import hashlib

import numpy as np

from dataset.arc import Pair, Task
from dataset.randomness import WordStream, random_orders, random_words
from dataset.symmetries import ARC_SIZE, DIHEDRAL_INVERSES, NUM_DIHEDRAL, dihedral

# Streams of random words: a new use takes a new number, as a changed one would change the datasets.
_TRANSFORMS, _TRANSLATIONS, _HASH = 0, 1, 2

_NUM_COLORS = 10
_WORDS_PER_TRANSFORM = _NUM_COLORS  # one for the dihedral number, the others order the colours 1 to 9
_DRAWS_PER_VARIANT = 5  # before giving up on distinct ones
_CHUNK_DRAWS = 256
_SWAPS = np.array([dihedral(np.empty((1, 2)), number).shape == (2, 1) for number in range(NUM_DIHEDRAL)])


def draw_transforms(task: Task, num_aug: int, *, seed: int) -> np.ndarray:
    """That of the original, which changes nothing, and of `num_aug` variants of it, all different puzzles.

    uint8 [1 + variants, 11]: the dihedral number, then what each colour becomes. Fewer variants where
    5 * num_aug draws have no more.
    """
    identity = np.array([[0, *range(_NUM_COLORS)]], np.uint8)
    distinct = _Distinct(task)
    kept = [identity[distinct.are_new(identity)]]
    words = WordStream(seed, stream=_TRANSFORMS)
    words.seek(_place(task))
    num_missing, num_draws = num_aug, _DRAWS_PER_VARIANT * num_aug
    while num_missing and num_draws:
        drawn = _draw(words, min(num_draws, _CHUNK_DRAWS))
        kept.append(drawn[distinct.are_new(drawn)][:num_missing])
        num_missing -= len(kept[-1])
        num_draws -= len(drawn)
    return np.concatenate(kept)


def _draw(stream: WordStream, count: int) -> np.ndarray:
    """The next transforms, uint8 [count, 11]; their words are read one transform after the other."""
    words = stream.read(count * _WORDS_PER_TRANSFORM).reshape(count, _WORDS_PER_TRANSFORM)
    transforms = np.zeros((count, 1 + _NUM_COLORS), np.uint8)
    transforms[:, 0] = _below(words[:, 0], NUM_DIHEDRAL)
    transforms[:, 2:] = random_orders(words[:, 1:]) + 1
    return transforms


def _place(task: Task) -> int:
    """Where the task's random words are: a number below 2**64 that only its id decides."""
    return int.from_bytes(hashlib.sha256(task.id.encode()).digest()[:8], "big")


def _below(words: np.ndarray, bounds: int | np.ndarray) -> np.ndarray:
    """Each word as a number from 0 to below its bound, uniform but for 2**-32."""
    return (words >> np.uint64(32)) * np.asarray(bounds, np.uint64) >> np.uint64(32)


def draw_translations(task: Task, transforms: np.ndarray, num_examples: int, *, seed: int) -> np.ndarray:
    """Where the grids of the first `num_examples` pairs lie inside 30 x 30, in each puzzle; all but one pair,
    at random, move, uniformly over what has room for both grids.

    transforms: [puzzles, 11]. Returns uint8 [puzzles, num_examples, 2]: down, right.
    """
    num_puzzles = len(transforms)
    width = 1 + 2 * num_examples
    words = random_words(seed, stream=_TRANSLATIONS, index=_place(task), count=num_puzzles * width)
    words = words.reshape(num_puzzles, width)
    shapes = [np.maximum(*(grid.shape for grid in pair)) for pair in task.pairs[:num_examples]]
    rooms = ARC_SIZE + 1 - np.array(shapes)  # places for the rows, and for the columns
    swaps = _SWAPS[transforms[:, 0]][:, None, None]
    rooms = np.where(swaps, rooms[:, ::-1], rooms)
    translations = _below(words[:, 1:].reshape(rooms.shape), rooms).astype(np.uint8)
    translations[np.arange(num_puzzles), _below(words[:, 0], num_examples)] = 0
    return translations


class _Distinct:
    """Tells new variants of a task from those that it has seen.

    The content of thousands of variants is never made: their hashes are sums over what each colour adds to
    them, worked out once for each of the 8 dihedral transforms. Equal puzzles have equal hashes; where the
    hashes are equal, the contents are made and compared, so that the answer is exact.
    """

    def __init__(self, task: Task):
        self._pairs = task.pairs
        self._is_used = np.zeros(_NUM_COLORS, bool)
        for pair in self._pairs:
            for grid in pair:
                self._is_used[grid] = True
        sums = [
            sum(_color_sums(grid, weights) for grid, weights in zip(pair, _cell_weights(), strict=True))
            for pair in self._pairs
        ]
        self._sums = np.stack(sums, axis=1)  # [8, pairs, colours]
        self._seen: dict[int, set[bytes]] = {}  # of each hash: the transforms, less what the task has not
        self._content = functools.cache(self._make_content)

    def are_new(self, transforms: np.ndarray) -> np.ndarray:
        """bool [n]: whether no puzzle before it, of these or of an earlier call, is the same."""
        names = np.where(np.r_[True, self._is_used], transforms, 0).astype(np.uint8)
        hashes = self._hash(transforms).tolist()
        are_new = np.zeros(len(transforms), bool)
        for place, (key, name) in enumerate(zip(hashes, map(bytes, names), strict=True)):
            seen = self._seen.setdefault(key, set())
            if name not in seen:
                content = self._content(name) if seen else None
                are_new[place] = all(self._content(other) != content for other in seen)
                seen.add(name)
        return are_new

    def _hash(self, transforms: np.ndarray) -> np.ndarray:
        """uint64 [n]: a sum over the pairs, as their order does not count, of numbers that are not linear."""
        values = _color_values()[transforms[:, 1:]]
        of_pairs = (self._sums[transforms[:, 0]] * values[:, None, :]).sum(axis=2)
        of_pairs ^= of_pairs >> np.uint64(31)
        of_pairs *= np.uint64(0x9E3779B97F4A7C15)  # any large odd number
        of_pairs ^= of_pairs >> np.uint64(29)
        return of_pairs.sum(axis=1)

    def _make_content(self, name: bytes) -> list[bytes]:
        number, colors = name[0], np.frombuffer(name[1:], np.uint8)
        pairs = (Pair(*(colors[dihedral(grid, number)] for grid in pair)) for pair in self._pairs)
        return sorted(pair.key for pair in pairs)


def _color_sums(grid: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """What each colour adds to the hash of a grid under each dihedral transform: the weights of its cells.

    weights: uint64 [30, 30]. Returns uint64 [8, colours].
    """
    of_cells = []
    for number, inverse in enumerate(DIHEDRAL_INVERSES):
        rows, columns = grid.shape[::-1] if _SWAPS[number] else grid.shape
        of_cells.append(dihedral(weights[:rows, :columns], inverse).ravel())
    has_color = grid.reshape(-1, 1) == np.arange(_NUM_COLORS)
    return np.stack(of_cells) @ has_color.astype(np.uint64)


@functools.cache
def _cell_weights() -> np.ndarray:
    """uint64 [2, 30, 30]: of the cells of inputs and of outputs."""
    count = 2 * ARC_SIZE**2
    return random_words(0, stream=_HASH, index=0, count=count).reshape(2, ARC_SIZE, ARC_SIZE)


@functools.cache
def _color_values() -> np.ndarray:
    """uint64 [colours], odd, so that no bit of a weight is lost."""
    return random_words(0, stream=_HASH, index=1, count=_NUM_COLORS) | np.uint64(1)
