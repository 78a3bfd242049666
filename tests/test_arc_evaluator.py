"""Votes over augmented views: by hand, against plain loops, on any number of ranks; the way back to grids."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from dataset.kinds.arc.evaluator import PASSES, corner_grids
from dataset.mixture import open_datasets
from distributed.world import is_main
from evaluation.evaluators import Evaluators
from tests.answers import add_in_batches, answers, metrics_of
from tests.arc_set import (
    MIRRORED,
    ONE_TASK,
    SIZE,
    TURNED,
    VIEWS,
    A,
    B,
    C,
    D,
    E,
    Prediction,
    Tasks,
    arc_answers,
    arc_evaluator,
    arc_evaluators,
    attempts,
    evaluated,
    passes,
    random_case,
    write_arc,
)
from tests.arc_source import build, make_tasks, write_folder
from tests.ranks import run_ranks


def test_outputs_that_nobody_knows_count_nowhere(tmp_path):
    """They are voted on, for the submission."""
    folder = write_arc(tmp_path / "data", {"a": [(A, B), (C, D)], "b": [(A, B)]}, sets={"all": ["a", "b"]})
    path = folder / "test_puzzles.json"
    puzzles = json.loads(path.read_text())
    del puzzles["a"]["test"][1]["output"], puzzles["b"]["test"][0]["output"]
    path.write_text(json.dumps(puzzles))
    votes = [Prediction("a", 0, B, 1.0), Prediction("a", 1, E, 1.0), Prediction("b", 0, C, 1.0)]
    metrics, submission = evaluated(folder, {"a": [(A, B), (C, D)], "b": [(A, B)]}, votes)
    assert passes(metrics) == [1.0] * 6
    assert (metrics["arc/count"], metrics["arc/test_inputs"], metrics["arc/votes"]) == (1, 1, 3)
    assert submission == {"a": [attempts(B, B), attempts(E, E)], "b": [attempts(C, C)]}


def test_a_dataset_of_hrms_tools_has_its_tasks_in_its_test_set(tmp_path):
    """It has no test_puzzles.json, and other names of variants."""
    folder = write_arc(tmp_path / "data", ONE_TASK, sets={"all": VIEWS})
    votes = [Prediction("a", 0, C, 9.0), Prediction(TURNED, 0, B, -9.0), Prediction(MIRRORED, 0, B, -9.0)]
    expected, _ = evaluated(folder, ONE_TASK, votes)
    given = arc_answers(folder, ONE_TASK, votes)
    (folder / "test_puzzles.json").unlink()
    names = folder / "identifiers.json"
    names.write_text(names.read_text().replace("|||", "_"))
    evaluator = arc_evaluator(folder)
    evaluator.add("all", given)
    assert metrics_of(evaluator)["all"] == expected


@pytest.mark.parametrize(
    ("votes", "expected"),
    [
        # Sigmoids 1 and 0.5 against 0.8 twice: the mean logit says otherwise.
        ([(C, 50.0), (C, 0.0), (B, 1.4), (B, 1.4)], (B, C)),
        ([(C, math.nan), (B, -5.0)], (B, C)),
        ([(C, math.inf), (B, -math.inf)], (C, B)),
        ([(D, 0.0), (A, 0.0), (E, 0.0)], (D, A)),  # of equals by the grid: 1 x 1 before 1 x 2
        ([(E, 0.0), (A, 0.0), (D, 0.0)], (D, A)),
        # The empty answer is a vote, but takes no place.
        ([(None, 9.0)] * 3 + [(C, 0.0), (B, -1.0)], (C, B)),
        ([(None, 9.0)] * 3 + [(C, 0.0)], (C, C)),
        ([(None, 9.0)] * 3, ([[0]], [[0]])),
    ],
)
def test_which_grids_are_submitted(tmp_path, votes, expected):
    folder = write_arc(tmp_path / "data", ONE_TASK, sets={"all": VIEWS})
    metrics, submission = evaluated(folder, ONE_TASK, [Prediction("a", 0, *vote) for vote in votes])
    assert submission["a"] == [attempts(*expected)]
    assert passes(metrics) == [float(B in expected[:1]), *[float(B in expected)] * 5]
    assert metrics["arc/votes"] == len(votes)


def test_a_search_that_found_no_answer_submits_none(tmp_path):
    """Its open cells show the puzzle. That is not a grid of the model, even if it is right."""
    folder = write_arc(tmp_path / "data", ONE_TASK, sets={"all": VIEWS})
    given = arc_answers(
        folder, ONE_TASK, [Prediction("a", 0, B), Prediction(TURNED, 0, B), Prediction("a", 0, C)]
    )
    for is_decided, submitted in (([False, False, True], (C, C)), ([False] * 3, ([[0]], [[0]]))):
        evaluator = arc_evaluator(folder)
        evaluator.add("all", given._replace(is_decided=np.array(is_decided)))
        metrics = metrics_of(evaluator)["all"]
        assert (metrics["arc/pass@2"], metrics["arc/votes"]) == (0, 3)
        evaluator.write(folder)
        assert json.loads((folder / "submission.json").read_text())["a"] == [attempts(*submitted)]


def test_what_nobody_answered_keeps_its_place(tmp_path):
    """Task a: one of two inputs right. b: no vote. c: in no set. So 0.5 / 3, or 1, if only answers count."""
    tasks: Tasks = {"a": [(A, B), (C, D)], "b": [(A, B)], "c": [(A, A), (B, B)]}
    folder = write_arc(tmp_path / "data", tasks, sets={"all": ["a", "b"]})
    metrics, submission = evaluated(folder, tasks, [Prediction("a", 1, D)])
    assert passes(metrics) == pytest.approx([1 / 6] * 6)
    assert (metrics["arc/count"], metrics["arc/test_inputs"]) == (3, 5)
    nothing = attempts([[0]], [[0]])
    assert submission == {"a": [nothing, attempts(D, D)], "b": [nothing], "c": [nothing] * 2}
    assert evaluated(folder, tasks, []) == ({}, {"a": [nothing] * 2, "b": [nothing], "c": [nothing] * 2})
    evaluator = arc_evaluator(folder)
    evaluator.only_answered = True
    evaluator.add("all", arc_answers(folder, tasks, [Prediction("a", 1, D)]))
    metrics = metrics_of(evaluator)["all"]
    assert [metrics[f"arc/{name}"] for name in ("pass@1", "count", "test_inputs")] == [1, 1, 1]


def test_equal_inputs_share_their_votes(tmp_path):
    tasks: Tasks = {"a": [(A, B), (C, E), (A, D)]}
    folder = write_arc(tmp_path / "data", tasks, sets={"all": VIEWS})
    votes = [Prediction("a", 0, B), Prediction("a", 2, D), Prediction(TURNED, 2, D)]
    metrics, submission = evaluated(folder, tasks, votes)
    assert passes(metrics) == pytest.approx([1 / 3, *[2 / 3] * 5])
    assert submission["a"] == [attempts(D, B), attempts([[0]], [[0]]), attempts(D, B)]


def test_sets_have_their_own_tasks_and_share_the_submission(tmp_path):
    tasks: Tasks = {"a": [(A, B)], "b": [(C, D)], "c": [(E, E)]}
    folder = write_arc(tmp_path / "data", tasks, sets={"one": ["a", TURNED], "two": ["a", "b"]})
    evaluator = arc_evaluator(folder)
    evaluator.add("one", arc_answers(folder, tasks, [Prediction("a", 0, B), Prediction(TURNED, 0, C)]))
    evaluator.add("two", arc_answers(folder, tasks, [Prediction("b", 0, D), Prediction("a", 0, C)]))
    metrics = metrics_of(evaluator)
    counts = {name: (of_set["arc/count"], of_set["arc/votes"]) for name, of_set in metrics.items()}
    assert counts == {"one": (2, 2), "two": (3, 2)}, "c, which is in no set, counts in both"
    assert metrics["one"]["arc/pass@2"] == 0.5
    assert metrics["two"]["arc/pass@2"] == pytest.approx(1 / 3)
    evaluator.write(folder)
    assert json.loads((folder / "submission.json").read_text())["a"] == [attempts(C, B)]


def _evaluate_random_case(folder: Path, output: Path, global_batch_size: int) -> dict:
    tasks, predictions = random_case(folder)
    evaluators = arc_evaluators(folder)
    given = arc_answers(folder, tasks, predictions)
    add_in_batches(evaluators, "all", given, global_batch_size=global_batch_size)
    metrics = evaluators.gather_metrics()
    if is_main():
        output.mkdir()
        evaluators.write(output)
    return metrics


@pytest.mark.slow
def test_ranks_and_batches_change_no_byte(tmp_path):
    folder = tmp_path / "data"
    random_case(folder)
    alone = _evaluate_random_case(folder, tmp_path / "alone", 10**6)
    assert 0 < alone["all"]["arc/pass@1"] < alone["all"]["arc/pass@2"] < alone["all"]["arc/pass@5"] <= 1
    first, *others = run_ranks(_evaluate_random_case, 3, folder, tmp_path / "shared", 16)
    assert first == alone
    assert others == [{}] * 2
    written = [tmp_path / name / "submission.json" for name in ("shared", "alone")]
    assert written[0].read_bytes() == written[1].read_bytes()


def test_metrics_against_plain_loops(tmp_path):
    tasks, predictions = random_case(tmp_path / "data")
    metrics, submission = evaluated(tmp_path / "data", tasks, predictions)
    shares: dict[int, list[float]] = {k: [] for k in PASSES}
    all_places, submitted = [], []
    for task, tests in tasks.items():
        places = []
        for test_input, (_, output) in enumerate(tests):
            mine = [vote for vote in predictions if vote.name[0] == task and vote.test_input == test_input]
            grids = [vote.grid for vote in mine if vote.grid is not None]
            chances = [1 / (1 + math.exp(-np.float32(vote.q_halt))) for vote in mine if vote.grid is not None]

            def score(grid, grids=grids, chances=chances):
                own = [chance for other, chance in zip(grids, chances, strict=True) if other == grid]
                return len(own), sum(own) / len(own)

            distinct = {json.dumps(grid) for grid in grids}
            ranked = sorted(map(json.loads, distinct), key=score, reverse=True)
            places.append(ranked.index(output) if output in ranked else math.inf)
            given = submission[task][test_input]
            assert [given["attempt_1"], given["attempt_2"]] == (ranked * 2)[:2]
            submitted.append(output in given.values())
        for k in PASSES:
            shares[k].append(np.mean([place < k for place in places]))
        all_places += places
    assert passes(metrics) == pytest.approx([np.mean(shares[k]) for k in PASSES])
    for k in PASSES:
        assert metrics[f"arc/outputs/pass@{k}"] == pytest.approx(np.mean([place < k for place in all_places]))
    assert metrics["arc/outputs/pass@2"] == np.mean(submitted) != metrics["arc/pass@2"]
    assert metrics["arc/outputs/count"] == len(submitted)
    assert metrics["arc/votes"] == len(predictions)


@pytest.mark.parametrize("form", [(), ("--materialize",), ("--max-size", 8)])
def test_labels_of_a_built_dataset_are_right(tmp_path, form):
    """Whatever the builder makes of its tasks is undone here. What is beyond the end of a grid is noise."""
    tasks = make_tasks(4)
    source = write_folder(tmp_path / "evaluation", tasks)
    test = build(tmp_path / "data", "--source", source, "--num-aug", 30, *form)["test"]
    rows = np.arange(test.num_examples)
    puzzles = test.puzzle_indices.searchsorted(rows, side="right") - 1
    inputs, labels = test.read(rows, puzzles)
    noise = np.random.default_rng(0).integers(0, 12, labels.shape, dtype=np.uint8)
    preds = np.where(labels == 0, noise, labels)
    evaluator = arc_evaluator(tmp_path / "data")
    evaluator.add("all", answers(inputs, labels, preds, identifiers=test.puzzle_identifiers[puzzles]))
    metrics = metrics_of(evaluator)["all"]
    assert passes(metrics) == [1.0] * 6
    assert (metrics["arc/count"], metrics["arc/votes"]) == (4, len(rows))
    evaluator.write(tmp_path)
    expected = {
        name: [attempts(*[pair["output"]] * 2) for pair in task["test"]] for name, task in tasks.items()
    }
    assert json.loads((tmp_path / "submission.json").read_text()) == expected


def test_a_mixture_of_folders_is_evaluated_folder_by_folder(tmp_path):
    """The identifiers of the second folder begin after those of the first, and its sets have its name.

    Both folders are passed as links with the same name.
    """
    other: Tasks = {"b": [(C, D)]}
    folders = [tmp_path / link / "current" for link in "ab"]
    for folder, name, tasks, views in (
        (folders[0], "one", ONE_TASK, VIEWS),
        (folders[1], "two", other, ["b"]),
    ):
        folder.parent.mkdir()
        folder.symlink_to(write_arc(tmp_path / name, tasks, sets={"all": views}))
    data = open_datasets(folders, splits=("test",), read_everything=False)
    evaluators = Evaluators(["arc"], data)
    mine = arc_answers(folders[0], ONE_TASK, [Prediction(TURNED, 0, B)])
    evaluators.add("one.all", mine)
    theirs = arc_answers(folders[1], other, [Prediction("b", 0, E)])
    shift = data.origin("two.all").first_identifier
    evaluators.add("two.all", theirs._replace(puzzle_identifiers=theirs.puzzle_identifiers + shift))
    metrics = evaluators.gather_metrics()
    found = {name: of_set["arc/pass@1"] for name, of_set in metrics.items()}
    assert found == {"one.all": 1.0, "two.all": 0.0}
    evaluators.write(tmp_path / "left")
    for name, expected in (("one", {"a": [attempts(B, B)]}), ("two", {"b": [attempts(E, E)]})):
        assert json.loads((tmp_path / "left" / name / "submission.json").read_text()) == expected


def test_samples_are_further_votes(tmp_path):
    """Of every example all answers vote; an evaluator that checks rows has the selected one alone."""
    evaluators = arc_evaluators(write_arc(tmp_path, ONE_TASK, sets={"all": VIEWS}))
    selected = arc_answers(tmp_path, ONE_TASK, [Prediction("a", 0, C)])
    samples = arc_answers(tmp_path, ONE_TASK, [Prediction("a", 0, grid) for grid in (C, B, B)])
    evaluators.add("all", selected, samples=samples)
    metrics = evaluators.gather_metrics()["all"]
    assert (metrics["arc/votes"], metrics["arc/pass@1"]) == (3, 1.0)
    evaluators.write(tmp_path)
    assert json.loads((tmp_path / "submission.json").read_text()) == {"a": [attempts(B, C)]}


def largest_corner(tokens: np.ndarray) -> tuple[int, int]:
    """By trying all: of the largest area the fewest rows."""
    best = (0, 0)
    grid = tokens.reshape(SIZE, SIZE).tolist()
    for rows in range(1, SIZE + 1):
        for columns in range(1, SIZE + 1):
            if all(2 <= grid[row][column] <= 11 for row in range(rows) for column in range(columns)):
                if rows * columns > best[0] * best[1]:
                    best = (rows, columns)
            else:
                break
    return best


@pytest.mark.slow
def test_largest_corner_against_plain_loops():
    draw = np.random.default_rng(0)
    cases = [np.full(900, 11), np.zeros(900, int), np.where(np.arange(900) == 899, 1, 2)]
    for density in (0.003, 0.01, 0.05, 0.2, 0.6):
        for _ in range(20):
            colors = draw.integers(2, 12, 900)
            cases.append(np.where(draw.random(900) < density, draw.choice([0, 1], 900), colors))
    staircase = np.add.outer(np.arange(SIZE), np.arange(SIZE))
    cases += [np.where(staircase < number, 5, 1).ravel() for number in range(1, 40, 3)]  # equal areas
    sizes = [largest_corner(case) for case in cases]
    for dtype in (np.uint8, np.int32):
        tokens = np.array(cases, dtype)
        for row, grid, (rows, columns) in zip(tokens, corner_grids(tokens), sizes, strict=True):
            assert np.array_equal(grid, row.reshape(SIZE, SIZE)[:rows, :columns])


def test_rows_of_no_test_input_end_the_evaluation(tmp_path, capsys):
    folder = write_arc(tmp_path / "data", ONE_TASK, sets={"all": VIEWS})
    evaluators = arc_evaluators(folder)
    evaluators.add("all", arc_answers(folder, {"a": [(E, B)]}, [Prediction(TURNED, 0, B)] * 2))
    with pytest.raises(SystemExit):
        evaluators.gather_metrics()
    (line,) = capsys.readouterr().err.splitlines()
    assert "2 test examples match no test input of their task in test_puzzles.json" in line


def _task(**changes) -> str:
    pair = {"input": A, "output": B}
    return json.dumps({"a": {"train": [pair], "test": [pair], **changes}})


BAD_NAMES = ("", "b", "<blank>", "a|||t8|||0123456789", "a|||t0|||0123456788", "a|||t0|||012345678",
             "a|||t0", "a|||t0|||0123456789\n")  # fmt: skip
BAD_FILES = [
    ("test_puzzles.json", "{", "is not valid JSON"),
    ("test_puzzles.json", "[]", "is not a JSON object of tasks"),
    ("test_puzzles.json", "{}", "is not a JSON object of tasks"),
    ("test_puzzles.json", '{"a": []}', "task a: not a task.*Build the dataset again"),
    ("test_puzzles.json", _task(test=[{"output": A}]), "test pair 1 has no input. Build"),
    ("test_puzzles.json", _task().replace('"a"', '"b"'), "'a', identifier 1, is in the test split"),
    ("identifiers.json", None, "does not contain the names of 4 identifiers"),
    ("identifiers.json", '{"a": 1}', "does not contain the names of 4 identifiers"),
    ("identifiers.json", "[0, 1, 2, 3]", "identifier 1, is in the test split"),
    ("identifiers.json", '["<blank>", "a"]', "does not contain the names of 4 identifiers"),
    *(
        ("identifiers.json", json.dumps(["<blank>", "a", name, "a"]), "identifier 2, is in the test split")
        for name in BAD_NAMES
    ),
]


def test_bad_datasets(tmp_path):
    folder = write_arc(tmp_path / "data", ONE_TASK, sets={"all": VIEWS})
    for file, content, message in BAD_FILES:
        whole = (folder / file).read_text()
        (folder / file).unlink()
        if content is not None:
            (folder / file).write_text(content)
        with pytest.raises(ValueError, match=message) as error:
            arc_evaluator(folder)
        assert "\n" not in str(error.value)
        assert file in str(error.value)
        (folder / file).write_text(whole)
