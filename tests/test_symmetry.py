"""Puzzles that are equal up to symmetry, against all transforms of small puzzles."""

import itertools
import math

import numpy as np
import pytest

from dataset import leaks, symmetry
from dataset.augmentations import AUGMENTATIONS, dihedral
from dataset.description import lay_out
from dataset.kinds.coloring import make_inputs
from dataset.kinds.sudoku.generate import NUM_MINIMAL_PUZZLES, generate_puzzle
from dataset.kinds.sudoku.symmetries import draw_symmetries
from dataset.leaks import find_leaked, main
from dataset.symmetry import GraphSymmetry, ImageSymmetry, SudokuSymmetry
from tests import arc_source, pairs_source
from tests.puzzle_sets import A, write
from tests.refusals import refusal
from tests.sudoku_source import build_sets

_BOX_4 = (2, 2)


def _draw_sudokus(count: int, *, box=_BOX_4, seed: int = 0) -> np.ndarray:
    drawn = [generate_puzzle(seed, stream=0, index=index, box=box)[0] for index in range(count)]
    return np.array(drawn, np.uint8) + np.uint8(1)


def _transform_sudokus(tokens: np.ndarray, *, box, seed: int = 0) -> np.ndarray:
    """Returns a random transform of each Sudoku by the rules of its builder."""
    transforms = draw_symmetries(seed, stream=9, index=0, count=len(tokens), box=box)
    return AUGMENTATIONS["sudoku"].apply(tokens, transforms, None)


def _orbit_of_4x4(tokens: np.ndarray) -> set[bytes]:
    """Returns all images of a 4x4 Sudoku."""
    blocks = [(0, 1), (1, 0)]
    orders = [
        [2 * band + line for band, lines in zip(bands, each, strict=True) for line in lines]
        for bands in blocks
        for each in itertools.product(blocks, blocks)
    ]
    digits = list(itertools.permutations(range(1, 5)))
    parts = itertools.product(range(2), orders, orders, digits)
    transforms = np.array(
        [[swaps, *rows, *columns, *names] for swaps, rows, columns, names in parts], np.uint8
    )
    images = AUGMENTATIONS["sudoku"].apply(np.tile(tokens, (len(transforms), 1)), transforms, None)
    return {image.tobytes() for image in images}


def _ignore_colors(monkeypatch) -> None:
    """Lets the search alone decide: all lines have the same color."""
    same = np.zeros((2, 9), np.uint64)
    monkeypatch.setattr(SudokuSymmetry, "_color_lines", lambda self, _: (same[:, : self.box[1] ** 2],) * 2)


@pytest.mark.slow
def test_minimal_4x4_sudokus_have_36_classes(monkeypatch):
    puzzles, family = np.unique(_draw_sudokus(1500), axis=0), SudokuSymmetry(_BOX_4)
    hashes = family.hash_rows(puzzles)
    numbers, firsts = np.unique(hashes, return_index=True)
    assert len(numbers) == 36
    orbits = [_orbit_of_4x4(puzzles[first]) for first in firsts]
    assert sum(map(len, orbits)) == NUM_MINIMAL_PUZZLES[_BOX_4]
    for puzzle, number in zip(puzzles, np.searchsorted(numbers, hashes), strict=True):
        assert puzzle.tobytes() in orbits[number]
    for _ in range(2):  # with colors and without
        for puzzle in puzzles[::400]:
            for other, orbit in zip(puzzles[firsts], orbits, strict=True):
                assert family.maps(other, puzzle) == (puzzle.tobytes() in orbit)
        _ignore_colors(monkeypatch)


