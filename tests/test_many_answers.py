"""Puzzles with many right answers: their enumerations, builders and evaluators, against brute force."""

import itertools
import json
import math
import tracemalloc

import numpy as np
import pytest

from dataset.augmentations import NUM_DIHEDRAL, dihedral
from dataset.build import build_dataset
from dataset.kinds import coloring, queens
from dataset.kinds.evaluator import Answers
from dataset.kinds.kind import find_kind
from dataset.many_answers import ManyAnswersEvaluator
from tests.answers import metrics_of
from tests.sudoku_source import build_sets, files_of


def _sampled(inputs: np.ndarray, preds: np.ndarray, num_samples: int = 1, is_decided=None) -> Answers:
    """preds: [n * num_samples, cells]."""
    repeated, zeros = inputs.repeat(num_samples, axis=0), np.zeros(len(preds))
    return Answers(repeated, np.full(repeated.shape, -100), zeros, preds, zeros, is_decided, num_samples)


def _colors(answers: np.ndarray) -> list[tuple[int, ...]]:
    return [tuple(answer[:: math.isqrt(len(answer)) + 1].tolist()) for answer in answers]


# ------------------------------------------------------------------------------------------------------ rules


@pytest.mark.parametrize(("size", "count"), [(4, 2), (5, 10), (6, 4), (8, 92), (10, 724)])
def test_all_solutions_of_queens(size, count):
    solutions = queens.all_solutions(size)
    assert len(np.unique(solutions, axis=0)) == count
    assert queens.are_valid(solutions, solutions).all()


def test_answers_to_queens_equal_those_of_brute_force():
    inputs = queens.all_inputs(5)
    boards = []
    for columns in itertools.product(range(5), repeat=5):
        cells = list(enumerate(columns))
        pairs = itertools.combinations(cells, 2)
        if all(b[1] != a[1] and abs(b[1] - a[1]) != b[0] - a[0] for a, b in pairs):
            boards.append({row * 5 + column for row, column in cells})
    subsets = {
        frozenset(left) for board in boards for k in (1, 2, 3) for left in itertools.combinations(board, k)
    }
    assert {frozenset(np.flatnonzero(row == queens.QUEEN)) for row in inputs} == subsets
    answers, counts = queens.find_answers(inputs)
    assert queens.count_answers(inputs).tolist() == counts.tolist()
    for row, found in zip(inputs, np.split(answers, counts.cumsum()[:-1]), strict=True):
        given = set(np.flatnonzero(row == queens.QUEEN).tolist())
        expected = sorted(sorted(board) for board in boards if given <= board)
        assert sorted(np.flatnonzero(each == queens.QUEEN).tolist() for each in found) == expected


def test_wrong_boards_are_not_valid():
    board = queens.all_solutions(6)[0]
    empty = np.full_like(board, queens.EMPTY)
    others = [np.roll(board.reshape(6, 6), 1, axis=0).ravel(), np.where(board == 1, 0, board), empty]
    attacked = np.where(np.eye(6, dtype=bool), queens.QUEEN, queens.EMPTY).ravel().astype(np.uint8)
    answers = np.array([board, *others, attacked, attacked.reshape(6, 6)[::-1].ravel()])
    assert queens.are_valid(np.tile(empty, (6, 1)), answers).tolist() == [True] + [False] * 5
    assert not queens.are_valid(queens.all_solutions(6)[1:2], board[None]), "it moves given queens"


def test_colorings_equal_those_of_brute_force():
    random = np.random.default_rng(0)
    inputs = coloring.make_inputs(random.random((30, 10)) < 0.5, 5)
    answers, counts = coloring.find_answers(inputs)
    assert (counts == 0).any()
    assert (counts > 1).any()
    assert coloring.count_answers(inputs).tolist() == counts.tolist()
    for row, found in zip(inputs, np.split(answers, counts.cumsum()[:-1]), strict=True):
        edges = [(i, j) for i, j in itertools.combinations(range(5), 2) if row[5 * i + j] == coloring.EDGE]
        right = set()
        for colors in itertools.product(range(3), repeat=5):
            if all(colors[i] != colors[j] for i, j in edges):
                names = list(dict.fromkeys(colors))
                right.add(tuple(coloring.COLORS[names.index(color)] for color in colors))
        assert sorted(_colors(found)) == sorted(right)
        assert all((each != row).reshape(5, 5).sum() == 5 for each in found), "the answer repeats the edges"


