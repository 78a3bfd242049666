"""Tasks of a limited time: each in a process of its own, whose rows are there as soon as they are told.

A task that raises, hangs or dies costs itself alone: its error is a row like the others.
"""

import contextlib
import dataclasses
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.harness import REPOSITORY

Row = dict[str, Any]
Tell = Callable[..., None]  # makes a row of its keyword arguments


@dataclasses.dataclass(frozen=True)
class Options:
    """What every task is told. data: a dataset folder; golden: the folder of the golden runs."""

    device: str
    is_tiny: bool
    golden: Path
    data: Path


class NothingToDoError(Exception):
    """A reason why a task has nothing to do here."""


@dataclasses.dataclass(frozen=True)
class Task:
    """A measurement. share: of the seconds of all tasks, the most that it may take.

    run: called as `run(options, seconds, tell, *arguments)`, where seconds is how long it may take; an
    importable function.
    """

    part: str
    name: str
    share: float
    run: Callable[..., None]
    arguments: tuple = ()


def run_task(task: Task, options: Options, *, seconds: float) -> Iterator[Row]:
    """Runs a task; yields its rows as they come, then one of what ended it otherwise than it should."""
    context = multiprocessing.get_context("forkserver")  # it has imported torch, and touched no GPU
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(theirs, task, options, seconds))
    process.start()
    theirs.close()
    began = time.monotonic()  # the first one waited for the imports
    failure = None
    try:
        while True:
            left = began + seconds - time.monotonic()
            if left <= 0 or not ours.poll(left):
                failure = f"took longer than {seconds:.0f} s"
                break
            row = ours.recv()
            if row is None:
                break
            yield {"part": task.part, "name": task.name, **row}
    except (EOFError, OSError):
        process.join()
        failure = f"its process ended with status {process.exitcode}"
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # and what it has started
        process.kill()
        process.join()
    if failure:
        yield {"part": task.part, "name": task.name, "error": failure}


def _serve(connection: Connection, task: Task, options: Options, seconds: float) -> None:
    os.setpgid(0, 0)
    try:
        task.run(options, seconds, lambda **row: connection.send(row), *task.arguments)
    except NothingToDoError as reason:
        connection.send({"skipped": str(reason)})
    except BaseException as error:
        text = " ".join(str(error).split())[:1000]
        connection.send({"error": f"{type(error).__name__}: {text}", "where": place_of(error)})
    connection.send(None)


def place_of(error: BaseException) -> str:
    """Returns file and line of the innermost frame in this repository that an error came through."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename).is_relative_to(REPOSITORY) and ".venv" not in frame.filename
    ]
    return f"{Path(frames[-1].filename).relative_to(REPOSITORY)}:{frames[-1].lineno}" if frames else "?"
