"""An evaluation in the course of a run: the test split, with the averages of the weights if there are any."""

from __future__ import annotations

import contextlib
from pathlib import Path

from config.schema import PretrainConfig
from dataset.format import Dataset
from evaluation.evaluate import evaluate_split
from evaluation.evaluators import Evaluators
from evaluation.report import write_outputs
from parallel.errors import collective_errors
from parallel.interruption import Interruption
from parallel.process_group import is_main
from training.state import TrainState


def evaluate(
    config: PretrainConfig,
    state: TrainState,
    data: Dataset,
    interruption: Interruption | None = None,
    *,
    only_first_batches: bool = False,
) -> dict[str, float] | None:
    """Evaluates the test split; returns on rank 0 the metrics of every set, as they are logged.

    All ranks call it. With EMA the averages are evaluated, and the weights themselves if asked for. None
    where the run was asked to stop before its end.
    """
    averages = contextlib.nullcontext() if state.ema is None else state.ema.swapped_in(step=state.step)
    passes = {"eval": averages} | ({"eval_raw": contextlib.nullcontext()} if config.raw else {})
    row = {}
    for name, chosen_weights in passes.items():
        with collective_errors():
            evaluators = Evaluators(config.evaluators, data)
        with chosen_weights:
            results = evaluate_split(
                state.model,
                data,
                loss_type=config.arch.loss.loss_type,
                global_batch_size=config.global_batch_size,
                device=state.carry.steps.device,
                halting=config.halting,
                outputs=config.save_outputs,
                evaluators=evaluators,
                only_first_batches=only_first_batches,
                **({} if interruption is None else {"all_reduce_stop": interruption.all_reduce_request}),
            )
        if results is None:
            return None
        if not only_first_batches:
            folder = Path(config.checkpoint_path) / name.replace("eval", "evaluation") / f"step_{state.step}"
            with collective_errors():
                write_outputs(folder, results)
                if is_main():
                    evaluators.write(folder)
        for set_name, result in results.items():
            row |= {f"{name}/{set_name}/{metric}": value for metric, value in result.metrics.items()}
    return row
