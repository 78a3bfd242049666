"""Losses and metrics of a step, as sums over slots; callers divide these by sums over all ranks.

A slot without any label (padding, or a puzzle without an answer) adds 0 to every sum.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from config.architecture import NetworkConfig
from dataset.format import IGNORE_LABEL_ID
from models.carry import Carry, Divisors, Metrics, Reasoning, StepOutput, Sums
from models.objective import Objective
from models.random import Draws

if TYPE_CHECKING:
    from models.network import Network


def softmax_cross_entropy(logits: Tensor, labels: Tensor, *, label_smoothing: float) -> Tensor:
    """Returns the cross-entropy of each cell: float32 [batch, length], 0 where the label is ignored.

    logits: [batch, length, vocab]. labels: [batch, length]. label_smoothing: the share of each label that is
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
    labels: [batch, length]. label_smoothing: the share of each label that is spread over the vocabulary.
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
    """Returns the share of scored cells that are right, float32 [batch], and whether all are, bool [batch].

    0 and False for a slot without any scored cell.
    """
    counted = labels != IGNORE_LABEL_ID
    num_counted = counted.sum(-1)
    num_correct = ((logits.argmax(-1) == labels) & counted).sum(-1)
    return num_correct / num_counted.clamp(min=1), (num_correct == num_counted) & (num_counted > 0)


class ContinueTarget(NamedTuple):
    """A training target of q_continue: float32 [batch] logits, and targets in [0, 1] to compare them with.

    mask: bool [batch], the slots that have this target.
    """

    logits: Tensor
    targets: Tensor
    mask: Tensor


class TokenObjective(Objective):
    """The losses and metrics of a network that predicts tokens and q_halt."""

    metrics: ClassVar[Metrics] = {
        # Divided by "count": over slots that halted and have a label.
        "count": None,
        "accuracy": "count",
        "exact_accuracy": "count",
        "q_halt_accuracy": "count",
        "steps": "count",
        "lm_loss": "slots",
        "q_halt_loss": "slots",
        "q_continue_loss": "slots",
    }
    # Over slots with a label in the first step of a puzzle; unlike the others, independent of halting.
    training_metrics: ClassVar[Metrics] = {"exact_accuracy_after_step_1": "first_step_count"}

    def __init__(self, network: Network, arch: NetworkConfig):
        super().__init__(network)
        self.arch, self.loss = arch, arch.loss

    def losses(
        self,
        before: Carry,
        output: StepOutput,
        *,
        divisors: Divisors,
        reasoning: Reasoning,
        draws: Draws | None,
    ) -> tuple[Tensor, Sums]:
        """Returns lm_loss + halting_weight (q_halt_loss + q_continue_loss), and the sums of the metrics.

        In the loss, a slot in thinking step t = 1, 2, ... of a puzzle has the weight supervision_decay^(t-1)
        (arXiv 2511.08653); in the metric sums all steps have the same weight.
        """
        targets, steps = self.continue_targets(before, output, reasoning, draws), output.carry.steps
        losses, sums = self._losses_and_sums(output, targets, label_smoothing=self.loss.label_smoothing)
        if self.loss.supervision_decay < 1:
            weights = self.loss.supervision_decay ** (steps - 1)
            losses = {name: weights * each for name, each in losses.items()}
        total = {name: each.sum() for name, each in losses.items()}
        halting_loss = total["q_halt_loss"] + total.get("q_continue_loss", 0)
        return total["lm_loss"] + self.loss.halting_weight * halting_loss, sums

    def sums(self, output: StepOutput) -> Sums:
        """Returns the metric sums of final answers; the losses among them have no label smoothing."""
        return self._losses_and_sums(output, (), label_smoothing=0.0)[1]

    def continue_targets(
        self, before: Carry, output: StepOutput, reasoning: Reasoning, draws: Draws | None
    ) -> tuple[ContinueTarget, ...]:
        """Returns the targets of q_continue: none here, so that q_continue is not trained."""
        return ()

    def _losses_and_sums(
        self, output: StepOutput, targets: tuple[ContinueTarget, ...], *, label_smoothing: float
    ) -> tuple[dict[str, Tensor], Sums]:
        """Returns {loss: [batch]}, and the sums without gradient. targets: of q_continue."""
        labels, prediction = output.carry.data.labels, output.prediction
        labels_per_slot = (labels != IGNORE_LABEL_ID).sum(-1)
        has_labels = labels_per_slot > 0
        with torch.no_grad():
            accuracy, is_exact = correct_sequences(prediction.logits, labels)

        cross_entropy = CROSS_ENTROPIES[self.loss.loss_type]
        per_cell = cross_entropy(prediction.logits, labels, label_smoothing=label_smoothing)
        losses = {"lm_loss": per_cell.sum(-1) / labels_per_slot.clamp(min=1)}
        losses["q_halt_loss"] = _binary_cross_entropy(prediction.q_halt, is_exact.float(), has_labels)
        if targets:
            losses["q_continue_loss"] = sum(
                _binary_cross_entropy(logits, values, has_labels & mask) for logits, values, mask in targets
            )

        with torch.no_grad():
            valid = output.carry.halted & has_labels
            is_first = (output.carry.steps == 1) & has_labels
            sums = {
                "count": valid,
                "accuracy": valid * accuracy,
                "exact_accuracy": valid & is_exact,
                "q_halt_accuracy": valid & ((prediction.q_halt >= 0) == is_exact),
                "steps": valid * output.carry.steps,
                "first_step_count": is_first,
                "exact_accuracy_after_step_1": is_first & is_exact,
            }
            sums = {name: values.sum() for name, values in (sums | losses).items()}
        return losses, sums


def _binary_cross_entropy(logits: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, targets, reduction="none") * mask
