"""Evaluates a model during a run, on the test split, other test sets, and held-out training puzzles."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from config.schema import PretrainConfig
from distributed.errors import collective_errors
from distributed.signals import Interruption
from distributed.world import is_main
from evaluation.metric_tables import metrics_by_set
from evaluation.passes import evaluate_split
from evaluation.results import write_outputs
from runtime.metrics_file import read_rows
from training.data import RunData
from training.run_folder import disk_errors_warn
from training.state import TrainState


def evaluate(
    config: PretrainConfig,
    state: TrainState,
    data: RunData,
    interruption: Interruption | None = None,
    *,
    only_first_batches: bool = False,
) -> dict[str, float] | None:
    """Evaluates all test and validation sets. All ranks call it.

    If the config key `ema` is set, evaluates the moving averages of the weights. If the key `raw` is set,
    also evaluates the weights themselves on the test split. Writes answers of the test split into the run
    folder if the key `save_outputs` or an evaluator asks for them.

    Args:
        config: Config of the run.
        state: Weights and averages of this rank.
        data: Data of the run, from `open_data`.
        interruption: Checked for stop requests during the evaluation. If None, the evaluation always
            completes.
        only_first_batches: Whether to evaluate only the first batch of each set, and write no files.

    Returns:
        On rank 0 the metrics, for example {"eval/all/accuracy": 0.5}, otherwise {}. None if a signal stopped
        the evaluation. Names start with "eval/<set>/" for the test split, "eval_raw/<set>/" for the test
        split with raw weights, "test/<folder>.<set>/" for `test_data_path`, and "validation/<set>/" for
        held-out puzzles.
    """
    all_reduce_stop = (lambda: False) if interruption is None else interruption.all_reduce_request
    reasoning = state.model.eval_reasoning(config.halting)
    data.warn_if_rebuilt()
    # (start of the name, prefix of set names, dataset, evaluators, held-out puzzles or None)
    passes = [("eval", "", data.dataset, data.evaluators[0], None)]
    if config.raw:
        passes.append(("eval_raw", "", data.dataset, data.evaluators[0], None))
    for (folder, dataset), evaluators in zip(data.tests.items(), data.evaluators[1:], strict=True):
        passes.append(("test", f"{folder}.", dataset, evaluators, None))
    if data.validation:
        passes.append(("validation", "", data.dataset, None, data.validation))
    row = {}
    for name, prefix, dataset, evaluators, puzzles in passes:
        has_files = name in ("eval", "eval_raw")
        evaluators = None if evaluators is None else evaluators.fresh_copy()
        start = f"{name.removesuffix('_raw')}/{prefix}"
        found = data.leaks.found.items()
        leaks = {set_name.removeprefix(start): leak for set_name, leak in found if set_name.startswith(start)}
        with contextlib.nullcontext() if name == "eval_raw" else state.averaged():
            results = evaluate_split(
                state.model,
                dataset,
                "test" if puzzles is None else "train",
                global_batch_size=config.global_batch_size,
                reasoning=reasoning,
                outputs=config.save_outputs if has_files else (),
                evaluators=evaluators,
                only_first_batches=only_first_batches,
                puzzles=puzzles,
                leaks=leaks,
                all_reduce_stop=all_reduce_stop,
                fetch_rows=state.table.fetch,
                ranks=state.ranks,
                stages=state.mesh.pipeline,
            )
        if results is None:
            return None
        if has_files and not only_first_batches:
            folder = Path(config.checkpoint_path) / name.replace("eval", "evaluation") / f"step_{state.step}"
            with collective_errors(), disk_errors_warn(folder):
                write_outputs(folder, results)
                if is_main():
                    evaluators.write(folder)
        row |= {
            f"{name}/{prefix}{set_name}/{metric}": value
            for set_name, result in results.items()
            for metric, value in result.metrics.items()
        }
    return row


def read_results(folder: Path) -> tuple[list[dict[str, Any]], dict[str, dict[str, float]]]:
    """Reads metrics.jsonl of a run folder.

    Returns (all rows, {test set: {metric: value}} of the last evaluation). Without an evaluation, the dict is
    {}.
    """
    rows = [row for row, _ in read_rows(folder)]
    metrics = [found for row in rows if (found := metrics_by_set(row))]
    return rows, metrics[-1] if metrics else {}
