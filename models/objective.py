"""What training minimizes and measures, for models that answer with tokens and q_halt.

    loss of a slot = decay^(t - 1) * (lm_loss + halting_weight * (q_halt_loss + q_continue_loss))
    loss of a step = sum over slots / number of slots in the global batch

lm_loss          Cross-entropy of the cells with a label, the mean over these cells. By default it is computed
                 with stablemax in place of softmax (`arch.loss.loss_type`).
q_halt_loss      Binary cross-entropy of q_halt against "all cells with a label are right".
q_continue_loss  Binary cross-entropy of q_continue against the value of another thinking step (section 2 of
                 the HRM paper, arXiv 2506.21734). Only with arch.no_ACT_continue=false, HRM's default.
halting_weight   `arch.loss.halting_weight`, by default 0.5.
decay            `arch.loss.supervision_decay`, by default 1. t is the number of the thinking step, from 1.

Every slot counts in the divisor, also a slot with a puzzle that has no label. Such a slot adds 0 to the loss
and to every metric. Its puzzle embedding still decays. `training.step.forward_and_backward` divides the loss.

LDT has an objective of its own with the same members (`models.ldt.BoardObjective`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from config.architecture import ArchConfig
from dataset.format import IGNORE_LABEL_ID
from models.carry import Carry, Reasoning, StepOutput
from models.compilation import eager_blocks
from models.random import SlotRng

if TYPE_CHECKING:
    from models.network import Network

# Detached scalars by name: sums over slots of this rank.
Sums = dict[str, Tensor]
# Numbers by name that losses are divided by, over the global batch; "slots" is one of them.
Divisors = dict[str, "float | Tensor"]
# {metric: name of its divisor}. The value of a metric is the sum with its name, divided by the sum with the
# name of the divisor. In a metric, "slots" is the number of slots, summed over the steps since the last row.
# In an evaluation, it is the number of puzzles with a label. In the loss, it is global_batch_size.
# None: the sum is logged undivided.
Metrics = dict[str, "str | None"]
ContinueTarget = tuple[Tensor, Tensor, Tensor]  # (logits, targets in [0, 1], mask), each [batch]


class Objective:
    """The loss and the metrics of a model with a Q head, or of one with another q_halt (SE-RRM).

    Attributes:
        metrics: Metrics of training and evaluation, from the sums that `losses` and `sums` return.
        training_metrics: Metrics of training only, from the sums that `losses` returns.
    """

    metrics: ClassVar[Metrics] = {
        # Divided by "count", the number of slots that halted and have a label.
        "count": None,
        "accuracy": "count",
        "exact_accuracy": "count",
        "q_halt_accuracy": "count",
        "steps": "count",
        "lm_loss": "slots",
        "q_halt_loss": "slots",
        "q_continue_loss": "slots",
    }
    # The mean over slots with a label in their first thinking step. Unlike the others, it does not depend on
    # halting.
    training_metrics: ClassVar[Metrics] = {"exact_accuracy_after_step_1": "first_step_count"}

    def __init__(self, arch: ArchConfig):
        self.arch, self.loss = arch, arch.loss

    def divisors(self, carry: Carry) -> Sums:
        """Returns this rank's part of every divisor of a loss term, except "slots": scalars by name.

        They are summed over ranks. Called before the forward pass, with the input of the thinking step.
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
        """Returns the loss, summed over the slots of a micro-batch, and the metric sums.

        The caller divides the loss by divisors["slots"]. If a term is a mean over something else, multiply it
        by divisors["slots"] / divisors[name]. In the loss, thinking step t has the weight
        supervision_decay^(t - 1) (arXiv 2511.08653). In the metric sums, all steps have the same weight.

        Args:
            network: The network. An objective keeps no reference to it.
            before: Input of the thinking step, after `HaltingModel.refill`.
            output: Output of the thinking step.
            divisors: "slots" and the divisors that `divisors` names, summed over ranks.
            reasoning: Settings of the thinking step.
            rng: Random numbers of the slots.
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
        """Returns the metric sums of final answers in an evaluation. Their losses have no label smoothing."""
        return self._losses_and_sums(output, [], label_smoothing=0.0)[1]

    def _losses_and_sums(
        self, output: StepOutput, targets: list[ContinueTarget], *, label_smoothing: float
    ) -> tuple[dict[str, Tensor], Sums]:
        """Returns {loss: [batch]}, and the sums without gradient."""
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

    # Targets of q_continue.

    def continue_targets(
        self,
        network: Network,
        before: Carry,
        output: StepOutput,
        reasoning: Reasoning,
        rng: SlotRng | None,
    ) -> list[ContinueTarget]:
        """Returns the training targets of q_continue in this step; [] if q_continue is not trained.

        q_target=exact: One target for all slots, from one more call of the network, as published.
        q_target=deferred: Slots that continue get their target from the call of the next training step. This
        target trains only the Q head, because the graph of the earlier step is freed. Slots that halt get
        their target from one more call for these slots. On CUDA, the host waits for their number.
        """
        if reasoning.max_steps == 1 or self.arch.no_ACT_continue:
            return []
        carry, prediction = output
        if self.arch.q_target == "exact":
            values = self._values_of_one_more_step(network, carry, reasoning, rng)
            return [(prediction.q_continue, values, torch.ones_like(carry.halted))]
        best = torch.maximum(prediction.q_halt, prediction.q_continue).detach()
        _, earlier_q_continue = network.q_values(before.state["z_H"])
        targets = [(earlier_q_continue, torch.sigmoid(best), before.steps > 0)]
        slots = carry.halted.nonzero().flatten()
        if len(slots):
            values, rng = torch.zeros_like(best), None if rng is None else rng[slots]
            with eager_blocks():
                halted = carry.select(slots)
                values[slots] = self._values_of_one_more_step(network, halted, reasoning, rng)
            targets.append((prediction.q_continue, values, carry.halted))
        return targets

    @torch.no_grad()
    def _values_of_one_more_step(
        self, network: Network, carry: Carry, reasoning: Reasoning, rng: SlotRng | None
    ) -> Tensor:
        """Returns sigmoid(max(q_halt, q_continue)) after one more call: [batch].

        After the last step, q_halt replaces the maximum (arXiv 2407.04811). The call uses the random numbers
        of this step again.
        """
        data = carry.data
        _, following = network(
            carry.state, data.inputs, data.puzzle_identifiers, reasoning=reasoning, rng=rng
        )
        best = torch.maximum(following.q_halt, following.q_continue)
        return torch.sigmoid(torch.where(carry.steps >= reasoning.max_steps, following.q_halt, best))

    def more_calls(self, reasoning: Reasoning) -> float:
        """Returns the mean number of additional forward passes of a training step, for its targets."""
        if self.arch.no_ACT_continue or reasoning.max_steps == 1:
            return 0
        return 1 if self.arch.q_target == "exact" else 1 / reasoning.max_steps


def softmax_cross_entropy(logits: Tensor, labels: Tensor, *, label_smoothing: float) -> Tensor:
    """Returns the cross-entropy of each cell: float32 [batch, length], 0 where the label is ignored.

    logits: [batch, length, vocab]. labels: [batch, length]. label_smoothing: Fraction of each label that is
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
    """Returns the cross-entropy of each cell with stablemax (arXiv 2501.04697) in place of softmax.

    float64 [batch, length] (float32 on mps), 0 where the label is ignored. logits: [batch, length, vocab].
    labels: [batch, length]. label_smoothing: As in `softmax_cross_entropy`.
    """
    wide = logits.to(torch.float32 if logits.device.type == "mps" else torch.float64)
    s = torch.where(wide < 0, 1 / (1 - wide + 1e-30), wide + 1)
    log_probabilities = torch.log(s / s.sum(dim=-1, keepdim=True))
    counted = labels != IGNORE_LABEL_ID
    chosen = log_probabilities.gather(-1, torch.where(counted, labels, 0).long().unsqueeze(-1)).squeeze(-1)
    if label_smoothing:
        chosen = torch.lerp(chosen, log_probabilities.mean(-1), label_smoothing)
    return torch.where(counted, -chosen, 0)


