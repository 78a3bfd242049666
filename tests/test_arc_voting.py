"""Votes over augmented views: by hand, against plain loops, and the same on any number of ranks."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from dataset.format import load_metadata
from evaluation.arc import PASSES, ArcJudge
from evaluation.arc_tasks import Views, corner_grids, load_tasks, to_lists
from evaluation.judges import Judge, build_judge
from parallel.process_group import is_main
from tests.answers import add_in_batches
from tests.arc_set import SIZE, Grid, Prediction, Tasks, arc_answers, augment, lay, write_arc
from tests.ranks import run_ranks

A, B, C, D, E = [[1, 2]], [[3], [4]], [[5, 5], [6, 0]], [[7]], [[8, 9, 8]]
TURNED = "a|||t1|||0213456789"
MIRRORED = "a|||t4|||0987654321"
ONE_TASK: Tasks = {"a": [(A, B)]}
VIEWS = ["a", TURNED, MIRRORED]


def arc_judge(folder: Path, **options) -> ArcJudge:
    return build_judge("arc", folder=folder, metadata=load_metadata(folder, "test"), **options)


def judged(
    folder: Path, tasks: Tasks, predictions: list[Prediction], *, further_votes: tuple[Path, ...] = ()
) -> tuple[dict[str, float], dict]:
    """Metrics of the set `all`, and the submission."""
    judge = arc_judge(folder, further_votes=further_votes)
    if predictions:
        judge.add("all", arc_answers(folder, tasks, predictions))
    metrics = judge.gather_metrics()
    judge.write(folder)
    return metrics.get("all", {}), json.loads((folder / "submission.json").read_text())


def passes(metrics: dict[str, float]) -> list[float]:
    return [metrics[f"arc/pass@{k}"] for k in PASSES]


def attempts(first: Grid, second: Grid) -> dict[str, Grid]:
    return {"attempt_1": first, "attempt_2": second}


# ---------------------------------------------------------------------------------------------------- by hand


def test_views_of_one_input_vote_together(tmp_path):
    """Most votes first; the views agree once their augmentation is undone."""
    folder = write_arc(tmp_path / "data", ONE_TASK, sets={"all": VIEWS})
    votes = [Prediction("a", 0, C, 9.0), Prediction(TURNED, 0, B, -9.0), Prediction(MIRRORED, 0, B, -9.0)]
    metrics, submission = judged(folder, ONE_TASK, votes)
    assert passes(metrics) == [1.0] * 6
    assert {name: metrics[f"arc/{name}"] for name in ("count", "test_inputs", "votes")} == {
        "count": 1,
        "test_inputs": 1,
        "votes": 3,
    }
    assert submission == {"a": [attempts(B, C)]}


@pytest.mark.parametrize(
    ("right_logit", "other_logit"), [(0.5, 1.0), (1.5, 1.0), (7.9999, 8.0), (8.0001, 8.0), (-8.0001, -8.0)]
)
def test_equal_votes_are_ordered_by_mean_probability(tmp_path, right_logit, other_logit):
    folder = write_arc(tmp_path / "data", ONE_TASK, sets={"all": VIEWS})
    votes = [Prediction("a", 0, C, other_logit), Prediction(TURNED, 0, B, right_logit)]
    metrics, submission = judged(folder, ONE_TASK, votes)
    is_first = right_logit > other_logit
    assert passes(metrics) == [float(is_first), *[1.0] * 5]
    assert submission["a"] == [attempts(B, C) if is_first else attempts(C, B)]


def test_probabilities_are_averaged_not_logits(tmp_path):
    """Sigmoids 1 and 0.5 against 0.8 twice: the mean logit says otherwise."""
    folder = write_arc(tmp_path / "data", ONE_TASK, sets={"all": VIEWS})
    votes = [Prediction("a", 0, C, q) for q in (50.0, 0.0)] + [Prediction("a", 0, B, 1.4)] * 2
    assert passes(judged(folder, ONE_TASK, votes)[0])[:2] == [1.0, 1.0]


def test_no_number_counts_as_no_probability(tmp_path):
    folder = write_arc(tmp_path / "data", ONE_TASK, sets={"all": VIEWS})
    votes = [Prediction("a", 0, C, math.nan), Prediction("a", 0, B, -5.0)]
    assert judged(folder, ONE_TASK, votes)[1]["a"] == [attempts(B, C)]
    votes = [Prediction("a", 0, C, math.inf), Prediction("a", 0, B, -math.inf)]
    assert judged(folder, ONE_TASK, votes)[1]["a"] == [attempts(C, B)]


def test_ties_are_broken_by_the_grid(tmp_path):
    folder = write_arc(tmp_path / "data", ONE_TASK, sets={"all": VIEWS})
    votes = [Prediction("a", 0, grid) for grid in (D, A, E)]
    expected = judged(folder, ONE_TASK, votes)
    assert expected[1]["a"] == [attempts(D, A)]  # 1 x 1 before 1 x 2
    assert judged(folder, ONE_TASK, votes[::-1]) == expected


def test_right_answer_at_each_place(tmp_path):
    folder = write_arc(tmp_path / "data", ONE_TASK, sets={"all": VIEWS})
    for place, expected in ((0, 6), (1, 5), (2, 4), (4, 4), (5, 3), (9, 3), (10, 2), (99, 2), (100, 1)):
        votes = [Prediction("a", 0, [[number // 10, number % 10, 1]], 3.0) for number in range(place)]
        metrics, _ = judged(folder, ONE_TASK, [*votes, Prediction("a", 0, B, 2.0)])
        assert passes(metrics) == [0.0] * (6 - expected) + [1.0] * expected, place


def test_what_nobody_answered_keeps_its_place(tmp_path):
    """Task a: one of two inputs right. b: no vote. c: in no set. So 0.5 / 3."""
    tasks: Tasks = {"a": [(A, B), (C, D)], "b": [(A, B)], "c": [(A, A), (B, B)]}
    folder = write_arc(tmp_path / "data", tasks, sets={"all": ["a", "b"]})
    metrics, submission = judged(folder, tasks, [Prediction("a", 1, D)])
    assert passes(metrics) == pytest.approx([1 / 6] * 6)
    assert (metrics["arc/count"], metrics["arc/test_inputs"]) == (3, 5)
    nothing = attempts([[0]], [[0]])
    assert submission == {"a": [nothing, attempts(D, D)], "b": [nothing], "c": [nothing] * 2}
    assert judged(folder, tasks, []) == ({}, {"a": [nothing] * 2, "b": [nothing], "c": [nothing] * 2})


def test_the_same_grid_for_another_input_is_another_vote(tmp_path):
    tasks: Tasks = {"a": [(A, B), (C, D)], "b": [(A, B)]}
    folder = write_arc(tmp_path / "data", tasks, sets={"all": ["a", TURNED, "b"]})
    votes = [Prediction("a", 0, D), Prediction(TURNED, 0, B), Prediction("a", 1, D), Prediction("b", 0, D)]
    metrics, submission = judged(folder, tasks, [*votes, Prediction("a", 0, B)])
    assert passes(metrics) == [0.5] * 6
    assert submission == {"a": [attempts(B, D), attempts(D, D)], "b": [attempts(D, D)]}


def test_equal_inputs_share_their_votes(tmp_path):
    tasks: Tasks = {"a": [(A, B), (C, E), (A, D)]}
    folder = write_arc(tmp_path / "data", tasks, sets={"all": VIEWS})
    votes = [Prediction("a", 0, B), Prediction("a", 2, D), Prediction(TURNED, 2, D)]
    metrics, submission = judged(folder, tasks, votes)
    assert passes(metrics) == pytest.approx([1 / 3, *[2 / 3] * 5])
    assert submission["a"] == [attempts(D, B), attempts([[0]], [[0]]), attempts(D, B)]


def test_empty_answers_are_votes_but_take_no_place(tmp_path):
    folder = write_arc(tmp_path / "data", ONE_TASK, sets={"all": VIEWS})
    empty = [Prediction("a", 0, None, 9.0)] * 3
    metrics, submission = judged(folder, ONE_TASK, [*empty, Prediction("a", 0, C), Prediction("a", 0, B, -1)])
    assert passes(metrics) == [0.0, *[1.0] * 5]
    assert metrics["arc/votes"] == 5
    assert submission["a"] == [attempts(C, B)]
    assert judged(folder, ONE_TASK, [*empty, Prediction("a", 0, C)])[1]["a"] == [attempts(C, C)]
    assert judged(folder, ONE_TASK, empty)[1]["a"] == [attempts([[0]], [[0]])]


def test_sets_have_their_own_tasks_and_share_the_submission(tmp_path):
    tasks: Tasks = {"a": [(A, B)], "b": [(C, D)], "c": [(E, E)]}
    folder = write_arc(tmp_path / "data", tasks, sets={"one": ["a", TURNED], "two": ["a", "b"]})
    judge = arc_judge(folder)
    judge.add("one", arc_answers(folder, tasks, [Prediction("a", 0, B), Prediction(TURNED, 0, C)]))
    judge.add("two", arc_answers(folder, tasks, [Prediction("b", 0, D), Prediction("a", 0, C)]))
    metrics = judge.gather_metrics()
    assert {name: (of_set["arc/count"], of_set["arc/votes"]) for name, of_set in metrics.items()} == {
        "one": (2, 2),  # a, and c, which is nowhere
        "two": (3, 2),
    }
    assert metrics["one"]["arc/pass@2"] == 0.5
    assert metrics["two"]["arc/pass@2"] == pytest.approx(1 / 3)
    judge.write(folder)
    assert json.loads((folder / "submission.json").read_text())["a"] == [attempts(C, B)]


# ------------------------------------------------------------------------------------------ the way to a grid


def random_names(draw: np.random.Generator, task: str, num: int) -> list[str]:
    """Views with every dihedral number and random colours, 0 too."""
    colors = ["".join(map(str, draw.permutation(10))) for _ in range(num)]
    return [f"{task}|||t{number % 8}|||{order}" for number, order in enumerate(colors)]


def test_undoing_gives_the_grid_back(tmp_path):
    draw = np.random.default_rng(0)
    names = ["a", *random_names(draw, "a", 64)]
    folder = write_arc(tmp_path / "data", ONE_TASK, sets={"all": names})
    views = Views(
        folder, load_metadata(folder, "test"), tasks=load_tasks(folder), used=np.arange(1, len(names) + 1)
    )
    identifiers = json.loads((folder / "identifiers.json").read_text())
    sizes = [(1, 1), (30, 30), (30, 1), (1, 30), (29, 30)] + [
        tuple(draw.integers(1, 31, 2)) for _ in range(150)
    ]
    for index, size in enumerate(sizes):
        grid, name = draw.integers(0, 10, size, dtype=np.uint8), names[index % len(names)]
        laid = lay(augment(grid, name))[None].astype((np.uint8, np.int32)[index % 2])
        undone = views.undo(corner_grids(laid)[0], identifiers.index(name))
        assert to_lists(undone) == grid.tolist(), (name, size)


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


def test_largest_corner_against_plain_loops():
    draw = np.random.default_rng(0)
    cases = [np.full(900, 11), np.zeros(900, int), np.where(np.arange(900) == 899, 1, 2)]
    for density in (0.003, 0.01, 0.05, 0.2, 0.6):
        for _ in range(20):
            colors = draw.integers(2, 12, 900)
            cases.append(np.where(draw.random(900) < density, draw.choice([0, 1], 900), colors))
    staircase = np.add.outer(np.arange(SIZE), np.arange(SIZE))
    cases += [np.where(staircase < number, 5, 1).ravel() for number in range(1, 40, 3)]  # equal areas
    for dtype in (np.uint8, np.int32):
        tokens = np.array(cases, dtype)
        for row, grid in zip(tokens, corner_grids(tokens), strict=True):
            rows, columns = largest_corner(row)
            assert np.array_equal(grid, row.reshape(SIZE, SIZE)[:rows, :columns])


# ------------------------------------------------------------------------------------------------------ ranks


def random_case(folder: Path) -> tuple[Tasks, list[Prediction]]:
    """Writes a dataset of 6 tasks and 20 views of each, and returns predictions that often agree."""
    draw = np.random.default_rng(1)

    def grid() -> Grid:
        return draw.integers(0, 10, draw.integers(1, 6, 2)).tolist()

    tasks = {name: [(grid(), grid()) for _ in range(draw.integers(1, 4))] for name in "fedcba"}
    names = [name for task in tasks for name in (task, *random_names(draw, task, 19))]
    if not folder.exists():
        write_arc(folder, tasks, sets={"all": names})
    guesses = {task: [grid() for _ in range(3)] for task in tasks}
    predictions = []
    for name in names:
        tests = tasks[name[0]]
        for test_input, (_, output) in enumerate(tests):
            choice = int(draw.integers(0, 5))
            guess = [*guesses[name[0]], output, None][choice]
            predictions.append(Prediction(name, test_input, guess, float(draw.normal())))
    return tasks, predictions


def _judge_random_case(folder: Path, output: Path, global_batch_size: int) -> dict:
    tasks, predictions = random_case(folder)
    judge = arc_judge(folder)
    add_in_batches(judge, "all", arc_answers(folder, tasks, predictions), global_batch_size=global_batch_size)
    metrics = judge.gather_metrics()
    if is_main():
        output.mkdir()
        judge.write(output)
    return metrics


def test_ranks_and_batches_change_no_byte(tmp_path):
    folder = tmp_path / "data"
    random_case(folder)
    alone = _judge_random_case(folder, tmp_path / "alone", 10**6)
    assert 0 < alone["all"]["arc/pass@1"] < alone["all"]["arc/pass@2"] < alone["all"]["arc/pass@5"] <= 1
    for ranks, batch in ((1, 7), (2, 16), (4, 7), (4, 300)):
        output = tmp_path / f"{ranks}_{batch}"
        first, *others = run_ranks(_judge_random_case, ranks, folder, output, batch)
        assert first == alone
        assert others == [{}] * (ranks - 1)
        for name in ("submission.json", "votes.npz"):
            assert (output / name).read_bytes() == (tmp_path / "alone" / name).read_bytes()


def test_metrics_against_plain_loops(tmp_path):
    tasks, predictions = random_case(tmp_path / "data")
    metrics, submission = judged(tmp_path / "data", tasks, predictions)
    shares: dict[int, list[float]] = {k: [] for k in PASSES}
    submitted = []
    for task, tests in tasks.items():
        places = []
        for test_input, (_, output) in enumerate(tests):
            mine = [vote for vote in predictions if vote.name[0] == task and vote.test_input == test_input]
            grids = [vote.grid for vote in mine if vote.grid is not None]
            chances = [1 / (1 + math.exp(-np.float32(vote.q_halt))) for vote in mine if vote.grid is not None]

            def score(grid, grids=grids, chances=chances):
                own = [chance for other, chance in zip(grids, chances, strict=True) if other == grid]
                return len(own), sum(own) / len(own)

            ranked = sorted({json.dumps(grid) for grid in grids}, key=lambda text: score(json.loads(text)))[
                ::-1
            ]
            ranked = [json.loads(text) for text in ranked]
            places.append(ranked.index(output) if output in ranked else math.inf)
            given = submission[task][test_input]
            assert [given["attempt_1"], given["attempt_2"]] == (ranked * 2)[:2]
        for k in PASSES:
            shares[k].append(np.mean([place < k for place in places]))
        right = [output in given.values() for (_, output), given in zip(tests, submission[task], strict=True)]
        submitted.append(np.mean(right))
    assert passes(metrics) == pytest.approx([np.mean(shares[k]) for k in PASSES])
    assert metrics["arc/pass@2"] == pytest.approx(np.mean(submitted))
    assert metrics["arc/votes"] == len(predictions)


# ---------------------------------------------------------------------------------------------- further votes


def evaluated(folder: Path, output: Path, predictions: list[Prediction], **options) -> tuple[Judge, dict]:
    judge = arc_judge(folder, **options)
    judge.add("all", arc_answers(folder, random_case(folder)[0], predictions))
    metrics = judge.gather_metrics()
    output.mkdir()
    judge.write(output)
    return judge, metrics


def test_votes_of_several_evaluations(tmp_path):
    folder = tmp_path / "data"
    _, predictions = random_case(folder)
    parts = predictions[:50], predictions[50:90], predictions[90:]
    evaluated(folder, tmp_path / "0", parts[0])
    files = [tmp_path / "0" / "votes.npz", tmp_path / "1" / "votes.npz"]
    evaluated(folder, tmp_path / "1", parts[1], further_votes=files[:1])  # writes its own votes only
    judge, together = evaluated(folder, tmp_path / "2", parts[2], further_votes=files)
    _, at_once = evaluated(folder, tmp_path / "all", predictions)
    assert together == at_once
    assert judge.gather_metrics() == at_once, "counted twice"
    for name, is_equal in (("submission.json", True), ("votes.npz", False)):
        both = [(tmp_path / run / name).read_bytes() for run in ("2", "all")]
        assert (both[0] == both[1]) == is_equal


def _gather_with_further(folder: Path, votes: Path) -> dict:
    return arc_judge(folder, further_votes=[votes]).gather_metrics()


def test_further_votes_count_once_on_several_ranks(tmp_path):
    _, predictions = random_case(tmp_path / "data")
    _, metrics = evaluated(tmp_path / "data", tmp_path / "0", predictions)
    votes = tmp_path / "0" / "votes.npz"
    assert run_ranks(_gather_with_further, 2, tmp_path / "data", votes) == [metrics, {}]


@pytest.fixture
def votes(tmp_path) -> Path:
    """A good file of votes on ONE_TASK, whose dataset is in `data` beside it."""
    folder = write_arc(tmp_path / "data", ONE_TASK, sets={"all": VIEWS})
    judged(folder, ONE_TASK, [Prediction("a", 0, B), Prediction("a", 0, None), Prediction("a", 0, A)])
    return (folder / "votes.npz").rename(tmp_path / "votes.npz")


def _with_array(path: Path) -> None:
    with path.open("wb") as file:
        np.save(file, np.zeros(3))


def _with(**changes):
    def damage(path: Path) -> None:
        with np.load(path) as file:
            arrays = {**file, **changes}
        np.savez(path, **{name: array for name, array in arrays.items() if array is not None})

    return damage


def _with_entry(number: int, **changes):
    def damage(path: Path) -> None:
        with np.load(path) as file:
            arrays = dict(file)
        for field, value in changes.items():
            arrays["entries"][field][number] = value
        np.savez(path, **arrays)

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (Path.unlink, "is missing"),
        (lambda path: path.write_bytes(b""), "no file of votes"),
        (lambda path: path.write_bytes(path.read_bytes()[:300]), "no file of votes"),
        (lambda path: path.write_text("votes"), "no file of votes"),
        (_with_array, "no file of votes"),
        (_with(digest=np.array([{}], object)), "no file of votes"),
        (_with(cells=None), "no file of votes"),
        (_with(entries=np.zeros(3)), "of another type"),
        (_with(set_names=np.array([1])), "of another type"),
        (_with(digest=np.array("0" * 64)), "votes on other tasks"),
        (_with(digest=np.zeros(3)), "votes on other tasks"),
        (_with(set_names=np.array(["other"])), "votes on a set 'other': the sets are all"),
        (_with(cells=np.zeros(3, np.uint8)), "no grids of colours"),
        (_with(cells=np.full(4, 10, np.uint8)), "no grids of colours"),
        (_with(cells=np.zeros(4)), "no grids of colours"),
        (_with_entry(0, set=1), "entry 0 is out of range"),
        (_with_entry(1, task=1), "entry 1 is out of range"),
        (_with_entry(2, task=-1), "entry 2 is out of range"),
        (_with_entry(1, test_input=1), "entry 1 is out of range"),
        (_with_entry(1, test_input=-1), "entry 1 is out of range"),
        (_with_entry(1, rows=31), "entry 1 is out of range"),
        (_with_entry(1, rows=0), "entry 1 is out of range"),
        (_with_entry(1, votes=0), "entry 1 is out of range"),
        (_with_entry(1, votes=1 << 40), "entry 1 is out of range"),
        (_with_entry(1, halting=-1), "entry 1 is out of range"),
        (_with_entry(1, halting=(1 << 32) + 1), "entry 1 is out of range"),
    ],
)
def test_bad_votes(votes, damage, message):
    judged(votes.parent / "data", ONE_TASK, [], further_votes=(votes,))
    damage(votes)
    with pytest.raises(ValueError, match=message) as error:
        arc_judge(votes.parent / "data", further_votes=[votes])
    assert "\n" not in str(error.value)
    assert str(votes) in str(error.value)


def test_votes_named_twice(votes):
    with pytest.raises(ValueError, match="name a file twice"):
        arc_judge(votes.parent / "data", further_votes=[votes, votes.parent / "data" / ".." / votes.name])


# --------------------------------------------------------------------------------------------------- mistakes


def test_rows_of_no_test_input_end_the_evaluation(tmp_path, capsys):
    folder = write_arc(tmp_path / "data", ONE_TASK, sets={"all": VIEWS})
    judge = arc_judge(folder)
    judge.add("all", arc_answers(folder, {"a": [(E, B)]}, [Prediction(TURNED, 0, B)] * 2))
    with pytest.raises(SystemExit):
        judge.gather_metrics()
    (line,) = capsys.readouterr().err.splitlines()
    assert "2 test examples show no test input of their task in test_puzzles.json" in line


def _test(given, wanted) -> str:
    return json.dumps({"a": {"test": [{"input": given, "output": wanted}]}})


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("test_puzzles.json", None, "is missing, and votes need it"),
        ("test_puzzles.json", "{", "is not valid JSON"),
        ("test_puzzles.json", "[]", "is no JSON object of tasks"),
        ("test_puzzles.json", "{}", "is no JSON object of tasks"),
        ("test_puzzles.json", '{"a": []}', "task 'a' has no list of tests"),
        ("test_puzzles.json", '{"a": {"test": []}}', "task 'a' has no list of tests"),
        ("test_puzzles.json", '{"a": {"test": [3]}}', "'input' of test 0 of task 'a' is no grid"),
        ("test_puzzles.json", '{"a": {"test": [{"input": [[1]]}]}}', "'output' of test 0 of task 'a' is no"),
        *(
            ("test_puzzles.json", _test(*pair), "put' of test 0 of task 'a' is no grid")
            for grid in (
                [],
                [[]],
                [[1], [1, 2]],
                [[10]],
                [[-1]],
                [[True]],
                [[0.5]],
                [1],
                [[0]] * 31,
                [[0] * 31],
            )
            for pair in ((grid, A), (A, grid))
        ),
        ("test_puzzles.json", _test(A, B).replace('"a"', '"b"'), "'a', identifier 1, is in the test split"),
        ("identifiers.json", None, "is missing, and votes need it"),
        ("identifiers.json", "]", "is not valid JSON"),
        ("identifiers.json", '{"a": 1}', "is no JSON list of names"),
        ("identifiers.json", "[0, 1, 2, 3]", "is no JSON list of names"),
        ("identifiers.json", '["<blank>", "a"]', "has 2 names, but there are 4 identifiers"),
        *(
            (
                "identifiers.json",
                json.dumps(["<blank>", "a", name, "a"]),
                "identifier 2, is in the test split",
            )
            for name in (
                "",
                "b",
                "<blank>",
                "a|||t8|||0123456789",
                "a|||t0|||0123456788",
                "a|||t0|||012345678",
                "a|||t0",
                "a|||t0|||0123456789\n",
            )
        ),
    ],
)
def test_bad_datasets(tmp_path, file, content, message):
    folder = write_arc(tmp_path / "data", ONE_TASK, sets={"all": VIEWS})
    (folder / file).unlink()
    if content is not None:
        (folder / file).write_text(content)
    with pytest.raises(ValueError, match=message) as error:
        arc_judge(folder)
    assert "\n" not in str(error.value)
    assert file in str(error.value)


@pytest.mark.parametrize("changes", [{"vocab_size": 11}, {"seq_len": 899}])
def test_what_is_no_arc(tmp_path, changes):
    folder = write_arc(tmp_path / "data", ONE_TASK, sets={"all": VIEWS})
    values = load_metadata(folder, "test").__dict__
    with pytest.raises(ValueError, match="is no ARC dataset: its seq_len is .*, not 900 and 12"):
        build_judge(
            "arc", folder=folder, metadata=type(load_metadata(folder, "test"))(**{**values, **changes})
        )
