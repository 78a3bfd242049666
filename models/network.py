"""The interface of a network: one thinking step, from a state and puzzles to the next state and an answer.

`Network` is the base of all networks, and `TokenNetwork` of those with one vector for each cell.
"""

import contextlib
import math
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from config.architecture import ArchConfig, TokenConfig
from dataset.format import Metadata
from dataset.loader import Batch
from models.carry import Prediction, Reasoning, State
from models.halting import q_head_wants_to_halt, sample_exploration
from models.layers import Embedding, Linear, rotary_angles, rotary_table
from models.noise import with_initial_noise
from models.objective import Objective
from models.puzzle_embedding import PuzzleEmbedding
from models.random import SlotRng

_Q_HEAD_BIAS = -5.0  # initially q_halt is -5, so that no slot wants to halt


class Network(nn.Module):
    """The base of networks. The file of a model defines a subclass and assigns it to `NETWORK`.

    A subclass defines three methods:

    __init__(arch, metadata)  builds the modules, and registers them in the order of use. The backward pass
                              then completes the gradients in about the reverse order, and ranks send them
                              in that order.
    initial_state             returns the state of a slot that starts on a puzzle
    forward                   runs one thinking step

    Attributes:
        objective_class: Class of `objective`, which defines the loss and the metrics.
        undecayed: Names of the weights without weight decay.
        is_search: Whether an evaluation is a search (`models.search.Search`).
        boards_per_slot: Number of puzzles in a slot in training. Each step works on one of them.
        dtype: Dtype of activations and states.
        puzzle_emb: Table of puzzle embeddings. None if the model has none.
    """

    objective_class: ClassVar[type] = Objective
    undecayed: ClassVar[tuple[str, ...]] = ()
    is_search: ClassVar[bool] = False
    boards_per_slot: int = 1
    puzzle_emb: PuzzleEmbedding | None

    def __init__(self, arch: ArchConfig):
        super().__init__()
        self.arch, self.objective = arch, self.objective_class(arch)
        self.dtype, self.puzzle_emb = dtype_of(arch), None

    def initial_state(self, batch_size: int, *, seq_len: int) -> State:
        """Returns the state of slots that start, by names such as z_H, each [batch_size, ..., hidden]."""
        return {}

    def start(self, data: Batch, reasoning: Reasoning, rng: SlotRng | None, fresh: Tensor) -> State:
        """Returns the state of slots that start on `data`. Callers ignore the rows that are not fresh.

        fresh: The slots that start, bool [batch]. With `init_noise`, their states are noise.
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

        inputs: Tokens, int32 [batch, seq_len]. puzzle_identifiers: int32 [batch]. rng: Random numbers, needed
        for noise and dropout.
        """
        raise NotImplementedError

    def wants_to_halt(self, state: State, prediction: Prediction, rng: SlotRng | None = None) -> Tensor:
        """Returns which slots the model wants to halt: bool [batch]. By default, the Q head decides.

        `HaltingModel.halts` then applies the limits (models/halting.py). state: After the step. rng: Random
        numbers of the step. None in an evaluation without noise.
        """
        return q_head_wants_to_halt(prediction, self.arch)

    def sample_randomness(
        self, *, seed: int, step: int, batch_size: int, reasoning: Reasoning
    ) -> dict[str, np.ndarray]:
        """Samples {name: [batch_size, ...]} on the host: a row for each slot of a step's global batch."""
        return sample_exploration(self.arch, seed=seed, step=step, batch_size=batch_size, reasoning=reasoning)

    def pick_boards(self, rng: SlotRng) -> Tensor | None:
        """Returns the puzzle of each slot on which a training step works: indices, int64 [batch].

        None if slots hold one puzzle. Only LDT (boards_per_slot) holds several.
        """
        return None


class TokenNetwork(Network):
    """The base of networks with one vector for each cell: `embed` reads a puzzle, `answer` gives the answer.

    `__init__` builds the modules that `embed` needs. A subclass builds all others, and must have the heads
    `lm_head` and `q_head` for `answer`.
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
        """Returns the embedded puzzle e, [batch, positions, hidden]: the puzzle positions, then the cells.

            e = sqrt(hidden_size) * [puzzle embedding, token embeddings]

        The factor makes the entries of the cells about 1, because token embeddings are initialized with
        standard deviation 1 / sqrt(hidden_size). Puzzle embeddings start at 0. With pos_encodings=learned,

            e = sqrt(hidden_size) * sqrt(1/2) * ([puzzle embedding, token embeddings] + position embeddings)

        Rotary positions are applied in the attention.

        inputs: Tokens, int32 [batch, seq_len]. puzzle_identifiers: int32 [batch].
        """
        e = self.embed_tokens(inputs)
        if self.puzzle_emb is not None:
            # The embedding of a puzzle has puzzle_emb_ndim numbers. They fill the puzzle positions from the
            # left, and zeros fill the rest. Example: TRM has puzzle_emb_ndim = hidden_size and 16 puzzle
            # positions. The embedding is at position 0. Positions 1 to 15 are zeros, unless position
            # embeddings are added.
            embedding = self.puzzle_emb(puzzle_identifiers).to(e.dtype)
            num_zeros = self.num_puzzle_positions * e.shape[-1] - embedding.shape[-1]
            puzzle = F.pad(embedding, (0, num_zeros)).unflatten(1, (self.num_puzzle_positions, -1))
            e = torch.cat((puzzle, e), dim=1)
        if self.embed_pos is not None:
            e = math.sqrt(0.5) * (e + self.embed_pos(torch.arange(e.shape[1], device=e.device)))
        return math.sqrt(self.arch.hidden_size) * e

    def answer(self, z_H: Tensor) -> Prediction:
        """Returns the tokens of the cells and the Q values, from a state [batch, positions, hidden]."""
        logits = self.lm_head(z_H)[:, self.num_puzzle_positions :]
        return Prediction(logits, *self.q_values(z_H))

    def q_values(self, z_H: Tensor) -> tuple[Tensor, Tensor]:
        """Returns q_halt and q_continue, float32 [batch] each. The Q head reads position 0.

        With arch.conv=instead, position 0 sees only cells near it. Then the Q head reads the mean of all.
        """
        q = self.q_head(z_H.mean(dim=1) if self.arch.conv == "instead" else z_H[:, 0]).float()
        return q[:, 0], q[:, 1]


def build_q_head(width: int) -> Linear:
    """Builds the output head for q_halt and q_continue. Initially both are -5 for every state."""
    q_head = Linear(width, 2, bias=True)
    nn.init.zeros_(q_head.weight)
    nn.init.constant_(q_head.bias, _Q_HEAD_BIAS)
    return q_head


def gradient_if(has_gradient: bool) -> contextlib.AbstractContextManager:
    """Returns a context without gradient, or one that changes nothing if `has_gradient`."""
    return contextlib.nullcontext() if has_gradient else torch.no_grad()


def dtype_of(arch: ArchConfig) -> torch.dtype:
    """Returns the dtype of activations and states. The number format must be chosen already."""
    assert arch.forward_dtype != "auto", "a network is built with a chosen number format"
    return getattr(torch, arch.forward_dtype)
