"""The interface of a network: one thinking step, from a state and puzzles to the next state and an answer.

`Network` is the base class of all networks. `TokenNetwork` is the base class of networks with one vector for
each cell, such as HRM and TRM. `TokenNetwork.embed` embeds the puzzle, and `TokenNetwork.answer` computes the
answer from a state.
"""

import contextlib
import math
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from config.architecture import ArchConfig, TokenConfig
from dataset.loader import Batch
from dataset.metadata import Metadata
from models.carry import Prediction, Reasoning, State
from models.halting import sample_exploration
from models.layers import Embedding, Linear, rotary_angles, rotary_table
from models.noise import with_initial_noise
from models.objective import Objective
from models.puzzle_embedding import PuzzleEmbedding
from models.random import SlotRng


class Network(nn.Module):
    """The base class of networks. Each model has a subclass, the `NETWORK` of its file.

    A slot is one position of the batch, and works on one puzzle. A call of the network is one thinking step
    of every slot.

    A subclass defines `__init__(arch, metadata)`, `initial_state` and `forward`. `__init__` must assign
    modules in the order in which `forward` uses them. Ranks send the gradients in the reverse order, while
    the backward pass still runs.

    Attributes:
        objective: The loss and the metrics, an instance of `objective_class`.
        undecayed: Names of the parameters without weight decay.
        is_search: Whether an evaluation is a search for the answer, as in LDT. Each thinking step is one step
            of the search. A slot halts if its search has found an answer. If several searches run on a
            puzzle, the first one that finds an answer decides.
        is_random: Whether every evaluation needs random numbers.
        of_data: Names of the tensors in a checkpoint that describe the training data, such as "candidates".
        boards_per_slot: Number of puzzles that a slot stores in training. Each training step works on one of
            them.
        num_answers: Maximum number of right answers that a training batch contains for each puzzle. If 1, the
            batch contains only the label.
        dtype: Dtype of activations and hidden states.
        puzzle_emb: Table of puzzle embeddings. None if the network has none.
    """

    objective_class: ClassVar[type] = Objective
    undecayed: ClassVar[tuple[str, ...]] = ()
    is_search: ClassVar[bool] = False
    is_random: ClassVar[bool] = False
    of_data: ClassVar[tuple[str, ...]] = ()
    boards_per_slot: int = 1
    num_answers: int = 1
    puzzle_emb: PuzzleEmbedding | None

    def __init__(self, arch: ArchConfig):
        super().__init__()
        assert arch.forward_dtype != "auto", "replace forward_dtype=auto by bfloat16 or float32 first"
        self.arch, self.objective = arch, self.objective_class(arch)
        if self.objective.metrics.get("count", "") is not None:
            raise ValueError(
                f'{self.objective_class.__name__}.metrics lacks "count": None, the number of puzzles. Add it.'
            )
        self.dtype, self.puzzle_emb = getattr(torch, arch.forward_dtype), None

    def initial_state(self, batch_size: int, *, seq_len: int) -> State:
        """Returns the state before the first thinking step on a puzzle: {name: tensor [batch_size, ...]}.

        The state is the same for all puzzles. Hidden states have names that start with "z_", such as z_H, and
        the shape [batch_size, ..., hidden]. The comment at `models.carry.State` has the rules for other
        names. If the network has no state, the result is {}.

        seq_len: Number of cells (tokens) of a puzzle.
        """
        return {}

    def start(self, data: Batch, reasoning: Reasoning, rng: SlotRng | None, fresh: Tensor) -> State:
        """Returns the states with which slots start on new puzzles: {name: tensor [batch, ...]}.

        By default, these are the states that `initial_state` returns. If reasoning.init_noise is not 0,
        noise of this standard deviation replaces the hidden states.

        data: Puzzles of all slots. rng: Random numbers. If None, the states are not random. fresh: Slots that
        start on a new puzzle, bool [batch]. The caller ignores the states of all other slots.
        """
        state = self.initial_state(len(data.inputs), seq_len=data.inputs.shape[1])
        return with_initial_noise(state, reasoning, rng, fresh)

    def forward(
        self,
        state: State,
        inputs: Tensor,
        puzzle_identifiers: Tensor,
        *,
        reasoning: Reasoning,
        rng: SlotRng | None = None,
    ) -> tuple[State, Prediction]:
        """Runs one thinking step of every slot. Returns the state after the step, and the prediction.

        The returned state must be detached. The caller passes it to the next thinking step.

        Args:
            state: State before the step, {name: tensor [batch, ...]}.
            inputs: Tokens of the puzzles, int32 [batch, seq_len].
            puzzle_identifiers: For each puzzle, the row of its puzzle embedding in the table, int32 [batch].
            reasoning: Settings of the step, such as its number of cycles.
            rng: Random numbers, needed for noise and dropout.
        """
        raise NotImplementedError

    def wants_to_halt(self, state: State, prediction: Prediction, rng: SlotRng | None = None) -> Tensor:
        """Returns which slots the network wants to halt after a thinking step: bool [batch].

        By default, these are the slots with q_halt > 0. With arch.no_ACT_continue=false, these are the slots
        with q_halt > q_continue. `HaltingModel.halts` also applies exploration and `Reasoning.max_steps`.

        state, prediction: State after the step, and the prediction of the step. rng: Random numbers of the
        step. It may be None in an evaluation.
        """
        return prediction.q_halt > (0 if self.arch.no_ACT_continue else prediction.q_continue)

    def sample_randomness(
        self, *, seed: int, step: int, batch_size: int, reasoning: Reasoning
    ) -> dict[str, np.ndarray]:
        """Samples random numbers of a training step on the host: {name: array [batch_size, ...]}.

        `forward` can read the numbers of its slots from `SlotRng.arrays`. By default, the only array is
        "min_steps": the number of thinking steps that each slot must have made before it may halt
        (`sample_exploration`).

        step: The training step, from 1. batch_size: Size of the global batch. reasoning: Settings, such as
        `max_steps`, the number of thinking steps after which a puzzle halts in any case.
        """
        return sample_exploration(self.arch, seed=seed, step=step, batch_size=batch_size, reasoning=reasoning)

    def pick_boards(self, rng: SlotRng) -> Tensor | None:
        """Samples which puzzle each slot works on in a training step.

        Returns the index of this puzzle in its slot, int64 [batch]. If each slot stores only one puzzle,
        returns None. Only LDT stores several, with arch.boards_per_slot > 1.
        """
        return None


