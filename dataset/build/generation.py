"""Generates different puzzles for both splits of a dataset, on all CPU cores."""

import concurrent.futures
import contextlib
import functools
import itertools
import multiprocessing
import os
import signal
import sys
import threading
import time
import types
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from runtime.plugins import load_plugins, plugin_paths

_FIRST_LINE_SECONDS, _LINE_SECONDS = 10, 60  # times between lines that say how far the generation is
_SECONDS_ALONE = 2.0  # time that this process generates puzzles before it starts others
_DRAWS_OF_A_TASK = 8


def draw_distinct(
    draw: Callable[[str, int], Sequence[np.ndarray]],
    *,
    num_train: int,
    num_test: int,
    max_misses: int,
    refusal: str,
    distinct_part: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """Generates puzzles with different inputs. Returns (training, test), uint8 [puzzles, parts, cells] each.

    Calls draw(split, 0), draw(split, 1), ... until there are `num_test` test puzzles, and in the same way
    `num_train` training puzzles. No input is in both. After 2 s, all CPU cores work. Raises ValueError if
    `max_misses` calls in a row give no new puzzle.

    draw: Picklable function (split, index) -> list of puzzles [parts, cells]. Part 0 is the input, part 1
    usually the answer. refusal: Message of the ValueError. In it, {count} becomes the number of puzzles
    found. distinct_part: Part in which all puzzles of both splits differ.
    """
    seen: set[bytes] = set()
    drawn = {}
    due = time.monotonic() + _FIRST_LINE_SECONDS
    for split, count in (("test", num_test), ("train", num_train)):
        distinct: list[np.ndarray] = []
        last_index = -1  # index of the call that gave the latest new puzzle
        with contextlib.closing(_draw_in_turn(functools.partial(draw, split))) as draws:
            for index, puzzles in enumerate(draws):
                for puzzle in puzzles:
                    key = puzzle[distinct_part].tobytes()
                    if key not in seen and len(distinct) < count:
                        seen.add(key)
                        distinct.append(puzzle)
                        last_index = index
                if len(distinct) >= count:
                    break
                if time.monotonic() >= due:
                    print(
                        f"generated {len(distinct)} of {count} {split} puzzles", file=sys.stderr, flush=True
                    )
                    due = time.monotonic() + _LINE_SECONDS
                if index - last_index >= max_misses:
                    raise ValueError(refusal.format(count=len(seen)))
        drawn[split] = np.stack(distinct)
    return drawn["train"], drawn["test"]


def _draw_in_turn(draw: Callable[[int], Sequence[np.ndarray]]) -> Iterator[Sequence[np.ndarray]]:
    """Yields draw(0), draw(1), ... in this order, forever.

    After 2 s, one process for each core computes them.
    """
    started = time.monotonic()
    index = 0
    while time.monotonic() - started < _SECONDS_ALONE:
        yield draw(index)
        index += 1
    num_processes = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    pool = concurrent.futures.ProcessPoolExecutor(
        num_processes, multiprocessing.get_context("spawn"), initializer=_start, initargs=(plugin_paths(),)
    )
    try:
        pending: deque[Iterator] = deque()
        for first in itertools.count(index, _DRAWS_OF_A_TASK):
            draws = range(first, first + _DRAWS_OF_A_TASK)
            with _without_main():  # the executor starts processes here
                pending.append(pool.map(draw, draws, chunksize=_DRAWS_OF_A_TASK))
            if len(pending) > 2 * num_processes:
                yield from pending.popleft()
    except concurrent.futures.BrokenExecutor:
        raise MemoryError("a process that generates puzzles was killed (out of memory?).") from None
    finally:
        pool.shutdown(cancel_futures=True)


def _start(plugins: list[str]) -> None:
    """Prepares a process that generates puzzles: imports plugins, and ignores Ctrl-C.

    The parent process handles Ctrl-C. If the parent ends, this process ends too. plugins: Paths of the files.
    """
    load_plugins(plugins)

    def watch() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=watch, daemon=True).start()


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Context manager for code that starts processes. Prevents them from running the user's script again.

    With the start method "spawn", a new process would import the script as its main module.
    """
    main, sys.modules["__main__"] = sys.modules["__main__"], types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