CROSS_ENTROPIES = {
    "softmax_cross_entropy": softmax_cross_entropy,
    "stablemax_cross_entropy": stablemax_cross_entropy,
}


def correct_sequences(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the fraction of right cells, float32 [batch], and whether all cells are right, bool [batch].

    Only cells with a label count. A slot without labels has 0 and False.
    """
    counted = labels != IGNORE_LABEL_ID
    num_counted = counted.sum(-1)
    num_correct = ((logits.argmax(-1) == labels) & counted).sum(-1)
    return num_correct / num_counted.clamp(min=1), (num_correct == num_counted) & (num_counted > 0)


def _binary_cross_entropy(logits: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, targets, reduction="none") * mask


def sum_names(metrics: Metrics) -> tuple[str, ...]:
    """Returns the names of all sums from which `divide` computes the metrics."""
    divisors = {name for name in metrics.values() if name not in (None, "slots")}
    return (*metrics, *sorted(divisors - metrics.keys()))


def divide(sums: dict[str, float], metrics: Metrics, *, slots: float) -> dict[str, float]:
    """Returns {metric: value}. Metrics that are sums without divisor come last.

    Leaves out a metric if its divisor is 0, and a sum without divisor if it is 0. sums: Sums over all ranks
    and steps. slots: Value of the divisor "slots".
    """
    divisors = {**sums, "slots": slots}
    means = {name: by for name, by in metrics.items() if by is not None and divisors.get(by) and name in sums}
    counts = [name for name, by in metrics.items() if by is None and sums.get(name)]
    return {name: sums[name] / divisors[by] for name, by in means.items()} | {n: sums[n] for n in counts}