@pytest.mark.parametrize("box", [(2, 3), (3, 3), (3, 4)])
def test_a_transformed_sudoku_is_found_and_another_clue_is_not(box):
    family, puzzles = SudokuSymmetry(box), _draw_sudokus(4, box=box)
    for seed in range(3):
        moved = _transform_sudokus(puzzles, box=box, seed=seed)
        assert np.array_equal(family.hash_rows(moved), family.hash_rows(puzzles))
        assert all(family.maps(*pair) for pair in zip(puzzles, moved, strict=True))
    cell = np.flatnonzero(moved[0] > 1)[0]
    for token in {1, 2, 3, 4} - {moved[0, cell]}:  # no clue, or another digit
        other = moved[0].copy()
        other[cell] = token
        assert family.hash_rows(other[None]) != family.hash_rows(puzzles[:1])
        assert family.maps(puzzles[0], other) is False
    bands = puzzles[0].reshape(box[1], box[0], -1)[:, ::-1].copy()
    bands[0, [0, 1]] = bands[0, [1, 0]]
    assert family.maps(puzzles[0], bands.ravel())  # rows change places in a band
    bands[[0, 1], 0] = bands[[1, 0], 0]
    assert family.maps(puzzles[0], bands.ravel()) is False  # rows of two bands


def test_a_search_ends_undecided(monkeypatch):
    _ignore_colors(monkeypatch)
    family, puzzles = SudokuSymmetry((3, 3)), _draw_sudokus(2, box=(3, 3))
    monkeypatch.setattr(symmetry, "_MOST_STEPS", 1000)
    assert family.maps(*puzzles) is None


_FIELD = AUGMENTATIONS["pairs"]


@pytest.mark.parametrize("num_grids", [1, 2])
@pytest.mark.parametrize(("num_images", "free"), [(8, ()), (1, (0, 2)), (8, (0, 1, 2))])
def test_fields_against_all_transforms(num_images, free, num_grids):
    """Grids of up to 2x2 cells of 3 symbols in 3x3 fields. With two grids, both change alike."""
    draw = np.random.default_rng(0)
    names = [np.arange(3)]
    for order in itertools.permutations(free):
        names.append(np.arange(3))
        names[-1][[*free]] = order
    grids = [draw.integers(0, 3, (draw.integers(1, 3), 2)) for _ in range(40 * num_grids)]
    rows = np.array([lay_out(grid, num_rows=3, num_columns=3) for grid in grids]).reshape(40, -1)
    family = ImageSymmetry("pairs", num_images, 3, free, num_grids)
    transforms = np.array([[number, *each] for number in range(num_images) for each in names], np.uint8)
    of_grids = transforms.repeat(num_grids, axis=0)
    hashes = family.hash_rows(rows)
    for row, number in zip(rows, hashes, strict=True):
        grids = np.tile(row.reshape(num_grids, -1), (len(transforms), 1))
        images = {image.tobytes() for image in _FIELD.apply(grids, of_grids, None).reshape(-1, len(row))}
        is_image = np.array([other.tobytes() in images for other in rows])
        assert np.array_equal(hashes == number, is_image)
        assert [family.maps(row, other) for other in rows[::8]] == is_image[::8].tolist()


def test_mazes_against_all_transforms():
    rows = np.random.default_rng(0).integers(1, 3, (60, 9), dtype=np.uint8)
    family = ImageSymmetry("square", 8)
    hashes = family.hash_rows(rows)
    for row, number in zip(rows, hashes, strict=True):
        images = {dihedral(row.reshape(3, 3), each).tobytes() for each in range(8)}
        is_image = [other.tobytes() in images for other in rows]
        assert (hashes == number).tolist() == is_image
        assert [family.maps(row, other) for other in rows[::8]] == is_image[::8]


def _least_orders(graphs: np.ndarray) -> list[bytes]:
    """Returns the least of all orders of each graph's nodes. Isomorphic graphs have the same one."""
    size = math.isqrt(graphs.shape[1])
    grids, orders = graphs.reshape(-1, size, size), itertools.permutations(range(size))
    images = [[row.tobytes() for row in grids[:, order][:, :, order]] for order in map(list, orders)]
    return [*map(min, zip(*images, strict=True))]


