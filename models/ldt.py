"""The lattice deduction transformer (LDT, arXiv 2605.08605), which strikes out candidates, and guesses.

A board is a set of candidate values for each cell. A forward pass predicts which candidates to keep, the
value of each cell, and whether the board has a contradiction. A move (`models.lattice`) changes the board by
these. In training, the boards of a slot continue from the model's own moves, made by the training step's pass
(the paper's code: by a second one, after the update); an evaluation is a search by the same moves.
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
from models.search import ANEW, NO_GUESS, Board, Search

_HALF_TURNS = (0, 1, 4, 5)  # those of a grid's eight symmetries that map rows to rows


class LDTPrediction(NamedTuple):
    """A `Prediction` with the fields of `Outputs`."""

    logits: Tensor
    q_halt: Tensor
    q_continue: None
    keep: Tensor
    digit: Tensor
    conflict: Tensor


class BoardObjective:
    """The objective of LDT, three losses of its outputs. Its members are those of `Objective`."""

    metrics: ClassVar[Metrics] = {
        "count": None,
        **dict.fromkeys(("exact_accuracy", "wrong", "undecided", "steps"), "count"),
    }
    # Shares of called boards and of moves; "kills" counts struck-out candidates on boards with the solution.
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
        """Returns the sum of three losses, each a mean over the loops, and the sums of the metrics.

        keep: weighted binary cross-entropy of all candidates. digit: cross-entropy of cells that are not
        given, on boards that still have the target. conflict: binary cross-entropy of "the target is lost".
        """
        arch, state, slots = self.arch, before.state, divisors["slots"]
        _, _, _, keep, digit, conflict = output.prediction
        target, bad, cells = state["target"], is_bad(state), digit_cells(state)

        kept = (state["alive"] & target)[:, None].to(keep.dtype)
        log_keep = F.logsigmoid(keep)
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

    number: of this block in the level, to give each block its own random numbers of dropout.
    """

    def __init__(self, width: int, *, num_heads: int, expansion: float, has_rotary: bool, number: int):
        super().__init__()
        inner, options = round(expansion * width), {"bias": True, "has_rotary": has_rotary}
        self.norm1, self.attn = LayerNorm(width), Attention(width, num_heads=num_heads, **options)
        self.norm2, self.up_proj = LayerNorm(width), Linear(width, inner, bias=True)
        self.down_proj = Linear(inner, width, bias=True)
        self.number = number

    def forward(self, h: Tensor, rotary: Tensor | None, dropout: Dropout | None) -> Tensor:
        """Returns the new h. dropout: for the weights of attention, and for the output of both branches."""
        weights, first, second = (
            dropout and dropout._replace(stream=3 * self.number + use) for use in range(3)
        )
        mixed = self.attn(self.norm1(h), rotary, dropout=weights)
        h = h + (first(mixed) if first else mixed)
        out = self.down_proj(F.gelu(self.up_proj(self.norm2(h))))
        return h + (second(out) if second else out)


