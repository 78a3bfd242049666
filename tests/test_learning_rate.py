"""The learning rate at its corners."""

import pytest

from optimizers.learning_rate import scheduled_lr


def _rates(**options) -> list[float]:
    return [scheduled_lr(step, base=2.0, total_steps=100, **options) for step in range(1, 101)]


def test_warm_up_is_linear_and_reaches_the_peak():
    rates = _rates(warmup_steps=10, min_ratio=1.0)
    assert rates[:10] == pytest.approx([0.2 * step for step in range(1, 11)])
    assert rates[10:] == pytest.approx([2.0] * 90)


def test_cosine_ends_exactly_at_the_last_step():
    rates = _rates(warmup_steps=10, min_ratio=0.1)
    assert rates[9] == pytest.approx(2.0)
    assert rates[54] == pytest.approx(2.0 * 0.55)
    assert rates[99] == pytest.approx(0.2)
    assert rates[9:] == sorted(rates[9:], reverse=True)


@pytest.mark.parametrize("warmup_steps", [0, 100, 200])
def test_no_warm_up_and_nothing_but_warm_up(warmup_steps):
    rates = _rates(warmup_steps=warmup_steps, min_ratio=0.5)
    assert all(0 < rate <= 2.0 for rate in rates)
    assert rates[-1] == pytest.approx({0: 1.0, 100: 2.0, 200: 1.0}[warmup_steps])
