"""Confidence intervals and t-tests, for an accuracy over test puzzles and for a mean over seeds.

For an integer number of degrees of freedom, the distribution function of Student's t is a finite sum
(Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.3 and 26.7.4). The standard library is
therefore enough.
"""

import math
import statistics
from collections.abc import Sequence


def wilson_interval(success_rate: float, count: int, *, z: float = 1.959964) -> tuple[float, float]:
    """Returns the ends (low, high) of Wilson's 95 % confidence interval of a fraction.

    The interval is also accurate for fractions near 0 or 1, and for few trials. If `success_rate` is a mean
    of values between 0 and 1, such as fractions of correct cells, the interval is wider than necessary.

    success_rate: Fraction of successes. A number outside of [0, 1] counts as 0 or 1.
    count: Number of independent trials, at least 1.
    z: Quantile of the normal distribution. It sets the confidence, 1.96 for 95 %.
    """
    assert count >= 1
    success_rate = min(max(success_rate, 0.0), 1.0)
    shrinkage = z * z / count
    centre = (success_rate + shrinkage / 2) / (1 + shrinkage)
    variance = success_rate * (1 - success_rate) / count + shrinkage / (4 * count)
    half = z * math.sqrt(variance) / (1 + shrinkage)
    return max(centre - half, 0.0), min(centre + half, 1.0)


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float | None]:
    """Returns (mean, sample standard deviation). With a single value, the deviation is None."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None


def goal_p(values: Sequence[float], goal: float) -> float | None:
    """Returns the p-value of a one-sided t-test for "the mean of `values` is above `goal`".

    A small p-value supports this claim. Returns None for a single value. If all values are equal, returns 0
    if they are above `goal`, otherwise 1.
    """
    mean, deviation = mean_and_deviation(values)
    if deviation is None:
        return None
    if deviation == 0:
        return 0.0 if mean > goal else 1.0
    return t_tail((mean - goal) * math.sqrt(len(values)) / deviation, len(values) - 1)


def difference_p(values: Sequence[float], others: Sequence[float]) -> float | None:
    """Returns the p-value of a two-sided t-test for "the two samples have different means".

    The test assumes equal variances (pooled variance). A small p-value supports a difference. If the pooled
    variance is 0, returns 1 for equal means, otherwise 0. Returns None if both samples have only one value.
    """
    freedom = len(values) + len(others) - 2
    if freedom < 1:
        return None
    means = [statistics.fmean(sample) for sample in (values, others)]
    squares = sum(
        (value - mean) ** 2 for mean, sample in zip(means, (values, others), strict=True) for value in sample
    )
    deviation = math.sqrt(squares / freedom * (1 / len(values) + 1 / len(others)))
    if deviation == 0:
        return 1.0 if means[0] == means[1] else 0.0
    return 2 * t_tail(abs(means[0] - means[1]) / deviation, freedom)


def mean_interval(values: Sequence[float], *, confidence: float = 0.95) -> tuple[float, float] | None:
    """Returns the confidence interval (low, high) of the mean of `values`, by Student's t distribution.

    Returns None for a single value.
    """
    mean, deviation = mean_and_deviation(values)
    if deviation is None:
        return None
    low, high = 0.0, 1e6
    for _ in range(100):  # bisection, beyond the precision of a float
        middle = (low + high) / 2
        is_below = t_tail(middle, len(values) - 1) > (1 - confidence) / 2
        low, high = (middle, high) if is_below else (low, middle)
    half = high * deviation / math.sqrt(len(values))
    return mean - half, mean + half


def t_tail(t: float, freedom: int) -> float:
    """Returns P(T >= t) for a random number T with Student's t distribution.

    freedom: Degrees of freedom, at least 1.
    """
    angle = math.atan2(t, math.sqrt(freedom))
    is_odd = freedom % 2
    term = total = (math.cos(angle) if freedom > 1 else 0.0) if is_odd else 1.0
    for number in range(2 + is_odd, freedom - 1, 2):
        term *= math.cos(angle) ** 2 * (number - 1) / number
        total += term
    within = 2 / math.pi * (angle + math.sin(angle) * total) if is_odd else math.sin(angle) * total
    return (1 - within) / 2
