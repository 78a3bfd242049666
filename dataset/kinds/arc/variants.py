"""Variants of an ARC task: other puzzles by the same rule, turned, mirrored and in other colours.

A variant is a transform (`symmetries`), applied to every pair of the task. Two variants are the same puzzle
where their pairs are the same, in whatever order. Invariant: no two variants that `draw_transforms` returns
are the same puzzle, nor is one the original; and what is drawn depends on the seed and the task's id alone,
so that other tasks may come and go, and more variants begin with the same.
"""

import hashlib
from collections.abc import Callable

import numpy as np

from dataset.kinds.arc.symmetries import IDENTITY
from dataset.kinds.arc.tasks import NUM_COLORS, SIZE, Task
from dataset.randomness import WordStream, random_orders, random_words
from dataset.symmetries import DIHEDRAL_FLAGS, NUM_DIHEDRAL, dihedral

# Streams of random words: a new use takes a new number, as a changed one would change the datasets.
_TRANSFORMS, _TRANSLATIONS = 0, 1

_WORDS_PER_TRANSFORM = NUM_COLORS  # one for the dihedral number, the others order the colours 1 to 9
_DRAWS_PER_VARIANT = 5  # before giving up on distinct ones
_CHUNK_DRAWS = 256


def draw_transforms(task: Task, num_aug: int, *, seed: int) -> np.ndarray:
    """Draws `num_aug` variants that are all different puzzles; before them comes the original.

    Returns their transforms, uint8 [1 + variants, 11]: the dihedral number, then what each colour becomes.
    There are fewer variants where 5 * num_aug draws have no more.
    """
    content_of = _content_of_variants(task)
    seen, kept = {content_of(bytes(IDENTITY))}, [bytes(IDENTITY)]
    words = WordStream(seed, stream=_TRANSFORMS)
    words.seek(_place(task))
    num_draws = _DRAWS_PER_VARIANT * num_aug
    while len(kept) <= num_aug and num_draws:
        drawn = _draw(words, min(num_draws, _CHUNK_DRAWS))
        num_draws -= len(drawn)
        for transform in map(bytes, drawn):
            content = content_of(transform)
            if content not in seen and len(kept) <= num_aug:
                seen.add(content)
                kept.append(transform)
    return np.frombuffer(b"".join(kept), np.uint8).reshape(-1, 1 + NUM_COLORS)


def _content_of_variants(task: Task) -> Callable[[bytes], bytes]:
    """Makes the function: transform -> bytes that are equal for the same puzzles, and only for those."""
    # The numbers of rows and columns are moved beyond the colours, which alone are translated.
    others = bytes(range(NUM_COLORS, 256))
    turned = [
        [
            b"".join(
                bytes(length + NUM_COLORS for length in grid.shape) + grid.tobytes()
                for grid in (dihedral(grid, number) for grid in pair)
            )
            for pair in task.pairs
        ]
        for number in range(NUM_DIHEDRAL)
    ]

    def content_of(transform: bytes) -> bytes:
        colors = transform[1:] + others
        return b"".join(sorted(pair.translate(colors) for pair in turned[transform[0]]))

    return content_of


def _draw(stream: WordStream, count: int) -> np.ndarray:
    """Draws the next transforms, uint8 [count, 11]; their words are read one transform after the other."""
    words = stream.read(count * _WORDS_PER_TRANSFORM).reshape(count, _WORDS_PER_TRANSFORM)
    transforms = np.zeros((count, 1 + NUM_COLORS), np.uint8)
    transforms[:, 0] = _below(words[:, 0], NUM_DIHEDRAL)
    transforms[:, 2:] = random_orders(words[:, 1:]) + 1
    return transforms


def _place(task: Task) -> int:
    """Returns the place of the task's random words: a number below 2**64 that only the task's id decides."""
    return int.from_bytes(hashlib.sha256(task.id.encode()).digest()[:8], "big")


def _below(words: np.ndarray, bounds: int | np.ndarray) -> np.ndarray:
    """Turns each word into a number from 0 to below its bound, uniform but for 2**-32."""
    return (words >> np.uint64(32)) * np.asarray(bounds, np.uint64) >> np.uint64(32)


def draw_translations(task: Task, transforms: np.ndarray, num_examples: int, *, seed: int) -> np.ndarray:
    """Draws the places of the grids of the first `num_examples` pairs inside 30 x 30, in each puzzle.

    All but one pair, at random, move, uniformly over the places that have room for both grids.

    transforms: [puzzles, 11]. Returns uint8 [puzzles, num_examples, 2]: down, right.
    """
    num_puzzles = len(transforms)
    width = 1 + 2 * num_examples
    words = random_words(seed, stream=_TRANSLATIONS, index=_place(task), count=num_puzzles * width)
    words = words.reshape(num_puzzles, width)
    shapes = [np.maximum(*(grid.shape for grid in pair)) for pair in task.pairs[:num_examples]]
    rooms = SIZE + 1 - np.array(shapes)  # places for the rows, and for the columns
    swaps = DIHEDRAL_FLAGS[transforms[:, 0], 0][:, None, None]
    rooms = np.where(swaps, rooms[:, ::-1], rooms)
    translations = _below(words[:, 1:].reshape(rooms.shape), rooms).astype(np.uint8)
    translations[np.arange(num_puzzles), _below(words[:, 0], num_examples)] = 0
    return translations
