"""How far to trust a score: the uncertainty of one test, and the spread of several runs.

Two questions that are easily mixed up: how the score would move with other test puzzles (`wilson_interval`),
and how it moves with another seed (`mean_and_deviation`). Neither says anything of the other.
"""

import math
import statistics
from collections.abc import Sequence


def wilson_interval(successes_share: float, count: int, *, z: float = 1.959964) -> tuple[float, float]:
    """(low, high), fractions: where the true share lies with 95 % confidence (z), by Wilson's score interval.

    successes_share: how many of `count` (at least 1) independent trials succeeded, as a fraction. Unlike the
    usual share plus minus 1.96 standard errors it holds near 0 and 1 and for few trials, and never leaves
    0 .. 1. It is valid, if too wide, for the mean p of any values in 0 .. 1, such as the share of right
    cells: their variance is at most p (1 - p), that of successes and failures.
    """
    assert count >= 1
    assert 0 <= successes_share <= 1
    shrinkage = z * z / count
    centre = (successes_share + shrinkage / 2) / (1 + shrinkage)
    variance = successes_share * (1 - successes_share) / count + shrinkage / (4 * count)
    half = z * math.sqrt(variance) / (1 + shrinkage)
    return max(centre - half, 0.0), min(centre + half, 1.0)


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float | None]:
    """(mean, sample standard deviation: over n - 1), e.g. of one score over seeds; one value has none: None.

    values: at least one.
    """
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None
