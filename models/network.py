"""The interface of a network: one thinking step, from a state and puzzles to the next state and an answer.

`Network` is the base class of all networks. `TokenNetwork` is the base class of networks with one vector for
each cell, such as HRM and TRM. It embeds the puzzle (`embed`) and reads the answer from a state (`answer`).
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
from models.halting import q_head_wants_to_halt, sample_exploration
from models.layers import Embedding, Linear, rotary_angles, rotary_table
from models.noise import with_initial_noise
from models.objective import Objective
from models.puzzle_embedding import PuzzleEmbedding
from models.random import SlotRng

# Initially q_halt and q_continue are both -5. So no slot halts early, whether the rule is q_halt > 0 or
# q_halt > q_continue.
_Q_HEAD_BIAS = -5.0


class Network(nn.Module):
    """The base class of networks. The file of a model defines a subclass and assigns it to `NETWORK`.

    A subclass defines three methods:

    __init__(arch, metadata)  builds the modules, and assigns them in the order in which `forward` uses them.
                              Ranks send the gradients of the parameters in the reverse of this order, during
                              the backward pass, which completes them in about the same reverse order.
    initial_state             returns the state of a slot that starts on a puzzle
    forward                   runs one thinking step

    Attributes:
        objective_class: Class of `objective`, which defines the loss and the metrics.
        undecayed: Names of the weights without weight decay.
        is_search: Whether an evaluation is a search (`models.search.Search`).
        is_random: Whether an evaluation always needs random numbers, also without noise in `Reasoning`.
        boards_per_slot: Number of puzzles in a batch position in training. Each step works on one of them.
        num_answers: Number of right answers of each puzzle in a batch of training (`Batch.answers`). 1: only
            the label.
        dtype: Dtype of activations and states.
        puzzle_emb: Table of puzzle embeddings. None if the model has none.
    """

    objective_class: ClassVar[type] = Objective
    undecayed: ClassVar[tuple[str, ...]] = ()
    is_search: ClassVar[bool] = False
    is_random: ClassVar[bool] = False
    boards_per_slot: int = 1
    num_answers: int = 1
    puzzle_emb: PuzzleEmbedding | None

    def __init__(self, arch: ArchConfig):
        super().__init__()
        self.arch, self.objective = arch, self.objective_class(arch)
        self.dtype, self.puzzle_emb = dtype_of(arch), None

    def initial_state(self, batch_size: int, *, seq_len: int) -> State:
        """Returns the state before the first thinking step on a puzzle: {name: tensor [batch_size, ...]}.

        It is the same for all puzzles, without noise. Returns {} if the network has no state. A name that
        starts with "z_", such as z_H, is a latent state, [batch_size, ..., hidden]. `models.carry.State` has
        the rules for other names. seq_len: Number of cells of a puzzle.
        """
        return {}

    def start(self, data: Batch, reasoning: Reasoning, rng: SlotRng | None, fresh: Tensor) -> State:
        """Returns the state before the first thinking step, for every slot (position of the batch).

        By default, it is the result of `initial_state`. If reasoning.init_noise is not 0, the states of the
        slots in `fresh` are random. The caller uses only the states of these slots.

        data: The puzzles. rng: Random numbers. If None, the states are not random.
        fresh: Mask of the slots that start on a new puzzle, bool [batch].
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
        """Runs one thinking step. Returns the new state, detached, and the prediction.

        inputs: Tokens, int32 [batch, seq_len]. puzzle_identifiers: int32 [batch]. reasoning: Settings of the
        step. rng: Random numbers, needed for noise and dropout.
        """
        raise NotImplementedError

    def wants_to_halt(self, state: State, prediction: Prediction, rng: SlotRng | None = None) -> Tensor:
        """Returns for each slot whether the network wants to halt after a thinking step: bool [batch].

        A slot is a position of the batch. By default, the Q head decides: q_halt > 0. With
        no_ACT_continue=false, q_halt > q_continue. `HaltingModel.halts` calls this method, and then considers
        the largest number of steps and the exploration.

        state, prediction: Results of the thinking step. rng: Random numbers of the step. None in an
        evaluation without noise.
        """
        return q_head_wants_to_halt(prediction, self.arch)

    def sample_randomness(
        self, *, seed: int, step: int, batch_size: int, reasoning: Reasoning
    ) -> dict[str, np.ndarray]:
        """Samples random numbers of a training step on the host: {name: array [batch_size, ...]}.

        An array has a row for each slot (position) of the global batch. By default, the result is that of
        `sample_exploration`: {"min_steps": array}, the thinking steps before which a slot may not halt.
        """
        return sample_exploration(self.arch, seed=seed, step=step, batch_size=batch_size, reasoning=reasoning)

    def pick_boards(self, rng: SlotRng) -> Tensor | None:
        """Returns the index of the puzzle that each slot works on in a training step: int64 [batch].

        Returns None if a slot (position of the batch) holds one puzzle. Only in LDT, it can hold several
        (arch.boards_per_slot). rng: Random numbers of the training step.
        """
        return None


