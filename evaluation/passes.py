"""One pass of a model over every example of a test split: metric sums over all ranks, and outputs in dataset
order.

Every rank works on its slice of each global batch. Slots run `halt_max_steps` steps; the metrics are those of
the last.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dataset.format import Batch, Split
from dataset.plan import EvaluationPlan
from dataset.puzzles import PuzzleDataset, build_loader
from models import HaltingModel
from models.halting import StepOutput
from models.losses import correct_sequences, loss_and_metrics
from parallel.collectives import gather_objects, reduce_sum_
from training.metrics import MetricSums, evaluation_metrics


@dataclasses.dataclass(frozen=True)
class SetResult:
    """metrics: those of shared use, and `count`. after_each_step: exact accuracy after step 1, 2, ...
    outputs: [rows, ...].
    """

    metrics: dict[str, float]
    after_each_step: list[float]
    outputs: dict[str, np.ndarray]


class _SetSums:
    """What a rank keeps of one set while it passes."""

    def __init__(self, device: torch.device, num_steps: int):
        self.metrics = MetricSums(device)
        self.exact_after_step = torch.zeros(num_steps, dtype=torch.float32, device=device)
        self.rows: list[np.ndarray] = []
        self.outputs: list[dict[str, np.ndarray]] = []


def evaluate_split(
    model: HaltingModel,
    data: Split,
    folder: Path,
    *,
    loss_type: str,
    global_batch_size: int,
    device: torch.device,
    rank: int,
    world_size: int,
    outputs: Sequence[str] = (),
    split: str = "test",
) -> dict[str, SetResult]:
    """The result of every set, on rank 0 (elsewhere an empty dict). All ranks call it; the model's mode is
    kept.

    A set without a single label has no metrics. Memory holds the saved outputs, and nothing else, for all
    rows.
    """
    plan = EvaluationPlan(data.sets, global_batch_size=global_batch_size)
    loader = build_loader(PuzzleDataset(folder, split, plan, rank=rank, world_size=world_size), device=device)
    sums = {name: _SetSums(device, model.halt_max_steps) for name in data.sets}

    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            for set_name, host_batch in loader:
                _pass_batch(model, host_batch, sums[set_name], loss_type, device, outputs)
    finally:
        model.train(was_training)
    results = {name: _reduce_set(part, outputs) for name, part in sums.items()}
    return results if rank == 0 else {}


def _pass_batch(
    model: HaltingModel,
    host_batch: Batch,
    sums: _SetSums,
    loss_type: str,
    device: torch.device,
    outputs: Sequence[str],
) -> None:
    batch = host_batch.to(device)
    carry = model.initial_carry(batch)
    for step in range(model.halt_max_steps):
        output = model(carry, batch)
        carry = output.carry
        _, is_exact = correct_sequences(output.prediction.logits, batch.labels)
        sums.exact_after_step[step] += is_exact.sum()
    sums.metrics.add(loss_and_metrics(output, loss_type=loss_type)[1])
    if outputs:
        is_real = host_batch.is_real
        sums.rows.append(host_batch.rows[is_real].numpy())
        sums.outputs.append(
            {name: _output(name, output)[is_real.to(device)].cpu().numpy() for name in outputs}
        )


def _output(name: str, output: StepOutput) -> Tensor:
    """The array that `eval_save_outputs` calls `name`, [batch, ...]; preds has every cell."""
    logits = output.prediction.logits
    if name == "preds":
        return logits.argmax(-1).to(torch.uint8 if logits.shape[-1] <= 256 else torch.int32)
    if name == "logits":
        return logits.float()
    if name == "q_halt_logits":
        return output.prediction.q_halt
    if name == "q_continue_logits":
        return output.prediction.q_continue
    return getattr(output.carry.data, name)


def _reduce_set(sums: _SetSums, names: Sequence[str]) -> SetResult:
    """All ranks call it; only rank 0's value is meant."""
    metrics = evaluation_metrics(sums.metrics.reduced())
    exact = reduce_sum_(sums.exact_after_step).tolist()
    outputs = {}
    if names:
        parts = gather_objects((sums.rows, sums.outputs))
        if parts is not None:
            order = np.argsort(np.concatenate([rows for part_rows, _ in parts for rows in part_rows]))
            for name in names:
                values = np.concatenate(
                    [output[name] for _, part_outputs in parts for output in part_outputs]
                )
                outputs[name] = values[order]
    return SetResult(metrics, [count / metrics["count"] for count in exact] if metrics else [], outputs)


def save_outputs(folder: Path, results: dict[str, SetResult]) -> None:
    """Writes `<set>__outputs.npz` for every set that has any."""
    for name, result in results.items():
        if result.outputs:
            folder.mkdir(parents=True, exist_ok=True)
            np.savez(folder / f"{name}__outputs.npz", **result.outputs)
