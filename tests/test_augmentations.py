"""Transforms against plain loops over one grid at a time, and the way back."""

import numpy as np
import pytest

from dataset.augmentations import AUGMENTATIONS, DIHEDRAL_INVERSES, NUM_DIHEDRAL, dihedral
from dataset.kinds.arc.tasks import SIZE
from tests.arc_set import lay


def test_dihedral_numbers_are_those_of_the_public_tools():
    grid = np.arange(6).reshape(2, 3)
    expected = [
        grid,
        np.rot90(grid),
        np.rot90(grid, 2),
        np.rot90(grid, 3),
        np.fliplr(grid),
        np.flipud(grid),
        grid.T,
        np.fliplr(np.rot90(grid)),
    ]
    for number, wanted in enumerate(expected):
        assert np.array_equal(dihedral(grid, number), wanted), number
        assert np.array_equal(dihedral(dihedral(grid, number), DIHEDRAL_INVERSES[number]), grid), number


@pytest.mark.parametrize("size", [4, 9])
def test_sudoku(size):
    draw = np.random.default_rng(size)
    tokens = draw.integers(0, size + 2, (20, size * size), dtype=np.uint8)
    orders = [np.concatenate([draw.permutation(size) for _ in range(2)]) for _ in tokens]
    transforms = np.array(
        [[draw.integers(2), *order, *(draw.permutation(size) + 1)] for order in orders], np.uint8
    )
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
    nothing = [
        np.zeros((0, width), np.uint8) for width in (seq_len, chosen.num_bytes(seq_len, vocab_size), 2)
    ]
    assert chosen.apply(*nothing).shape == (0, seq_len)
