"""Losses and metrics of one step, as sums over slots: divided once, at the end, over all slots of all ranks.

A slot without a counted label (padding, or a puzzle without an answer) adds 0 to every sum.
"""

from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from config.architecture import LossConfig, NetworkConfig
from dataset.format import IGNORE_LABEL_ID
from models.carry import Carry, Counts, Metrics, Reasoning, StepOutput, Sums
from models.random import Draws


def softmax_cross_entropy(logits: Tensor, labels: Tensor, *, label_smoothing: float) -> Tensor:
    """Computes the loss of each cell, in float32, 0 where the label is ignored.

    logits [batch, length, vocab], labels [batch, length]. label_smoothing: the share of every label that is
    distributed evenly over the vocabulary (arXiv 1512.00567, section 7).
    """
    return F.cross_entropy(
        logits.float().transpose(1, 2),
        labels.long(),
        ignore_index=IGNORE_LABEL_ID,
        reduction="none",
        label_smoothing=label_smoothing,
    )


def stablemax_cross_entropy(logits: Tensor, labels: Tensor, *, label_smoothing: float) -> Tensor:
    """Computes the loss of each cell by stablemax (arXiv 2501.04697), in float64 (on mps in float32)."""
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
    """Computes the share of counted cells that are right, float32, and whether all are, bool; [batch] each.

    0 and False for a slot without a label.
    """
    counted = labels != IGNORE_LABEL_ID
    num_counted = counted.sum(-1)
    num_correct = ((logits.argmax(-1) == labels) & counted).sum(-1)
    return num_correct / num_counted.clamp(min=1), (num_correct == num_counted) & (num_counted > 0)


class ContinueTarget(NamedTuple):
    """Targets of q_continue, for the slots where they count.

    logits, targets: float32 [batch]; counts: bool [batch].
    """

    logits: Tensor
    targets: Tensor
    counts: Tensor


class TokenLosses:
    """The losses and metrics of a network that answers by tokens and says how sure it is.

    A base in front of `Network`. no_ACT_continue: whether q_halt alone says that an answer is final.
    """

    metrics: ClassVar[Metrics] = {
        # Of slots that halted, with a label.
        "count": None,
        "accuracy": "count",
        "exact_accuracy": "count",
        "q_halt_accuracy": "count",
        "steps": "count",
        "lm_loss": "slots",
        "q_halt_loss": "slots",
        "q_continue_loss": "slots",
    }
    # Of slots in the first step of their puzzle, with a label: all come there whatever the Q head says.
    training_metrics: ClassVar[Metrics] = {"exact_accuracy_after_step_1": "first_step_count"}
    no_ACT_continue = True

    def __init__(self, arch: NetworkConfig, *more: Any, **options: Any):
        super().__init__(arch, *more, **options)
        self.loss: LossConfig = arch.loss
        self.halt_exploration_prob = arch.halt_exploration_prob

    def losses(
        self, before: Carry, output: StepOutput, *, counts: Counts, reasoning: Reasoning, draws: Draws | None
    ) -> tuple[Tensor, Sums]:
        """Computes lm_loss + halting_weight (q_halt_loss + q_continue_loss), and the sums of the metrics.

        Each slot counts by supervision_decay^(t - 1) in its step t = 1, 2, ... (arXiv 2511.08653); in the
        sums all steps count alike.
        """
        targets, steps = self.continue_targets(before, output, reasoning, draws), output.carry.steps
        losses, sums = self._losses_and_sums(output, targets, label_smoothing=self.loss.label_smoothing)
        if self.loss.supervision_decay < 1:
            weights = self.loss.supervision_decay ** (steps - 1)
            losses = {name: [weights * part for part in parts] for name, parts in losses.items()}
        total = {name: _sum_of_all(parts) for name, parts in losses.items()}
        halting_loss = total["q_halt_loss"] + total.get("q_continue_loss", 0)
        return total["lm_loss"] + self.loss.halting_weight * halting_loss, sums

    def sums(self, output: StepOutput) -> Sums:
        """Computes the sums of final answers, with the labels as they are."""
        return self._losses_and_sums(output, (), label_smoothing=0.0)[1]

    def continue_targets(
        self, before: Carry, output: StepOutput, reasoning: Reasoning, draws: Draws | None
    ) -> tuple[ContinueTarget, ...]:
        """Returns no target: q_continue is not trained."""
        return ()

    def _losses_and_sums(
        self, output: StepOutput, targets: tuple[ContinueTarget, ...], *, label_smoothing: float
    ) -> tuple[dict[str, list[Tensor]], Sums]:
        """Computes the parts of each loss, [batch] each, and the detached sums of losses and metrics."""
        labels, prediction = output.carry.data.labels, output.prediction
        labels_per_slot = (labels != IGNORE_LABEL_ID).sum(-1)
        has_labels = labels_per_slot > 0
        with torch.no_grad():
            accuracy, is_exact = correct_sequences(prediction.logits, labels)

        cross_entropy = CROSS_ENTROPIES[self.loss.loss_type]
        per_cell = cross_entropy(prediction.logits, labels, label_smoothing=label_smoothing)
        losses = {"lm_loss": [per_cell.sum(-1) / labels_per_slot.clamp(min=1)]}
        losses["q_halt_loss"] = [_binary_cross_entropy(prediction.q_halt, is_exact.float(), has_labels)]
        if targets:
            losses["q_continue_loss"] = [
                _binary_cross_entropy(logits, values, has_labels & counts)
                for logits, values, counts in targets
            ]

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
            sums = {name: values.sum() for name, values in sums.items()}
            sums.update({name: _sum_of_all(parts) for name, parts in losses.items()})
        return losses, sums


def _sum_of_all(parts: list[Tensor]) -> Tensor:
    return sum(part.sum() for part in parts)


def _binary_cross_entropy(logits: Tensor, targets: Tensor, counts: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, targets, reduction="none") * counts
