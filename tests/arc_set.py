"""Writes small ARC datasets with several views of each task, and answers to them. Uses only plain loops.

The names of views have the form of the public tools: <task>|||t<dihedral number>|||<new colors>. Grids in
`Tasks` and `Prediction` have the colors and orientation of the task, before the transform of a view.
"""

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dataset.augmentations import dihedral
from dataset.build.writing import write_dataset
from dataset.files import load_metadata, open_dataset
from dataset.kinds.arc.evaluator import PASSES, ArcEvaluator
from dataset.kinds.evaluator import Answers
from dataset.metadata import Split
from dataset.sets import PuzzleSet
from evaluation.evaluators import Evaluators, build_evaluator
from tests.answers import answers, metadata, metrics_of

SIZE = 30
Grid = list[list[int]]
Tasks = dict[str, list[tuple[Grid, Grid]]]  # of each test: input, output


def augment(grid: np.ndarray, name: str) -> np.ndarray:
    """Returns a grid of colors under the transform in the name of a puzzle identifier."""
    _, *augmentation = name.split("|||")
    number, colors = augmentation or ("t0", "0123456789")
    return dihedral(np.array([int(color) for color in colors], np.uint8)[grid], int(number.removeprefix("t")))


def lay(grid: np.ndarray, down: int = 0, right: int = 0) -> np.ndarray:
    """Converts a grid of colors to tokens of a 30 x 30 field with end tokens: uint8 [900].

    down, right: Position of the grid in the field.
    """
    laid = np.zeros((SIZE, SIZE), np.uint8)
    rows, columns = grid.shape
    laid[down : down + rows, right : right + columns] = grid + 2
    laid[down + rows : down + rows + 1, right : right + columns] = 1
    laid[down : down + rows, right + columns : right + columns + 1] = 1
    return laid.ravel()


def write_arc(folder: Path, tasks: Tasks, *, sets: dict[str, list[str]], **changes) -> Path:
    """Writes a test split with the given views of tasks, and test_puzzles.json. Returns `folder`.

    Each view has one example for each test pair of its task. sets: {test set: names of its views}. changes:
    Changed fields of the metadata.
    """
    names = ["<blank>", *sorted({name for used in sets.values() for name in used})]
    made = {}
    for set_name, used in sets.items():
        tests = [tasks[name.partition("|||")[0]] for name in used]
        named = [(name, test) for name, own in zip(used, tests, strict=True) for test in own]
        grids = [[lay(augment(np.array(test[side]), name)) for name, test in named] for side in (0, 1)]
        made[set_name] = PuzzleSet(
            inputs=np.array(grids[0]),
            labels=np.array(grids[1]),
            puzzle_identifiers=np.array([names.index(name) for name in used], np.int32),
            puzzle_indices=np.cumsum([0, *map(len, tests)], dtype=np.int32),
            group_indices=np.arange(len(used) + 1, dtype=np.int32),
        )
    sizes = {"vocab_size": 12, "seq_len": SIZE**2, "num_puzzle_identifiers": len(names)}
    split = Split(metadata(sets=tuple(sets), **{**sizes, **changes}), made)
    write_dataset(folder, splits={"test": split}, identifiers=names, builder={"module": "tests"})
    pairs = {
        name: [{"input": given, "output": wanted} for given, wanted in tests] for name, tests in tasks.items()
    }
    content = {name: {"train": tests[:1], "test": tests} for name, tests in pairs.items()}
    (folder / "test_puzzles.json").write_text(json.dumps(content))
    return folder


class Prediction(NamedTuple):
    """A model's answer to a view of a test input.

    Attributes:
        name: Name of the view.
        test_input: Index of the test input in its task.
        grid: The answer before the transform of the view. None for an answer whose first token is no color.
        q_halt: Logit of the predicted probability that the answer is right.
    """

    name: str
    test_input: int
    grid: Grid | None
    q_halt: float = 0.0


def arc_answers(folder: Path, tasks: Tasks, predictions: list[Prediction]) -> Answers:
    names = json.loads((folder / "identifiers.json").read_text())
    inputs, preds = [], []
    for name, test_input, grid, _ in predictions:
        inputs.append(lay(augment(np.array(tasks[name.partition("|||")[0]][test_input][0]), name)))
        preds.append(np.zeros(SIZE**2, np.uint8) if grid is None else lay(augment(np.array(grid), name)))
    return answers(
        inputs,
        np.zeros_like(inputs),
        preds,
        identifiers=[names.index(name) for name, *_ in predictions],
        q_halt=[q_halt for *_, q_halt in predictions],
    )


# For votes by hand: five grids, and a task with three views.
A, B, C, D, E = [[1, 2]], [[3], [4]], [[5, 5], [6, 0]], [[7]], [[8, 9, 8]]
TURNED = "a|||t1|||0213456789"
MIRRORED = "a|||t4|||0987654321"
ONE_TASK: Tasks = {"a": [(A, B)]}
VIEWS = ["a", TURNED, MIRRORED]


def arc_evaluator(folder: Path) -> ArcEvaluator:
    return build_evaluator("arc", folder=folder, metadata=load_metadata(folder, "test"))


def arc_evaluators(folder: Path) -> Evaluators:
    """Returns the evaluators of a run, which may have several ranks."""
    data = open_dataset(folder, splits=("test",), read_everything=False)
    return Evaluators(["arc"], data)


def evaluated(folder: Path, tasks: Tasks, predictions: list[Prediction]) -> tuple[dict[str, float], dict]:
    """Evaluates answers to the test set "all". Returns (its metrics, content of submission.json)."""
    evaluator = arc_evaluator(folder)
    if predictions:
        evaluator.add("all", arc_answers(folder, tasks, predictions))
    metrics = metrics_of(evaluator)
    evaluator.write(folder)
    return metrics.get("all", {}), json.loads((folder / "submission.json").read_text())


def passes(metrics: dict[str, float]) -> list[float]:
    return [metrics[f"arc/pass@{k}"] for k in PASSES]


def attempts(first: Grid, second: Grid) -> dict[str, Grid]:
    return {"attempt_1": first, "attempt_2": second}


def random_names(draw: np.random.Generator, task: str, num: int) -> list[str]:
    """Returns the names of `num` views. The dihedral numbers take turns. All 10 colors are exchanged."""
    colors = ["".join(map(str, draw.permutation(10))) for _ in range(num)]
    return [f"{task}|||t{number % 8}|||{order}" for number, order in enumerate(colors)]


def random_case(folder: Path) -> tuple[Tasks, list[Prediction]]:
    """Writes a dataset of 6 tasks with 20 views each, if `folder` does not exist.

    Returns (tasks, one prediction for each view of each test input). Predictions often agree.
    """
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
