"""The Lattice Deduction Transformer (LDT, arXiv 2605.08605): removes candidates, and guesses.

LDT solves a puzzle by a search. It works on a board: a set of candidate values for each cell. A slot is one
entry of the batch, and works on one puzzle at a time. Its state is a board, not a latent vector: candidates
(`alive`), candidates at the start (`entered`), the solution (`target`), and facts about the last move
(models/lattice.py). The texts below describe the default keys (config/arch/ldt.yaml).

Thinking step      `LDT.forward` below, in this order:
                   1. `LDT.look` reads the board. For each candidate, it predicts whether it is right (keep).
                      For each cell, it predicts the value (digit). For the board, it predicts whether the
                      solution is lost (conflict). The loss compares these outputs with the solution.
                   2. `move` (models/lattice.py) removes unlikely candidates, and may guess a cell.
                   3. The board after the move gives the logits, q_halt, and whether the slot halts.
Gradient           All loops of `look` have gradient. The move has none, so no gradient flows into another
                   thinking step.
Puzzle embedding   LDT has none.
Halting            Training: A board leaves its slot if the move solved it, or after 101 moves. It also leaves
                   if the move called it contradictory, and a right candidate is really missing.
                   Evaluation: A contradictory board is reset to its start, and the search guesses again. The
                   slot halts if the board is solved, even with a wrong answer. After 1000 moves without an
                   answer, the puzzle is undecided (tables in models/lattice.py and models/halting.py).
Loss               keep_loss and 0.1 * conflict_loss, each summed over slots and divided by the number of
                   slots, plus 0.2 * digit_loss, summed over the cells of sound boards that are not given and
                   divided by their number (`BoardObjective.losses`).

The caller of the network is the same as for all models: training/step.py in training, and evaluation/loop.py
in evaluation. There is no Q head. q_halt is 5 if the board is solved, else -5.

With arch.boards_per_slot > 1, a slot holds several boards in training. Each training step picks one of them
at random, and the others wait.

Difference from the paper's code: There, the boards move by a second forward pass, after the update of the
weights. Here, the outputs of one forward pass give the loss and the move. So the boards move by the weights
before the update, with dropout.
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
    contains_solution,
    digit_cells,
    has_lost_solution,
    leaves,
    move,
    sums_of_moves,
)
from models.layers import Attention, Dropout, LayerNorm, Linear, grid_angles, rotary_table
from models.objective import Divisors, Metrics, Sums, correct_sequences
from models.random import SlotRng
from models.search import NO_GUESS, RESET, Search, SearchView

_HALF_TURNS = (0, 1, 4, 5)  # numbers of the symmetries that map rows to rows (`_turned_cells`)


class LDTPrediction(NamedTuple):
    """The `Prediction` of LDT, with the fields of `models.lattice.Outputs`.

    Attributes:
        logits: Logits of the answer, [batch, seq_len, vocab] in the forward dtype. They show the board after
            the move.
        q_halt: 5 if the board after the move is solved, else -5, float32 [batch].
        q_continue: Always None.
        keep, digit, conflict: Outputs of `LDT.look` for the board before the move, after each loop.
    """

    logits: Tensor
    q_halt: Tensor
    q_continue: None
    keep: Tensor
    digit: Tensor
    conflict: Tensor


class BoardObjective:
    """The loss and the metrics of LDT. It has the same methods as `models.objective.Objective`."""

    # Metrics of evaluation. {metric: the sum that divides it}. "count" is the number of puzzles with a label.
    metrics: ClassVar[Metrics] = {
        "count": None,
        "exact_accuracy": "count",
        "wrong": "count",
        "undecided": "count",
        "steps": "count",
    }
    # Metrics of training. A board is called contradictory here if its conflict probability is high.
    training_metrics: ClassVar[Metrics] = {
        "keep_loss": "slots",
        "digit_loss": "digit_cells",
        "conflict_loss": "slots",
        "bad": "slots",  # boards that have lost the solution
        "conflict_recall": "bad",  # fraction of the lost boards that the network calls contradictory
        "conflict_precision": "alarms",  # fraction of the boards called contradictory that are lost
        "kills": "sound",  # candidates that a step removes from a board that is not lost
        "wrong_kills": "kills",
        "left": None,  # boards that left their slot
        "steps": "left",
        "solved": "left",  # boards that left because they were solved, right or wrong
        "solved_right": "solved",
    }

    def __init__(self, arch: LDTConfig):
        self.arch = arch

    def divisors(self, carry: Carry) -> Sums:
        return {"digit_cells": digit_cells(carry.state).sum(), "bad": has_lost_solution(carry.state).sum()}

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
        """Returns the loss of a micro-batch times divisors["slots"], and the metric sums.

        The arguments are those of `Objective.losses`. The caller divides the first result by
        divisors["slots"]. The loss is:

            loss = sum of keep_loss / slots
                   + digit_weight * sum of digit_loss / digit_cells
                   + conflict_weight * sum of conflict_loss / slots

        The sums are over slots. slots is the number of slots of the global batch, and digit_cells is the
        number of its cells that count in digit_loss. With local_steps > 1, both are those of this rank.

        For each slot, every term is the mean over the loops. Targets are those of the board before the move.

        keep_loss      Binary cross-entropy of `keep`, the mean over all cells and values. The target is 1 if
                       the value is a candidate and right, else 0. Entries with target 1 have the weight
                       keep_weight, and all others kill_weight.
        digit_loss     Cross-entropy of `digit` against the solution, the sum over the cells that count. A
                       cell counts if its board is sound and the cell is not given.
        conflict_loss  Binary cross-entropy of `conflict`. The target is 1 if the board has lost the solution.
                       With balanced_conflict, the boards with target 1 together weigh as much as all others.
        """
        arch, state, slots = self.arch, before.state, divisors["slots"]
        prediction = output.prediction
        keep, digit, conflict = prediction.keep, prediction.digit, prediction.conflict
        target, is_lost, cells = state["target"], has_lost_solution(state), digit_cells(state)

        is_right = (state["alive"] & target)[:, None].to(keep.dtype)  # [batch, 1, cells, values]
        log_keep = F.logsigmoid(keep)
        log_kill = log_keep - keep  # equals log(1 - sigmoid(keep))
        of_entry = arch.keep_weight * is_right * log_keep + arch.kill_weight * (1 - is_right) * log_kill
        keep_loss = -of_entry.mean((1, 2, 3))  # [batch]

        values = target.argmax(-1)[:, None, :, None].expand(-1, digit.shape[1], -1, 1)
        log_digit = digit.log_softmax(-1).gather(-1, values)[..., 0]  # [batch, loops, cells]
        digit_loss = -torch.where(cells[:, None], log_digit, 0).sum(-1).mean(1)  # [batch]
        num_cells = torch.as_tensor(divisors["digit_cells"], device=cells.device).clamp(min=1)

        labels = is_lost.to(keep.dtype)[:, None].expand_as(conflict)
        conflict_loss = F.binary_cross_entropy_with_logits(conflict, labels, reduction="none").mean(1)
        weight = arch.conflict_weight
        if arch.balanced_conflict:
            num_lost = torch.as_tensor(divisors["bad"], device=is_lost.device)
            weight = weight / 2 * slots / torch.where(is_lost, num_lost, slots - num_lost)  # [batch]
        # The caller divides the result by slots. The factor slots / num_cells replaces this divisor by
        # num_cells for digit_loss.
        loss = keep_loss.sum() + arch.digit_weight * digit_loss.sum() * (slots / num_cells)
        loss = loss + (weight * conflict_loss).sum()

        is_contradictory = conflict[:, -1].sigmoid() > arch.conflict_threshold
        sums = {
            "keep_loss": keep_loss,
            "digit_loss": digit_loss,
            "conflict_loss": conflict_loss,
            "bad": is_lost,
            "digit_cells": cells,
            "alarms": is_contradictory,
            "conflict_recall": is_lost & is_contradictory,
            "conflict_precision": is_lost & is_contradictory,
        }
        sums = {name: values.detach().sum() for name, values in sums.items()}
        return loss, sums | sums_of_moves(before, output.carry, keep[:, -1].detach(), self.arch)

    def more_calls(self, reasoning: Reasoning) -> float:
        return 0  # `losses` does not call the network

    def sums(self, output: StepOutput) -> Sums:
        """Returns the metric sums of final answers in an evaluation."""
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


class PreNormBlock(nn.Module):
    """A pre-norm transformer block with biases, on h, [batch, positions, hidden].

        h = h + attn(norm1(h))
        h = h + down_proj(gelu(up_proj(norm2(h))))

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
        """Returns the new h, after attention and MLP.

        dropout: Dropout of the attention weights, and of the outputs of attention and MLP. None: no dropout.
        """
        if dropout is None:
            h = h + self.attn(self.norm1(h), rotary, dropout=None)
            return h + self.down_proj(F.gelu(self.up_proj(self.norm2(h))))
        # Each of the three dropouts of a block has a stream of random numbers.
        of_weights, of_attn, of_mlp = (dropout._replace(stream=3 * self.number + use) for use in range(3))
        h = h + of_attn(self.attn(self.norm1(h), rotary, dropout=of_weights))
        return h + of_mlp(self.down_proj(F.gelu(self.up_proj(self.norm2(h)))))


