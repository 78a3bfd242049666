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
    """Generates puzzles for both splits. Returns (training puzzles, test puzzles).

    Both arrays are uint8 [puzzles, parts, cells]. Part 0 of a puzzle is its input, and part 1 is usually its
    answer. If a split takes more than 2 s, all CPU cores generate the rest of it.

    Args:
        draw: `draw(split, index)` returns a list of puzzles, [parts, cells] each. It must be picklable. It is
            called for the index 0, 1, ... until there are enough puzzles.
        num_train: Number of training puzzles.
        num_test: Number of test puzzles.
        max_misses: Number of calls in a row without a new puzzle after which ValueError is raised.
        refusal: Message of this ValueError. "{count}" in it becomes the number of puzzles found, of both
            splits.
        distinct_part: Index of the part that must differ. A puzzle is left out if this part equals that of an
            earlier puzzle of either split.
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
    """Yields draw(0), draw(1), ... without end. After 2 s, one process per core computes them."""
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
    load_plugins(plugins)

    def watch() -> None:  # ends this process with its parent
        multiprocessing.parent_process().join()
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process handles Ctrl-C
    threading.Thread(target=watch, daemon=True).start()


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    # Processes that are started here must not import and run the user's script, as "spawn" does. They
    # inherit the signal mask, so Ctrl-C does not reach them before `_start` runs.
    main, sys.modules["__main__"] = sys.modules["__main__"], types.ModuleType("__main__")
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
