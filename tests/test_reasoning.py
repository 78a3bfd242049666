"""benchmarks.reasoning: that gains compare equals, and that it runs to its last line."""

import json
from pathlib import Path

import pytest

from benchmarks import reasoning
from dataset.build import build_dataset
from tests.ranks import run_program


def test_gains_are_of_means_and_at_equal_steps():
    first = {(4, 1): {"plain": 0.5, "vote": 0.4, "rules": 0.9, "any": 0.9}}
    first |= {(4, 8): {"plain": 0.5, "vote": 0.6, "rules": 0.9, "any": 0.9}}
    first |= {(16, 8): {"plain": 0.7, "vote": 0.7, "rules": 0.9, "any": 0.9}}
    second = {where: {way: share + 0.1 for way, share in shares.items()} for where, shares in first.items()}
    assert reasoning._gains([first, second]) == (pytest.approx(0.1), pytest.approx(0.2))
    assert "0.650 +- 0.071" in reasoning._table("models", [first, second])


@pytest.mark.slow
def test_what_reasoning_gains_ends_with_a_line_of_json(tmp_path, monkeypatch, capsys):
    """By the real programs, forked: it starts a dozen of them."""

    def run(*words: object, processes: int = 1) -> None:
        first, *rest = map(str, words)
        if first == "-m":
            assert rest[:2] == ["dataset.build", "sudoku"]
            build_dataset("sudoku", rest[2:])
            return
        finished = run_program(Path(first).stem, *rest, folder=tmp_path, world_size=processes)
        assert finished.statuses == [0] * processes, finished.stderr

    monkeypatch.setattr(reasoning, "run_program", run)
    monkeypatch.setattr(reasoning, "num_cores", lambda: 1)
    reasoning.main(["--quick", "--models", "hrm_4x4"])
    said = capsys.readouterr().out
    result = json.loads(said.splitlines()[-1])
    assert result["equal_over_processes"] is True
    assert result["grid_calls_over_parts"] == pytest.approx(16 / 36)
    assert {"gain_samples", "gain_steps", "grid_seconds_over_parts"} <= result.keys()
    assert "hrm_4x4 early, 1 seeds" in said
