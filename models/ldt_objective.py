"""The loss and the metrics of LDT. models/ldt.py introduces the words for boards and cells.

A board is lost if the right value of some cell is not a candidate. A given cell had only one candidate at the
start of the board.

    loss = sum of keep_loss / slots
           + digit_weight * sum of digit_loss / digit_cells
           + conflict_weight * sum of conflict_loss / slots

The sums are over the slots of the global batch. slots is the number of these slots, and digit_cells is the
number of their cells that count in digit_loss. With local_steps > 1, only the slots of this rank count.

keep_loss, digit_loss and conflict_loss of a slot are means over the loops of the network. They compare the
outputs of the network with the solution. Outputs, solution and candidates are those before the move.

keep_loss      Binary cross-entropy of `keep`, the mean over all cells and values. The target is 1 if the
               value is a candidate and right, else 0. Entries with target 1 have the weight keep_weight, and
               all others kill_weight.
digit_loss     Cross-entropy of `digit` against the solution, the sum over the cells that count. A cell counts
               if its board is not lost, the cell is not given, and the solution has one value in the cell.
               With several answers (arch.num_answers > 1), the solution is the union of the answers that fit
               the board.
conflict_loss  Binary cross-entropy of `conflict`. The target is 1 if the board is lost. With
               balanced_conflict, the lost boards together weigh as much as all others.

Names of metric sums: `bad` is the number of lost boards, `sound` the number of all other boards, and `alarms`
the number of boards with a high conflict probability.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from config.architecture import LDTConfig
from dataset.metadata import IGNORE_LABEL_ID
from models.carry import Carry, Reasoning, State, StepOutput
from models.lattice import SOLVED, given_cells, is_lost, is_right, kills, with_target
from models.objective import Divisors, Metrics, Sums, correct_sequences
from models.random import SlotRng

if TYPE_CHECKING:
    from models.ldt import LDT


class BoardObjective:
    """The loss and the metrics of LDT, with the same methods as `models.objective.Objective`.

    The docstring of this file contains the formulas.
    """

    # {metric: the sum that divides it}. "count" is the number of puzzles with a label.
    metrics: ClassVar[Metrics] = {
        "count": None,
        "exact_accuracy": "count",
        "wrong": "count",
        "undecided": "count",  # no answer
        "steps": "count",
    }
    training_metrics: ClassVar[Metrics] = {
        # Of the network, on the boards before the move (`_sums_of_outputs`).
        "keep_loss": "slots",
        "digit_loss": "digit_cells",
        "conflict_loss": "slots",
        "bad": "slots",  # lost boards
        "conflict_recall": "bad",  # fraction of the lost boards that the network calls contradictory
        "conflict_precision": "alarms",  # fraction of the boards called contradictory that are lost
        # Of the move (`_sums_of_moves`).
        "kills": "sound",  # candidates that a move removes from a board that is not lost
        "wrong_kills": "kills",
        "left": None,  # boards that left their slot
        "steps": "left",
        "solved": "left",  # boards that left because they were solved, right or wrong
        "solved_right": "solved",
    }

    def __init__(self, arch: LDTConfig):
        self.arch = arch

    def divisors(self, carry: Carry) -> Sums:
        board = with_target(carry.state)
        return {"digit_cells": _digit_cells(board).sum(), "bad": is_lost(board).sum()}

    def losses(
        self,
        network: LDT,
        before: Carry,
        output: StepOutput,
        *,
        divisors: Divisors,
        reasoning: Reasoning,
        rng: SlotRng | None,
    ) -> tuple[Tensor, Sums]:
        before = before._replace(state=with_target(before.state))
        arch, board, outputs = self.arch, before.state, output.prediction.of_network()
        losses = {  # each [batch]
            "keep_loss": self._keep_loss(board, outputs.keep),
            "digit_loss": self._digit_loss(board, outputs.digit),
            "conflict_loss": self._conflict_loss(board, outputs.conflict),
        }
        keep, digit, conflict = losses.values()
        # The caller divides the result by slots. The factor slots / num_cells replaces this divisor by
        # num_cells for digit_loss.
        num_cells = torch.as_tensor(divisors["digit_cells"], device=digit.device).clamp(min=1)
        loss = keep.sum() + arch.digit_weight * digit.sum() * (divisors["slots"] / num_cells)
        loss = loss + (self._conflict_weight(board, divisors) * conflict).sum()

        of_outputs = self._sums_of_outputs(board, outputs.conflict.detach())
        of_moves = self._sums_of_moves(before, output.carry, outputs.keep.detach())
        sums = {name: of_slots.detach() for name, of_slots in losses.items()} | of_outputs | of_moves
        return loss, {name: values.sum() for name, values in sums.items()}

    def more_calls(self, reasoning: Reasoning) -> float:
        return 0  # `losses` does not call the network

    # The losses of each slot, [batch], from logits [batch, loops, cells, values] or [batch, loops].
    def _keep_loss(self, board: State, keep: Tensor) -> Tensor:
        right = (board["alive"] & board["target"])[:, None].to(keep.dtype)  # [batch, 1, cells, values]
        log_keep = F.logsigmoid(keep)
        log_kill = log_keep - keep  # equals log(1 - sigmoid(keep))
        if_right, if_wrong = self.arch.keep_weight * right, self.arch.kill_weight * (1 - right)
        return -(if_right * log_keep + if_wrong * log_kill).mean((1, 2, 3))

    def _digit_loss(self, board: State, digit: Tensor) -> Tensor:
        values = board["target"].argmax(-1)[:, None, :, None].expand(-1, digit.shape[1], -1, 1)
        log_digit = digit.log_softmax(-1).gather(-1, values)[..., 0]  # [batch, loops, cells]
        return -torch.where(_digit_cells(board)[:, None], log_digit, 0).sum(-1).mean(1)

    def _conflict_loss(self, board: State, conflict: Tensor) -> Tensor:
        targets = is_lost(board).to(conflict.dtype)[:, None].expand_as(conflict)
        return F.binary_cross_entropy_with_logits(conflict, targets, reduction="none").mean(1)

    # With balanced_conflict, each board has a weight, [batch].
    def _conflict_weight(self, board: State, divisors: Divisors) -> float | Tensor:
        if not self.arch.balanced_conflict:
            return self.arch.conflict_weight
        lost, slots = is_lost(board), divisors["slots"]
        num_lost = torch.as_tensor(divisors["bad"], device=lost.device)
        return self.arch.conflict_weight / 2 * slots / torch.where(lost, num_lost, slots - num_lost)

    # What the metrics of the network count, for each board before the move, [batch, ...]. Here, a board is
    # called contradictory only if its conflict probability is high. Cells without candidates do not matter.
    def _sums_of_outputs(self, board: State, conflict: Tensor) -> Sums:
        lost, is_called = is_lost(board), conflict[:, -1].sigmoid() > self.arch.conflict_threshold
        return {
            "bad": lost,
            "digit_cells": _digit_cells(board),
            "alarms": is_called,
            "conflict_recall": lost & is_called,
            "conflict_precision": lost & is_called,
        }

    # What the metrics of the move count, for each board, [batch, ...].
    def _sums_of_moves(self, before: Carry, after: Carry, keep: Tensor) -> Sums:
        lost, left = is_lost(before.state), after.halted
        killed = kills(before.state, keep[:, -1], self.arch) & ~lost[:, None, None]
        solved = left & (after.state["outcome"] == SOLVED)
        return {
            "sound": ~lost,
            "kills": killed,
            "wrong_kills": killed & (before.state["target"] == 1),
            "left": left,
            "steps": left * after.steps,
            "solved": solved,
            "solved_right": solved & is_right(after.state),
        }

    def sums(self, output: StepOutput) -> Sums:
        labels, prediction = output.carry.data.labels, output.prediction
        has_label = (labels != IGNORE_LABEL_ID).any(-1)
        _, is_exact = correct_sequences(prediction.logits, labels)
        is_decided = prediction.q_halt > 0
        sums = {
            "count": has_label,
            "exact_accuracy": is_decided & is_exact,
            "wrong": is_decided & ~is_exact,
            "undecided": ~is_decided,
            "steps": output.carry.steps,
        }
        return {name: (has_label * values).sum() for name, values in sums.items()}


def _digit_cells(board: State) -> Tensor:  # the cells that count in digit_loss, bool [batch, cells]
    has_one_value = board["target"].sum(-1) == 1
    return ~given_cells(board) & ~is_lost(board)[:, None] & has_one_value