def _ignore_node_colors(monkeypatch) -> None:
    same = np.zeros((2, 8), np.uint64)
    monkeypatch.setattr(
        GraphSymmetry, "_color_nodes", lambda _, tokens: same[:, : math.isqrt(tokens.shape[1])]
    )


def test_graphs_against_all_orders_of_nodes(monkeypatch):
    graphs = make_inputs(np.array([*itertools.product([False, True], repeat=10)]), 5)
    _, firsts, numbers = np.unique(_least_orders(graphs), return_index=True, return_inverse=True)
    family = GraphSymmetry()
    hashes = family.hash_rows(graphs)
    assert len(firsts) == 34  # OEIS A000088
    assert np.array_equal(hashes, hashes[firsts][numbers])
    assert len(np.unique(hashes)) == 34
    for _ in range(2):  # with colors and without
        for graph, number in zip(graphs[::90], numbers[::90], strict=True):
            found = [family.maps(other, graph) for other in graphs[firsts]]
            assert found == (np.arange(34) == number).tolist()
        _ignore_node_colors(monkeypatch)


def test_regular_graphs(monkeypatch):
    """A refinement of nodes cannot tell these cycles apart. The search alone can."""
    cycles = {"hexagon": (6,), "triangles": (3, 3), "octagon": (8,), "squares": (4, 4), "both": (5, 3)}
    graphs = {}
    for name, lengths in cycles.items():
        starts, edges = np.cumsum([0, *lengths]).tolist(), np.zeros([sum(lengths)] * 2, bool)
        for start, length in zip(starts, lengths, strict=False):
            for node in range(length):
                edges[start + node, start + (node + 1) % length] = True
        size = len(edges)
        graphs[name] = make_inputs((edges | edges.T)[np.triu_indices(size, 1)][None], size)[0]
    family, draw = GraphSymmetry(), np.random.default_rng(0)
    hashes = [int(family.hash_rows(graph[None])[0]) for graph in graphs.values()]
    assert len({*hashes}) == 5
    _ignore_node_colors(monkeypatch)
    for (name, graph), (other, target) in itertools.product(graphs.items(), graphs.items()):
        if len(graph) == len(target):
            size = math.isqrt(len(graph))
            order = draw.permutation(size)
            moved = target.reshape(size, size)[order][:, order].ravel()
            assert family.maps(graph, moved) == (name == other)
    monkeypatch.setattr(symmetry, "_MOST_STEPS", 5)
    assert family.maps(graphs["hexagon"], graphs["triangles"]) is None


@pytest.mark.parametrize("split", ["inputs", "orbits"])
def test_the_command_counts_graphs_up_to_the_order_of_nodes(tmp_path, split):
    words = ("--nodes", 6, "--generate", 60, "--num-test", 40, "--split", split)
    sets = build_sets("coloring", tmp_path / "data", *words)
    trained, tested = (_least_orders(np.unique(sets[each].inputs, axis=0)) for each in ("train", "test"))
    assert len(trained) + len(tested) == 100
    assert 30 < len(tested) <= 40
    count = sum(key in trained for key in tested)
    assert 0 < count < 40 if split == "inputs" else count == 0
    assert _leaked(tmp_path / "data") == [(len(tested), 0, count, count)]


def _leaked(*folders) -> list[tuple]:
    return [each[1:] for each in find_leaked(folders)]


