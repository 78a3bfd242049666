"""Chooses a run's best checkpoint: by which metric, on which puzzles."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from checkpointing.best import BEST_STEP, SELECTED_BY
from config.schema import PretrainConfig
from distributed import log
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
        """Returns the step of the best of the values {step: value}, or None where no value is finite."""
        sign = -1 if self.lowest_is_best else 1
        rated = [(sign * value, step) for step, value in values.items() if math.isfinite(value)]
        return max(rated)[1] if rated else None


class BestStep:
    """The best step of a run so far by the metric `keep_best`, if the run has one; on rank 0."""

    def __init__(self, config: PretrainConfig):
        self._selection = None
        if config.keep_best is not None:
            self._selection = Selection(config.keep_best, has_validation=config.validation_fraction > 0)
        self._values: dict[int, float] = {}  # of the metric, by step

    def record(self, step: int, row: Mapping[str, float]) -> dict[str, float | str]:
        """Records a row of the log for the choice of the best checkpoint.

        Returns the best value so far, as best/<metric>, best/step and best/selected_by; {} where the row has
        no evaluation.
        """
        if self._selection is None or not self._selection.is_evaluated(row):
            return {}
        self.check(row)
        if (value := self._selection.value(row)) is not None:
            self._values[step] = value
        if (best := self.state()) is None:
            return {}
        name = f"best/{best['metric']}"
        return {name: best["value"], BEST_STEP: best["step"], SELECTED_BY: best["selected_by"]}

    def check(self, row: Mapping[str, float]) -> None:
        """Warns if an evaluation lacks the metric."""
        selection = self._selection
        if selection is None or not selection.is_evaluated(row) or selection.value(row) is not None:
            return
        names = {selection.short_name(name) for name in row} - {None}
        log.warning(
            f"keep_best={selection.metric} is no metric of an evaluation, so that no checkpoint is the best: "
            f"choose from {', '.join(sorted(names))}"
        )

    def among(self, steps: Iterable[int]) -> int | None:
        """Returns the best of these steps; None where none has a value. Other threads may call it."""
        values = {step: self._values[step] for step in steps if step in self._values}
        return None if self._selection is None else self._selection.best_step(values)

    def state(self) -> dict[str, float | str] | None:
        """Returns metric, selected_by, step and value of the best evaluation, for state.json; or None."""
        if (step := self.among(self._values)) is None:
            return None
        named = {"metric": self._selection.metric, "selected_by": self._selection.selected_by}
        return {**named, "step": step, "value": self._values[step]}

    def load_state(self, saved: dict[str, Any] | None, rows: Iterable[Mapping[str, float]]) -> None:
        """Takes the values of a resumed run from the rows of its log, and from the checkpoint's `state`.

        The row of the best step may be missing in the log.
        """
        if self._selection is None:
            return
        known = {"metric": self._selection.metric, "selected_by": self._selection.selected_by}
        if saved and known.items() <= saved.items():
            self._values[saved["step"]] = saved["value"]
        for row in rows:
            if (value := self._selection.value(row)) is not None:
                self._values[row["step"]] = value
