"""One pass of a model over every example of a test split.

Metric sums over all ranks, outputs in dataset order.

Every rank works on its slice of each global batch. All slots run `halt_max_steps` steps; the metrics are
those of the last one.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from dataset.format import Batch, Dataset
from dataset.plan import EvaluationPlan
from dataset.puzzles import PuzzleDataset, read_batches
from evaluation.metrics import MetricSums, evaluation_metrics
from models import HaltingModel
from models.halting import StepOutput
from models.losses import correct_sequences, loss_and_metrics
from parallel.collectives import gather_objects, reduce_sum_
from parallel.process_group import is_main, rank, world_size


@dataclasses.dataclass(frozen=True)
class SetResult:
    """What a pass says of one set.

    - metrics: under the names of `models.losses`, and `count`; empty where no row has a label
    - exact_accuracy_after_each_step: after step 1, 2, ..., halt_max_steps
    - outputs: [rows, ...] each, in dataset order
    """

    metrics: dict[str, float]
    exact_accuracy_after_each_step: list[float]
    outputs: dict[str, np.ndarray]


def evaluate_split(
    model: HaltingModel,
    data: Dataset,
    split: str = "test",
    *,
    loss_type: str,
    global_batch_size: int,
    device: torch.device,
    outputs: Sequence[str] = (),
    all_reduce_stop: Callable[[], bool] = lambda: False,
) -> dict[str, SetResult] | None:
    """The result of every set on rank 0; empty elsewhere. All ranks call it. The model's mode is kept.

    Of all rows at once, memory holds only the arrays named in `outputs`. all_reduce_stop: asked before every
    batch by all ranks, with one answer for all; once it is True there is no result, but None.
    """
    sets = data.splits[split].sets
    plan = EvaluationPlan(sets, global_batch_size=global_batch_size)
    dataset = PuzzleDataset(data.folder, split, plan, rank=rank(), world_size=world_size())
    sums = {name: _SetSums(device, num_steps=model.halt_max_steps, outputs=outputs) for name in sets}

    # Read here, without a worker: by now this process has threads, and a fork among them can hang (it did).
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode(), read_batches(dataset, device=device, num_workers=0) as batches:
            for set_name, host_batch in batches:
                if all_reduce_stop():
                    return None
                batch = host_batch.to(device)
                carry = model.initial_carry(batch)
                for step in range(model.halt_max_steps):
                    output = model(carry, batch)
                    carry = output.carry
                    sums[set_name].add_step(step, output)
                sums[set_name].add_last_step(output, host_batch, loss_type=loss_type)
    finally:
        model.train(was_training)
    results = {name: part.reduce() for name, part in sums.items()}
    return results if is_main() else {}


class _SetSums:
    """What a rank keeps of one set during a pass."""

    def __init__(self, device: torch.device, *, num_steps: int, outputs: Sequence[str]):
        self._metrics = MetricSums(device)
        self._exact_after_step = torch.zeros(num_steps, dtype=torch.float32, device=device)
        self._rows: list[np.ndarray] = []
        self._outputs: dict[str, list[np.ndarray]] = {name: [] for name in outputs}

    def add_step(self, step: int, output: StepOutput) -> None:
        _, is_exact = correct_sequences(output.prediction.logits, output.carry.data.labels)
        self._exact_after_step[step] += is_exact.sum()

    def add_last_step(self, output: StepOutput, host_batch: Batch, *, loss_type: str) -> None:
        self._metrics.add(loss_and_metrics(output, loss_type=loss_type)[1])
        if self._outputs:
            is_real = host_batch.is_real
            self._rows.append(host_batch.rows[is_real].numpy())
            for name, arrays in self._outputs.items():
                arrays.append(_output(name, output).cpu()[is_real].numpy())

    def reduce(self) -> SetResult:
        """The result over all ranks, which all call it; it is rank 0's that counts."""
        metrics = evaluation_metrics(self._metrics.reduced())
        exact = reduce_sum_(self._exact_after_step).tolist()
        parts = gather_objects((self._rows, self._outputs)) if self._outputs else None
        outputs = {}
        if parts is not None:
            order = np.argsort(np.concatenate([array for rows, _ in parts for array in rows]))
            for name in self._outputs:
                arrays = [array for _, arrays_of_rank in parts for array in arrays_of_rank[name]]
                outputs[name] = np.concatenate(arrays)[order]
        return SetResult(metrics, [number / metrics["count"] for number in exact] if metrics else [], outputs)


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
