"""What training minimizes and measures, for models that answer with tokens and q_halt.

    loss of a slot = decay^(t - 1) * (lm_loss + halting_weight * (q_halt_loss + q_continue_loss))
    loss of a step = sum of the losses of all slots / number of slots

t                The number of the slot's thinking step on its puzzle, from 1.
decay            arch.loss.supervision_decay, by default 1.
halting_weight   arch.loss.halting_weight, by default 0.5.
lm_loss          Cross-entropy of the tokens, the mean over the cells with a label. By default, stablemax
                 replaces softmax (arch.loss.loss_type). In training, labels are smoothed by
                 arch.loss.label_smoothing.
q_halt_loss      Binary cross-entropy of q_halt. The target is 1 if all cells with a label are right, else 0.
q_continue_loss  Binary cross-entropy of q_continue. The target is the value of one more thinking step,
                 sigmoid(max(q_halt, q_continue)) after that step (`Objective.continue_targets`). Only HRM
                 has this loss by default. With arch.no_ACT_continue=true, it is 0.
number of slots  The size of the global batch (global_batch_size). With local_steps > 1, each rank trains by
                 itself, and the number is that of its slots. Every slot counts, also a slot whose puzzle has
                 no label. Such a slot adds 0 to the loss, to every gradient and to every metric sum.

The factor decay^(t - 1) (arXiv 2511.08653) does not apply to metrics.

q_target=exact     One more call of the network on all slots, without gradient, gives the target of q_continue
                   for every slot. This is the published way.
q_target=deferred  If a slot does not halt, the next training step gives the target. To get a gradient for the
                   q_continue of this step, the next step applies the Q head again to the state that this step
                   returned. The loss of the next step contains the q_continue_loss of this step, with the
                   decay^(t - 1) of the next step. If a slot halts, one more call of the network on the halted
                   slots gives the target now. On CUDA, the host waits for the number of halted slots.

With gradient accumulation, the loss of every micro-batch is divided by the same number of slots. So the
gradients of the micro-batches add up to the gradient of the loss of the step. `forward_and_backward` in
training/step.py divides.

LDT has another objective with the same methods (`models.ldt_objective.BoardObjective`).
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from config.architecture import ArchConfig
from dataset.metadata import IGNORE_LABEL_ID
from models.carry import Carry, Reasoning, StepOutput
from models.compilation import eager_blocks
from models.random import SlotRng

if TYPE_CHECKING:
    from models.network import Network

# {name: sum over slots of this rank}, detached scalars.
Sums = dict[str, Tensor]
# {name: number that divides a term of the loss}. "slots" is the number of slots (docstring of this file).
Divisors = dict[str, "float | Tensor"]
# {metric: name of its divisor}. The value of a metric is sums[metric] / sums[divisor], or sums[metric] if the
# divisor is None. The divisor "slots" is not in `sums`. In training, it is the number of slots, summed over
# the steps since the last log row. In an evaluation, it is the number of puzzles with a label.
Metrics = dict[str, "str | None"]
# Targets of q_continue: (logits, values in [0, 1], mask of the slots that have a target). Each is [batch].
ContinueTarget = tuple[Tensor, Tensor, Tensor]


class Objective:
    """The loss and the metrics of a model that returns logits and q_halt.

    Attributes:
        metrics: Metrics of an evaluation, {metric: name of the sum that divides it, or None}. Example:
            "exact_accuracy": "count" divides the number of right answers by the number of puzzles. The method
            `sums` returns both numbers. Training also logs these metrics if `losses` returns their sums. The
            entry "count": None is required. Its sum is the number of puzzles with a label that have halted.
        training_metrics: Metrics of training only, in the same form. `losses` returns their sums.
    """

    metrics: ClassVar[Metrics] = {
        # Divided by "count", the number of slots that halted and have a label.
        "count": None,
        "accuracy": "count",  # fraction of right cells
        "exact_accuracy": "count",  # fraction of puzzles with all cells right
        "q_halt_accuracy": "count",
        "steps": "count",
        "lm_loss": "slots",
        "q_halt_loss": "slots",
        "q_continue_loss": "slots",
    }
    # The mean over the slots with a label that are in their first thinking step. It does not depend on when
    # slots halt.
    training_metrics: ClassVar[Metrics] = {"exact_accuracy_after_step_1": "first_step_count"}

    def __init__(self, arch: ArchConfig):
        self.arch, self.loss = arch, arch.loss

    def divisors(self, carry: Carry) -> Sums:
        """Returns the counts that divide loss terms: {name: count in the batch of this rank}.

        In this class, only the number of slots divides the loss, so the result is {}. A subclass may return
        other counts, such as a number of cells. The caller sums the counts over ranks, except with
        local_steps > 1. It then adds the number of slots as "slots", and passes the dict to `losses`.

        carry: Carry of this rank before the thinking step.
        """
        return {}

    def losses(
        self,
        network: Network,
        before: Carry,
        output: StepOutput,
        *,
        divisors: Divisors,
        reasoning: Reasoning,
        rng: SlotRng | None,
    ) -> tuple[Tensor, Sums]:
        """Returns the loss and the metric sums of a micro-batch, summed over its slots.

        The caller divides the loss by divisors["slots"]. A subclass may divide a loss term by another count:
        it multiplies the term by divisors["slots"] / divisors[name].

        Args:
            network: The network. It may be called again to compute training targets.
            before: Carry before the thinking step, from `HaltingModel.refill`.
            output: Carry after the thinking step, and the prediction of the step.
            divisors: {name: count}: the counts of the method `divisors`, and "slots", the number of slots of
                the global batch. With local_steps > 1, all counts are those of this rank.
            reasoning: Settings of the thinking step, such as the number of cycles.
            rng: Random numbers of the slots.

        Returns:
            The loss, a scalar tensor, and {metric or divisor of a metric: scalar tensor}.
        """
        targets = self.continue_targets(network, before, output, reasoning, rng)
        losses, sums = self._losses_and_sums(output, targets, label_smoothing=self.loss.label_smoothing)
        if self.loss.supervision_decay < 1:
            weights = self.loss.supervision_decay ** (output.carry.steps - 1)
            losses = {name: weights * loss for name, loss in losses.items()}
        total = {name: loss.sum() for name, loss in losses.items()}
        halting_loss = total["q_halt_loss"] + total.get("q_continue_loss", 0)
        return total["lm_loss"] + self.loss.halting_weight * halting_loss, sums

    def sums(self, output: StepOutput) -> Sums:
        """Returns the sums of the metrics of an evaluation over a batch: {name: scalar tensor}.

        Losses are computed without label smoothing, and summed over all puzzles with labels. The sums of all
        other `metrics` contain only puzzles with labels that have halted.

        output: Carry and prediction after the last thinking step of each puzzle.
        """
        return self._losses_and_sums(output, [], label_smoothing=0.0)[1]

    def _losses_and_sums(
        self, output: StepOutput, targets: list[ContinueTarget], *, label_smoothing: float
    ) -> tuple[dict[str, Tensor], Sums]:
        # Returns ({loss: values [batch]}, {metric: sum over the batch, scalar tensor}).
        labels, prediction, steps = output.carry.data.labels, output.prediction, output.carry.steps
        labels_per_slot = (labels != IGNORE_LABEL_ID).sum(-1)
        has_labels = labels_per_slot > 0
        with torch.no_grad():
            accuracy, is_exact = correct_sequences(prediction.logits, labels)

        cross_entropy = CROSS_ENTROPIES[self.loss.loss_type]
        per_cell = cross_entropy(prediction.logits, labels, label_smoothing=label_smoothing)
        losses = {
            "lm_loss": per_cell.sum(-1) / labels_per_slot.clamp(min=1),
            "q_halt_loss": _binary_cross_entropy(prediction.q_halt, is_exact.float(), has_labels),
        }
        if targets:
            losses["q_continue_loss"] = sum(
                _binary_cross_entropy(logits, values, has_labels & mask) for logits, values, mask in targets
            )

        with torch.no_grad():
            counted = output.carry.halted & has_labels
            is_first = (steps == 1) & has_labels
            sums = {
                "count": counted,
                "accuracy": counted * accuracy,
                "exact_accuracy": counted & is_exact,
                "q_halt_accuracy": counted & ((prediction.q_halt >= 0) == is_exact),
                "steps": counted * steps,
                "first_step_count": is_first,
                "exact_accuracy_after_step_1": is_first & is_exact,
            }
            sums = {name: values.sum() for name, values in (sums | losses).items()}
        return losses, sums

    def continue_targets(
        self,
        network: Network,
        before: Carry,
        output: StepOutput,
        reasoning: Reasoning,
        rng: SlotRng | None,
    ) -> list[ContinueTarget]:
        """Returns the training targets of q_continue: a list of (logits, targets, mask), each [batch].

        The mask is True in slots with a target. A target is sigmoid(max(q_halt, q_continue)) after one more
        thinking step (arXiv 2506.21734, section 2). For a puzzle that has already had max_steps thinking
        steps, it is sigmoid(q_halt) after one more step (arXiv 2407.04811).

        - With arch.q_target=exact, the list has one entry, for q_continue of this step.
        - With q_target=deferred, the first entry is for q_continue of the previous step. If slots halt in
          this step, the second entry is for their q_continue of this step.
        - If q_continue is not trained (no_ACT_continue=true, or max_steps is 1), the list is empty.

        before: Carry before the thinking step. output: Carry after the step, and the prediction of the step.
        """
        if reasoning.max_steps == 1 or self.arch.no_ACT_continue:
            return []
        carry, prediction = output
        if self.arch.q_target == "exact":
            values = self._values_of_one_more_step(network, carry, reasoning, rng)
            return [(prediction.q_continue, values, torch.ones_like(carry.halted))]
        # Targets of the previous step, in slots that have made one on this puzzle (before.steps > 0).
        best = torch.maximum(prediction.q_halt, prediction.q_continue).detach()
        _, previous_q_continue = network.q_values(before.state["z_H"])
        targets = [(previous_q_continue, torch.sigmoid(best), before.steps > 0)]
        # Targets of this step, in slots that halt.
        slots = carry.halted.nonzero().flatten()
        if len(slots):
            values, rng = torch.zeros_like(best), None if rng is None else rng[slots]
            with eager_blocks():  # each number of halted slots would be compiled separately
                halted = carry.select(slots)
                values[slots] = self._values_of_one_more_step(network, halted, reasoning, rng)
            targets.append((prediction.q_continue, values, carry.halted))
        return targets

    @torch.no_grad()
    def _values_of_one_more_step(
        self, network: Network, carry: Carry, reasoning: Reasoning, rng: SlotRng | None
    ) -> Tensor:
        # The additional step uses the random numbers of this step again.
        data = carry.data
        _, following = network(
            carry.state, data.inputs, data.puzzle_identifiers, reasoning=reasoning, rng=rng
        )
        best = torch.maximum(following.q_halt, following.q_continue)
        return torch.sigmoid(torch.where(carry.steps >= reasoning.max_steps, following.q_halt, best))

    def more_calls(self, reasoning: Reasoning) -> float:
        """Returns how many extra calls of the network the loss of a training step needs, for each slot.

        The extra calls compute the targets of q_continue. With q_target=deferred, only slots that halt need
        one. The result is then the estimate 1 / max_steps.
        """
        if self.arch.no_ACT_continue or reasoning.max_steps == 1:
            return 0
        return 1 if self.arch.q_target == "exact" else 1 / reasoning.max_steps


def softmax_cross_entropy(logits: Tensor, labels: Tensor, *, label_smoothing: float) -> Tensor:
    """Returns the cross-entropy of each cell: float32 [batch, seq_len], 0 in cells without a label.

    logits: [batch, seq_len, vocab]. labels: [batch, seq_len]. label_smoothing: Fraction of each label that is
    spread evenly over the vocabulary (arXiv 1512.00567, section 7).
    """
    return F.cross_entropy(
        logits.float().transpose(1, 2),
        labels.long(),
        ignore_index=IGNORE_LABEL_ID,
        reduction="none",
        label_smoothing=label_smoothing,
    )


def stablemax_cross_entropy(logits: Tensor, labels: Tensor, *, label_smoothing: float) -> Tensor:
    """Returns the cross-entropy of each cell, with stablemax (arXiv 2501.04697) instead of softmax.

    The result is float64 (float32 on mps) [batch, seq_len], 0 in cells without a label.

    logits: [batch, seq_len, vocab]. labels: [batch, seq_len]. label_smoothing: Fraction of each label that is
    spread evenly over the vocabulary.
    """
    wide = logits.to(torch.float32 if logits.device.type == "mps" else torch.float64)
    log_probabilities = torch.log(stablemax(wide))
    counted = labels != IGNORE_LABEL_ID
    chosen = log_probabilities.gather(-1, torch.where(counted, labels, 0).long().unsqueeze(-1)).squeeze(-1)
    if label_smoothing:
        chosen = torch.lerp(chosen, log_probabilities.mean(-1), label_smoothing)
    return torch.where(counted, -chosen, 0)


def stablemax(logits: Tensor) -> Tensor:
    """Returns s(x) / sum(s(x)) over the last axis, an alternative to softmax.

    s(x) is x + 1 if x >= 0, else 1 / (1 - x). The result has the shape and the dtype of the logits x.
    """
    # The branch that `where` does not choose has a gradient, too. Without the clamp, it would be inf at
    # x = 1, and inf * 0 is NaN.
    s = torch.where(logits < 0, 1 / (1 - logits.clamp(max=0)), logits + 1)
    return s / s.sum(dim=-1, keepdim=True)


# By arch.loss.loss_type. The probabilities are those that the cross-entropy compares with the labels.
CROSS_ENTROPIES = {
    "softmax_cross_entropy": softmax_cross_entropy,
    "stablemax_cross_entropy": stablemax_cross_entropy,
}
PROBABILITIES = {
    "softmax_cross_entropy": functools.partial(torch.softmax, dim=-1),
    "stablemax_cross_entropy": stablemax,
}


def loss_type_of(arch: ArchConfig) -> str:
    """Returns the key of `PROBABILITIES` for the logits of a model. Models without arch.loss have softmax."""
    return arch.loss.loss_type if hasattr(arch, "loss") else "softmax_cross_entropy"


def correct_sequences(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the fraction of right cells, and whether all cells are right, for each puzzle.

    The results are float32 [batch] and bool [batch]. Only cells with a label count. A puzzle without labels
    has 0 and False.
    """
    counted = labels != IGNORE_LABEL_ID
    num_counted = counted.sum(-1)
    num_correct = ((logits.argmax(-1) == labels) & counted).sum(-1)
    return num_correct / num_counted.clamp(min=1), (num_correct == num_counted) & (num_counted > 0)


def _binary_cross_entropy(logits: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, targets, reduction="none") * mask


def sum_names(metrics: Metrics) -> tuple[str, ...]:
    """Returns the names of the sums from which `divide` computes metrics: the metrics, then their divisors.

    Each name occurs once. The divisor "slots" is left out. Example: ("count", "recall", "bad") for {"count":
    None, "recall": "bad"}.
    """
    divisors = {name for name in metrics.values() if name not in (None, "slots")}
    return (*metrics, *sorted(divisors - metrics.keys()))


def divide(sums: dict[str, float], metrics: Metrics, *, slots: float) -> dict[str, float]:
    """Divides the sum of each metric by its divisor. Returns {metric: value}.

    If the divisor of a metric is None, the value is the sum itself, and is left out if it is 0. Other metrics
    are left out if their divisor is 0. Metrics without a sum are left out.

    slots: Value of the divisor "slots". In training, it is the global batch size times the number of steps.
    """
    divisors = {**sums, "slots": slots}
    means = {name: by for name, by in metrics.items() if by is not None and divisors.get(by) and name in sums}
    counts = [name for name, by in metrics.items() if by is None and sums.get(name)]
    return {name: sums[name] / divisors[by] for name, by in means.items()} | {n: sums[n] for n in counts}
