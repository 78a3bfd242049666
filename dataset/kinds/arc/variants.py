"""Variants of an ARC task: all of its grids are rotated or mirrored, and their colors are exchanged.

A transform is 11 bytes: a dihedral number, then the new color of each of the 10 colors. The grids of one
example may also be moved inside their field (translations). `dataset.augmentations` applies both. The name of
a variant contains its transform: <task>|||t<dihedral number>|||<new colors>.

Two variants are the same puzzle if they have the same pairs, in any order. Invariant: no two transforms that
`draw_transforms` returns give the same puzzle. They depend only on the task and the seed. A larger number of
variants only adds variants.
"""

import itertools
import re
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from dataset.augmentations import DIHEDRAL_FLAGS, NUM_DIHEDRAL, dihedral
from dataset.kinds.arc.tasks import NUM_COLORS, VARIANT_SEPARATOR, Pair, Task, grid_tokens
from dataset.randomness import BitStream, name_index, random_below, random_bits, random_orders
from dataset.sets import PuzzleSet

# Streams of random bits. Take a new number for a new purpose, because a changed number changes the datasets.
_TRANSFORMS, _TRANSLATIONS = 0, 1
_NUMBERS_PER_TRANSFORM = NUM_COLORS  # one for the dihedral number, the others for the order of colors 1 to 9
_DRAWS_PER_VARIANT = 5  # maximum, to find different variants
_CHUNK_DRAWS = 256

IDENTITY = (0, *range(NUM_COLORS))  # the transform that changes nothing

_SEPARATOR = re.escape(VARIANT_SEPARATOR)
_NAME = re.compile(rf"(.+?)(?:({_SEPARATOR}|_)t([0-7])\2([0-9]{{10}}))?", re.DOTALL)  # HRM's tools use _


def variant_name(task_id: str, transform: list[int]) -> str:
    """Returns the name of a variant, such as "0a938d79|||t3|||0214356789". transform: 11 numbers."""
    dihedral_index, *colors = transform
    return VARIANT_SEPARATOR.join((task_id, f"t{dihedral_index}", "".join(map(str, colors))))


