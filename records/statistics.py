"""Student's t: whether the mean over seeds holds a goal, and the interval that it lies in.

The distribution with a whole number of degrees of freedom is a finite sum (Abramowitz and Stegun, Handbook of
Mathematical Functions, 26.7.3 and 26.7.4), so nothing beyond the standard library is needed.
"""

import math
from collections.abc import Sequence

from evaluation.results import mean_and_deviation

MOST_P = 0.01  # a goal is held where the p of `goal_p` is below

_STEPS_OF_BISECTION = 200  # more than a float has bits


def goal_p(values: Sequence[float], goal: float) -> float | None:
    """Computes the p of the one-sided one-sample t-test: the mean is above the goal, against not above it.

    None for fewer than two values. Values that are all the same have p 0 above the goal, else 1.
    """
    mean, deviation = mean_and_deviation(values)
    if deviation is None:
        return None
    if deviation == 0:
        return 0.0 if mean > goal else 1.0
    return t_tail((mean - goal) * math.sqrt(len(values)) / deviation, len(values) - 1)


def mean_interval(values: Sequence[float], *, confidence: float = 0.95) -> tuple[float, float] | None:
    """Computes the interval that the mean over all seeds lies in with this confidence; None for one value."""
    mean, deviation = mean_and_deviation(values)
    if deviation is None:
        return None
    low, high = 0.0, 1.0
    while t_tail(high, len(values) - 1) > (1 - confidence) / 2:
        high *= 2
    for _ in range(_STEPS_OF_BISECTION):
        middle = (low + high) / 2
        is_below = t_tail(middle, len(values) - 1) > (1 - confidence) / 2
        low, high = (middle, high) if is_below else (low, middle)
    half = high * deviation / math.sqrt(len(values))
    return mean - half, mean + half


def t_tail(t: float, freedom: int) -> float:
    """Computes P(T >= t) of Student's t with `freedom` (at least 1) degrees of freedom."""
    angle = math.atan2(t, math.sqrt(freedom))
    is_odd = freedom % 2
    term = total = (math.cos(angle) if freedom > 1 else 0.0) if is_odd else 1.0
    for number in range(2 + is_odd, freedom - 1, 2):
        term *= math.cos(angle) ** 2 * (number - 1) / number
        total += term
    within = 2 / math.pi * (angle + math.sin(angle) * total) if is_odd else math.sin(angle) * total
    return (1 - within) / 2
