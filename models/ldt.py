"""The Lattice Deduction Transformer (LDT, arXiv 2605.08605): removes candidates, and guesses.

A slot is one position of the batch, and works on one puzzle at a time. Its state is a board, not a latent
vector. A board has candidates for each cell: the values that are still possible. One thinking step is one
move of each board (`LDT.forward`):

1. `LDT.look` reads the candidates, `alive`, uint8 [batch, cells, values]. It returns logits after each loop:
       keep      [batch, loops, cells, values]  is this value right in this cell?
       digit     [batch, loops, cells, values]  which value does this cell have?
       conflict  [batch, loops]                 is the board lost?
2. `move` removes the candidates that are unlikely by keep. If the board is now neither solved nor
   contradictory, `move` guesses: it samples an open cell, and one of the cell's candidates by digit. It
   removes all other candidates of this cell.
3. The board after the move gives the answer (logits, q_halt), and decides whether the slot halts.

Words for boards and cells:

hint           In training, some open cells of a new board start with only one candidate. It is the right
               value, or in some boards a wrong one.
lost           The board has lost the solution: in some cell, the right value is not a candidate. A move has
               removed the right value, or a hint at the start was wrong. Only training knows which boards are
               lost, from the labels.
contradictory  The model says that the board is lost: conflict is high, or a cell has no candidate. The model
               may be wrong.
solved         Every cell has one candidate, right or wrong, and the board is not contradictory.

open cell      A cell with several candidates.
given cell     A cell that had one candidate at the start of the board, from the puzzle or from a hint. A move
               never removes this candidate.

Files, in the order of a thinking step (the keys are in config/arch/ldt.yaml):

models/ldt.py            the network, the thinking step, halting
models/ldt_symmetry.py   random symmetries: `look` rotates boards and permutes values
models/lattice.py        the state of a slot, its start with hints, the move, and what happens after the move
models/ldt_objective.py  the loss, with its divisors, and the metrics

Gradient  All loops of `look` have gradient. The move has none, so no gradient flows into another step.
Halting   Training: A slot halts if its board is solved, if the board is both contradictory and lost, or after
          101 moves. Evaluation: A contradictory board is reset to its start. A slot halts if its board is
          solved, even with a wrong answer. After 1000 moves without an answer, the puzzle is undecided.

There is no puzzle embedding and no Q head. q_halt is 5 if the board is solved, else -5. With
arch.boards_per_slot > 1, a slot stores several boards in training. Each training step picks one of them at
random. The other boards do not change. training/step.py and evaluation/loop.py call LDT like any other model.

Difference from the paper's code: There, a second forward pass computes the moves, after the update of the
weights. Here, one forward pass gives the loss and the move. So the weights before the update decide the
moves, with dropout.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from config.architecture import LDTConfig
from dataset.loader import Batch
from dataset.metadata import IGNORE_LABEL_ID, Metadata, columns_of
from models.blocks import Level
from models.carry import Reasoning, State, where
from models.lattice import CONTRADICTORY, RESET, SOLVED, Outputs, leaves, move, start_boards, with_hints
from models.layers import Attention, Dropout, LayerNorm, Linear, grid_angles, rotary_table
from models.ldt_objective import BoardObjective
from models.ldt_symmetry import BoardSymmetry
from models.network import Network
from models.random import SlotRng


class LDTPrediction(NamedTuple):
    """The output of one thinking step of LDT, which makes one move on each board (models/lattice.py).

    Attributes:
        logits: Logits of the answer, [batch, seq_len, vocab], computed from the candidates after the move.
        q_halt: 5 if the board is solved after the move, else -5, float32 [batch].
        q_continue: Always None.
        keep, digit, conflict: Outputs of the network for the candidates before the move, after each run of
            the blocks (loop). `models.lattice.Outputs` describes them.
    """

    logits: Tensor
    q_halt: Tensor
    q_continue: None
    keep: Tensor
    digit: Tensor
    conflict: Tensor

    def of_network(self) -> Outputs:
        return Outputs(self.keep, self.digit, self.conflict)


class PreNormBlock(nn.Module):
    """A pre-norm transformer block with biases. Its input and output are [batch, positions, hidden].

        h = h + attn(norm1(h))
        h = h + down_proj(gelu(up_proj(norm2(h))))

    The argument `dropout` of `forward` applies to the attention weights, and to the outputs of attention and
    MLP. If `dropout` is None, there is no dropout.

    number: Index of this block in the network. The random numbers of the dropout depend on it.
    """

    def __init__(self, width: int, *, num_heads: int, expansion: float, has_rotary: bool, number: int):
        super().__init__()
        inner, options = round(expansion * width), {"bias": True, "has_rotary": has_rotary}
        self.norm1, self.attn = LayerNorm(width), Attention(width, num_heads=num_heads, **options)
        self.norm2, self.up_proj = LayerNorm(width), Linear(width, inner, bias=True)
        self.down_proj = Linear(inner, width, bias=True)
        self.number = number

    def forward(self, h: Tensor, rotary: Tensor | None, dropout: Dropout | None) -> Tensor:
        if dropout is None:
            h = h + self.attn(self.norm1(h), rotary, dropout=None)
            return h + self.down_proj(F.gelu(self.up_proj(self.norm2(h))))
        # Each of the three dropouts of a block has a stream of random numbers.
        of_weights, of_attn, of_mlp = (dropout._replace(stream=3 * self.number + use) for use in range(3))
        h = h + of_attn(self.attn(self.norm1(h), rotary, dropout=of_weights))
        return h + of_mlp(self.down_proj(F.gelu(self.up_proj(self.norm2(h)))))


class LDT(Network):
    """The network of LDT (arXiv 2605.08605). Its state is a board: the candidates (possible values) of cells.

    A thinking step removes unlikely candidates. Then it guesses the value of a cell, unless the board is
    solved or contradictory. The method `look` computes the logits that both parts use, from the boards,
    [batch, cells, values]:

        h = h0 = input_proj(board)                  [batch, cells, hidden]
        loops times:
            x = [h + h0, cls]                       [batch, cells + 1, hidden]
            u = blocks(x + positions)               [batch, cells + 1, hidden]
            h = layer_norm(x + u) at the cells      [batch, cells, hidden]
            keep, digit = keep_head(h), digit_head(h)
            conflict = conflict_head(u at cls)

    [ , ] concatenates along the positions. cls is a learned vector. `models.lattice.Outputs` describes the
    logits keep, digit and conflict. The loss uses the logits of all loops. The move uses only those of the
    last loop.

    Attributes:
        values: Tokens that occur in labels of the training data, and in the inputs of unscored cells, int64
            [values]. The axis "values" of boards and logits has this order.
        candidates: Labels that a cell may have, by its input token, uint8 [vocab, vocab]. Entry (i, j) is 1
            if a cell with input token i may have label j.
        symmetries: Whether grids may be rotated and reflected, and whether values may be permuted, uint8 [2].
    """

    objective_class = BoardObjective
    is_search = is_random = True
    of_data = ("candidates", "symmetries")

    def __init__(self, arch: LDTConfig, metadata: Metadata):
        super().__init__(arch)
        self.boards_per_slot, self.num_answers = arch.boards_per_slot, arch.num_answers
        width, vocab_size, num_cells = arch.hidden_size, metadata.vocab_size, metadata.seq_len
        # If the metadata do not say which labels an input may have, any input may have any label. Example: an
        # estimate of memory without a dataset.
        candidates = np.zeros((vocab_size, vocab_size), np.uint8)
        candidates.flat[list(metadata.candidates or range(vocab_size**2))] = 1
        values = np.flatnonzero(candidates.any(axis=0))
        self.register_buffer("candidates", torch.from_numpy(candidates))
        self.register_buffer("values", torch.from_numpy(values), persistent=False)
        may = {"may_turn": bool(metadata.may_turn), "may_permute": bool(metadata.may_permute)}
        self.register_buffer("symmetries", torch.tensor([*may.values()], dtype=torch.uint8))
        num_columns = columns_of(metadata, needed_by="arch=ldt")
        grid = np.arange(num_cells).reshape(-1, num_columns)
        self.symmetry = BoardSymmetry(grid, num_values=len(values), **may)

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

    # PyTorch's default distributions, as in the paper's code with pos_encodings=learned. With rope, that code
    # has separate layers for queries, keys and values. Their weights are smaller (factor 0.82). The biases of
    # the attention are then random, not 0.
    def _initialize_(self) -> None:
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
        """Returns a copy of the metadata of a dataset, with `candidates`, `may_turn` and `may_permute`.

        The network needs these fields (`Metadata` describes them), but the files of a dataset lack them.

        weights: State dict of a trained network. Its tensors "candidates" and "symmetries" contain the
        fields.
        """
        table = weights["candidates"][: metadata.vocab_size, : metadata.vocab_size]
        candidates = tuple(table.flatten().nonzero().flatten().tolist())
        may_turn, may_permute = map(bool, weights["symmetries"])
        may = {"may_turn": may_turn, "may_permute": may_permute}
        return dataclasses.replace(metadata, candidates=candidates, **may)

    def start(self, data: Batch, reasoning: Reasoning, rng: SlotRng | None, fresh: Tensor) -> State:
        entered = self.candidates[data.inputs.long()][..., self.values]  # uint8 [batch, cells, values]
        labels = _complete(data.labels, data.inputs)
        solution = (labels[..., None] == self.values).to(torch.uint8)
        # In training, some open cells of some boards start with only one candidate.
        if self.training and rng is not None and self.arch.hint_prob + self.arch.wrong_hint_prob > 0:
            entered = with_hints(entered, solution, self.arch, rng)
        if not self.training or self.num_answers == 1:
            return start_boards(entered, solution)
        answers = data.answers
        if answers is None:  # no puzzle yet: the blank carry at the start of a run
            answers = F.pad(data.labels[:, None], (0, 0, 0, self.num_answers - 1), value=IGNORE_LABEL_ID)
        answers = _complete(answers, data.inputs[:, None])
        indices = torch.searchsorted(self.values, answers.long()).clamp(max=len(self.values) - 1)
        answers = torch.where(self.values[indices] == answers, indices, -1).to(torch.int16)
        return start_boards(entered, solution, answers)

    def view(self, state: State) -> tuple[Tensor, Tensor]:
        """Returns the candidates of each cell and the last guess, for display.

        The candidates are bool [batch, seq_len, vocab]. The guess is the index of the guessed cell, int16
        [batch]. It is NO_GUESS (-1) if the last move has guessed no cell, and RESET (-2) if the board was
        contradictory, so that the search has reset the board to its start.
        """
        candidates = state["alive"].new_zeros(*state["alive"].shape[:2], len(self.candidates))
        candidates[..., self.values] = state["alive"]
        guess = torch.where(state["outcome"] == CONTRADICTORY, RESET, state["guess"])
        return candidates.bool(), guess

    def wants_to_halt(self, state: State, prediction: LDTPrediction, rng: SlotRng | None = None) -> Tensor:
        return leaves(state) if self.training else prediction.q_halt > 0

    def sample_randomness(self, **_: Any) -> dict[str, np.ndarray]:
        return {}  # LDT does not explore

    def pick_boards(self, rng: SlotRng) -> Tensor | None:
        if self.boards_per_slot == 1:
            return None
        return rng.integers((), below=self.boards_per_slot, use="picked board")

    def forward(
        self,
        state: State,
        inputs: Tensor,
        puzzle_identifiers: Tensor,
        *,
        reasoning: Reasoning,
        rng: SlotRng | None = None,
    ) -> tuple[State, LDTPrediction]:
        dropout = self.arch.dropout if self.training else 0.0
        outputs = self.look(state["alive"], rng, loops=reasoning.loops, dropout=dropout)
        moved = move(state, outputs.last(), self.arch, reasoning, rng, in_search=not self.training)
        if not self.training:  # a search starts a contradictory board again
            moved["alive"] = where(moved["outcome"] == CONTRADICTORY, state["entered"], moved["alive"])
            # A trace of an answer also calls the network after a board is solved.
            was_solved = state["outcome"] == SOLVED
            moved = {name: where(was_solved, state[name], tensor) for name, tensor in moved.items()}
        q_halt = torch.where(moved["outcome"] == SOLVED, 5.0, -5.0)
        return moved, LDTPrediction(self._logits(moved["alive"], inputs), q_halt, None, *outputs)

    def _logits(self, alive: Tensor, inputs: Tensor) -> Tensor:
        # The largest logit of a cell with one candidate is that of the candidate. For any other cell, it is
        # that of the input token.
        logits = alive.new_zeros(*alive.shape[:2], len(self.candidates), dtype=self.dtype)
        logits[..., self.values] = 8 * alive.to(self.dtype)
        is_open = (alive.sum(-1, keepdim=True) != 1).to(self.dtype)
        return logits.scatter_add(-1, inputs.long()[..., None], 9 * is_open)

    def look(self, alive: Tensor, rng: SlotRng | None, *, loops: int, dropout: float = 0.0) -> Outputs:
        """Runs the network on boards. Returns the logits after each loop.

        If `rng` is passed, each board is first transformed by its own random symmetry (`BoardSymmetry`). The
        logits of cells are transformed back.

        alive: Candidates, uint8 [batch, cells, values]. loops: How often the stack of blocks runs. dropout:
        Dropout probability. If it is not 0, `rng` is needed.
        """
        num_boards, num_cells = alive.shape[:2]
        seen, sources, keys = alive, None, None
        if rng is not None:
            sources = self.symmetry.sample(rng)
            seen = self.symmetry.transform(alive, sources)
        if dropout:  # a random key of 46 bits for each board
            high, low = rng.integers((2,), below=1 << 23, use="look dropout").unbind(1)
            keys = high << 23 | low
        outputs = []
        h = h0 = self.input_proj(seen.to(self.dtype))
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
            keep, digit = (self.symmetry.transform_back(logits, sources) for logits in (keep, digit))
        return Outputs(keep, digit, conflict[..., 0])

    # The embeddings of the cells and of cls, [1, cells + 1, hidden]. With rotary positions, cells have 0.
    def _positions(self, num_cells: int) -> Tensor:
        if self.row_embed is None:
            return F.pad(self.cls_pos, (0, 0, num_cells, 0))
        table = (self.row_embed[:, None] + self.col_embed).flatten(0, 1)
        return torch.cat((table[None], self.cls_pos), dim=1)

    def facts(self) -> dict[str, Any]:
        """Returns the constants with which a web page runs the search: {name: value for JSON}."""
        return {
            "values": self.values.tolist(),
            "candidates": self.candidates[:, self.values].tolist(),  # of each token
            "kill_threshold": self.arch.kill_threshold,
            "conflict_threshold": self.arch.eval_conflict_threshold,
            "decision_cell": self.arch.decision_cell,
            "temperature": self.arch.temperature if self.arch.decision_value == "drawn" else 0,  # 0: the best
        }


def _complete(labels: Tensor, inputs: Tensor) -> Tensor:
    """Returns labels in which every cell without a label has its input token as the label.

    Example of such cells: the padding beside a small grid. A puzzle without any label stays without labels.

    labels, inputs: Tokens, [..., cells].
    """
    is_scored = labels != IGNORE_LABEL_ID
    return torch.where(is_scored | ~is_scored.any(-1, keepdim=True), labels, inputs)


NETWORK = LDT
