"""How many messages ranks exchange in a step, counted in a real run: none comes that is not known here."""

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.ranks import call_each, run_ranks
from tests.sudoku_source import build_sets
from tests.tiny import run_of, tiny_arch, tiny_config

_COLLECTIVES = (
    *("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_single", "all_gather_object"),
    *("all_to_all", "all_to_all_single", "barrier", "monitored_barrier", "broadcast", "gather", "reduce"),
    *("gather_object", "broadcast_object_list", "reduce_scatter_tensor", "scatter", "batch_isend_irecv"),
    *("send", "recv"),
)


@contextlib.contextmanager
def _counted(calls: list[str]) -> Iterator[None]:
    """Notes the name of every collective that is called."""
    original = {name: getattr(dist, name) for name in _COLLECTIVES if hasattr(dist, name)}

    def noting(name: str):
        def call(*arguments, **options):
            calls.append(name)
            return original[name](*arguments, **options)

        return call

    for name in original:
        setattr(dist, name, noting(name))
    try:
        yield
    finally:
        for name, function in original.items():
            setattr(dist, name, function)


def _messages(folder: Path, data: Path, options: dict[str, Any]) -> list[Counter]:
    """Trains 5 steps or more, of which 1 and 4 are logged; returns what each sends until the next begins."""
    import pretrain

    calls, begins, train_step = [], [], pretrain.train_step

    def noting(*arguments, **others):
        begins.append(len(calls))
        return train_step(*arguments, **others)

    paths = {"data_path": str(data), "checkpoint_path": str(folder)}
    steps = {"eval_interval": None, "max_steps": 5, "log_interval": 4, "sanity_check": False}
    pretrain.train_step = noting
    with _counted(calls):
        pretrain.train(run_of(tiny_config(**paths, **steps, **options)))
    pretrain.train_step = train_step
    return [Counter(calls[begin:end]) for begin, end in itertools.pairwise(begins)]


_JOIN = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
# Config keys, and what a step sends: gradients by all_reduce, rows of the puzzles by all_gather.
_RUNS = {
    "plain": ({"sync": "flat"}, Counter(all_reduce=1, all_gather=1)),
    "shared memory": ({}, Counter(all_reduce=3, all_gather=1)),  # of 4 bytes each
    "shared memory, whole moments": ({"data_parallel_shard_degree": 1}, Counter(all_reduce=2, all_gather=1)),
    "puzzles alone": (  # what is told, and their rows
        {"train_only": "puzzle_embeddings"},
        Counter(all_reduce=1, all_gather=1),
    ),
    "buckets": ({"sync": "flat", "bucket_size_mb": 0.1}, Counter(all_reduce=3, all_gather=1)),
    "no table": ({"sync": "flat", "arch": tiny_arch(puzzle_emb_ndim=0).model_dump()}, Counter(all_reduce=1)),
    "a spread table": (  # how many rows go where, which, they themselves, and back
        {"sync": "flat", "puzzle_emb_sharding": "rows"},
        Counter(all_reduce=1, all_to_all_single=4),
    ),
    "shared moments": (
        {"sync": "flat", "data_parallel_shard_degree": -1},
        Counter(all_reduce=1, all_gather=1, **{_JOIN: 1}),
    ),
    "ddp": ({"sync": "ddp"}, Counter(all_reduce=2, all_gather=1)),  # what is told, by itself
}
_ROW = Counter(reduce=1, all_gather=1)  # metrics and times, where they are logged


@pytest.mark.slow
def test_a_step_sends_its_gradients_and_the_rows_of_its_puzzles(tmp_path):
    build_sets("sudoku", tmp_path / "data", "--generate", 40, "--num-test", 1, "--box", "2x2")
    runs = [(tmp_path / name, tmp_path / "data", options) for name, (options, _) in _RUNS.items()]
    for sent in run_ranks(call_each, 2, _messages, runs):
        for (name, (_, step)), messages in zip(_RUNS.items(), sent, strict=True):
            assert messages == [step + _ROW, step, step, step + _ROW], name


@pytest.mark.slow
def test_local_steps_send_no_gradients(tmp_path, sudoku_folder):
    """After every fourth: weights, rows that moved, and their numbers."""
    options = {"local_steps": 4, "outer_lr": 0.7, "outer_momentum": 0.9, "ema": 0.9}
    exchange = Counter(all_reduce=1, all_gather=2)
    for sent in run_ranks(_messages, 2, tmp_path, sudoku_folder, options):
        assert sent[:4] == [Counter()] * 3 + [exchange + _ROW]
