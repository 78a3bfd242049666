"""Generated ARC tasks: what is drawn, that it follows from its rule, and datasets of small fields."""

import hashlib
import json

import numpy as np
import pytest

from dataset.description import read_info
from dataset.files import open_split
from dataset.kinds.arc import generate
from dataset.kinds.arc.generate import FAMILIES, LARGEST, SMALLEST, generate_tasks
from dataset.kinds.kind import find_kind
from tests.arc_source import build, make_tasks, write_folder


@pytest.fixture(scope="module")
def generated():
    return generate_tasks(15, subset="evaluation", seed=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("generated") / "data"
    build(path, "--generate", 10, "--num-aug", 3, "--max-size", 8)
    return path


def test_tasks_are_even_over_the_families_and_have_no_input_twice(generated):
    names = [f"{name}_{number}" for number in range(3) for name in FAMILIES]
    assert [task.id for task, _ in generated] == names
    assert {(len(task.train), len(task.test)) for task, _ in generated} == {(3, 2)}
    pairs = [pair for task, _ in generated for pair in task.pairs]
    sizes = {length for pair in pairs for length in pair.input.shape}
    assert sizes == set(range(SMALLEST, LARGEST + 1))
    assert max(length for pair in pairs for length in pair.output.shape) <= LARGEST
    assert all(grid.dtype == np.uint8 and grid.max() <= 9 for pair in pairs for grid in pair)
    assert not any(np.array_equal(*pair) for pair in pairs)


def test_more_tasks_begin_with_the_same_and_a_seed_gives_others(generated):
    contents = [task.content for task, _ in generated]
    fewer, other = (generate_tasks(4, subset="evaluation", seed=seed) for seed in (3, 4))
    assert [task.content for task, _ in fewer] == contents[:4]
    assert not {task.content for task, _ in other} & set(contents)
    # Recorded once: a difference means that datasets of a seed change.
    assert hashlib.sha256(repr(contents).encode()).hexdigest()[:16] == "402b95316fb0ef63"


def test_an_input_that_comes_again_is_drawn_again(monkeypatch):
    monkeypatch.setattr(generate, "_Draw", lambda seed, index, draw=generate._Draw: draw(seed, index % 5))
    pairs = [pair for task, _ in generate_tasks(15, subset="evaluation", seed=3) for pair in task.pairs]
    assert len({pair.input.tobytes() + bytes(pair.input.shape) for pair in pairs}) == len(pairs)


@pytest.mark.slow
def test_demonstrations_decide(generated):
    for task, rule in generated:
        own = FAMILIES[task.id.partition("_")[0]]
        explaining = [other for other in own.rules if own.explains(other, task.train)]
        assert rule in explaining
        assert all(own.explains(other, task.test) for other in explaining), task.id
        for family in FAMILIES.values():
            others = family.rules[:200] if family is not own else []
            assert not any(family.explains(other, task.train) for other in others), task.id


def test_answers_are_the_recorded_ones(generated):
    """By each rule, and in its colours by all else that it could be; recorded where plain loops agreed."""
    answers = []
    for task, rule in generated:
        family = FAMILIES[task.id.partition("_")[0]]
        has_few = [len(set(values)) < 9 for values in zip(*family.rules, strict=True)]  # these are no colours
        for other in family.rules:
            if all(few or a == b for few, a, b in zip(has_few, other, rule, strict=True)):
                answers += [family.answer(pair.input, *other).tolist() for pair in task.pairs]
    assert hashlib.sha256(repr(answers).encode()).hexdigest()[:16] == "8ee862daf79ba2e0"


@pytest.mark.slow
def test_rules_are_drawn_from_all_that_there_are(monkeypatch):
    assert {name: len(set(family.rules)) for name, family in FAMILIES.items()} == {
        "fill": 9 * 8 * 2, "recolour": 36 * (8 * 8 - 7), "mirror": 8, "count": 9 * 2 * 9 * 3,
        "connect": 9 * 9 * 4,
    }  # fmt: skip
    monkeypatch.setattr(generate, "FAMILIES", {"mirror": FAMILIES["mirror"]})
    mirrors = [rule for _, rule in generate_tasks(9, subset="a", seed=0)]
    assert set(mirrors[:8]) == set(FAMILIES["mirror"].rules), "each once, before any is there twice"
    assert mirrors[8] in mirrors[:8]


def test_demonstrations_are_trained_on_and_tests_evaluated(folder):
    sizes = {split: open_split(folder, split).sets["all"].num_examples for split in ("train", "test")}
    assert sizes == {"train": 10 * 4 * 3, "test": 10 * 4 * 2}
    info = read_info([folder], open_split(folder, "train").metadata)
    assert (info.kind.name, info.metadata.seq_len) == ("arc", 64)
    arguments = json.loads((folder / "manifest.json").read_text())["builder"]["arguments"]
    assert (arguments["generate"], arguments["max_size"], arguments["seed"]) == (10, 8, 0)


def test_tasks_after_the_first_have_none_of_their_inputs(folder, tmp_path):
    build(tmp_path / "others", "--generate", 14, "--skip", 10, "--num-aug", 0, "--max-size", 8)
    folders = (folder, tmp_path / "others")
    asked, others = (json.loads((each / "test_puzzles.json").read_text()) for each in folders)
    assert len(others) == 4
    assert not asked.keys() & others.keys()
    inputs, known = (
        {json.dumps(pair["input"]) for task in tasks.values() for pair in task["train"] + task["test"]}
        for tasks in (asked, others)
    )
    assert len(inputs | known) == (10 + 4) * 5


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


def test_tasks_that_are_too_large_are_left_out_if_a_person_says_so(tmp_path, capsys):
    """1D-ARC has grids of 1 x 32."""
    small, large = make_tasks(3, seed=1, largest=4), make_tasks(2, seed=2, largest=30)
    long = {"input": [[1] * 32], "output": [[2] * 32]}
    write_folder(tmp_path / "evaluation", small | large | {"long": {"train": [long], "test": [long]}})
    words = ["--source", tmp_path / "evaluation", "--num-aug", 2]
    too_long = "long: the input of .* has 1x32 cells, .*Pass --max-size 30 to skip"
    with pytest.raises(ValueError, match=too_long):
        build(tmp_path / "data", *words)
    sets = build(tmp_path / "data", *words, "--max-size", 6)
    said = "tasks with a grid of more than 6 rows or columns, left out: 3\n"
    assert capsys.readouterr().out.startswith(said)
    assert sorted(json.loads((tmp_path / "data/test_puzzles.json").read_text())) == sorted(small)
    assert sets["train"].inputs.shape[1] == 36
    assert sets["train"].translations.max() == 3