def test_the_command_counts_sudokus_of_all_folders(tmp_path, monkeypatch, capsys):
    a, b = tmp_path / "a", tmp_path / "b"
    words = ("--box", "2x2", "--num-test", 30)
    build_sets("sudoku", a, *words, "--generate", 300)
    build_sets("sudoku", b, *words, "--generate", 10, "--seed", 1)
    assert _leaked(a) == [(30, 0, 30, 30)]
    assert _leaked(a, b) == [(30, 0, 30, 30), (30, 0, 30, 30)]
    capsys.readouterr()
    main([str(b)])
    (alone,) = find_leaked([b])
    counts = f"In a training split: 0. Including symmetric ones: {alone.symmetric}"
    assert capsys.readouterr().out == f"{b}, set all: 30 test puzzles. {counts}\n"
    assert alone.symmetric == alone.at_most < 30
    monkeypatch.setattr(SudokuSymmetry, "maps", lambda *_: None)
    main([str(a)])
    assert "Including symmetric ones: 0 (at most 30)\n" in capsys.readouterr().out
    monkeypatch.setattr(SudokuSymmetry, "maps", lambda *_: False)
    assert _leaked(b)[0][2:] == (0, 0)
    monkeypatch.setattr(leaks, "_MOST_CANDIDATES", 1)  # others are not searched
    assert _leaked(b)[0][2:] == (0, alone.symmetric)
    other = tmp_path / "other"
    build_sets("maze", other, "--size", 6, "--generate", 5, "--min-path-cells", 4)
    assert "Run the command once for each." in refusal(main, "leaks", a, other)


def test_pairs_have_the_symmetries_of_their_command(tmp_path):
    def grids(*names: str, split: str) -> list[dict]:
        return [{"input": name.replace("/", "\n"), "output": "a", "split": split} for name in names]

    lines = grids("ab#/#bb", "a#a/bbb", split="train")
    lines += grids("ba#/#aa", "#a/bb/b#", "b#a/bbb", "#b#/aaa", split="test")
    source = pairs_source.write_json(tmp_path / "pairs.jsonl", lines)
    for number, (words, expected) in enumerate(
        {
            (): 0,
            ("--symmetries", "symbols", "--fixed-symbols", "#"): 1,
            ("--symmetries", "dihedral"): 1,
            ("--symmetries", "symbols"): 2,
            ("--symmetries", "symbols,dihedral", "--fixed-symbols", "#", "--materialize"): 2,
        }.items()
    ):
        pairs_source.build(tmp_path / str(number), source, *words)
        assert _leaked(tmp_path / str(number)) == [(4, 0, expected, expected)]
    # A manifest of a stranger.
    manifest = tmp_path / "1" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"fixed_symbols": "#"', '"fixed_symbols": 5'))
    assert "--fixed-symbols '5': '5' is in no pair" in refusal(main, "leaks", tmp_path / "1")
    # In a field of another size, the same grid has other tokens.
    taller = pairs_source.write_json(tmp_path / "t.jsonl", [*lines, *grids("a/a/a/a", split="test")])
    pairs_source.build(tmp_path / "taller", taller)
    assert "have different kinds of puzzles" in refusal(main, "leaks", tmp_path / "0", tmp_path / "taller")


def test_arc_pairs_are_transformed_with_their_answers(tmp_path):
    tasks = arc_source.make_tasks(4, largest=4)
    source = arc_source.write_folder(tmp_path / "evaluation", tasks)
    arc_source.build(tmp_path / "a", "--source", source, "--num-aug", 0)
    assert _leaked(tmp_path / "a") == [(6, 0, 0, 0)]
    (first, second, third, _), names = tasks.values(), np.roll(np.arange(10), 3)
    moved = {side: names[np.rot90(first["train"][0][side])].tolist() for side in ("input", "output")}
    second["test"][0] = moved
    third["test"][0] = {**moved, "input": first["train"][0]["input"]}  # only the answer is changed
    source = arc_source.write_folder(tmp_path / "b" / "evaluation", tasks)
    arc_source.build(tmp_path / "c", "--source", source, "--num-aug", 2, "--materialize")
    assert _leaked(tmp_path / "c") == [(6, 0, 1, 1)]


def test_without_a_kind_only_equal_puzzles_are_counted(tmp_path, capsys):
    main([str(write(tmp_path / "a", train=A, test=A))])
    assert (
        "6 test puzzles. In a training split: 6. Including symmetric ones: unknown\n"
        in capsys.readouterr().out
    )
