"""The boards of LDT: their start, their moves, and what happens after a move.

A board is a puzzle with candidates for each cell, the values that are still possible. An open cell has
several candidates. A given cell had only one at the start. A hint (in training, `with_hints`) leaves an open
cell only one candidate at the start. `Outputs` describes the probabilities keep, digit and conflict that the
network predicts. models/ldt.py has more about these words.

The state of a slot (`start_boards` creates it, and `move` changes alive, guess and outcome):

    alive    uint8 [batch, cells, values]  1 for each candidate of the board
    entered  uint8 [batch, cells, values]  `alive` at the start of the board
    target   uint8 [batch, cells, values]  the solution, one-hot. All 0 if a hint at the start was wrong
    outcome  uint8 [batch]                 SOLVED or CONTRADICTORY after the last move, else 0
    guess    int16 [batch]                 the cell that the last move guessed, or NO_GUESS
    answers  int16 [batch, answers, cells] only in training with arch.num_answers > 1: right answers, as
                                           indices of values. -1 in an unused entry

A board is lost if some cell has no candidate that is right by `target`.

If the state has `answers`, an answer fits a board if its value in every cell is a candidate. `target` is then
the union of the answers that fit before the move. If none fits, `target` does not change (`with_target`). So
a board is not lost as long as an answer fits.

A move (`move`) has three parts:

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
    CONTRADICTORY, lost             leaves the slot                   is reset to `entered`
    CONTRADICTORY, not lost         stays, without a guess            is reset to `entered`
    none                            stays, with a guess               stays, with a guess

In training, a board also leaves after arch.halt_max_steps moves. If a board leaves, the slot starts on a new
puzzle. Training uses `target` for the loss, for some guesses (`arch.true_pin_prob`), and to know which boards
are lost. An evaluation does not use it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from config.architecture import LDTConfig
from models.carry import Reasoning, State, where
from models.random import SlotRng

NO_GUESS, RESET = -1, -2  # in place of a guessed cell. RESET: the board was reset to its start
SOLVED, CONTRADICTORY = 1, 2  # outcomes of a move


class Outputs(NamedTuple):
    """The logits of the LDT network for boards, after each loop through its transformer blocks.

    Attributes:
        keep: Logit of the probability that a value is right in a cell, float32 [batch, loops, cells, values].
        digit: Logits of the values of a cell, for a softmax over the values, float32 [batch, loops, cells,
            values].
        conflict: Logit of the probability that the right value of some cell is not a candidate, float32
            [batch, loops].
    """

    keep: Tensor
    digit: Tensor
    conflict: Tensor

    def last(self) -> Outputs:
        """Returns the logits after the last loop, detached, without the axis of loops."""
        return Outputs(*(logits[:, -1].detach() for logits in self))


def start_boards(entered: Tensor, solution: Tensor, answers: Tensor | None = None) -> State:
    """Returns the state of boards before their first move. The docstring of this file lists its tensors.

    entered: Candidates at the start, uint8 [batch, cells, values]. solution: One-hot solution, uint8 in the
    same shape. answers: Right answers of each puzzle as indices of values, int16 [batch, answers, cells].
    Unused entries are -1. If `answers` is passed, `solution` has no effect.
    """
    has_solution = ((entered & solution).sum(-1) == 1).all(-1)  # bool [batch]
    target = solution * has_solution[:, None, None]  # all 0 on a board with a wrong hint
    outcome = torch.zeros(len(entered), dtype=torch.uint8, device=entered.device)
    guess = torch.full_like(outcome, NO_GUESS, dtype=torch.int16)
    state = {"alive": entered, "entered": entered, "target": target, "guess": guess, "outcome": outcome}
    if answers is None:
        return state
    return with_target(state | {"target": torch.zeros_like(target), "answers": answers})


def with_target(state: State) -> State:
    """Returns the state with a new training target: the union of the answers that fit each board.

    An answer fits if its value in every cell is a candidate. If no answer fits a board, the target of this
    board does not change. If the state has no "answers", returns `state` itself.
    """
    if "answers" not in state:
        return state
    fits = _fits(state)
    values = state["answers"].clamp(min=0).long().transpose(1, 2)  # [batch, cells, answers]
    source = fits[:, None].expand_as(values).to(torch.uint8)
    union = torch.zeros_like(state["target"]).scatter_reduce(-1, values, source, "amax")
    return state | {"target": where(fits.any(-1), union, state["target"])}


def _fits(state: State) -> Tensor:  # which answers fit the board, bool [batch, answers]
    answers = state["answers"]
    alive = state["alive"][:, None].expand(-1, answers.shape[1], -1, -1)
    is_candidate = alive.gather(-1, answers.clamp(min=0).long()[..., None])[..., 0] == 1
    return (is_candidate & (answers >= 0)).all(-1)


def with_hints(entered: Tensor, solution: Tensor, arch: LDTConfig, rng: SlotRng) -> Tensor:
    """Adds random hints to boards in training: some open cells keep only one candidate.

    Returns the new candidates. Each board has one of three kinds of hints:

    - with probability arch.hint_prob: right hints in 0 to 100 % of its open cells
    - with probability arch.wrong_hint_prob: hints in 10 to 100 % of its open cells. 1 to 30 % of these hints
      are wrong, at least one
    - otherwise: none

    entered: Candidates at the start, uint8 [batch, cells, values]. solution: One-hot solution, in the same
    shape.
    """
    is_open = entered.sum(-1) > 1  # [batch, cells]
    num_open = is_open.sum(-1)  # [batch], as all numbers of hints
    kind, amount, wrong_amount = rng.uniform((3,), use="hints").unbind(1)
    has_wrong = kind < arch.wrong_hint_prob
    has_hints = kind < arch.wrong_hint_prob + arch.hint_prob
    num_if_wrong = (num_open * (0.1 + 0.9 * amount)).long().clamp(min=1)
    num_hints = torch.where(has_wrong, num_if_wrong, (num_open * amount).long()) * has_hints
    num_wrong = (num_hints * (0.01 + 0.29 * wrong_amount)).long().clamp(min=1) * has_wrong
    # Put the open cells of each board in random order. The first num_hints of them get hints. Of these,
    # the first num_wrong get a wrong one.
    order = torch.where(is_open, rng.uniform(is_open.shape[1:], use="hint cells"), 2.0).argsort(-1)
    rank = order.argsort(-1)  # place of each cell in the order
    scores = torch.where(entered > solution, rng.uniform(entered.shape[1:], use="wrong hints"), -1.0)
    wrong = F.one_hot(scores.argmax(-1), entered.shape[-1]).to(torch.uint8)  # a random wrong candidate
    hint = torch.where((rank < num_wrong[:, None])[..., None], wrong, solution)
    return torch.where((is_open & (rank < num_hints[:, None]))[..., None], hint, entered)


def move(
    state: State,
    last: Outputs,
    arch: LDTConfig,
    reasoning: Reasoning,
    rng: SlotRng,
    *,
    in_search: bool = False,
) -> State:
    """Makes a move on each board. Returns the new state.

    A move removes unlikely candidates, determines the outcome (solved, contradictory or none), and guesses a
    value if there is no outcome. The docstring of this file has the rules.

    Args:
        state: Boards before the move, from `start_boards` or from the previous move. A board is a puzzle with
            the candidates of each cell: the values that the cell may still have.
        last: Logits after the last pass through the transformer blocks, from `Outputs.last`.
        arch, reasoning: Thresholds, and the rules for guesses.
        rng: Random numbers of the boards.
        in_search: True in an evaluation. Then the threshold of contradictions is eval_conflict_threshold, and
            no guess reads the solution. In training, some guesses are the right value (`arch.true_pin_prob`).
    """
    state = with_target(state)
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
    score = last.digit[boards, cell] / (arch.temperature or 1.0)
    if reasoning.decision_value == "drawn" and arch.temperature > 0:
        # With Gumbel noise, the argmax is a sample of the softmax.
        score = score - (-rng.uniform(score.shape[1:], use="value").log()).log()
    allowed = alive[boards, cell]
    # In training, a fraction of the guesses takes the value of the solution, if it is still a candidate. This
    # fraction falls linearly from true_pin_prob to 0 during the run.
    if arch.true_pin_prob and not in_search:
        takes_solution = rng.uniform((), use="pin") < arch.true_pin_prob * (1 - reasoning.progress)
        is_right = allowed & (state["target"][boards, cell] == 1)
        allowed = torch.where((takes_solution & is_right.any(-1))[:, None], is_right, allowed)
    value = torch.where(allowed, score, -torch.inf).argmax(-1)

    guessed = alive.clone()
    guessed[boards, cell] = F.one_hot(value, score.shape[1]).bool()
    alive = where(has_ended, alive, guessed).to(torch.uint8)
    guess = torch.where(has_ended, NO_GUESS, cell).to(torch.int16)
    outcome = (is_solved * SOLVED + is_contradictory * CONTRADICTORY).to(torch.uint8)
    return state | {"alive": alive, "guess": guess, "outcome": outcome}


def kills(state: State, keep: Tensor, arch: LDTConfig) -> Tensor:
    """Returns which candidates `move` removes before it guesses: bool [batch, cells, values].

    A candidate is removed if its probability of being right is below arch.kill_threshold. A cell that had
    only one candidate at the start keeps this candidate.

    state: Boards before the move: the tensors `alive` and `entered`, uint8 [batch, cells, values]. keep:
    Logits of the probability that a value is right, [batch, cells, values].
    """
    is_open = ~given_cells(state)[..., None]
    return (state["alive"] == 1) & (keep.sigmoid() < arch.kill_threshold) & is_open


def leaves(state: State) -> Tensor:
    """Returns which boards leave their slot in training: bool [batch].

    A board leaves if it is solved, right or wrong, or if it is both contradictory and lost. A board is lost
    if some cell has no right candidate.

    state: Boards after their move, from `move`.
    """
    outcome = state["outcome"]
    return (outcome == SOLVED) | ((outcome == CONTRADICTORY) & is_lost(state))


def given_cells(state: State) -> Tensor:
    """Returns which cells had only one candidate at the start: bool [batch, cells]."""
    return state["entered"].sum(-1) == 1


def is_lost(state: State) -> Tensor:
    """Returns which boards have a cell in which no candidate is right: bool [batch].

    A candidate is right if `target` is 1 for it. In training, moves only remove candidates. So a lost board
    never gets a right answer.
    """
    return ~(state["alive"] & state["target"]).bool().any(-1).all(-1)


def is_right(state: State) -> Tensor:
    """Returns which boards still have a right answer among their candidates: bool [batch]."""
    return _fits(state).any(-1) if "answers" in state else ~is_lost(state)
