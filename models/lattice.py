"""The boards of the lattice deduction transformer (LDT, arXiv 2605.08605), and the moves on them.

A board is a set of candidate values for each cell. A move strikes out candidates, and then guesses the value
of one open cell: it pins the cell, that is, leaves one candidate there. A board is sound while every cell has
the solution's value as a candidate. The state has

- alive: uint8 [batch, cells, values], 1 for a present candidate
- entered: `alive` at the start of the board
- target: the solution, one-hot as `alive`; all 0 if the board was not sound at the start
- outcome: uint8 [batch], of the last move: SOLVED, CONTRADICTORY, or 0 for an open board
- guess: int16 [batch], the cell that the last move pinned, or NO_GUESS
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from config.architecture import LDTConfig
from models.carry import Carry, Reasoning, State, where
from models.objective import Sums
from models.random import SlotRng
from models.search import NO_GUESS

SOLVED, CONTRADICTORY = 1, 2  # outcomes of a move


class Outputs(NamedTuple):
    """The outputs of a forward pass over boards: float32 logits after each loop.

    keep: [batch, loops, cells, values], of a candidate being right. digit: [batch, loops, cells, values], of
    each value of a cell. conflict: [batch, loops], of the board having no solution any more.
    """

    keep: Tensor
    digit: Tensor
    conflict: Tensor

    def last(self) -> Outputs:
        """Returns the outputs after the last loop, detached, without the axis of loops."""
        return Outputs(*(each[:, -1].detach() for each in self))


def move(
    state: State,
    last: Outputs,
    arch: LDTConfig,
    reasoning: Reasoning,
    rng: SlotRng,
    *,
    in_search: bool = False,
) -> State:
    """Strikes out candidates; then pins one cell of each board that is neither solved nor contradictory.

    last: outputs of the last loop. in_search: whether this is an evaluation. In training, a share of the
    pins, which falls to 0 along the run, takes the value of the target.
    """
    alive = state["alive"].bool() & ~kills(state, last.keep, arch)
    number = alive.sum(-1)
    limit = reasoning.eval_conflict_threshold if in_search else arch.conflict_threshold
    is_contradictory = (number == 0).any(-1) | (last.conflict.sigmoid() > limit)
    is_solved = (number == 1).all(-1) & ~is_contradictory

    rows = torch.arange(len(number), device=number.device)
    rank = rng.uniform(number.shape[1:], use="cell")
    if reasoning.decision_cell == "fewest":
        rank = rank - number
    cell = torch.where(number > 1, rank, -torch.inf).argmax(-1)
    score = last.digit[rows, cell] / arch.temperature
    if reasoning.decision_value == "drawn":
        score = score - (-rng.uniform(score.shape[1:], use="value").log()).log()
    if arch.true_pin_prob and not in_search:
        is_true = rng.uniform((), use="pin") < arch.true_pin_prob * (1 - reasoning.progress)
        score = torch.where(is_true[:, None] & (state["target"][rows, cell] == 1), torch.inf, score)
    value = torch.where(alive[rows, cell], score, -torch.inf).argmax(-1)
    pinned = alive.clone()
    pinned[rows, cell] = F.one_hot(value, score.shape[1]).bool()
    has_ended = is_contradictory | is_solved
    alive = where(has_ended, alive, pinned).to(torch.uint8)
    guess = torch.where(has_ended, NO_GUESS, cell).to(torch.int16)
    outcome = (is_solved * SOLVED + is_contradictory * CONTRADICTORY).to(torch.uint8)
    return state | {"alive": alive, "guess": guess, "outcome": outcome}


def kills(state: State, keep: Tensor, arch: LDTConfig) -> Tensor:
    """Returns which candidates a move strikes out, by the logits `keep`: bool [batch, cells, values]."""
    is_given = state["entered"].sum(-1, keepdim=True) == 1
    return (state["alive"] == 1) & (keep.sigmoid() < arch.kill_threshold) & ~is_given


def leaves(state: State) -> Tensor:
    """Returns which boards leave their slot in training, besides those that are too old: bool [batch].

    These boards look solved (perhaps wrongly), or are rightly called contradictory.
    """
    outcome = state["outcome"]
    return (outcome == SOLVED) | ((outcome == CONTRADICTORY) & is_bad(state))


def sums_of_moves(before: Carry, after: Carry, keep: Tensor, arch: LDTConfig) -> Sums:
    """Returns sums for metrics: of struck-out candidates on sound boards, and of boards that leave."""
    sound, left, state = ~is_bad(before.state), after.halted, after.state
    killed = kills(before.state, keep, arch) & sound[:, None, None]
    solved = left & (state["outcome"] == SOLVED)
    sums = {"sound": sound, "kills": killed, "wrong_kills": killed & (before.state["target"] == 1)}
    sums |= {"left": left, "steps": left * after.steps, "solved": solved}
    sums["solved_right"] = solved & (holds(state["alive"], state["target"]) == 1)
    return {name: each.sum() for name, each in sums.items()}


def holds(alive: Tensor, solution: Tensor) -> Tensor:
    """Returns which boards are sound for this solution, one-hot as `alive`: uint8 [batch]."""
    return ((alive & solution).sum(-1) == 1).all(-1).to(torch.uint8)


def is_bad(state: State) -> Tensor:
    """Returns which boards are not sound: bool [batch]."""
    return holds(state["alive"], state["target"]) == 0


def digit_cells(state: State) -> Tensor:
    """Returns the cells of the digit loss, open at the start and on sound boards: bool [batch, cells]."""
    return (state["entered"].sum(-1) != 1) & ~is_bad(state)[:, None]