def test_renamed_colors_are_the_same_answer():
    inputs = coloring.make_inputs(np.array([[True, False, True]]), 3)  # a path 0 - 1, 1 - 2
    first, second = ([4, 5, 4], [6, 4, 6])
    answers = inputs.repeat(4, axis=0)
    answers[:, ::4] = [first, second, [6, 4, 5], [5, 5, 3]]
    standard = coloring.to_standard(inputs.repeat(4, axis=0), answers)
    assert _colors(standard)[:3] == [(4, 5, 4), (4, 5, 4), (4, 5, 6)]
    assert coloring.count_conflicts(inputs.repeat(4, axis=0), answers).tolist() == [0, 0, 0, -1]


# --------------------------------------------------------------------------------------------------- builders


def _groups(puzzles) -> list[tuple[bytes, list[bytes]]]:
    bounds = itertools.pairwise(puzzles.group_indices.tolist())
    groups = [(puzzles.inputs[a:b], puzzles.labels[a:b]) for a, b in bounds]
    assert all((inputs == inputs[0]).all() for inputs, _ in groups)
    return [(inputs[0].tobytes(), [label.tobytes() for label in labels]) for inputs, labels in groups]


@pytest.mark.parametrize("split", ["inputs", "orbits"])
def test_queens_dataset(tmp_path, capsys, split):
    sets = build_sets("queens", tmp_path / "data", "--size", 8, "--split", split)
    out = capsys.readouterr().out
    assert "5148 distinct inputs (64 with 1, 1052 with 2, 4032 with 3 queens given), 8464 pairs" in out
    train, test = _groups(sets["train"]), _groups(sets["test"])
    assert len(train) + len(test) == 5148
    assert abs(len(test) - 0.15 * 5148) < (1 if split == "inputs" else 8)
    known = {key for key, _ in train}
    assert len(known) == len(train)
    assert not known & {key for key, _ in test}
    answers, counts = queens.find_answers(np.array([np.frombuffer(key, np.uint8) for key, _ in train]))
    assert [len(set(labels)) for _, labels in train] == counts.tolist()
    assert sets["train"].labels.tobytes() == answers.tobytes()
    copies = {
        dihedral(row.reshape(8, 8), number).tobytes()
        for row in sets["test"].inputs
        for number in range(NUM_DIHEDRAL)
    }
    assert bool(copies & known) == (split == "inputs")
    manifest = json.loads((tmp_path / "data" / "manifest.json").read_text())
    assert manifest["several_solutions"] == ["train", "test"]


def test_coloring_dataset(tmp_path):
    words = ("--nodes", 6, "--edge-probability", 0.5, "--generate", 60, "--num-test", 10, "--seed", 3)
    sets = build_sets("coloring", tmp_path / "data", *words)
    train, test = _groups(sets["train"]), _groups(sets["test"])
    assert (len(train), len(test)) == (60, 10)
    assert len({key for key, _ in train + test}) == 70
    for puzzles in sets.values():
        assert coloring.RULES.are_valid(puzzles.inputs, puzzles.labels).all()
        standard = coloring.to_standard(puzzles.inputs, puzzles.labels)
        assert np.array_equal(standard, puzzles.labels)
    rows = np.array([np.frombuffer(key, np.uint8) for key, _ in train])
    assert [len(set(labels)) for _, labels in train] == coloring.find_answers(rows)[1].tolist()
    build_sets("coloring", tmp_path / "again", *words)
    assert files_of(tmp_path / "again") == files_of(tmp_path / "data")


