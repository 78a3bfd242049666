"""Generated ARC tasks: what is drawn, that it follows from its rule, and datasets of small fields."""

import dataclasses
import hashlib
import itertools
import json

import numpy as np
import pytest

from dataset.description import read_info
from dataset.format import open_split
from dataset.kinds.arc import generate
from dataset.kinds.arc.evaluator import SUBMISSION_FILE
from dataset.kinds.arc.generate import KINDS, LARGEST, SMALLEST, explains, generate_tasks, rules_of
from dataset.kinds.kind import find_kind
from dataset.show import main as show
from tests.answers import answers, metrics_of
from tests.arc_set import arc_evaluator
from tests.arc_source import build, make_tasks, write_folder
from tests.sudoku_source import files_of

GENERATE = ("--generate", 10, "--num-aug", 3, "--max-size", 8)


@pytest.fixture(scope="module")
def generated():
    return generate_tasks(15, subset="evaluation", seed=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("generated") / "data"
    build(path, *GENERATE)
    return path


# ------------------------------------------------------------------------------------------------------ tasks


def test_tasks_are_even_over_the_kinds_and_have_no_input_twice(generated):
    names = [each.task.id for each in generated]
    assert names == [f"{kind}_{number}" for number in range(3) for kind in KINDS]
    assert len({each.rule for each in generated}) == 15
    pairs = [pair for each in generated for pair in each.task.pairs]
    assert {(len(each.task.train), len(each.task.test)) for each in generated} == {(3, 2)}
    assert len({pair.input.tobytes() + bytes(pair.input.shape) for pair in pairs}) == len(pairs)
    sizes = {length for pair in pairs for length in pair.input.shape}
    assert sizes == set(range(SMALLEST, LARGEST + 1))
    assert max(length for pair in pairs for length in pair.output.shape) <= LARGEST
    assert all(grid.dtype == np.uint8 and grid.max() <= 9 for pair in pairs for grid in pair)
    assert not any(np.array_equal(*pair) for pair in pairs)


def test_more_tasks_begin_with_the_same_and_a_seed_gives_others(generated):
    contents = [each.task.content for each in generated]
    fewer, other = (generate_tasks(4, subset="evaluation", seed=seed) for seed in (3, 4))
    assert [each.task.content for each in fewer] == contents[:4]
    assert not {each.task.content for each in other} & set(contents)
    # Recorded once: a difference means that datasets of a seed change.
    assert hashlib.sha256(repr(contents).encode()).hexdigest()[:16] == "402b95316fb0ef63"


def test_an_input_that_comes_again_is_drawn_again(monkeypatch):
    monkeypatch.setattr(generate, "_Draw", lambda seed, index, draw=generate._Draw: draw(seed, index % 5))
    pairs = [pair for each in generate_tasks(15, subset="evaluation", seed=3) for pair in each.task.pairs]
    assert len({pair.input.tobytes() + bytes(pair.input.shape) for pair in pairs}) == len(pairs)


def test_demonstrations_decide(generated):
    for task, rule in generated:
        explaining = [other for other in rules_of(type(rule)) if explains(other, task.train)]
        assert rule in explaining
        assert all(explains(other, task.test) for other in explaining), task.id
        # Those of another kind explain nothing.
        for kind in KINDS.values():
            others = rules_of(kind)[:200] if kind is not type(rule) else []
            assert not any(explains(other, task.train) for other in others), task.id


@pytest.mark.parametrize("kind", KINDS)
def test_answers_follow_from_their_rule(generated, kind):
    """Each kind by plain loops over cells, which know nothing of how the rule is computed."""
    for task, rule in generated:
        for pair in task.pairs if task.id.startswith(kind) else ():
            assert explains(rule, [pair])
            for each in _with_every_way(rule):
                expected = globals()[f"_{kind}"](_cells(pair.input), each, *pair.input.shape)
                assert _cells(each.answer(pair.input)) == expected, each


def _with_every_way(rule) -> list:
    """The rule in its colours, with all else that it could be."""
    values_of = {field.name: field.metadata["values"] for field in dataclasses.fields(rule)}
    others = {name: values for name, values in values_of.items() if len(values) < 9}
    values = itertools.product(*others.values())
    return [dataclasses.replace(rule, **dict(zip(others, each, strict=True))) for each in values]


def _cells(grid: np.ndarray) -> dict[tuple[int, int], int]:
    return {place: int(color) for place, color in np.ndenumerate(grid)}


def _fill(cells, rule, rows, columns):
    def escapes(cell, been):
        """Whether a way over the ground leads out of the grid."""
        if cell not in cells:
            return True
        if cells[cell] or cell in been:
            return False
        been.add(cell)
        row, column = cell
        steps = [(row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1)]
        return any(escapes(step, been) for step in steps)

    changes = {
        cell for cell in cells if not cells[cell] and escapes(cell, set()) == (rule.where == "outside")
    }
    return cells | dict.fromkeys(changes, rule.color)


def _recolour(cells, rule, rows, columns):
    becomes = {rule.first: rule.of_first, rule.second: rule.of_second}
    return {cell: becomes.get(color, color) for cell, color in cells.items()}


def _mirror(cells, rule, rows, columns):
    last_row, last_column = rows - 1, columns - 1
    moved = {
        "left-right": lambda row, column: [(row, last_column - column)],
        "top-bottom": lambda row, column: [(last_row - row, column)],
        "diagonal": lambda row, column: [(column, row)],
        "other diagonal": lambda row, column: [(last_column - column, last_row - row)],
        "put right": lambda row, column: [(row, column), (row, columns + last_column - column)],
        "put left": lambda row, column: [(row, columns + column), (row, last_column - column)],
        "put below": lambda row, column: [(row, column), (rows + last_row - row, column)],
        "put above": lambda row, column: [(rows + row, column), (last_row - row, column)],
    }[rule.way]
    return {place: color for cell, color in cells.items() for place in moved(*cell)}


def _count(cells, rule, rows, columns):
    sizes = []
    left = {cell for cell, color in cells.items() if color == rule.color}
    while left:
        thing, reached = set(), [left.pop()]
        while reached:
            thing.add(cell := reached.pop())
            near = {other for other in left if max(abs(cell[0] - other[0]), abs(cell[1] - other[1])) == 1}
            left -= near
            reached += near
        sizes.append(len(thing))
    assert set(sizes) <= {1, 4}
    number = sizes.count(rule.thing**2)
    if rule.layout == "diagonal":
        return {(i, j): rule.of_answer * (i == j) for i, j in itertools.product(range(number), repeat=2)}
    return {(0, i) if rule.layout == "row" else (i, 0): rule.of_answer for i in range(number)}


def _connect(cells, rule, rows, columns):
    steps = {"rows": [(0, 1)], "columns": [(1, 0)], "both": [(0, 1), (1, 0)], "diagonals": [(1, 1), (1, -1)]}
    expected = dict(cells)
    dots = [cell for cell, color in cells.items() if color == rule.color]
    for (one, other), (down, right) in itertools.product(itertools.permutations(dots, 2), steps[rule.ways]):
        for distance in range(2, 2 * LARGEST):
            if (one[0] + distance * down, one[1] + distance * right) == other:
                between = [(one[0] + k * down, one[1] + k * right) for k in range(1, distance)]
                if not any(cells[cell] for cell in between):
                    expected |= dict.fromkeys(between, rule.of_line)
    return expected


def test_rules_are_drawn_from_all_that_there_are():
    assert {name: len(rules_of(kind)) for name, kind in KINDS.items()} == {
        "fill": 9 * 8 * 2, "recolour": 36 * (8 * 8 - 7), "mirror": 8, "count": 9 * 2 * 9 * 3,
        "connect": 9 * 9 * 4,
    }  # fmt: skip
    mirrors = [
        each.rule for each in generate_tasks(43, subset="a", seed=0) if each.task.id.startswith("mirror")
    ]
    assert len(mirrors) == 9
    assert set(mirrors) == set(rules_of(KINDS["mirror"])), "each once, before any is there twice"


# ---------------------------------------------------------------------------------------------------- dataset


def test_the_same_command_gives_the_same_bytes(folder, tmp_path):
    build(tmp_path / "again", *GENERATE)
    assert files_of(tmp_path / "again") == files_of(folder)
    arguments = json.loads((folder / "manifest.json").read_text())["builder"]["arguments"]
    assert {name: arguments[name] for name in ("generate", "max_size", "seed")} == {
        "generate": 10, "max_size": 8, "seed": 0,
    }  # fmt: skip
    build(tmp_path / "other", *GENERATE, "--seed", 1)
    assert files_of(tmp_path / "other")["train/all__inputs.npy"] != files_of(folder)["train/all__inputs.npy"]


def test_demonstrations_are_trained_on_and_tests_evaluated(folder):
    sizes = {split: open_split(folder, split).sets["all"].num_examples for split in ("train", "test")}
    assert sizes == {"train": 10 * 4 * 3, "test": 10 * 4 * 2}
    facts = read_info([folder], open_split(folder, "train").metadata)
    assert (facts.kind.name, facts.metadata.seq_len) == ("arc", 64)


def test_right_answers_score_in_a_small_field(folder):
    """Every view, turned and in other colours, finds the way back to its test input."""
    data = open_split(folder, "test").sets["all"].materialize()
    evaluator = arc_evaluator(folder)
    evaluator.add(
        "all", answers(data.inputs, data.labels, data.labels, identifiers=data.puzzle_identifiers.repeat(2))
    )
    metrics = metrics_of(evaluator)["all"]
    assert (metrics["arc/pass@1"], metrics["arc/count"], metrics["arc/votes"]) == (1, 10, 80)
    evaluator.write(folder.parent)
    submission = json.loads((folder.parent / SUBMISSION_FILE).read_text())
    tasks = json.loads((folder / "test_puzzles.json").read_text())
    right = {name: [test["output"] for test in task["test"]] for name, task in tasks.items()}
    assert {name: [each["attempt_1"] for each in tests] for name, tests in submission.items()} == right


def test_a_task_is_asked_and_found_in_a_small_field(folder):
    (name, task), *_ = json.loads((folder / "test_puzzles.json").read_text()).items()
    question, _ = (each.laid_into(64) for each in find_kind("arc").read_puzzles(json.dumps(task)))
    training, test = (open_split(folder, split) for split in ("train", "test"))
    names = json.loads((folder / "identifiers.json").read_text())
    assert names[question.find_identifier(training)] == name
    assert np.array_equal(question.tokens, test.sets["all"].inputs[0])
    assert np.array_equal(question.solution, test.sets["all"].labels[0])
    assert question.cells_of(question.solution).shape == np.shape(task["test"][0]["output"])
    views = question.draw_demonstrations(5, seed=0)
    assert views.inputs.shape == (3, 64)


def test_show_draws_a_task(folder, capsys):
    show([str(folder), "--split", "test", "--color", "never"])
    first = next(iter(json.loads((folder / "test_puzzles.json").read_text()).values()))["test"][0]
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[4:]]
    drawn = {side: [row[place] for row in rows if len(row) > place] for place, side in enumerate(first)}
    assert drawn == {side: ["".join(map(str, row)) for row in grid] for side, grid in first.items()}


def test_tasks_that_are_too_large_are_left_out(tmp_path, capsys):
    small, large = make_tasks(3, seed=1, largest=4), make_tasks(2, seed=2, largest=30)
    write_folder(tmp_path / "evaluation", small | large)
    sets = build(tmp_path / "data", "--source", tmp_path / "evaluation", "--num-aug", 2, "--max-size", 6)
    assert capsys.readouterr().out.startswith(
        "tasks with a grid of more than 6 rows or columns, left out: 2\n"
    )
    assert sorted(json.loads((tmp_path / "data/test_puzzles.json").read_text())) == sorted(small)
    assert sets["train"].inputs.shape[1] == 36
    assert sets["train"].translations.max() == 3
