"""What many tests need, such as a small generated dataset.

TEST_THREADS=2 gives torch two threads in every process of the tests; one is the default.
Fixtures import what they need: the process that hands out the tests reads this file too, without torch.
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

# Modules with tests of half a minute or more: each worker starts with one of them.
_LONGEST = ("test_recovery", "test_compilation", "test_layouts", "test_wandb")


@pytest.hookimpl(trylast=True)  # after -m and -k have chosen
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Lets every worker of pytest-xdist start with modules that have slow tests, and end with quick ones.

    Worksteal gives each worker a contiguous share. Idle workers take tests from the end of another share. If
    these are quick, all workers end together, and no module's fixtures are set up on several workers. Of the
    quick modules, those that start ranks come first: their worker alone starts the server of `tests.ranks`.
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
    """What has been imported is never garbage: the collector need not look at it in every test."""
    gc.freeze()
    gc.enable()


signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which tests send, and nohup lets all processes ignore


@pytest.fixture(autouse=True)
def no_plugins(monkeypatch):
    """Forgets the plugins that a test imports."""
    from runtime import plugins

    monkeypatch.setattr(plugins, "_loaded", {})
    before = len(sys.modules)
    yield
    if len(sys.modules) > before:
        for name in [name for name in sys.modules if name.startswith("plugin_")]:
            del sys.modules[name]


@pytest.fixture(scope="session", autouse=True)
def _configs_are_parsed_once() -> None:
    from tests.parsing import parse_once

    parse_once()


@pytest.fixture(scope="session")
def sudoku_folder(tmp_path_factory) -> Path:
    """200 generated 4x4 puzzles for training and 100 for testing."""
    from dataset.build import build_dataset

    folder = tmp_path_factory.mktemp("data") / "sudoku"
    build_dataset("sudoku", ["--output-dir", str(folder), "--generate", "200", "--box", "2x2"])
    return folder


@pytest.fixture
def heeds_interrupts() -> Iterator[None]:
    """Lets Ctrl-C end this process and its children: workers of pytest-xdist and jobs after `&` ignore it."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, handler)


@pytest.fixture
def float64() -> Iterator[None]:
    """torch computes in float64 where it is asked for less."""
    from tests import float64

    with float64.float64():
        yield


@pytest.fixture(autouse=True)
def _nothing_was_shown(monkeypatch) -> None:
    """Warnings are shown once for each text and process: every test begins as a process does."""
    monkeypatch.setattr("distributed.log._console.shown", set())


@pytest.fixture(autouse=True)
def _threads_are_few() -> None:
    """Programs that a test calls in its own process take all cores, which slows down all tests after it."""
    import torch

    from tests.ranks import NUM_THREADS

    torch.set_num_threads(NUM_THREADS)


@pytest.fixture
def run(tmp_path) -> Path:
    """A run folder that is not there yet."""
    return tmp_path / "run"


@pytest.fixture
def free_port() -> int:
    """A TCP port that nobody listens on; the system chooses others, from 32768, for those who do not ask."""
    while True:
        with contextlib.suppress(OSError), socket.socket() as free:
            free.bind(("127.0.0.1", random.randrange(20_000, 30_000)))
            return free.getsockname()[1]


@pytest.fixture
def source(tmp_path) -> Path:
    """CSV files of 4x4 puzzles: 40 for training and 10 for testing."""
    from tests.sudoku_source import source_rows, write_csv

    write_csv(tmp_path / "source" / "train.csv", source_rows(40))
    write_csv(tmp_path / "source" / "test.csv.gz", source_rows(10, stream=1))
    return tmp_path / "source"


@pytest.fixture
def folders(tmp_path) -> list[Path]:
    """Datasets `a` and `b` to be joined: each is the same for training and for testing."""
    from tests.puzzle_sets import A, B, write

    return [write(tmp_path / name, train=groups, test=groups) for name, groups in (("a", A), ("b", B))]