class TokenNetwork(Network):
    """The base class of networks with one hidden vector for each cell (token).

    `embed` returns the embedded puzzle. `answer` computes logits from a hidden state. A subclass must assign
    `lm_head` and `q_head`, the output layers that `answer` calls.
    """

    def __init__(self, arch: TokenConfig, metadata: Metadata):
        super().__init__(arch)
        width = arch.hidden_size
        self.num_puzzle_positions = arch.num_puzzle_positions
        num_positions = self.num_puzzle_positions + metadata.seq_len
        self.embed_tokens = Embedding(metadata.vocab_size, width, dtype=self.dtype)
        if arch.puzzle_emb_ndim:
            self.puzzle_emb = PuzzleEmbedding(metadata.num_puzzle_identifiers, arch.puzzle_emb_ndim)
        self.embed_pos = rotary = None
        if arch.pos_encodings == "learned":
            self.embed_pos = Embedding(num_positions, width, dtype=self.dtype)
        elif arch.pos_encodings == "rope":
            head_dim = width // arch.num_heads
            rotary = rotary_table(rotary_angles(num_positions, head_dim, base=arch.rope_theta))
        self.register_buffer("rotary", rotary, persistent=False)

    def embed(self, inputs: Tensor, puzzle_identifiers: Tensor) -> Tensor:
        """Returns the embedded puzzle, [batch, positions, hidden] in the dtype of the activations.

            e = sqrt(hidden_size) * [puzzle embedding, token embeddings]

        [ , ] concatenates along the positions. The puzzle embedding is a learned vector for each puzzle
        identifier. With pos_encodings=learned, a learned vector of each position is added:

            e = sqrt(hidden_size) * sqrt(1/2) * ([puzzle embedding, token embeddings] + position embeddings)

        With pos_encodings=rope, nothing is added, because the attention applies the rotary position
        embeddings.

        Args:
            inputs: Tokens, int32 [batch, seq_len].
            puzzle_identifiers: For each puzzle, the row of its puzzle embedding in the table, int32 [batch].
        """
        e = self.embed_tokens(inputs)
        if self.puzzle_emb is not None:
            # The puzzle embedding is one vector of puzzle_emb_ndim numbers. It is padded with zeros, and cut
            # into puzzle positions of hidden_size numbers. Example: TRM has puzzle_emb_ndim = hidden_size and
            # 16 puzzle positions. Position 0 is the puzzle embedding, and positions 1 to 15 are zeros.
            embedding = self.puzzle_emb(puzzle_identifiers).to(e.dtype)  # [batch, puzzle_emb_ndim]
            num_zeros = self.num_puzzle_positions * e.shape[-1] - embedding.shape[-1]
            puzzle = F.pad(embedding, (0, num_zeros)).unflatten(1, (self.num_puzzle_positions, -1))
            e = torch.cat((puzzle, e), dim=1)
        if self.embed_pos is not None:
            e = math.sqrt(0.5) * (e + self.embed_pos(torch.arange(e.shape[1], device=e.device)))
        # Token embeddings are initialized with standard deviation 1 / sqrt(hidden_size). The factor makes
        # it 1.
        return math.sqrt(self.arch.hidden_size) * e

    def answer(self, z_H: Tensor) -> Prediction:
        """Applies the output layers to a hidden state. Returns logits, q_halt and q_continue.

        z_H: Hidden state z_H, for example after a thinking step, [batch, positions, hidden].
        """
        logits = self.lm_head(z_H)[:, self.num_puzzle_positions :]
        return Prediction(logits, *self.q_values(z_H))

    def q_values(self, z_H: Tensor) -> tuple[Tensor, Tensor]:
        """Returns q_halt and q_continue, each float32 [batch]: logits of "the answer is right".

        q_halt is about the answer now, and q_continue about the answer after more thinking steps. Both are
        computed from position 0 of z_H, [batch, positions, hidden]. If a convolution replaces attention
        (arch.conv=instead), position 0 depends only on the cells near it. Both are then computed from the
        mean over all positions.
        """
        read = z_H.mean(dim=1) if self.arch.conv == "instead" else z_H[:, 0]
        q = self.q_head(read).float()
        return q[:, 0], q[:, 1]


def build_q_head(width: int) -> Linear:
    """Builds the output layer for q_halt and q_continue, the logits that decide when a puzzle halts.

    Initially, q_halt and q_continue are -5 for every hidden state. So no slot halts early, neither by the
    rule q_halt > 0 nor by the rule q_halt > q_continue.
    """
    q_head = Linear(width, 2, bias=True)
    nn.init.zeros_(q_head.weight)
    nn.init.constant_(q_head.bias, -5.0)
    return q_head


def gradient_if(has_gradient: bool) -> contextlib.AbstractContextManager:
    """Returns `torch.no_grad()` if `has_gradient` is False, else a context manager without effect."""
    return contextlib.nullcontext() if has_gradient else torch.no_grad()