class LDT(Search):
    """The network of LDT, with its moves. `models.lattice` describes the state of a slot.

    `look` runs the network on a board, [batch, cells, values]:

        h = h0 = input_proj(board)                  [batch, cells, hidden]
        loops times:
            x = [h + h0, cls]                       [batch, cells + 1, hidden]
            u = blocks(x + positions)               [batch, cells + 1, hidden]
            h = layer_norm(x + u) at the cells      [batch, cells, hidden]
            keep, digit = keep_head(h), digit_head(h)
            conflict = conflict_head(u at cls)

    [ , ] concatenates along the positions. cls is a learned vector. All loops have gradient. The loss uses
    the outputs of all loops, and the move uses those of the last loop.

    Attributes:
        values: Tokens that occur in labels of the training data, int64 [values]. The axis "values" of boards
            and outputs has this order.
        candidates: Labels that a cell may have, by its input token, uint8 [vocab, vocab]. Entry (i, j) is 1
            if a cell with input token i may have label j.
        symmetries: Whether grids may be turned, and whether values may be permuted, uint8 [2].
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
        may_turn, self.may_permute = bool(metadata.may_turn), bool(metadata.may_permute)
        symmetries = torch.tensor([may_turn, self.may_permute], dtype=torch.uint8)
        self.register_buffer("symmetries", symmetries)
        num_columns = columns_of(metadata, needed_by="arch=ldt")
        grid = np.arange(num_cells).reshape(-1, num_columns)
        # If values may be permuted, the puzzle is a Sudoku, and its grid has boxes.
        turned_cells = _turned_cells(grid, may_turn=may_turn, has_boxes=self.may_permute)
        self.register_buffer("turned_cells", turned_cells, persistent=False)

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
        self.blocks = Level(PreNormBlock(width, number=index, **options) for index in range(arch.num_layers))
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
        """Returns new boards for the puzzles of `data`.

        The candidates of a cell are the values that its input token allows. In training, some boards get
        hints: some open cells start with only one candidate (`_with_hints`).
        """
        entered = self.candidates[data.inputs.long()][..., self.values]  # uint8 [batch, cells, values]
        solution = (data.labels[..., None] == self.values).to(torch.uint8)
        if self.training and rng is not None and self.arch.hint_prob + self.arch.wrong_hint_prob > 0:
            entered = self._with_hints(entered, solution, rng)
        # All 0 on a board with a wrong hint.
        target = solution * contains_solution(entered, solution)[:, None, None]
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

        A board gets one of three kinds of hints:

        - with probability hint_prob: right hints in 0 to 100 % of its open cells
        - with probability wrong_hint_prob: hints in 10 to 100 % of its open cells. 1 to 30 % of them are
          wrong, at least one
        - otherwise: none

        entered, solution: uint8 [batch, cells, values].
        """
        is_open = entered.sum(-1) > 1  # [batch, cells]
        num_open = is_open.sum(-1)  # [batch], as all numbers of hints
        kind, amount, wrong_amount = rng.uniform((3,), use="hints").unbind(1)
        has_wrong = kind < self.arch.wrong_hint_prob
        has_hints = kind < self.arch.wrong_hint_prob + self.arch.hint_prob
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

    # Halting.

    def wants_to_halt(self, state: State, prediction: LDTPrediction, rng: SlotRng | None = None) -> Tensor:
        """Returns the boards that leave their slot in training, or that are solved in evaluation."""
        return leaves(state) if self.training else prediction.q_halt > 0

    def sample_randomness(self, **_: Any) -> dict[str, np.ndarray]:
        return {}  # LDT does not explore

    def pick_boards(self, rng: SlotRng) -> Tensor | None:
        """Picks one board of each slot at random: indices, int64 [batch]. None if slots hold one board."""
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
        """Runs one thinking step: the network on the boards, then one move. Returns the new boards.

        In evaluation (a search), a contradictory board is reset to its start. A solved board does not change.
        """
        dropout = self.arch.dropout if self.training else 0.0
        outputs = self.look(state["alive"], rng, loops=reasoning.loops, dropout=dropout)
        moved = move(state, outputs.last(), self.arch, reasoning, rng, in_search=not self.training)
        if not self.training:
            moved["alive"] = where(moved["outcome"] == CONTRADICTORY, state["entered"], moved["alive"])
            # A trace of an answer also calls the network after a board is solved.
            was_solved = state["outcome"] == SOLVED
            moved = {name: where(was_solved, state[name], tensor) for name, tensor in moved.items()}
        q_halt = torch.where(moved["outcome"] == SOLVED, 5.0, -5.0)
        return moved, LDTPrediction(self._logits(moved["alive"], inputs), q_halt, None, *outputs)

    def _logits(self, alive: Tensor, inputs: Tensor) -> Tensor:
        """Returns logits of the answer, [batch, seq_len, vocab]. They have only a few values.

        The largest logit of a cell with one candidate is that of the candidate. For any other cell, it is
        that of the input token.
        """
        logits = alive.new_zeros(*alive.shape[:2], len(self.candidates), dtype=self.dtype)
        logits[..., self.values] = 8 * alive.to(self.dtype)
        is_open = (alive.sum(-1, keepdim=True) != 1).to(self.dtype)
        return logits.scatter_add(-1, inputs.long()[..., None], 9 * is_open)

    def look(self, alive: Tensor, rng: SlotRng | None, *, loops: int, dropout: float = 0.0) -> Outputs:
        """Applies the network `loops` times to the boards. Returns the outputs of each loop.

        With `rng` (in training and in a search), each board is transformed by a random symmetry first.
        Example: the grid is rotated, and the values are permuted. The outputs are transformed back.

        alive: Candidates of the boards, uint8 [batch, cells, values]. rng: If None, the boards are not
        transformed. loops: Number of loops. dropout: Dropout rate.
        """
        num_boards, num_cells = alive.shape[:2]
        turned, sources = alive, None
        if rng is not None:
            sources = self._sample_symmetry(rng)
            turned = alive.flatten(1).gather(1, sources).view(alive.shape)
        keys = None
        if dropout:  # a random key of 46 bits for each board
            high, low = rng.integers((2,), below=1 << 23, use="look dropout").unbind(1)
            keys = high << 23 | low
        outputs = []
        h = h0 = self.input_proj(turned.to(self.dtype))
        cls = self.cls_embed.to(self.dtype).expand(num_boards, -1, -1)
        positions = self._positions(num_cells).to(self.dtype)
        for loop in range(loops):
            x = torch.cat((h + h0, cls), dim=1)
            drops = None if keys is None else Dropout(keys + loop, 0, dropout)
            u = self.blocks(x, positions, self.rotary, drops)  # a level adds its first two arguments
            h = self.loop_norm((x + u)[:, :-1])
            outputs.append((self.keep_head(h), self.digit_head(h), self.conflict_head(u[:, -1])))
        keep, digit, conflict = (torch.stack(logits, dim=1).float() for logits in zip(*outputs, strict=True))
        if sources is not None:
            targets = sources[:, None].expand(-1, loops, -1)

            def turn_back(logits: Tensor) -> Tensor:  # [batch, loops, cells, values]
                zeros = torch.zeros_like(targets, dtype=logits.dtype)
                return zeros.scatter(2, targets, logits.flatten(2)).view(logits.shape)

            keep, digit = turn_back(keep), turn_back(digit)
        return Outputs(keep, digit, conflict[..., 0])

    def _sample_symmetry(self, rng: SlotRng) -> Tensor:
        """Samples a symmetry of each board: int64 [batch, cells * values].

        Entry i of the board that the network sees is the entry of `alive` with this index.
        """
        symmetry = rng.integers((), below=len(self.turned_cells), use="look symmetry")
        values = torch.arange(len(self.values), device=symmetry.device).expand(len(symmetry), -1)
        if self.may_permute:
            values = rng.uniform(self.values.shape, use="look values").argsort(dim=-1, stable=True)
        cells = self.turned_cells[symmetry]
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
    symmetries = [0] if not may_turn else range(8) if is_square else _HALF_TURNS
    turned = (np.rot90(grid, symmetry // 2) for symmetry in symmetries)
    turned = [
        np.fliplr(cells) if symmetry % 2 else cells
        for symmetry, cells in zip(symmetries, turned, strict=True)
    ]
    return torch.from_numpy(np.stack(turned).reshape(len(turned), -1).astype(np.int64))


NETWORK = LDT
