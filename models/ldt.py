"""The Lattice Deduction Transformer (LDT, arXiv 2605.08605): removes candidates, and guesses.

A board is a puzzle on which the model works: a set of candidate values for each cell. A thinking step is one
forward pass and one move (`LDT.forward`):

1. `LDT.look` runs the network on the board. It predicts which candidates are right, the value of each cell,
   and whether the board has lost the solution. It sees the board under a random symmetry.
2. `models.lattice.move` removes unlikely candidates. If the board is then neither solved nor contradictory,
   it guesses the value of one open cell.

The new board is the state of the next thinking step. It has no gradient.

Training    `BoardObjective.losses` compares the predictions for the board before the move with the solution.
            `models.lattice` has a table of when a board leaves its slot. Then the slot starts a new puzzle
            (`LDT.start`). With arch.boards_per_slot > 1, a slot holds several boards, and each training step
            picks one of them.
Evaluation  A search. A contradictory board is reset to its start, and the search makes other random guesses.
            The search ends when the board looks solved. After eval_halt_max_steps moves, the puzzle is
            undecided.

There is no Q head, and `models.objective.Objective` is not used. In the paper's code, a second pass after the
update of the weights moves the boards. Here, the pass that computes the loss moves them. So the boards move
by the weights before the update, with dropout.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from config.architecture import LDTConfig
from dataset.format import IGNORE_LABEL_ID, Metadata, columns_of
from dataset.loader import Batch
from models.blocks import Level
from models.carry import Carry, Reasoning, State, StepOutput, where
from models.lattice import (
    CONTRADICTORY,
    SOLVED,
    Outputs,
    digit_cells,
    holds,
    is_bad,
    leaves,
    move,
    sums_of_moves,
)
from models.layers import Attention, Dropout, LayerNorm, Linear, grid_angles, rotary_table
from models.objective import Divisors, Metrics, Sums, correct_sequences
from models.random import SlotRng
from models.search import NO_GUESS, RESET, Search, SearchView

_HALF_TURNS = (0, 1, 4, 5)  # the symmetries of a grid that map rows to rows (`_turned_cells`)


class LDTPrediction(NamedTuple):
    """The `Prediction` of LDT, with the fields of `models.lattice.Outputs`.

    logits: The answer of the moved board, [batch, seq_len, vocab] in the forward dtype. q_halt: 5 if the
    moved board is solved, else -5, float32 [batch]. keep, digit, conflict: For the board before the move.
    """

    logits: Tensor
    q_halt: Tensor
    q_continue: None
    keep: Tensor
    digit: Tensor
    conflict: Tensor


class BoardObjective:
    """The objective of LDT: three losses. It has the members of `models.objective.Objective`."""

    metrics: ClassVar[Metrics] = {
        "count": None,
        **dict.fromkeys(("exact_accuracy", "wrong", "undecided", "steps"), "count"),
    }
    # Name of a sum: name of the sum that divides it, as in `Objective.metrics`. bad: Boards that have lost
    # the solution. alarms: Boards that the network calls contradictory. sound: All boards that are not bad.
    # kills: Candidates that the step removes, per sound board. left: Boards that leave their slot. solved:
    # Boards that leave because they look solved.
    training_metrics: ClassVar[Metrics] = {
        **{"keep_loss": "slots", "digit_loss": "digit_cells", "conflict_loss": "slots"},
        **{"bad": "slots", "conflict_recall": "bad", "conflict_precision": "alarms"},
        **{"kills": "sound", "wrong_kills": "kills"},
        **{"left": None, "steps": "left", "solved": "left", "solved_right": "solved"},
    }

    def __init__(self, arch: LDTConfig):
        self.arch = arch

    def divisors(self, carry: Carry) -> Sums:
        return {"digit_cells": digit_cells(carry.state).sum(), "bad": is_bad(carry.state).sum()}

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
        """Returns the loss, summed over slots, and the metric sums. Arguments: As in `Objective.losses`.

            loss = keep_loss + digit_weight * digit_loss + conflict_weight * conflict_loss

        Each loss is a mean over the loops. The targets are of the board before the move. The caller divides
        the returned loss by divisors["slots"], the number of slots of the global batch.

        keep_loss      Binary cross-entropy of `keep` against "a candidate, and right", the mean over all
                       cells and values, also those without a candidate. The weight is keep_weight for right
                       candidates, else kill_weight.
        digit_loss     Cross-entropy of `digit`, the mean over the cells of `digit_cells` in the global batch.
                       These are the cells without a given value, on boards that have the solution.
        conflict_loss  Binary cross-entropy of `conflict` against "the board has lost the solution". With
                       balanced_conflict, the boards that have lost it have half of the total weight.
        """
        arch, state, slots = self.arch, before.state, divisors["slots"]
        _, _, _, keep, digit, conflict = output.prediction
        target, bad, cells = state["target"], is_bad(state), digit_cells(state)

        kept = (state["alive"] & target)[:, None].to(keep.dtype)
        log_keep = F.logsigmoid(keep)  # log_keep - keep is log(1 - sigmoid(keep))
        of_entry = arch.keep_weight * kept * log_keep + arch.kill_weight * (1 - kept) * (log_keep - keep)
        keep_loss = -of_entry.mean((1, 2, 3))

        values = target.argmax(-1)[:, None, :, None].expand(-1, digit.shape[1], -1, 1)
        log_digit = digit.log_softmax(-1).gather(-1, values)[..., 0]
        digit_loss = -torch.where(cells[:, None], log_digit, 0).sum(-1).mean(1)
        num_cells = torch.as_tensor(divisors["digit_cells"], device=bad.device).clamp(min=1)

        wanted = bad.to(keep.dtype)[:, None].expand_as(conflict)
        conflict_loss = F.binary_cross_entropy_with_logits(conflict, wanted, reduction="none").mean(1)
        weight = arch.conflict_weight
        if arch.balanced_conflict:
            num_bad = torch.as_tensor(divisors["bad"], device=bad.device)
            weight = weight / 2 * slots / torch.where(bad, num_bad, slots - num_bad)
        # The caller divides by slots, so the sum of digit_loss is divided by num_cells only.
        loss = keep_loss.sum() + arch.digit_weight * digit_loss.sum() * (slots / num_cells)
        loss = loss + (weight * conflict_loss).sum()

        alarms = conflict[:, -1].sigmoid() > arch.conflict_threshold
        sums = {"keep_loss": keep_loss, "digit_loss": digit_loss, "conflict_loss": conflict_loss, "bad": bad}
        sums |= {"digit_cells": cells, "alarms": alarms}
        sums |= dict.fromkeys(("conflict_recall", "conflict_precision"), bad & alarms)
        sums = {name: each.detach().sum() for name, each in sums.items()}
        return loss, sums | sums_of_moves(before, output.carry, keep[:, -1].detach(), self.arch)

    def more_calls(self, reasoning: Reasoning) -> float:
        return 0

    def sums(self, output: StepOutput) -> Sums:
        labels = output.carry.data.labels
        counted = (labels != IGNORE_LABEL_ID).any(-1)
        _, is_exact = correct_sequences(output.prediction.logits, labels)
        is_decided = output.prediction.q_halt > 0
        sums = {"count": counted, "exact_accuracy": is_decided & is_exact, "wrong": is_decided & ~is_exact}
        sums |= {"undecided": ~is_decided, "steps": output.carry.steps}
        return {name: (counted * each).sum() for name, each in sums.items()}


class PreNormBlock(nn.Module):
    """A pre-norm transformer block: h += attn(norm(h)); h += down(gelu(up(norm(h)))), all with biases.

    number: Index of this block in the level. It gives each block different random numbers for dropout.
    """

    def __init__(self, width: int, *, num_heads: int, expansion: float, has_rotary: bool, number: int):
        super().__init__()
        inner, options = round(expansion * width), {"bias": True, "has_rotary": has_rotary}
        self.norm1, self.attn = LayerNorm(width), Attention(width, num_heads=num_heads, **options)
        self.norm2, self.up_proj = LayerNorm(width), Linear(width, inner, bias=True)
        self.down_proj = Linear(inner, width, bias=True)
        self.number = number

    def forward(self, h: Tensor, rotary: Tensor | None, dropout: Dropout | None) -> Tensor:
        """Returns the new h. dropout: Dropout of the attention weights and of the output of both branches."""
        if dropout is None:
            h = h + self.attn(self.norm1(h), rotary, dropout=None)
            return h + self.down_proj(F.gelu(self.up_proj(self.norm2(h))))
        weights, first, second = (dropout._replace(stream=3 * self.number + use) for use in range(3))
        h = h + first(self.attn(self.norm1(h), rotary, dropout=weights))
        return h + second(self.down_proj(F.gelu(self.up_proj(self.norm2(h)))))


class LDT(Search):
    """The network of LDT, with its moves. `models.lattice` describes the state of a slot.

    The forward pass of `look`, with a board of [batch, cells, values]:

        h = h0 = input_proj(board)
        loops times:
            x = [h + h0, cls]                       [batch, cells + 1, hidden]
            u = blocks(x + positions)
            h = layer_norm(x + u) at the cells      [batch, cells, hidden]
            keep, digit = keep_head(h), digit_head(h)
            conflict = conflict_head(u at the last position)

    All loops have gradient. A thinking step then moves the board by the outputs of the last loop.

    Attributes:
        values: Tokens that occur in labels of the training data, int64 [values].
        candidates: uint8 [vocab, vocab], 1 if a cell with input token i may have label j.
        symmetries: uint8 [2]: whether grids may be turned, and whether values may be permuted.
        turned_cells: Source cell of each cell in each symmetry of the grid, int64 [symmetries, cells].
    """

    objective_class = BoardObjective
    of_data = ("candidates", "symmetries")

    def __init__(self, arch: LDTConfig, metadata: Metadata):
        super().__init__(arch)
        self.boards_per_slot = arch.boards_per_slot
        width, vocab_size, num_cells = arch.hidden_size, metadata.vocab_size, metadata.seq_len
        # If the metadata do not say which labels an input may have, any input may have any label. Example: an
        # estimate of memory without a dataset.
        candidates = np.zeros((vocab_size, vocab_size), np.uint8)
        candidates.flat[list(metadata.candidates or range(vocab_size**2))] = 1
        values = np.flatnonzero(candidates.any(axis=0))
        self.register_buffer("candidates", torch.from_numpy(candidates))
        self.register_buffer("values", torch.from_numpy(values), persistent=False)
        may = [bool(metadata.may_turn), bool(metadata.may_permute)]
        self.register_buffer("symmetries", torch.tensor(may, dtype=torch.uint8))
        self.may_permute = may[1]
        num_columns = columns_of(metadata, needed_by="arch=ldt")
        grid = np.arange(num_cells).reshape(-1, num_columns)
        # If values may be permuted, the puzzle is a Sudoku, and its grid has boxes.
        self.register_buffer(
            "turned_cells", _turned_cells(grid, may_turn=may[0], has_boxes=may[1]), persistent=False
        )

        self.input_proj = Linear(len(values), width, bias=True)
        self.row_embed = self.col_embed = rotary = None
        if arch.pos_encodings == "learned":
            self.row_embed, self.col_embed = (nn.Parameter(torch.randn(size, width)) for size in grid.shape)
        else:
            head_dim = width // arch.num_heads
            angles = grid_angles(num_cells, num_columns, head_dim, base=arch.rope_theta)
            angles = F.pad(angles, (0, 0, 0, 1))  # angle 0 for the cls token after the cells
            rotary = rotary_table(angles)
        self.register_buffer("rotary", rotary, persistent=False)
        self.cls_embed, self.cls_pos = (nn.Parameter(torch.randn(1, 1, width).mul_(0.02)) for _ in range(2))
        options = {"num_heads": arch.num_heads, "expansion": arch.expansion}
        options["has_rotary"] = self.row_embed is None
        self.blocks = Level(PreNormBlock(width, number=n, **options) for n in range(arch.num_layers))
        self.loop_norm = LayerNorm(width)
        self.keep_head, self.digit_head = (Linear(width, len(values), bias=True) for _ in range(2))
        self.conflict_head = Linear(width, 1, bias=True)
        self._initialize_()

    def _initialize_(self) -> None:
        """Initializes the matrices with PyTorch's default distributions, as the paper's code does."""
        for name, module in self.named_modules():
            if isinstance(module, Linear):
                rows, columns = module.weight.shape
                of_qkv = name.endswith("qkv_proj")
                bound = (6 / (rows + columns)) ** 0.5 if of_qkv else columns**-0.5
                nn.init.uniform_(module.weight, -bound, bound)
                if module.bias is not None and not name.endswith("o_proj"):
                    nn.init.uniform_(module.bias, -bound, bound)

    @staticmethod
    def complete(metadata: Metadata, weights: State) -> Metadata:
        table = weights["candidates"][: metadata.vocab_size, : metadata.vocab_size]
        candidates = tuple(table.flatten().nonzero().flatten().tolist())
        may_turn, may_permute = map(bool, weights["symmetries"])
        may = {"may_turn": may_turn, "may_permute": may_permute}
        return dataclasses.replace(metadata, candidates=candidates, **may)

    # Boards.

    def start(self, data: Batch, reasoning: Reasoning, rng: SlotRng | None, fresh: Tensor) -> State:
        """Returns new boards. A cell has the candidates that its input token allows.

        In training, some boards get hints (`_with_hints`).
        """
        entered = self.candidates[data.inputs.long()][..., self.values]
        solution = (data.labels[..., None] == self.values).to(torch.uint8)
        if self.training and rng is not None and self.arch.hint_prob + self.arch.wrong_hint_prob > 0:
            entered = self._with_hints(entered, solution, rng)
        target = solution * holds(entered, solution)[:, None, None]  # 0 if a wrong hint has lost the solution
        outcome = torch.zeros(len(entered), dtype=torch.uint8, device=entered.device)
        guess = torch.full_like(outcome, NO_GUESS, dtype=torch.int16)
        return {"alive": entered, "entered": entered, "target": target, "guess": guess, "outcome": outcome}

    def view(self, state: State) -> SearchView:
        candidates = state["alive"].new_zeros(*state["alive"].shape[:2], len(self.candidates))
        candidates[..., self.values] = state["alive"]
        guess = torch.where(state["outcome"] == CONTRADICTORY, RESET, state["guess"])
        return SearchView(candidates.bool(), guess)

    def _with_hints(self, entered: Tensor, solution: Tensor, rng: SlotRng) -> Tensor:
        """Returns `entered` with hints: some open cells of some boards have only one candidate.

        With probability hint_prob, all hints of a board are right, for 0 to 100 % of the open cells. With
        probability wrong_hint_prob, 10 to 100 % of the open cells get hints, and 1 to 30 % of the hints are
        wrong, at least one. entered, solution: uint8 [batch, cells, values].
        """
        # number: Hints of the board. The first num_wrong of them are wrong. The cells are in random order.
        is_open = entered.sum(-1) > 1
        num_open = is_open.sum(-1)
        kind, share, part = rng.uniform((3,), use="hints").unbind(1)
        is_wrong = kind < self.arch.wrong_hint_prob
        is_hinted = kind < self.arch.wrong_hint_prob + self.arch.hint_prob
        least_one = (num_open * (0.1 + 0.9 * share)).long().clamp(min=1)
        number = torch.where(is_wrong, least_one, (num_open * share).long()) * is_hinted
        num_wrong = (number * (0.01 + 0.29 * part)).long().clamp(min=1) * is_wrong
        order = torch.where(is_open, rng.uniform(is_open.shape[1:], use="hint cells"), 2.0).argsort(-1)
        rank = order.argsort(-1)
        others = torch.where((entered > solution), rng.uniform(entered.shape[1:], use="wrong hints"), -1.0)
        wrong = F.one_hot(others.argmax(-1), entered.shape[-1]).to(torch.uint8)
        hint = torch.where((rank < num_wrong[:, None])[..., None], wrong, solution)
        return torch.where((is_open & (rank < number[:, None]))[..., None], hint, entered)

    # Halting.

    def wants_to_halt(self, state: State, prediction: LDTPrediction, rng: SlotRng | None = None) -> Tensor:
        return leaves(state) if self.training else prediction.q_halt > 0

    def sample_randomness(self, **_: Any) -> dict[str, np.ndarray]:
        return {}

    def pick_boards(self, rng: SlotRng) -> Tensor | None:
        if self.boards_per_slot == 1:
            return None
        return rng.integers((), below=self.boards_per_slot, use="picked board")

    # Forward pass.

    def forward(
        self,
        state: State,
        inputs: Tensor,
        puzzle_identifiers: Tensor,
        *,
        reasoning: Reasoning,
        rng: SlotRng | None = None,
    ) -> tuple[State, LDTPrediction]:
        """Runs one thinking step: the network on the boards, then one move.

        In evaluation (a search), a contradictory board is reset. A solved board does not change. Only a trace
        of an answer calls the network on solved boards.
        """
        dropout = self.arch.dropout if self.training else 0.0
        outputs = self.look(state["alive"], rng, loops=reasoning.loops, dropout=dropout)
        moved = move(state, outputs.last(), self.arch, reasoning, rng, in_search=not self.training)
        if not self.training:
            moved["alive"] = where(moved["outcome"] == CONTRADICTORY, state["entered"], moved["alive"])
            was_solved = state["outcome"] == SOLVED
            moved = {name: where(was_solved, state[name], each) for name, each in moved.items()}
        q_halt = torch.where(moved["outcome"] == SOLVED, 5.0, -5.0)
        return moved, LDTPrediction(self._logits(moved["alive"], inputs), q_halt, None, *outputs)

    def _logits(self, alive: Tensor, inputs: Tensor) -> Tensor:
        """Returns logits of the answer. A cell with one candidate gets this value, else its input token."""
        logits = alive.new_zeros(*alive.shape[:2], len(self.candidates), dtype=self.dtype)
        logits[..., self.values] = 8 * alive.to(self.dtype)
        is_open = (alive.sum(-1, keepdim=True) != 1).to(self.dtype)
        return logits.scatter_add(-1, inputs.long()[..., None], 9 * is_open)

    def look(self, alive: Tensor, rng: SlotRng | None, *, loops: int, dropout: float = 0.0) -> Outputs:
        """Runs all loops on the boards. Returns the outputs of each loop.

        In training and in a search, the network sees each board under a random symmetry, and the outputs are
        transformed back. alive: Candidates of the boards, uint8 [batch, cells, values]. rng: If None, there
        is no symmetry.
        """
        num_boards, num_cells, num_values = alive.shape
        seen, index = alive, None
        if rng is not None:
            index = self._sample_symmetry(rng)
            seen = alive.flatten(1).gather(1, index).view(alive.shape)
        keys = None
        if dropout:
            high, low = rng.integers((2,), below=1 << 23, use="look dropout").unbind(1)
            keys = high << 23 | low
        outputs = []
        h = h0 = self.input_proj(seen.to(self.dtype))
        cls = self.cls_embed.to(self.dtype).expand(num_boards, -1, -1)
        positions = self._positions(num_cells).to(self.dtype)
        for loop in range(loops):
            x = torch.cat((h + h0, cls), dim=1)
            drops = None if keys is None else Dropout(keys + loop, 0, dropout)
            u = self.blocks(x, positions, self.rotary, drops)
            h = self.loop_norm((x + u)[:, :-1])
            outputs.append((self.keep_head(h), self.digit_head(h), self.conflict_head(u[:, -1])))
        keep, digit, conflict = (torch.stack(each, dim=1).float() for each in zip(*outputs, strict=True))
        if index is not None:
            index = index[:, None].expand(-1, loops, -1)  # the scatter undoes the gather above
            keep, digit = (
                torch.zeros_like(index, dtype=each.dtype).scatter(2, index, each.flatten(2)).view(each.shape)
                for each in (keep, digit)
            )
        return Outputs(keep, digit, conflict[..., 0])

    def _sample_symmetry(self, rng: SlotRng) -> Tensor:
        """Samples a symmetry of each board: int64 [batch, cells * values], the source of each entry."""
        number = rng.integers((), below=len(self.turned_cells), use="look symmetry")
        values = torch.arange(len(self.values), device=number.device).expand(len(number), -1)
        if self.may_permute:
            values = rng.uniform(self.values.shape, use="look values").argsort(dim=-1, stable=True)
        cells = self.turned_cells[number]
        return (cells[:, :, None] * len(self.values) + values[:, None]).flatten(1)

    def _positions(self, num_cells: int) -> Tensor:
        """Returns the position embeddings of the cells and of cls: [1, cells + 1, hidden].

        With rotary positions, the embeddings of the cells are 0.
        """
        if self.row_embed is None:
            return F.pad(self.cls_pos, (0, 0, num_cells, 0))
        table = (self.row_embed[:, None] + self.col_embed).flatten(0, 1)
        return torch.cat((table[None], self.cls_pos), dim=1)

    def facts(self) -> dict[str, Any]:
        return {
            "values": self.values.tolist(),
            "candidates": self.candidates[:, self.values].tolist(),  # of each token
            "kill_threshold": self.arch.kill_threshold,
            "conflict_threshold": self.arch.eval_conflict_threshold,
        }


def _turned_cells(grid: np.ndarray, *, may_turn: bool, has_boxes: bool) -> Tensor:
    """Returns the source cell of each cell in each allowed symmetry of a grid: int64 [symmetries, cells].

    Symmetry 2 k + f is k quarter turns to the left, then a left-right reflection if f = 1. If the grid or its
    boxes are not square, only the four symmetries that map rows to rows are allowed.
    grid: Indices of the cells, [rows, columns]. may_turn: If False, only the identity is allowed.
    """
    rows, columns = grid.shape
    is_square = rows == columns and (not has_boxes or np.isclose(rows**0.5 % 1, 0))
    numbers = [0] if not may_turn else range(8) if is_square else _HALF_TURNS
    turned = (np.rot90(grid, number // 2) for number in numbers)
    turned = [np.fliplr(each) if number % 2 else each for number, each in zip(numbers, turned, strict=True)]
    return torch.from_numpy(np.stack(turned).reshape(len(turned), -1).astype(np.int64))


NETWORK = LDT