class LDT(Search):
    """The network of LDT, with its moves. `models.lattice` describes the state of a slot.

    values: int64 [values], the tokens in labels of the training data. candidates: uint8 [vocab, vocab], 1
    where a cell with this input token (row) may have this label (column). symmetries: uint8 [2], whether
    grids may be turned, and whether values may be permuted.
    """

    objective_class = BoardObjective
    of_data = ("candidates", "symmetries")

    def __init__(self, arch: LDTConfig, metadata: Metadata):
        super().__init__(arch)
        self.boards_per_slot = arch.boards_per_slot
        width, vocab_size, num_cells = arch.hidden_size, metadata.vocab_size, metadata.seq_len
        # Without facts about training data, as for an estimate of sizes, any input may have any label.
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
        # Only puzzles with boxes (Sudoku) may have their values permuted.
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
            angles = F.pad(angles, (0, 0, 0, 1))  # angle 0 for the extra token behind the cells
            rotary = rotary_table(angles)
        self.register_buffer("rotary", rotary, persistent=False)
        self.cls_embed, self.cls_pos = (nn.Parameter(0.02 * torch.randn(1, 1, width)) for _ in range(2))
        options = {"num_heads": arch.num_heads, "expansion": arch.expansion}
        options["has_rotary"] = self.row_embed is None
        self.blocks = Level(PreNormBlock(width, number=n, **options) for n in range(arch.num_layers))
        self.loop_norm = LayerNorm(width)
        self.keep_head, self.digit_head = (Linear(width, len(values), bias=True) for _ in range(2))
        self.conflict_head = Linear(width, 1, bias=True)
        self._draw_weights_()

    def _draw_weights_(self) -> None:
        """Initializes the matrices as PyTorch does by default, because the paper's code does so."""
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

    # Start of boards.

    def start(self, data: Batch, reasoning: Reasoning, rng: SlotRng | None, fresh: Tensor) -> State:
        """Returns new boards, with the candidates that the inputs leave; in training some get hints."""
        entered = self.candidates[data.inputs.long()][..., self.values]
        solution = (data.labels[..., None] == self.values).to(torch.uint8)
        if self.training and rng is not None and self.arch.hint_prob + self.arch.wrong_hint_prob > 0:
            entered = self._with_hints(entered, solution, rng)
        target = solution * holds(entered, solution)[:, None, None]
        outcome = torch.zeros(len(entered), dtype=torch.uint8, device=entered.device)
        guess = torch.full_like(outcome, NO_GUESS, dtype=torch.int16)
        return {"alive": entered, "entered": entered, "target": target, "guess": guess, "outcome": outcome}

    def board(self, state: State) -> Board:
        candidates = state["alive"].new_zeros(*state["alive"].shape[:2], len(self.candidates))
        candidates[..., self.values] = state["alive"]
        return Board(candidates.bool(), torch.where(state["outcome"] == CONTRADICTORY, ANEW, state["guess"]))

    def _with_hints(self, entered: Tensor, solution: Tensor, rng: SlotRng) -> Tensor:
        """Returns `entered` with some open cells filled in at random: by `solution`, or partly wrongly."""
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

    # Halting: `leaves` says which boards leave their slots in training.

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
        """Runs the network on the boards, and moves them.

        In evaluation (a search), contradictory boards are reset, and solved boards stay as they are.
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
        """Returns logits of the answer: a cell's only candidate is the likeliest token, else the input is."""
        logits = alive.new_zeros(*alive.shape[:2], len(self.candidates), dtype=self.dtype)
        logits[..., self.values] = 8 * alive.to(self.dtype)
        is_open = (alive.sum(-1, keepdim=True) != 1).to(self.dtype)
        return logits.scatter_add(-1, inputs.long()[..., None], 9 * is_open)

    def look(self, alive: Tensor, rng: SlotRng | None, *, loops: int, dropout: float = 0.0) -> Outputs:
        """Runs all loops on the boards; returns the outputs of each loop.

        With `rng`, each board is transformed by a random symmetry, and the outputs are transformed back.
        alive: uint8 [batch, cells, values].
        """
        num_boards, num_cells, num_values = alive.shape
        x, index = alive, None
        if rng is not None:
            index = self._draw_symmetry(rng)
            x = alive.flatten(1).gather(1, index).view(alive.shape)
        keys = None
        if dropout:
            high, low = rng.integers((2,), below=1 << 23, use="look dropout").unbind(1)
            keys = high << 23 | low
        outputs = []
        h = h0 = self.input_proj(x.to(self.dtype))
        cls = self.cls_embed.to(self.dtype).expand(num_boards, -1, -1)
        positions = self._positions(num_cells).to(self.dtype)
        for loop in range(loops):
            h = torch.cat((h + h0, cls), dim=1)
            drops = None if keys is None else Dropout(keys + loop, 0, dropout)
            u = self.blocks(h, positions, self.rotary, drops)
            h = self.loop_norm((h + u)[:, :-1])
            outputs.append((self.keep_head(h), self.digit_head(h), self.conflict_head(u[:, -1])))
        keep, digit, conflict = (torch.stack(each, dim=1).float() for each in zip(*outputs, strict=True))
        if index is not None:
            index = index[:, None].expand(-1, loops, -1)
            keep, digit = (
                torch.zeros_like(index, dtype=each.dtype).scatter(2, index, each.flatten(2)).view(each.shape)
                for each in (keep, digit)
            )
        return Outputs(keep, digit, conflict[..., 0])

    def _draw_symmetry(self, rng: SlotRng) -> Tensor:
        """Draws a symmetry for each board: the index that each entry is read from, int64 [batch, entries]."""
        number = rng.integers((), below=len(self.turned_cells), use="look symmetry")
        values = torch.arange(len(self.values), device=number.device).expand(len(number), -1)
        if self.may_permute:
            values = rng.uniform(self.values.shape, use="look values").argsort(dim=-1, stable=True)
        cells = self.turned_cells[number]
        return (cells[:, :, None] * len(self.values) + values[:, None]).flatten(1)

    def _positions(self, num_cells: int) -> Tensor:
        """Returns the learned positions of the cells and of the last token, which predicts contradictions."""
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
    """Returns for each allowed symmetry of a grid, and each cell, its source cell: int64 [symmetries, cells].

    Symmetry 2 k + f is k quarter turns to the left, then a left-right reflection if f = 1. A grid that is no
    square, or has boxes that are no squares, has just the four symmetries that map rows to rows.
    grid: numbers of the cells, [rows, columns]. may_turn: whether more than the identity is allowed.
    """
    rows, columns = grid.shape
    is_square = rows == columns and (not has_boxes or np.isclose(rows**0.5 % 1, 0))
    numbers = [0] if not may_turn else range(8) if is_square else _HALF_TURNS
    turned = (np.rot90(grid, number // 2) for number in numbers)
    turned = [np.fliplr(each) if number % 2 else each for number, each in zip(numbers, turned, strict=True)]
    return torch.from_numpy(np.stack(turned).reshape(len(turned), -1).astype(np.int64))


NETWORK = LDT
