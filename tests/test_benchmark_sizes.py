"""benchmarks.sizes: the published experiments run by their names, for a few steps of tiny models."""

import json
from pathlib import Path

import pytest

from benchmarks import sizes
from dataset.build import build_dataset
from tests.ranks import REPOSITORY, run_program


def test_names_are_experiments_with_a_published_score():
    for name in sizes.EXPERIMENTS:
        text = (REPOSITORY / "config" / "experiment" / f"{name}.yaml").read_text()
        assert "# Published:" in text
    assert {kind for kind, _ in sizes.EXPERIMENTS.values()} == sizes._KINDS.keys()


@pytest.mark.slow
def test_what_is_done_is_not_trained_again(tmp_path, monkeypatch, capsys):
    """By the real programs, forked."""
    started = []

    def run(*words: object, processes: int = 1, threads: int = 1, until=None) -> None:
        first, *rest = map(str, words)
        started.append(first)
        if first == "-m":
            assert rest[0] == "dataset.build"
            build_dataset(rest[1], rest[2:])
            return
        finished = run_program(
            Path(first).stem, *rest, f"max_steps={sizes._QUICK_STEPS}", folder=tmp_path, world_size=processes
        )
        assert finished.statuses == [0] * processes, finished.stderr

    monkeypatch.setattr(sizes, "run_program", run)
    words = ["--quick", "--only", "sudoku_extreme", "trm_maze", "--folder", str(tmp_path / "sizes")]
    results = []
    for _ in range(2):
        sizes.main(words)
        results.append(json.loads(capsys.readouterr().out.splitlines()[-1]))
    assert started == ["-m", "pretrain.py"] * 2
    assert results[0]["trm_maze"] == results[1]["trm_maze"]
    for name, groups, epochs in (("sudoku_extreme", 1000, 20000), ("trm_maze", 1000, 50000)):
        found = results[0][name]
        assert found["published_seconds"] == pytest.approx(
            epochs * groups * found["step_seconds"] / found["puzzles"], rel=1e-3
        )
        assert found["peak_memory_bytes"] > 2**20
        assert min(found["first_loss"], found["last_loss"]) > 0