def parse_variant_name(name: str) -> tuple[str, tuple[int, ...]]:
    """Splits the name of a variant into (id of the task, transform).

    Example: "0a938d79|||t7|||0213456789" gives ("0a938d79", (7, 0, 2, 1, 3, 4, 5, 6, 7, 8, 9)). If the name
    is only an id, the transform is `IDENTITY`. Raises ValueError if the name is not valid, or if two colors
    get the same new color.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"{name!r} is not a name of a variant")
    task_id, _, dihedral_index, colors = match.groups()
    if dihedral_index is None:
        return task_id, IDENTITY
    transform = (int(dihedral_index), *map(int, colors))
    if sorted(transform[1:]) != list(range(NUM_COLORS)):
        raise ValueError(f"{name!r} maps two colors to the same color")
    return task_id, transform


def draw_transforms(task: Task, num_aug: int, *, seed: int) -> np.ndarray:
    """Samples transforms that make different variants of a task: uint8 [1 + num_aug, 11].

    The first transform changes nothing. If 5 * num_aug random transforms do not give `num_aug` different
    variants, the result has fewer rows.
    """
    bits, num_draws = BitStream(seed, stream=_TRANSFORMS), _DRAWS_PER_VARIANT * num_aug
    bits.seek(name_index(task.id))
    counts = (min(_CHUNK_DRAWS, num_draws - first) for first in range(0, num_draws, _CHUNK_DRAWS))
    drawn = (transform.tobytes() for count in counts for transform in _draw(bits, count))
    return _keep_distinct(task, itertools.chain([bytes(IDENTITY)], drawn), most=1 + num_aug)


def dihedral_transforms(task: Task) -> np.ndarray:
    """Returns the transforms that rotate or mirror a task: uint8 [n, 11], n up to 8.

    The first transform changes nothing. If several transforms give the same puzzle, only the first of them is
    returned.
    """
    transforms = (bytes((dihedral_index, *IDENTITY[1:])) for dihedral_index in range(NUM_DIHEDRAL))
    return _keep_distinct(task, transforms, most=NUM_DIHEDRAL)


def _keep_distinct(task: Task, transforms: Iterable[bytes], *, most: int) -> np.ndarray:
    content_of, distinct = _content_of_variants(task), {}
    for transform in transforms:
        distinct.setdefault(content_of(transform), transform)
        if len(distinct) == most:
            break
    return np.frombuffer(b"".join(distinct.values()), np.uint8).reshape(-1, 1 + NUM_COLORS)


def _content_of_variants(task: Task) -> Callable[[bytes], bytes]:
    """Returns a function that converts a transform of the task (11 bytes) to a key.

    Two transforms have the same key if and only if they give the same pairs, in any order.
    """
    # Numbers of rows and columns are shifted above the colors, so that bytes.translate changes only colors.
    others = bytes(range(NUM_COLORS, 256))

    def key(pair: Pair, dihedral_index: int) -> bytes:
        grids = [dihedral(grid, dihedral_index) for grid in pair]
        return b"".join(bytes(side + NUM_COLORS for side in grid.shape) + grid.tobytes() for grid in grids)

    turned = [[key(pair, dihedral_index) for pair in task.pairs] for dihedral_index in range(NUM_DIHEDRAL)]

    def content_of(transform: bytes) -> bytes:
        colors = transform[1:] + others
        return b"".join(sorted(pair.translate(colors) for pair in turned[transform[0]]))

    return content_of


def _draw(stream: BitStream, count: int) -> np.ndarray:
    bits = stream.read(count * _NUMBERS_PER_TRANSFORM).reshape(count, _NUMBERS_PER_TRANSFORM)
    transforms = np.zeros((count, 1 + NUM_COLORS), np.uint8)
    transforms[:, 0] = random_below(bits[:, 0], NUM_DIHEDRAL)
    transforms[:, 2:] = random_orders(bits[:, 1:]) + 1  # color 0 stays 0
    return transforms


def draw_translations(
    task: Task, pairs: Sequence[Pair], transforms: np.ndarray, *, size: int, seed: int
) -> np.ndarray:
    """Samples how far to move the grids of each example in their field.

    Returns (rows down, columns right) for each example of each variant: uint8 [variants, pairs, 2]. The input
    and the output of an example move by the same distance. Both must fit into the field. One random example
    of each variant is not moved.

    task, seed: Together, they determine the random numbers. pairs: Examples of the task to move. transforms:
    Transform of each variant, uint8 [variants, 11]. size: Rows and columns of the field.
    """
    num_puzzles, num_examples = len(transforms), len(pairs)
    width = 1 + 2 * num_examples
    bits = random_bits(seed, stream=_TRANSLATIONS, index=name_index(task.id), count=num_puzzles * width)
    bits = bits.reshape(num_puzzles, width)
    shapes = [np.maximum(*(grid.shape for grid in pair)) for pair in pairs]
    rooms = size + 1 - np.array(shapes)  # number of positions, vertical and horizontal
    swaps = DIHEDRAL_FLAGS[transforms[:, 0], 0][:, None, None]
    rooms = np.where(swaps, rooms[:, ::-1], rooms)
    translations = random_below(bits[:, 1:].reshape(rooms.shape), rooms).astype(np.uint8)
    translations[np.arange(num_puzzles), random_below(bits[:, 0], num_examples)] = 0
    return translations


def lay_out(tasks: Iterable[tuple], *, size: int) -> PuzzleSet:
    """Converts tasks to a `PuzzleSet`. A task is a group.

    tasks: For each task, (pairs, transforms uint8 [variants, 11], translations uint8 [variants, pairs, 2],
    puzzle identifiers int32 [variants]). The first transform of a task must change nothing. size: Rows and
    columns of a field.
    """
    pairs, transforms, translations, identifiers = zip(*tasks, strict=True)
    num_puzzles = [len(task_transforms) for task_transforms in transforms]
    num_examples = np.repeat([len(examples) for examples in pairs], num_puzzles)
    inputs, labels = (
        np.stack([grid_tokens(pair[side], size=size) for examples in pairs for pair in examples])
        for side in range(2)
    )
    return PuzzleSet(
        inputs=inputs,
        labels=labels,
        puzzle_identifiers=np.concatenate(identifiers),
        puzzle_indices=np.r_[0, num_examples.cumsum()].astype(np.int32),
        group_indices=np.cumsum([0, *num_puzzles], dtype=np.int32),
        augmentation="arc",
        transforms=np.concatenate(transforms),
        translations=np.concatenate([task_translations.reshape(-1, 2) for task_translations in translations]),
    )