def test_edges_have_the_wanted_probability():
    from dataset.kinds.coloring.build import _draw

    graphs = _draw("test", 0, seed=0, num_nodes=4, edge_probability=0.3)[:, 0]  # only K4 has no 3-coloring
    assert abs((graphs == coloring.EDGE).mean() / (12 / 16) - 0.3) < 0.04


def test_a_draw_does_not_list_all_answers():
    """256 graphs of 10 nodes with few edges have two million answers."""
    from dataset.kinds.coloring.build import _draw

    tracemalloc.start()
    assert len(_draw("test", 0, seed=0, num_nodes=10, edge_probability=0.01)) == 256
    assert tracemalloc.get_traced_memory()[1] < 5e7
    tracemalloc.stop()


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["queens", "--size", "3"], "integer from 4 to 10"),
        (
            ["queens", "--size", "5", "--num-test", "35"],
            "--num-test 35 is too large. There are only 34 test inputs.",
        ),
        (["coloring", "--generate", "5", "--edge-probability", "1"], "is not between 0 and 1"),
        (["coloring", "--generate", "90", "--nodes", "3"], "then no new one. Lower --generate or --num-test"),
        (
            ["coloring", "--generate", "20", "--num-test", "5", "--nodes", "4"]
            + ["--split", "orbits", "--seed", "1"],
            "first class of symmetric inputs is too large .* larger puzzles or another --seed.$",
        ),
    ],
)
def test_refused_options(tmp_path, words, reason):
    with pytest.raises(ValueError, match=reason):
        build_dataset(words[0], [*words[1:], "--output-dir", str(tmp_path / "data")])


def test_too_many_answers_are_counted_and_refused_before_they_are_listed(tmp_path, monkeypatch):
    words = ("--nodes", "3", "--generate", "2", "--num-test", "1", "--output-dir", str(tmp_path / "data"))
    monkeypatch.setattr("dataset.kinds.coloring.build._MOST_ANSWERS", 3)
    monkeypatch.setattr("dataset.kinds.coloring.build.write_with_answers", None)
    with pytest.raises(ValueError, match=r"the 3 graphs have \d+ colorings, more than 3\. Lower --gen"):
        build_dataset("coloring", words)


# ------------------------------------------------------------------------------------------------- evaluators


@pytest.mark.slow
def test_ceilings_and_floors_of_8x8_queens():
    """As a second program computed them; a uniform oracle reaches the ceiling, a constant one the floor."""
    inputs, random = queens.all_inputs(8), np.random.default_rng(0)
    answers, counts = queens.find_answers(inputs)
    firsts = counts.cumsum() - counts
    drawn = firsts[:, None] + random.integers(0, counts[:, None], (len(counts), 20))
    scores = {}
    for name, rows in (("uniform", drawn), ("constant", firsts[:, None].repeat(20, axis=1))):
        evaluator = ManyAnswersEvaluator("queens", queens.RULES)
        evaluator.add("all", _sampled(inputs, answers[rows.ravel()], 20))
        scores[name] = metrics_of(evaluator)["all"]
    expected = {"mean": (0.997, 0.800), "inputs": (0.980, 0.608), "pairs": (0.907, 0.326)}
    for name, (ceiling, floor) in expected.items():
        key = f"queens/coverage_{name}"
        found = scores["uniform"]
        assert (round(found[f"{key}_ceiling"], 3), round(found[f"{key}_floor"], 3)) == (ceiling, floor)
        assert abs(found[key] - found[f"{key}_ceiling"]) < 0.01
        assert scores["constant"][key] == pytest.approx(found[f"{key}_floor"], abs=1e-12)
    assert {each["queens/valid_accuracy"] for each in scores.values()} == {1.0}
    assert (found["queens/count"], found["queens/samples"]) == (5148, 20)


def test_right_answers_are_counted_without_a_list_of_them():
    """A list of the colorings of 200 graphs of 10 nodes without edges takes 197 MB."""
    inputs = coloring.make_inputs(np.zeros((200, 45), bool), 10)
    evaluator = ManyAnswersEvaluator("coloring", coloring.RULES)
    tracemalloc.start()
    try:
        evaluator.add("all", _sampled(inputs, inputs))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2**26
    ((found, num),) = evaluator.partial()["all"].items()
    assert (found.num_right, num) == (9842, 200)


