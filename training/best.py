"""Selects the best checkpoint of a run by a metric of its evaluations (config key `keep_best`)."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from checkpointing.files import BEST_STEP, SELECTED_BY
from config.schema import PretrainConfig
from distributed import log
from distributed.collectives import broadcast_object
from distributed.world import is_main
from evaluation.metric_tables import is_count, is_number, metrics_by_set
from runtime.metrics_file import is_step

_PASSES = ("eval", "eval_raw", "validation")
_ERRORS = ("conflicts", "undecided", "wrong")  # metrics that are 0 at best


def goal_of(name: str) -> Literal["max", "min"] | None:
    """Returns "max" if high values of a metric are better, and "min" if low values are better.

    Example: "max" for "eval/all/exact_accuracy". Returns None for a metric of unknown meaning.
    """
    metric = name.rpartition("/")[2]
    if metric.endswith("loss") or metric in _ERRORS:
        return "min"
    return "max" if "accuracy" in metric or metric.startswith("pass@") else None


class Selection:
    """Selects the best checkpoint of a run by a metric in its log, metrics.jsonl.

    The best value of a loss, of `conflicts`, `undecided` or `wrong` is the lowest one. For any other metric,
    the highest value is the best. If several values are equal, the newest checkpoint is the best.
    `selected_by` is the split of the metric, "validation" or "test".

    keep_best: Name of the metric. A name with a set, such as "eval/all/exact_accuracy", means this value of a
        row. A name without a set, such as "exact_accuracy", means the mean over all sets of a split, weighted
        by the number of puzzles of each set. If all sets have 0 puzzles, their weights are equal.
    has_validation: Whether a metric without a set is read from the validation split instead of the test
        split.
    """

    def __init__(self, keep_best: str, *, has_validation: bool):
        self.metric = keep_best
        split, _, rest = keep_best.partition("/")
        self._is_one_value = split in _PASSES and "/" in rest
        self._pass = split if self._is_one_value else "validation" if has_validation else "eval"
        self.selected_by = "validation" if self._pass == "validation" else "test"
        self.lowest_is_best = goal_of(keep_best) == "min"

    def value(self, row: Mapping[str, float]) -> float | None:
        """Returns the value of the metric `keep_best` in a row of metrics.jsonl. None if it is missing."""
        if self._is_one_value:
            return row.get(self.metric)
        evaluator, slash, _ = self.metric.rpartition("/")
        sets = [metrics for metrics in metrics_by_set(row, self._pass).values() if self.metric in metrics]
        if len(sets) < 2:
            return sets[0][self.metric] if sets else None
        # An evaluator of a plugin may have no count, or count nothing in all sets.
        counts = [metrics.get(f"{evaluator}{slash}count", metrics.get("count", 1)) for metrics in sets]
        counts = counts if sum(counts) else [1] * len(sets)
        total = sum(metrics[self.metric] * count for metrics, count in zip(sets, counts, strict=True))
        return total / sum(counts)

    def evaluated(self, row: Mapping[str, float]) -> list[str]:
        """Returns the keys of a row that are from the split of the metric, such as "eval/all/accuracy"."""
        return [name for name in row if name.startswith(f"{self._pass}/")]

    def best_step(self, values: Mapping[int, float]) -> int | None:
        """Returns the step with the best value, or the latest of several such steps.

        Returns None if no value is finite.

        values: {training step: value of the metric}.
        """
        sign = -1 if self.lowest_is_best else 1
        rated = [(sign * value, step) for step, value in values.items() if math.isfinite(value)]
        return max(rated)[1] if rated else None


class BestStep:
    """Remembers the metric `keep_best` of each evaluation, and finds the training step with the best value.

    The config key `keep_best` names the metric. If it is null, no step is the best. Only rank 0 has values.
    """

    def __init__(self, config: PretrainConfig):
        self._selection = None
        if config.keep_best is not None:
            self._selection = Selection(config.keep_best, has_validation=config.validation_fraction > 0)
        self._values: dict[int, float] = {}  # {step: value of keep_best}

    def record(self, step: int, row: Mapping[str, float]) -> dict[str, float | str]:
        """Remembers the value of the metric `keep_best` in a row.

        Returns entries to add to the row: best/<metric> (best value so far), best/step, and best/selected_by
        (split of the metric, "validation" or "test"). Returns {} if `keep_best` is null, if the row contains
        no evaluation on the split of the metric, or if no value so far is finite. Warns if the evaluation
        lacks the metric.

        row: Row of metrics.jsonl for training step `step`.
        """
        if self._selection is None or not self._selection.evaluated(row):
            return {}
        self.check(row)
        if (value := self._selection.value(row)) is not None:
            self._values[step] = value
        if (best := self.state()) is None:
            return {}
        name = f"best/{best['metric']}"
        return {name: best["value"], BEST_STEP: best["step"], SELECTED_BY: best["selected_by"]}

    def check(self, row: Mapping[str, float]) -> None:
        """Warns if the row contains an evaluation, but not the metric that `keep_best` names."""
        selection = self._selection
        if selection is None or not selection.evaluated(row) or selection.value(row) is not None:
            return
        names = {name.split("/", 2)[2] for name in selection.evaluated(row) if not is_count(name)}
        problem = "is not a metric of the evaluation, so no checkpoint is the best"
        hint = f"Choose from {', '.join(sorted(names))}."
        if not names:
            problem, hint = f"{problem}: the puzzles have no labels", "Set keep_best=null."
        log.warning(f"keep_best={selection.metric} {problem}. {hint}")

    def best_of(self, steps: Iterable[int]) -> int | None:
        """Returns which of some training steps has the best evaluation. Other threads may call it.

        Returns None if none of the steps has an evaluation with a finite value, or if `keep_best` is null.
        """
        values = {step: self._values[step] for step in steps if step in self._values}
        return None if self._selection is None else self._selection.best_step(values)

    def ends_early(self, patience: int | None) -> bool:
        """Returns whether the run must end because its evaluations no longer improve. All ranks call it.

        Rank 0 decides, and broadcasts the result.

        patience: Number of evaluations without a new best value that ends the run. If None, the result is
        False.
        """
        if patience is None or not broadcast_object(is_main() and self.is_exhausted(patience)):
            return False
        if is_main():
            best = self.state()
            log.info(
                f"stop_patience={patience}: {best['metric']} ({best['selected_by']} split) was not better "
                f"than {best['value']:.4g} in {patience} evaluations. The run ends."
            )
        return True

    def is_exhausted(self, patience: int) -> bool:
        steps = [step for step in sorted(self._values) if math.isfinite(self._values[step])]
        sign = -1 if self._selection.lowest_is_best else 1
        best = max(steps, key=lambda step: sign * self._values[step], default=None)  # the first of equal ones
        return best is not None and sum(step > best for step in sorted(self._values)) >= patience

    def state(self) -> dict[str, float | str] | None:
        """Returns the best evaluation so far, or None if there is no evaluation with a finite value.

        Example: {"metric": "exact_accuracy", "selected_by": "test", "step": 100, "value": 0.9}.
        """
        if (step := self.best_of(self._values)) is None:
            return None
        named = {"metric": self._selection.metric, "selected_by": self._selection.selected_by}
        return {**named, "step": step, "value": self._values[step]}

    def load_state(self, saved: dict[str, Any] | None, rows: Iterable[Mapping[str, float]]) -> None:
        """Restores the values of earlier evaluations in a resumed run. Does not communicate.

        saved: The best evaluation when the checkpoint was saved, as `state` returned it. None if there was no
            evaluation yet, or if the checkpoint is from another run. Ignored if the metric or its split has
            changed since then.
        rows: Rows of metrics.jsonl up to the step of the checkpoint. If the row of the best step is lost, its
            value is known from `saved`.
        """
        if self._selection is None:
            return
        known = {"metric": self._selection.metric, "selected_by": self._selection.selected_by}
        is_known = saved is not None and known.items() <= saved.items()
        if is_known and is_step(saved.get("step")) and is_number(saved.get("value")):
            self._values[saved["step"]] = saved["value"]
        for row in rows:
            numbers = {name: value for name, value in row.items() if isinstance(value, (int, float))}
            if (value := self._selection.value(numbers)) is not None:
                self._values[row["step"]] = value
