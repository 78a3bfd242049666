"""Transforms and their way back, and variants of ARC tasks, against plain loops over one grid at a time."""

import numpy as np
import pytest

from dataset.augmentations import AUGMENTATIONS, DIHEDRAL_INVERSES, NUM_DIHEDRAL, dihedral
from dataset.kinds.arc import variants
from dataset.kinds.arc.tasks import SIZE, Task
from dataset.kinds.arc.variants import draw_transforms, draw_translations
from dataset.randomness import BitStream, name_index
from tests.arc_set import lay
from tests.arc_source import make_tasks, parse_task, task_of


def test_dihedral_numbers_are_those_of_the_public_tools():
    grid = np.arange(6).reshape(2, 3)
    expected = [*(np.rot90(grid, turns) for turns in range(4)), np.fliplr(grid), np.flipud(grid), grid.T]
    expected.append(np.fliplr(np.rot90(grid)))
    for number, wanted in enumerate(expected):
        assert np.array_equal(dihedral(grid, number), wanted), number
        assert np.array_equal(dihedral(dihedral(grid, number), DIHEDRAL_INVERSES[number]), grid), number


@pytest.mark.parametrize("size", [4, 9])
def test_sudoku(size):
    draw = np.random.default_rng(size)
    tokens = draw.integers(0, size + 2, (20, size * size), dtype=np.uint8)
    orders = [np.concatenate([draw.permutation(size) for _ in range(2)]) for _ in tokens]
    rows = [[draw.integers(2), *order, *(draw.permutation(size) + 1)] for order in orders]
    transforms = np.array(rows, np.uint8)
    family = AUGMENTATIONS["sudoku"]
    assert transforms.shape[1] == family.num_bytes(size * size, size + 2)
    assert family.is_valid(transforms, size * size).all()
    found = family.apply(tokens, transforms, None)
    for row, transform, result in zip(tokens, transforms, found, strict=True):
        transposes, rows, columns, digits = np.split(transform, [1, 1 + size, 1 + 2 * size])
        moved = row.reshape(size, size)[rows][:, columns]
        moved = moved.T if transposes[0] else moved
        assert np.array_equal(result, np.array([0, 1, *(digits + 1)])[moved].ravel())


def test_arc_grids_of_every_size():
    draw = np.random.default_rng(1)
    sizes = [(1, 1), (30, 30), (30, 1), (1, 30), (29, 30), (30, 29)]
    sizes += [tuple(draw.integers(1, 31, 2)) for _ in range(200)]
    grids = [draw.integers(0, 10, size) for size in sizes]
    transforms, translations, expected = [], [], []
    for index, grid in enumerate(grids):
        number, colors = index % NUM_DIHEDRAL, np.array([0, *(draw.permutation(9) + 1)])
        moved = colors[dihedral(grid, number)]
        offset = [int(draw.integers(0, SIZE - length + 1)) for length in moved.shape]
        transforms.append([number, *colors])
        translations.append(offset)
        expected.append(lay(moved, *offset))
    tokens = np.stack([lay(grid, 0, 0) for grid in grids])
    family = AUGMENTATIONS["arc"]
    transforms, translations = np.array(transforms, np.uint8), np.array(translations, np.uint8)
    assert family.is_valid(transforms, SIZE**2).all()
    assert np.array_equal(family.apply(tokens, transforms, translations), np.stack(expected))


@pytest.mark.parametrize(
    ("family", "transform"),
    [
        ("square", [8]),
        ("sudoku", [2, *range(4), *range(4), *range(1, 5)]),
        ("sudoku", [0, *range(4), *(0, 1, 2, 2), *range(1, 5)]),
        ("sudoku", [0, *(0, 1, 2, 4), *range(4), *range(1, 5)]),
        ("sudoku", [0, *range(4), *range(4), *range(4)]),
        ("arc", [8, *range(10)]),
        ("arc", [0, *range(1, 11)]),
        ("arc", [0, *range(9), 8]),
    ],
)
def test_what_is_no_transform(family, transform):
    assert not AUGMENTATIONS[family].is_valid(np.array([transform], np.uint8), 16).any()


@pytest.mark.parametrize(
    ("family", "seq_len", "vocab_size"), [("square", 25, 6), ("sudoku", 81, 11), ("arc", 900, 12)]
)
def test_a_rank_without_rows_gets_none(family, seq_len, vocab_size):
    chosen = AUGMENTATIONS[family]
    widths = (seq_len, chosen.num_bytes(seq_len, vocab_size), 2)
    nothing = [np.zeros((0, width), np.uint8) for width in widths]
    assert chosen.apply(*nothing).shape == (0, seq_len)


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
    words.seek(name_index(task.id))
    return variants._draw(words, count)


def content(task: Task, transform: np.ndarray) -> tuple:
    pairs = (tuple(str(moved(grid, transform).tolist()) for grid in pair) for pair in task.pairs)
    return tuple(sorted(pairs))


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
