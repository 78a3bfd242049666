"""Variants of ARC tasks against a plain loop that makes every one of them."""

import numpy as np
import pytest

from dataset.augmentations import dihedral
from dataset.kinds.arc import variants
from dataset.kinds.arc.tasks import Task
from dataset.kinds.arc.variants import draw_transforms, draw_translations
from dataset.randomness import BitStream
from tests.arc_source import make_tasks, parse_task, task_of

IDENTITY = [0, *range(10)]
RANDOM = [
    parse_task(content, task_id=name, subset="x", source="here") for name, content in make_tasks(3).items()
]

# Tasks that have few variants, and how many: colours that are equal, grids that turning does not change,
# pairs that change places.
SYMMETRIC = [
    (task_of(([[3]], [[3]]), ([[3]], [[3]])), 8),
    (task_of(([[0]], [[0]]), ([[0]], [[0]])), 0),
    (task_of(([[1]], [[2]]), ([[2]], [[1]])), 35),
    (task_of(([[1]], [[2]]), ([[3]], [[1]])), 9 * 8 * 7 - 1),
    (task_of(([[0, 4]], [[0]]), ([[0]], [[0]])), 9 * 4 - 1),
    (task_of(([[1, 1], [2, 1]], [[0]]), ([[1, 2], [1, 1]], [[0]])), 9 * 8 * 2 - 1),
]


def moved(grid: np.ndarray, transform: np.ndarray) -> np.ndarray:
    return np.asarray(transform[1:])[dihedral(grid, int(transform[0]))]


def rng(task: Task, count: int, *, seed: int) -> np.ndarray:
    words = BitStream(seed, stream=variants._TRANSFORMS)
    words.seek(variants._index(task))
    return variants._draw(words, count)


def content(task: Task, transform: np.ndarray) -> tuple:
    return tuple(
        sorted(tuple(map(str, (moved(grid, transform).tolist() for grid in pair))) for pair in task.pairs)
    )


@pytest.mark.parametrize("task", [*RANDOM, *(task for task, _ in SYMMETRIC)])
@pytest.mark.parametrize("num_aug", [0, 1, 60])
def test_the_first_distinct_draws_are_kept(monkeypatch, task, num_aug):
    seen, expected = {content(task, IDENTITY)}, [IDENTITY]
    for transform in rng(task, 5 * num_aug, seed=3):
        if len(expected) <= num_aug and content(task, transform) not in seen:
            seen.add(content(task, transform))
            expected.append(transform.tolist())
    found = draw_transforms(task, num_aug, seed=3)
    assert found.dtype == np.uint8
    assert found.tolist() == expected
    monkeypatch.setattr(variants, "_CHUNK_DRAWS", 7)
    assert draw_transforms(task, num_aug, seed=3).tolist() == expected


@pytest.mark.parametrize(("task", "count"), SYMMETRIC)
def test_all_variants_of_a_task_that_has_few(task, count):
    transforms = draw_transforms(task, 2000, seed=0)
    assert len(transforms) == 1 + count
    assert len({content(task, transform) for transform in transforms}) == 1 + count


def test_translations_are_uniform_over_what_fits_and_one_pair_stays():
    wide = (np.ones((3, 20)).astype(int).tolist(), np.ones((5, 2)).astype(int).tolist())
    full = (np.ones((30, 1)).astype(int).tolist(), [[1]])
    task = task_of(wide, full, wide, wide)
    transforms = np.array([[number, *range(10)] for number in range(8)] * 500, np.uint8)
    pairs = task.pairs[1:]  # not the first ones of the task, as with repeated pairs
    found = draw_translations(task, pairs, transforms, size=30, seed=0)
    assert (found.dtype, found.shape) == (np.uint8, (4000, 3, 2))
    stays = (found == 0).all(axis=2)
    assert stays.any(axis=1).all()
    for swaps in (False, True):
        rows = np.isin(transforms[:, 0], (1, 3, 6, 7)) == swaps
        rooms = np.array([[1, 30], [26, 11], [26, 11]])[:, :: -1 if swaps else 1]
        for pair, room in enumerate(rooms):
            values = found[rows, pair]
            assert values.max(axis=0).tolist() == (room - 1).tolist()
            for axis in range(2):
                counts = np.bincount(values[:, axis], minlength=room[axis])
                expected = 2000 * 2 / 3 / room[axis]  # two of three move
                assert (np.abs(counts[1:] - expected) < 6 * expected**0.5).all()
    # Each is the one that stays as often.
    assert abs(int(stays[:, 1].sum()) - int(stays[:, 2].sum())) < 250


def test_translations_of_more_variants_begin_with_the_same():
    transforms = draw_transforms(RANDOM[2], 20, seed=0)
    pairs = RANDOM[2].pairs[:3]
    many = draw_translations(RANDOM[2], pairs, transforms, size=8, seed=0)
    assert np.array_equal(draw_translations(RANDOM[2], pairs, transforms[:9], size=8, seed=0), many[:9])