class TokenNetwork(Network):
    """The base class of networks with one vector for each cell.

    `embed` returns the embedded puzzle. `answer` reads the logits and the Q values from a state.

    `__init__` builds the modules that `embed` needs. A subclass builds all other modules. It must assign the
    heads `lm_head` and `q_head`, because `answer` uses them.
    """

    def __init__(self, arch: TokenConfig, metadata: Metadata):
        super().__init__(arch)
        width = arch.hidden_size
        self.num_puzzle_positions = arch.num_puzzle_positions
        num_positions = self.num_puzzle_positions + metadata.seq_len
        self.embed_tokens = Embedding(metadata.vocab_size, width, std=width**-0.5, dtype=self.dtype)
        if arch.puzzle_emb_ndim:
            self.puzzle_emb = PuzzleEmbedding(metadata.num_puzzle_identifiers, arch.puzzle_emb_ndim)
        self.embed_pos = rotary = None
        if arch.pos_encodings == "learned":
            self.embed_pos = Embedding(num_positions, width, std=width**-0.5, dtype=self.dtype)
        elif arch.pos_encodings == "rope":
            head_dim = width // arch.num_heads
            rotary = rotary_table(rotary_angles(num_positions, head_dim, base=arch.rope_theta))
        self.register_buffer("rotary", rotary, persistent=False)

    def embed(self, inputs: Tensor, puzzle_identifiers: Tensor) -> Tensor:
        """Returns the embedded puzzle e, [batch, positions, hidden] in the forward dtype.

            e = sqrt(hidden_size) * [puzzle embedding, token embeddings]

        [ , ] concatenates along the positions: first the puzzle positions, then the cells. Token embeddings
        are initialized with standard deviation 1 / sqrt(hidden_size). The factor makes it 1. Puzzle
        embeddings are initialized with 0.

        If pos_encodings=learned, a learned vector of each position is added:

            e = sqrt(hidden_size) * sqrt(1/2) * ([puzzle embedding, token embeddings] + position embeddings)

        If pos_encodings=rope, nothing is added here. The attention rotates its queries and keys.

        inputs: Tokens, int32 [batch, seq_len]. puzzle_identifiers: int32 [batch].
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
        return math.sqrt(self.arch.hidden_size) * e

    def answer(self, z_H: Tensor) -> Prediction:
        """Returns logits, q_halt and q_continue. z_H: State after the thinking step.

        z_H is [batch, positions, hidden], and the logits are [batch, seq_len, vocab].
        """
        logits = self.lm_head(z_H)[:, self.num_puzzle_positions :]
        return Prediction(logits, *self.q_values(z_H))

    def q_values(self, z_H: Tensor) -> tuple[Tensor, Tensor]:
        """Returns q_halt and q_continue, each float32 [batch]. The Q head reads position 0 of z_H.

        If arch.conv=instead, position 0 depends only on the cells near it. The Q head then reads the mean of
        z_H over all positions.
        """
        read = z_H.mean(dim=1) if self.arch.conv == "instead" else z_H[:, 0]
        q = self.q_head(read).float()
        return q[:, 0], q[:, 1]


def build_q_head(width: int) -> Linear:
    """Builds the Q head, the output head for q_halt and q_continue. Initially both are -5 for every state."""
    q_head = Linear(width, 2, bias=True)
    nn.init.zeros_(q_head.weight)
    nn.init.constant_(q_head.bias, _Q_HEAD_BIAS)
    return q_head


def gradient_if(has_gradient: bool) -> contextlib.AbstractContextManager:
    """Returns `torch.no_grad()`. If `has_gradient` is True, returns a context that changes nothing."""
    return contextlib.nullcontext() if has_gradient else torch.no_grad()


def dtype_of(arch: ArchConfig) -> torch.dtype:
    """Returns the dtype of activations and states: torch.bfloat16 or torch.float32.

    It is the value of arch.forward_dtype. The caller must replace "auto" before.
    """
    assert arch.forward_dtype != "auto", "replace forward_dtype=auto by bfloat16 or float32 first"
    return getattr(torch, arch.forward_dtype)
