"""Hooks and fixtures for many tests, such as a small generated dataset.

TEST_THREADS=2 gives torch two threads in every process of the tests. The default is one thread. Fixtures
import what they need, because the process that distributes the tests also imports this file, without torch.
"""

import contextlib
import gc
import itertools
import os
import random
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# Modules with the longest tests, of `make test` or of those that are marked long. Workers start with them.
_LONGEST = ("test_layouts", "test_recovery", "test_update_sharding", "test_wandb")


@pytest.hookimpl(trylast=True)  # after -m and -k have chosen
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sorts tests so that every worker of pytest-xdist starts with slow modules and ends with quick ones.

    The mode worksteal gives each worker a contiguous share. Idle workers take tests from the end of another
    share. If these are quick, all workers end together, and the fixtures of a slow module are set up on one
    worker. Of the quick modules, those that start ranks come first, so that few workers start the server of
    `tests.ranks`.
    """
    num_workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if num_workers == 1:
        return
    slow, quick = [], []
    for path, each in itertools.groupby(items, key=lambda item: item.path):
        module = list(each)
        if num_slow := sum(item.get_closest_marker("slow") is not None for item in module):
            slow.append((path.stem not in _LONGEST, -num_slow, module))
        else:
            quick += module
    slow = [module for *_, module in sorted(slow, key=lambda each: each[:2])]
    shares = [list(itertools.chain(*slow[worker::num_workers])) for worker in range(num_workers)]
    quick.sort(key=lambda item: vars(item.module).keys().isdisjoint(("run_ranks", "run_program", "_server")))
    rest = iter(quick)
    for share in shares:
        share += itertools.islice(rest, max(0, len(items) // num_workers - len(share)))
    items[:] = [*itertools.chain(*shares), *rest]


# Every program that a test calls or starts has as many threads.
os.environ.setdefault("OMP_NUM_THREADS", os.environ.get("TEST_THREADS", "1"))

gc.disable()  # imports leave millions of objects and no garbage: the collector takes a tenth of their time


def pytest_collection_finish() -> None:
    """Excludes all imported objects from garbage collection, so that tests run faster."""
    gc.freeze()
    gc.enable()


signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which tests send, and nohup lets all processes ignore


@pytest.fixture(autouse=True)
def no_plugins(monkeypatch):
    """Forgets the plugins that a test has imported, with their families of transforms, at its end."""
    from dataset.augmentations import AUGMENTATIONS
    from runtime import plugins

    monkeypatch.setattr(plugins, "_loaded", {})
    monkeypatch.setattr(plugins, "_has_option", False)
    before = len(sys.modules)
    yield
    if len(sys.modules) > before:
        for name in [name for name in sys.modules if name.startswith("plugin_")]:
            del sys.modules[name]
        for name, family in list(AUGMENTATIONS.items()):
            if any(getattr(part, "__module__", "").startswith("plugin_") for part in family):
                del AUGMENTATIONS[name]


@pytest.fixture(scope="session", autouse=True)
def _configs_are_parsed_once() -> None:
    from tests.parsing import parse_once

    parse_once()


@pytest.fixture(scope="session")
def sudoku_folder(tmp_path_factory) -> Path:
    """A dataset of 4x4 Sudokus: 200 generated puzzles for training and 100 for testing."""
    from dataset.build import build_dataset

    folder = tmp_path_factory.mktemp("data") / "sudoku"
    build_dataset("sudoku", ["--output-dir", str(folder), "--generate", "200", "--box", "2x2"])
    return folder


@pytest.fixture
def heeds_interrupts() -> Iterator[None]:
    """Lets Ctrl-C end this process and its children.

    Without this fixture, workers of pytest-xdist and jobs that a shell started with `&` ignore Ctrl-C.
    """
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, handler)


@pytest.fixture
def float64() -> Iterator[None]:
    """Makes torch compute in float64 where code names float32 or bfloat16, or uses the default dtype."""
    from tests import float64

    with float64.float64():
        yield


@pytest.fixture(autouse=True)
def _nothing_was_shown(monkeypatch) -> None:
    """Lets every test show all warnings, because a process shows equal warnings only once."""
    monkeypatch.setattr("distributed.log._console.shown", set())


@pytest.fixture(autouse=True)
def _threads_are_few() -> None:
    """Resets the number of torch's threads, because a program that ran in this process may have raised it."""
    import torch

    from tests.ranks import NUM_THREADS

    torch.set_num_threads(NUM_THREADS)


@pytest.fixture
def run(tmp_path) -> Path:
    """Path of a run folder that does not exist yet."""
    return tmp_path / "run"


@pytest.fixture
def free_port() -> int:
    """A free TCP port from 20000 to 29999. Linux itself assigns ports from 32768 on."""
    while True:
        with contextlib.suppress(OSError), socket.socket() as free:
            free.bind(("127.0.0.1", random.randrange(20_000, 30_000)))
            return free.getsockname()[1]


@pytest.fixture
def source(tmp_path) -> Path:
    """A folder with CSV files of 4x4 Sudokus: 40 puzzles for training and 10 for testing."""
    from tests.sudoku_source import source_rows, write_csv

    write_csv(tmp_path / "source" / "train.csv", source_rows(40))
    write_csv(tmp_path / "source" / "test.csv.gz", source_rows(10, stream=1))
    return tmp_path / "source"


@pytest.fixture
def folders(tmp_path) -> list[Path]:
    """Folders of two datasets, a and b, to be joined. In each, both splits have the same content."""
    from tests.puzzle_sets import A, B, write

    return [write(tmp_path / name, train=groups, test=groups) for name, groups in (("a", A), ("b", B))]
