"""Mistakes that several ranks meet: one line from us, status not 0, nothing half-written.

What each line says is held where it is made: test_dataset_files.py for data, mistakes.yaml for configs.
"""

import resource
import shutil
import sys
from pathlib import Path

import pytest
import torch

from distributed.collectives import Ranks
from tests.checkpoints import save_on
from tests.ranks import NUM_THREADS, Finished, run_program
from tests.tiny import OVERRIDES, tiny_config
from training import state


@pytest.fixture
def data(tmp_path, sudoku_folder) -> Path:
    return shutil.copytree(sudoku_folder, tmp_path / "data")


def _assert_is_one_line(finished: Finished, world_size: int, *parts: str) -> None:
    assert all(status not in (0, None) for status in finished.statuses), finished
    assert len(finished.statuses) == world_size
    assert len(finished.error_lines) == 1, finished.stderr
    assert finished.error_lines[0].startswith("error: ")
    for part in parts:
        assert part in finished.error_lines[0]


def _pretrain(folder: Path, *words: str, world_size: int | None = 2, **environment: str) -> Finished:
    options = {"folder": folder, "world_size": world_size, **environment}
    return run_program("pretrain", "data_path=data", *OVERRIDES, *words, **options)


# The word on the command line, or the file of the data that is cut to its half, and what the line names.
_MISTAKES = [
    ("epoch=3", ["unknown key 'epoch'", "'epochs'"]),
    ("data/train/all__inputs.npy", ["all__inputs.npy", "truncated"]),
    ("global_batch_size=25", ["global_batch_size 25", "2 processes"]),
    ("backend=nccl", ["backend=nccl", "device=cuda"]),
    ("checkpoint_path=file/run", ["cannot write into the run folder", "checkpoint_path"]),
    ("evaluators=[arc]", ["is not a dataset of kind arc", "Choose the evaluator"]),
]
_COMPILER = ("compile=true", ["compile=true", "no-such-compiler", "compile=auto"])


@pytest.mark.parametrize(
    ("mistake", "parts"),
    [
        *_MISTAKES[:2],
        *(pytest.param(*each, marks=pytest.mark.slow) for each in _MISTAKES[2:]),
        pytest.param(*_COMPILER, marks=[pytest.mark.slow, pytest.mark.long]),
    ],
)
def test_mistakes_in_training(tmp_path, data, mistake, parts):
    (tmp_path / "file").touch()
    words = [mistake]
    if "=" not in mistake:
        (tmp_path / mistake).write_bytes((tmp_path / mistake).read_bytes()[:-100])
        words = []
    _assert_is_one_line(_pretrain(tmp_path, *words, CXX="no-such-compiler"), 2, *parts)
    if mistake == "epoch=3":
        _assert_is_one_line(_pretrain(tmp_path, *words, world_size=None), 1, *parts)
    assert {path.name for path in tmp_path.iterdir()} == {"data", "file", ".output_pretrain"}


def _evaluate(folder: Path, *words: str) -> Finished:
    words = (*words, "device=cpu", f"cpu_threads={NUM_THREADS}")
    return run_program("evaluate", *words, folder=folder, world_size=2)


@pytest.mark.slow
def test_mistakes_in_evaluation(tmp_path, data):
    save_on(data, tmp_path / "run")
    for name in ("deeper", "corrupt"):
        shutil.copytree(tmp_path / "run" / "step_1", tmp_path / name / "step_1")
    config = tmp_path / "deeper" / "step_1" / "config.yaml"
    config.write_text(config.read_text().replace("H_layers: 1", "H_layers: 2"))
    (tmp_path / "deeper" / "step_1" / "manifest.json").unlink()
    (tmp_path / "corrupt" / "step_1" / "weights.safetensors").write_bytes(b"nothing")
    (tmp_path / "file").touch()
    for words, parts in (
        ([], ["checkpoint is missing"]),
        (["checkpoint=deeper/step_1"], ["weights do not match the config", "H_level.layers.1"]),
        (["checkpoint=corrupt"], ["step_1", "corrupt"]),
        (["checkpoint=run", "output_dir=file/out"], ["cannot write into", "output_dir"]),
    ):
        _assert_is_one_line(_evaluate(tmp_path, *words), 2, *parts)


def _limit_memory() -> None:
    """From here on this process has 300 MB."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + 300 * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere memory has no such limit")
def test_memory_at_its_end_is_one_line_with_what_needs_less(tmp_path, data):
    sizes = ("arch.hidden_size=256", "arch.H_layers=2", "arch.L_layers=2", "global_batch_size=192")
    words = ("data_path=data", *OVERRIDES, *sizes, "checkpoint_path=run", "sanity_check=false")
    finished = run_program("pretrain", *words, folder=tmp_path, spoil=_limit_memory)
    assert finished.statuses == [1]
    assert "Traceback" not in finished.stderr
    for part in ("error: out of memory", "192 of its 192 slots", "gradient_accumulation_steps=2"):
        assert part in finished.error_lines[-1]
    assert "in train_step" in (tmp_path / "run" / "logs" / "rank_0.log").read_text()


@pytest.mark.parametrize(("num_ranks", "told"), [(2, False), (4, True)])
def test_ranks_that_need_each_other_have_nothing_to_shard(monkeypatch, num_ranks, told):
    monkeypatch.setattr(state, "all_ranks", lambda: Ranks(0, num_ranks))
    advice = state.memory_advice(tiny_config(tensor_parallel_degree=2), torch.device("cuda"))
    assert ("data_parallel_shard_degree=-1" in advice) == told
    assert ("puzzle_emb_sharding=rows" in advice) == told
