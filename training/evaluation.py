"""An evaluation in the course of a run: the test split, and the puzzles that are held out for validation."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

from config.schema import PretrainConfig
from dataset.format import Dataset
from evaluation.passes import SetResult, evaluate_split
from evaluation.results import write_outputs
from parallel.errors import collective_errors
from parallel.process_group import is_main
from parallel.signals import Interruption
from training.data import RunData
from training.state import TrainState


def evaluate(
    config: PretrainConfig,
    state: TrainState,
    data: RunData,
    interruption: Interruption | None = None,
    *,
    only_first_batches: bool = False,
) -> dict[str, float] | None:
    """Evaluates the test split; returns on rank 0 the metrics of every set, as they are logged.

    All ranks call it. With EMA the averages are evaluated, and the weights themselves if asked for; the model
    runs the cycles of its architecture, whatever the stage. The puzzles of `test_data_path` are evaluated as
    test/<folder>.<set>; puzzles that `validation_fraction` holds out, without evaluators. None where the run
    was asked to stop before its end.
    """
    options: dict[str, Any] = {"only_first_batches": only_first_batches}
    if interruption is not None:
        options["all_reduce_stop"] = interruption.all_reduce_request
    row = {}
    data.warn_if_built_anew()
    for name in ("eval", "eval_raw") if config.raw else ("eval",):
        evaluators = data.evaluators[0].anew()
        with contextlib.nullcontext() if name == "eval_raw" else state.averaged():
            results = _evaluate(
                config, state, data.dataset, evaluators=evaluators, outputs=config.save_outputs, **options
            )
        if results is None:
            return None
        if not only_first_batches:
            folder = Path(config.checkpoint_path) / name.replace("eval", "evaluation") / f"step_{state.step}"
            with collective_errors():
                write_outputs(folder, results)
                if is_main():
                    evaluators.write(folder)
        row |= _named(results, name)
    for (name, dataset), evaluators in zip(data.tests.items(), data.evaluators[1:], strict=True):
        evaluators = evaluators.anew()
        with state.averaged():
            results = _evaluate(config, state, dataset, evaluators=evaluators, **options)
        if results is None:
            return None
        row |= _named({f"{name}.{set_name}": result for set_name, result in results.items()}, "test")
    if data.validation:
        with state.averaged():
            results = _evaluate(
                config, state, data.dataset, split="train", puzzles=data.validation, **options
            )
        if results is None:
            return None
        row |= _named(results, "validation")
    return row


def _evaluate(
    config: PretrainConfig, state: TrainState, dataset: Dataset, **options: Any
) -> dict[str, SetResult] | None:
    return evaluate_split(
        state.model,
        dataset,
        global_batch_size=config.global_batch_size,
        reasoning=dataclasses.replace(state.model.eval_reasoning, halts_early=config.halting == "act"),
        fetch_rows=state.fetch_rows,
        **options,
    )


def _named(results: dict[str, SetResult], name: str) -> dict[str, float]:
    """Returns the metrics of all sets as they are logged."""
    return {
        f"{name}/{set_name}/{metric}": value
        for set_name, result in results.items()
        for metric, value in result.metrics.items()
    }
