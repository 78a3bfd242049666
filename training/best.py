"""Chooses a run's best checkpoint: by which metric, on which puzzles."""

import math
from collections.abc import Mapping
from typing import Literal

from evaluation.results import metrics_by_set

_PASSES = ("eval", "eval_raw", "validation")


def goal_of(name: str) -> Literal["max", "min"] | None:
    """Returns whether high ("max") or low ("min") values of a metric are good; None where neither are."""
    metric = name.rpartition("/")[2]
    if metric.endswith("loss"):
        return "min"
    return "max" if "accuracy" in metric or metric.startswith("pass@") else None


class Selection:
    """The rule that selects the best checkpoint from the rows of the log, by the metric `keep_best`.

    keep_best: a metric such as exact_accuracy, averaged over sets by number of puzzles, or one value of a row
    such as eval/all/exact_accuracy. The best loss is the lowest, any other best value the highest; of equal
    values the newest wins. selected_by: "validation" or "test", the puzzles that the metric is of. A best
    value on the test split is the maximum of several, and so too optimistic for new puzzles.
    """

    def __init__(self, keep_best: str, *, has_validation: bool):
        self.metric = keep_best
        split, _, rest = keep_best.partition("/")
        self._is_one_value = split in _PASSES and "/" in rest
        self._pass = split if self._is_one_value else "validation" if has_validation else "eval"
        self.selected_by = "validation" if self._pass == "validation" else "test"
        self.lowest_is_best = goal_of(keep_best) == "min"

    def value(self, row: Mapping[str, float]) -> float | None:
        """Returns the value of `keep_best` in a row of the log; None where the row has no such metric."""
        if self._is_one_value:
            return row.get(self.metric)
        evaluator, slash, _ = self.metric.rpartition("/")
        sets = [each for each in metrics_by_set(row, self._pass).values() if self.metric in each]
        if len(sets) < 2:
            return sets[0][self.metric] if sets else None
        counts = [each[f"{evaluator}{slash}count"] for each in sets]
        return sum(each[self.metric] * count for each, count in zip(sets, counts, strict=True)) / sum(counts)

    def short_name(self, name: str) -> str | None:
        """Returns the metric of a name such as eval/all/exact_accuracy; None for other puzzles."""
        split, _, rest = name.partition("/")
        return rest.partition("/")[2] if split == self._pass else None

    def is_evaluated(self, row: Mapping[str, float]) -> bool:
        """Returns whether a row of the log has an evaluation of the puzzles `selected_by`."""
        return any(name.startswith(f"{self._pass}/") for name in row)

    def best_step(self, values: Mapping[int, float]) -> int | None:
        """Returns the step of the best value. values: {step: value}; None where no value is finite."""
        sign = -1 if self.lowest_is_best else 1
        rated = [(sign * value, step) for step, value in values.items() if math.isfinite(value)]
        return max(rated)[1] if rated else None
