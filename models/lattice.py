"""The boards of the Lattice Deduction Transformer (LDT, arXiv 2605.08605), and the moves on them.

A board is a set of candidate values for each cell. The words for boards and cells:

open cell             It has several candidates.
given cell            It had one candidate at the start of the board, because the puzzle or a hint gives its
                      value. A move never removes this candidate.
sound board           Every cell has the value of the solution among its candidates.
lost board            Not sound: it has lost the solution. A move has removed a right candidate, or a hint at
                      the start was wrong.
solved board          Every cell has one candidate, right or wrong.
contradictory board   The model says that the board has lost the solution. It may be wrong.

The state of a slot (`LDT.start` makes it):

    alive    uint8 [batch, cells, values]  1 for each candidate of the board
    entered  uint8 [batch, cells, values]  `alive` at the start of the board
    target   uint8 [batch, cells, values]  the solution, one-hot. All 0 if a hint at the start was wrong
    outcome  uint8 [batch]                 SOLVED or CONTRADICTORY after the last move, else 0
    guess    int16 [batch]                 the cell that the last move guessed, or NO_GUESS

In every thinking step, `LDT.forward` calls `move`, which makes one move of each board:

1. Remove the candidates with a low `keep` probability (`kills`), except those of given cells.
2. If a cell has no candidate, or if the `conflict` probability is high, the outcome is CONTRADICTORY.
   Otherwise, if every cell has one candidate, the outcome is SOLVED.
3. If there is no outcome, guess: sample an open cell and one of its candidates, and remove its other
   candidates.

What happens to the board after its move:

    outcome                         training                          evaluation (a search)
    ------------------------------  --------------------------------  ----------------------------------------
    SOLVED                          leaves the slot                   stays. The slot halts, and the board is
                                                                      the answer
    CONTRADICTORY, board lost       leaves the slot                   is reset to `entered`
    CONTRADICTORY, board sound      stays, without a guess            is reset to `entered`
    none                            stays, with a guess               stays, with a guess

In training, a board also leaves after arch.halt_max_steps moves. If a board leaves, the slot starts on a new
puzzle. Training uses `target` for the loss and to know which boards are sound. An evaluation does not use it.
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
    """The outputs of a forward pass on boards: float32 logits after each loop.

    Attributes:
        keep: For each cell and value, whether the value is right, [batch, loops, cells, values]. The sigmoid
            is the probability.
        digit: The value of each cell, [batch, loops, cells, values]. The softmax over the values gives the
            probabilities.
        conflict: Whether the board has lost the solution, [batch, loops]. The sigmoid is the probability.
    """

    keep: Tensor
    digit: Tensor
    conflict: Tensor

    def last(self) -> Outputs:
        """Returns the outputs of the last loop, detached, without the axis of loops."""
        return Outputs(*(logits[:, -1].detach() for logits in self))


def move(
    state: State,
    last: Outputs,
    arch: LDTConfig,
    reasoning: Reasoning,
    rng: SlotRng,
    *,
    in_search: bool = False,
) -> State:
    """Makes one move of each board, the steps 1 to 3 in the docstring of this file. Returns the new state.

    In evaluation, the caller then resets contradictory boards. With arch.true_pin_prob > 0, a fraction of the
    guesses in training takes the value of the solution, if it is still a candidate. This fraction falls
    linearly from true_pin_prob to 0 during the run.

    last: Outputs of the last loop. in_search: Whether this is an evaluation.
    """
    # 1. Remove candidates.
    alive = state["alive"].bool() & ~kills(state, last.keep, arch)
    num_candidates = alive.sum(-1)  # [batch, cells]
    # 2. Outcome.
    limit = reasoning.eval_conflict_threshold if in_search else arch.conflict_threshold
    is_contradictory = (num_candidates == 0).any(-1) | (last.conflict.sigmoid() > limit)
    is_solved = (num_candidates == 1).all(-1) & ~is_contradictory
    has_ended = is_contradictory | is_solved

    # 3. Sample a guess for every board. A board that has ended does not use it. First sample the cell,
    # [batch]: the open cell with the highest priority.
    boards = torch.arange(len(num_candidates), device=num_candidates.device)
    priority = rng.uniform(num_candidates.shape[1:], use="cell")
    if reasoning.decision_cell == "fewest":
        priority = priority - num_candidates  # random among the cells with the fewest candidates
    cell = torch.where(num_candidates > 1, priority, -torch.inf).argmax(-1)
    # Then sample the value, [batch]: the candidate with the highest score. Scores are [batch, values].
    score = last.digit[boards, cell] / arch.temperature
    if reasoning.decision_value == "drawn":
        # With Gumbel noise, the argmax is a sample of the softmax.
        score = score - (-rng.uniform(score.shape[1:], use="value").log()).log()
    if arch.true_pin_prob and not in_search:
        takes_solution = rng.uniform((), use="pin") < arch.true_pin_prob * (1 - reasoning.progress)
        is_solution = state["target"][boards, cell] == 1
        score = torch.where(takes_solution[:, None] & is_solution, torch.inf, score)
    value = torch.where(alive[boards, cell], score, -torch.inf).argmax(-1)

    guessed = alive.clone()
    guessed[boards, cell] = F.one_hot(value, score.shape[1]).bool()
    alive = where(has_ended, alive, guessed).to(torch.uint8)
    guess = torch.where(has_ended, NO_GUESS, cell).to(torch.int16)
    outcome = (is_solved * SOLVED + is_contradictory * CONTRADICTORY).to(torch.uint8)
    return state | {"alive": alive, "guess": guess, "outcome": outcome}


def kills(state: State, keep: Tensor, arch: LDTConfig) -> Tensor:
    """Returns which candidates a move removes: bool [batch, cells, values].

    A given cell keeps its candidate. keep: Logits of the last loop, [batch, cells, values].
    """
    is_given = state["entered"].sum(-1, keepdim=True) == 1
    return (state["alive"] == 1) & (keep.sigmoid() < arch.kill_threshold) & ~is_given


def leaves(state: State) -> Tensor:
    """Returns which boards leave their slot in training before halt_max_steps moves: bool [batch].

    These are the solved boards, right or wrong, and the contradictory boards that are lost. A
    contradictory board that is sound stays. state: State after the move.
    """
    outcome = state["outcome"]
    return (outcome == SOLVED) | ((outcome == CONTRADICTORY) & has_lost_solution(state))


def sums_of_moves(before: Carry, after: Carry, keep: Tensor, arch: LDTConfig) -> Sums:
    """Returns metric sums of the candidates removed from sound boards, and of the boards that leave.

    `models.ldt.BoardObjective.training_metrics` describes the metrics.

    before, after: Input and output of the thinking step. keep: Logits of the last loop, [batch, cells,
    values].
    """
    is_lost, left = has_lost_solution(before.state), after.halted
    killed = kills(before.state, keep, arch) & ~is_lost[:, None, None]
    solved = left & (after.state["outcome"] == SOLVED)
    sums = {
        "sound": ~is_lost,
        "kills": killed,
        "wrong_kills": killed & (before.state["target"] == 1),
        "left": left,
        "steps": left * after.steps,
        "solved": solved,
        "solved_right": solved & ~has_lost_solution(after.state),
    }
    return {name: values.sum() for name, values in sums.items()}


def contains_solution(alive: Tensor, solution: Tensor) -> Tensor:
    """Returns which boards are sound: bool [batch]. solution: One-hot, in the shape of `alive`."""
    return ((alive & solution).sum(-1) == 1).all(-1)


def has_lost_solution(state: State) -> Tensor:
    """Returns which boards are lost (not sound): bool [batch]."""
    return ~contains_solution(state["alive"], state["target"])


def digit_cells(state: State) -> Tensor:
    """Returns the cells of the digit loss: bool [batch, cells].

    These are the cells of sound boards that are not given.
    """
    return (state["entered"].sum(-1) != 1) & ~has_lost_solution(state)[:, None]
