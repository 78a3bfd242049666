"""Each way to select, against a naive loop over recorded runs."""

from collections import Counter

import numpy as np
import pytest

from evaluation.selection import Samples, select

_PUZZLES, _SAMPLES, _LENGTH = 300, 7, 3


@pytest.fixture
def runs() -> Samples:
    """Few different values, so that there are ties of every kind; some puzzles where no run halts."""
    generator = np.random.default_rng(0)
    shape = (_PUZZLES, _SAMPLES)
    q_halt = generator.integers(-3, 4, shape).astype(np.float32)
    q_halt[5, 2] = np.nan
    return Samples(
        preds=generator.integers(0, 2, (*shape, _LENGTH)).astype(np.uint8),
        q_halt=q_halt,
        steps=generator.integers(1, 4, shape).astype(np.int32),
        has_halted=generator.random(shape) < 0.2,
        residuals=generator.choice([0.5, 1.0, np.nan], shape).astype(np.float32),
        are_valid=generator.random(shape) < 0.2,
    )


def _rank(by: str, runs: Samples, puzzle: int, sample: int) -> tuple:
    """What makes a run come first: the smaller, the better."""
    whole = [tuple(pred) for pred in runs.preds[puzzle].tolist()]
    q_halt = runs.q_halt[puzzle, sample]
    own = {
        "q_head": 0,
        "q_head_any_step": 0,
        "first_to_halt": runs.steps[puzzle, sample] if runs.has_halted[puzzle, sample] else 99,
        "vote": -Counter(whole)[whole[sample]],
        "residual": np.nan_to_num(runs.residuals[puzzle, sample], nan=99),
        "rules": not runs.are_valid[puzzle, sample],
    }[by]
    return own, np.inf if np.isnan(q_halt) else -q_halt, sample


@pytest.mark.parametrize("by", ["q_head", "q_head_any_step", "first_to_halt", "vote", "residual", "rules"])
def test_naive_loop(runs, by):
    chosen = select(by, runs)
    for puzzle in range(_PUZZLES):
        best = min(range(_SAMPLES), key=lambda sample: _rank(by, runs, puzzle, sample))
        assert chosen[puzzle] == best