def test_coverage_against_a_plain_loop():
    """Wrong, repeated and undecided samples, in batches on two ranks."""
    random = np.random.default_rng(1)
    inputs = coloring.make_inputs(random.random((40, 6)) < 0.6, 4)
    inputs = inputs[coloring.find_answers(inputs)[1] > 0]
    num, samples = len(inputs), 5
    preds = inputs.repeat(samples, axis=0)
    preds[:, ::5] = random.integers(3, 7, (len(preds), 4))
    is_decided = random.random(len(preds)) < 0.8
    evaluators = [ManyAnswersEvaluator("coloring", coloring.RULES) for _ in range(2)]
    for start in range(0, num, 3):
        rows = slice(start * samples, (start + 3) * samples)
        batch = _sampled(inputs[start : start + 3], preds[rows], samples, is_decided[rows])
        evaluators[start // 3 % 2].add("all", batch)
    found = evaluators[0].metrics([each.partial() for each in evaluators])["all"]

    m, f, first, conflicts = [], [], [], 0
    for puzzle, row in enumerate(inputs):
        edges = [(i, j) for i, j in itertools.combinations(range(4), 2) if row[4 * i + j] == coloring.EDGE]
        right, complete = set(), []
        for sample in range(puzzle * samples, (puzzle + 1) * samples):
            colors = preds[sample, ::5].tolist()
            is_complete = bool(is_decided[sample]) and min(colors) > coloring.OPEN
            broken = sum(colors[i] == colors[j] for i, j in edges)
            name = tuple(list(dict.fromkeys(colors)).index(color) for color in colors)
            complete += [(name, broken)] * is_complete
            right |= {name} if is_complete and not broken else set()
            first += [is_complete and not broken] * (sample == puzzle * samples)
        conflicts += max(complete, key=complete.count)[1] if complete else len(edges)
        m.append(coloring.find_answers(row[None])[1][0])
        f.append(len(right))
    m, f = np.array(m), np.array(f)
    assert found["coloring/coverage_mean"] == pytest.approx((f / m).mean())
    assert found["coloring/coverage_inputs"] == pytest.approx(f.sum() / m.sum())
    assert found["coloring/coverage_pairs"] == pytest.approx((m * f).sum() / (m**2).sum())
    assert found["coloring/coverage_mean_ceiling"] == pytest.approx((1 - (1 - 1 / m) ** samples).mean())
    assert found["coloring/conflicts"] == conflicts > 0
    assert found["coloring/valid_accuracy"] == np.mean(first)
    assert 0 < f.sum() < m.sum()


# --------------------------------------------------------------------------------------------------- solve.py


def test_texts_of_puzzles():
    (board,) = find_kind("queens").read_puzzles("Q...... \n" + "....... \n" * 6)
    assert (board.remark, board.tokens.shape) == ("this puzzle has 4 right answers", (49,))
    (graph,) = find_kind("coloring").read_puzzles("?#. #?# .#?")
    assert graph.remark == "this puzzle has 2 right answers"
    answers = np.stack([graph.tokens] * 4)
    answers[:, ::4] = [[4, 5, 6], [6, 5, 6], [4, 4, 5], [6, 5, 4]]
    assert _colors(graph.distinct_answers(answers)) == [(4, 5, 6), (4, 5, 4)]


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        ("queens", "QQ.. .... .... ....", "no solution"),
        ("queens", "Q...", "4 cells are not a square of 4 to 10 rows"),
        ("coloring", "?#. .?# .#?", "not a graph"),
        ("coloring", "?### #?## ##?# ###?", "no solution"),
    ],
)
def test_invalid_texts_of_puzzles(kind, text, reason):
    with pytest.raises(ValueError, match=reason):
        _ = find_kind(kind).read_puzzles(text)[0].remark
