"""The boards of the Lattice Deduction Transformer (LDT, arXiv 2605.08605), and the moves on them.

A board is a set of candidate values for each cell. A cell is open if it has several candidates. A board is
sound if every cell has the value of the solution among its candidates. Otherwise it has lost the solution.

`move` makes one move of each board. `LDT.forward` calls it once in every thinking step.

1. It removes candidates with a low `keep` probability (`kills`), except those of given cells.
2. It calls a board contradictory if a cell has no candidate, or if the `conflict` probability is high. It
   calls another board solved if every cell has one candidate.
3. On any other board it guesses: it samples an open cell and a value, and removes the other candidates of
   the cell.

A cell with one candidate in `entered` is a given cell, also if the candidate is a hint. A move never removes
this candidate.

The state of a slot (`LDT.start` makes it):

    alive    uint8 [batch, cells, values]  1 for each candidate of the board
    entered  uint8 [batch, cells, values]  `alive` at the start. A search resets a board to it
    target   uint8 [batch, cells, values]  the solution, one-hot; 0 if the board was not sound at its start
    outcome  uint8 [batch]                 SOLVED or CONTRADICTORY after the last move, else 0
    guess    int16 [batch]                 the cell that the last move guessed, or NO_GUESS

What happens to a board after its move:

    outcome                         training                                    evaluation (a search)
    ------------------------------  ------------------------------------------  -------------------------
    SOLVED                          leaves, also if it is solved wrongly        stays; it is the answer
    CONTRADICTORY, solution lost    leaves                                      is reset to `entered`
    CONTRADICTORY, but sound        stays. It lost the candidates of 1.         is reset to `entered`
                                    There was no guess
    neither, sound or not           stays. There was also a guess               the same

In training, a board also leaves after arch.halt_max_steps moves. The losses and the rule that boards leave
(`leaves`) use `target`. The losses look at the board before the move, `leaves` at the board after it. An
evaluation does not use `target`.
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

    keep: "This value is right", of each cell and value, [batch, loops, cells, values]. A sigmoid follows.
    digit: The value of each cell, [batch, loops, cells, values]. A softmax over the values follows.
    conflict: "The board has lost the solution", [batch, loops]. A sigmoid follows.
    """

    keep: Tensor
    digit: Tensor
    conflict: Tensor

    def last(self) -> Outputs:
        """Returns the outputs of the last loop, detached, without the axis of loops."""
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
    """Removes candidates. Then guesses one cell of each board that is neither solved nor contradictory.

    Returns the new state. In evaluation, the caller resets contradictory boards. In training, a fraction of
    the guesses takes the value of the solution, if it is still a candidate. This fraction falls linearly from
    true_pin_prob to 0.

    last: Outputs of the last loop. in_search: Whether this is an evaluation.
    """
    alive = state["alive"].bool() & ~kills(state, last.keep, arch)
    number = alive.sum(-1)
    limit = reasoning.eval_conflict_threshold if in_search else arch.conflict_threshold
    is_contradictory = (number == 0).any(-1) | (last.conflict.sigmoid() > limit)
    is_solved = (number == 1).all(-1) & ~is_contradictory

    rows = torch.arange(len(number), device=number.device)
    rank = rng.uniform(number.shape[1:], use="cell")
    if reasoning.decision_cell == "fewest":
        rank = rank - number  # argmax: fewest candidates first, in random order
    cell = torch.where(number > 1, rank, -torch.inf).argmax(-1)
    score = last.digit[rows, cell] / arch.temperature
    if reasoning.decision_value == "drawn":
        # With Gumbel noise, the argmax is a sample of the softmax.
        score = score - (-rng.uniform(score.shape[1:], use="value").log()).log()
    if arch.true_pin_prob and not in_search:
        is_true = rng.uniform((), use="pin") < arch.true_pin_prob * (1 - reasoning.progress)
        score = torch.where(is_true[:, None] & (state["target"][rows, cell] == 1), torch.inf, score)
    value = torch.where(alive[rows, cell], score, -torch.inf).argmax(-1)
    guessed = alive.clone()
    guessed[rows, cell] = F.one_hot(value, score.shape[1]).bool()
    has_ended = is_contradictory | is_solved
    alive = where(has_ended, alive, guessed).to(torch.uint8)
    guess = torch.where(has_ended, NO_GUESS, cell).to(torch.int16)
    outcome = (is_solved * SOLVED + is_contradictory * CONTRADICTORY).to(torch.uint8)
    return state | {"alive": alive, "guess": guess, "outcome": outcome}


def kills(state: State, keep: Tensor, arch: LDTConfig) -> Tensor:
    """Returns which candidates a move removes: bool [batch, cells, values].

    A given cell keeps its candidate. keep: Logits of the last loop.
    """
    is_given = state["entered"].sum(-1, keepdim=True) == 1
    return (state["alive"] == 1) & (keep.sigmoid() < arch.kill_threshold) & ~is_given


def leaves(state: State) -> Tensor:
    """Returns which boards leave their slot in training before halt_max_steps moves: bool [batch].

    They look solved, rightly or wrongly, or they are rightly called contradictory. A board that is wrongly
    called contradictory stays. state: After the move.
    """
    outcome = state["outcome"]
    return (outcome == SOLVED) | ((outcome == CONTRADICTORY) & is_bad(state))


def sums_of_moves(before: Carry, after: Carry, keep: Tensor, arch: LDTConfig) -> Sums:
    """Returns metric sums of the candidates removed from sound boards, and of the boards that leave.

    before, after: Input and output of the thinking step. keep: Logits of the last loop.
    """
    sound, left, state = ~is_bad(before.state), after.halted, after.state
    killed = kills(before.state, keep, arch) & sound[:, None, None]
    solved = left & (state["outcome"] == SOLVED)
    sums = {"sound": sound, "kills": killed, "wrong_kills": killed & (before.state["target"] == 1)}
    sums |= {"left": left, "steps": left * after.steps, "solved": solved}
    sums["solved_right"] = solved & (holds(state["alive"], state["target"]) == 1)
    return {name: each.sum() for name, each in sums.items()}


def holds(alive: Tensor, solution: Tensor) -> Tensor:
    """Returns 1 for each board that is sound: uint8 [batch]. solution: One-hot, in the shape of `alive`."""
    return ((alive & solution).sum(-1) == 1).all(-1).to(torch.uint8)


def is_bad(state: State) -> Tensor:
    """Returns which boards have lost the solution, or never had it: bool [batch]."""
    return holds(state["alive"], state["target"]) == 0


def digit_cells(state: State) -> Tensor:
    """Returns the cells of the digit loss: bool [batch, cells]. They were open at the start of the board.

    Boards that have lost the solution have no such cells.
    """
    return (state["entered"].sum(-1) != 1) & ~is_bad(state)[:, None]
