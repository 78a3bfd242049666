"""The interface of a network for training and evaluation: a thinking step, the state, losses and halting."""

from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from config.architecture import ArchConfig
from dataset.format import Metadata
from dataset.loader import Batch
from models.blocks import Level
from models.carry import Board, Carry, Divisors, Metrics, Prediction, Reasoning, State, StepOutput, Sums
from models.flops import flops
from models.layers import Rotary, truncated_normal
from models.random import Draws


class PuzzleEmbedding(nn.Module):
    """A table with one learned row for each puzzle identifier.

    The table may have a million rows, and a step uses a few hundred. So `weights` is a buffer, not a
    parameter: in training each call returns the used rows as an autograd leaf, and remembers them. An
    optimizer of the table (`optimizers.puzzle_table`) then takes the gradients of these leaves.

    weights: float32 [num_puzzle_identifiers, ndim], initially 0. If ranks divide the table, calls read
    fetched rows instead (`read_from`).
    """

    weights_name: ClassVar[str] = "puzzle_emb.weights"  # name in the state dict of a network

    def __init__(self, num_puzzle_identifiers: int, ndim: int):
        super().__init__()
        self.register_buffer("weights", torch.zeros(num_puzzle_identifiers, ndim))
        self._used: list[tuple[Tensor, Tensor]] = []
        self._fetched: tuple[Tensor, Tensor] | None = None

    def read_from(self, identifiers: Tensor, rows: Tensor) -> None:
        """Makes later calls read fetched rows [n, ndim] only. identifiers: of the rows, int64 [n], rising."""
        self._fetched = identifiers, rows

    def forward(self, identifiers: Tensor) -> Tensor:
        """Returns the rows of `identifiers` [batch]: float32 [batch, ndim].

        In training mode with gradient, remembers the rows until `pop_gradients`.
        """
        rows = self._look_up(identifiers)
        if self.training and torch.is_grad_enabled():
            rows.requires_grad_()
            self._used.append((identifiers, rows))
        return rows

    def _look_up(self, identifiers: Tensor) -> Tensor:
        if self._fetched is None:
            return self.weights[identifiers]
        known, rows = self._fetched
        positions = torch.searchsorted(known, identifiers.long())
        assert identifiers.is_cuda or torch.equal(known[positions], identifiers.long()), "fetched beforehand"
        return rows[positions]

    def pop_gradients(self) -> tuple[Tensor, Tensor]:
        """Returns (identifiers [n], with repeats; gradients [n, ndim]) of all calls since the last pop."""
        used = [(identifiers, rows.grad) for identifiers, rows in self._used if rows.grad is not None]
        self._used.clear()
        if not used:
            nothing = torch.zeros(0, dtype=torch.int64, device=self.weights.device)
            return nothing, self.weights.new_zeros(0, self.weights.shape[1])
        identifiers, gradients = zip(*used, strict=True)
        return torch.cat(identifiers), torch.cat(gradients)


class Network(nn.Module):
    """The base of networks: one thinking step from tokens to an answer, the losses, and when a slot halts.

    A subclass must register modules in the order of use, so that the backward pass completes gradients, and
    ranks send them, in about the reverse order.

    state_names      states kept between steps, such as z_H, which the answer is computed from. Each z_X
                     starts as X_init, [hidden], a buffer that is drawn and never trained
    metrics          computed from the sums that `losses` and `sums` return (see `models.carry.Metrics`)
    training_metrics computed from the sums that `losses` returns, in training only
    boards_per_slot  number of puzzles in a slot in training; each step works on one of them
    undecayed        names of weights without weight decay
    of_data          names of stored tensors that are facts of the training data, not learned
    is_search        whether an evaluation is a search: a try at a puzzle ends when the network wants to halt,
                     the first such try answers the puzzle, and without one the puzzle is undecided
    puzzle_emb       the puzzle embeddings; None without them
    """

    state_names: ClassVar[tuple[str, ...]] = ("z_H", "z_L")
    metrics: ClassVar[Metrics] = {}
    training_metrics: ClassVar[Metrics] = {}
    boards_per_slot: int = 1
    undecayed: ClassVar[tuple[str, ...]] = ()
    of_data: ClassVar[tuple[str, ...]] = ()
    is_search: ClassVar[bool] = False
    puzzle_emb: PuzzleEmbedding | None

    def __init__(self, arch: ArchConfig):
        super().__init__()
        self.hidden_size = arch.hidden_size
        self.dtype = dtype_of(arch)
        self.puzzle_emb = None

    def register_initial_values(self) -> None:
        """Draws the initial value of each state, such as H_init of z_H, and registers it as a buffer."""
        for name in self.state_names:
            self.register_buffer(_init_of(name), truncated_normal(self.hidden_size, std=1).to(self.dtype))

    def register_rotary(self, angles: Tensor) -> None:
        """Registers a table of rotary positions (arXiv 2104.09864). angles: float32 [length, head_dim/2]."""
        self.register_buffer("rotary_cos", angles.cos(), persistent=False)
        self.register_buffer("rotary_sin", angles.sin(), persistent=False)

    @property
    def rotary(self) -> Rotary | None:
        """Returns the table of rotary positions as (cos, sin); None without one."""
        return (self.rotary_cos, self.rotary_sin) if hasattr(self, "rotary_cos") else None

    def register_puzzle_rows(self, arch: ArchConfig, metadata: Metadata, *, width: int | None = None) -> None:
        """Creates `puzzle_emb` if the architecture has one. width: length of a row; None: puzzle_emb_ndim."""
        if arch.has_puzzle_embeddings:
            width = width or arch.puzzle_emb_ndim
            self.puzzle_emb = PuzzleEmbedding(metadata.num_puzzle_identifiers, width)

    def puzzle_rows(self, puzzle_identifiers: Tensor) -> Tensor | None:
        """Returns the puzzle embeddings, [batch, width] in the forward dtype; None without a table."""
        return None if self.puzzle_emb is None else self.puzzle_emb(puzzle_identifiers).to(self.dtype)

    def keep_puzzles(self, identifiers: Tensor) -> None:
        """Drops all puzzle embeddings except those of `identifiers`, int64 [n], which become 0 to n - 1."""
        if self.puzzle_emb is not None:
            self.puzzle_emb.weights = self.puzzle_emb.weights[identifiers]

    @staticmethod
    def sizes_in(weights: State, arch: ArchConfig) -> dict[str, int]:
        """Returns {field of `Metadata`: size} that a dataset must have for a model with these weights."""
        raise NotImplementedError

    @staticmethod
    def table_in(weights: State, arch: ArchConfig) -> Tensor | None:
        """Returns the table of puzzle embeddings among trained weights; None without one."""
        return weights[PuzzleEmbedding.weights_name] if arch.has_puzzle_embeddings else None

    @staticmethod
    def complete(metadata: Metadata, weights: State) -> Metadata:
        """Returns the metadata with facts about the training data that are stored in the weights."""
        return metadata

    def levels(self) -> dict[str, Level]:
        """Returns the levels by the names of their modules."""
        return {name: each for name, each in self.named_modules() if isinstance(each, Level)}

    def block_weights(self) -> frozenset[str]:
        """Returns the names of the weights inside blocks; these are only used in the forward dtype."""
        levels = tuple(f"{name}.layers." for name in self.levels())
        return frozenset(name for name, _ in self.named_parameters() if name.startswith(levels))

    def cast_blocks_(self) -> None:
        """Casts the weights inside blocks to the forward dtype, to save later casts. Not for training."""
        for name in self.block_weights():
            weight = self.get_parameter(name)
            weight.data = weight.data.to(self.dtype)

    # State, losses and halting, which a subclass may override.

    def needs_draws(self, reasoning: Reasoning) -> bool:
        """Returns whether a step of an evaluation needs `Draws`."""
        return reasoning.is_noisy

    @property
    def keeps_state(self) -> bool:
        """Returns whether the network has a state that slots keep between steps."""
        return bool(self.initial_state(1, seq_len=1))

    def draw(self, *, seed: int, step: int, batch_size: int, reasoning: Reasoning) -> dict[str, np.ndarray]:
        """Draws {name: [batch_size, ...]} on the host: a row for each slot of a step's global batch."""
        return {}

    def start(self, data: Batch, reasoning: Reasoning, draws: Draws | None, fresh: Tensor) -> State:
        """Returns the initial state of slots that start on `data`.

        fresh: bool [batch], the slots that start; callers ignore other rows. With init_noise, the state is
        (as in EqR) normal noise of that standard deviation, cut at 2 sigma.
        """
        start = self.initial_state(len(data.inputs), seq_len=data.inputs.shape[1])
        if reasoning.init_noise and draws is not None:
            slots = fresh.nonzero().flatten()
            draws = draws[slots]
            for name in self.state_names if start else ():
                noise = draws.truncated_normal(start[name].shape[1:], use=f"start {name}")
                noise = (reasoning.init_noise * noise).to(self.dtype)
                start[name] = start[name].index_copy(0, slots, noise)
        return start

    def board(self, state: State) -> Board | None:
        """Returns the candidates of each cell, for display; None if the network keeps no candidates."""
        return None

    def search_facts(self) -> dict[str, Any] | None:
        """Returns constants as JSON values, by which a web page runs the search itself; None without one."""
        return None

    def divisors(self, carry: Carry) -> Sums:
        """Returns divisors of losses besides `slots`, known before the forward pass, to sum over ranks."""
        return {}

    def losses(
        self,
        before: Carry,
        output: StepOutput,
        *,
        divisors: Divisors,
        reasoning: Reasoning,
        draws: Draws | None,
    ) -> tuple[Tensor, Sums]:
        """Returns the loss summed over slots, to be divided by divisors["slots"], and sums of metrics.

        before, output: input and output of the thinking step. divisors: over the global batch. A term
        that is a mean over another number must be multiplied by divisors["slots"] / divisors[name].
        """
        raise NotImplementedError

    def sums(self, output: StepOutput) -> Sums:
        """Returns the metric sums of an evaluation, over slots with final answers."""
        raise NotImplementedError

    def wants_to_halt(self, state: State, prediction: Prediction) -> Tensor:
        """Returns which slots would halt now if they were free to: bool [batch]."""
        return prediction.q_halt > 0

    def halts(
        self, carry: Carry, prediction: Prediction, reasoning: Reasoning, draws: Draws | None
    ) -> Tensor:
        """Returns which slots halt after a step: bool [batch]. carry, prediction: results of the step."""
        halted = carry.steps >= reasoning.max_steps
        if reasoning.halts_early and reasoning.max_steps > 1:
            halted = halted | self.wants_to_halt(carry.state, prediction)
        return halted

    # Cost in floating-point operations (`models.flops`).

    def step_flops(self, reasoning: Reasoning, *, seq_len: int, trains: bool = False) -> float:
        """Counts the operations of a thinking step of one slot. trains: with the backward pass."""
        shape, total = self.state_shape(seq_len), self.head_flops(seq_len, trains=trains)
        for level, calls, with_gradient in self.calls(reasoning):
            with_gradient *= trains
            total += (calls - with_gradient) * flops(level, shape)
            total += with_gradient * flops(level, shape, trains=True)
        return total

    def calls(self, reasoning: Reasoning) -> list[tuple[Level, int, int]]:
        """Returns (level, number of calls in a step, number of those with gradient) for each level."""
        raise NotImplementedError

    def head_flops(self, seq_len: int, *, trains: bool = False) -> int:
        """Counts the operations of the output heads (`predict`) for one slot."""
        raise NotImplementedError

    # The thinking step: embed, reason, predict.

    def state_shape(self, seq_len: int) -> tuple[int, ...]:
        """Returns the shape of one slot's states (z_H, ...): [..., hidden]."""
        raise NotImplementedError

    def initial_state(self, batch_size: int, *, seq_len: int) -> State:
        """Returns {name of a state: its initial value at every position}; a subclass may keep others."""
        shape = (batch_size, *self.state_shape(seq_len))
        return {name: self.get_buffer(_init_of(name)).expand(shape) for name in self.state_names}

    def embed(self, inputs: Tensor, puzzle_identifiers: Tensor) -> Tensor:
        """Returns the embedded puzzle e, which every call of a level reads, in the shape of a state."""
        raise NotImplementedError

    def reason(self, state: State, e: Tensor, reasoning: Reasoning, draws: Draws | None) -> State:
        """Runs the recurrence of one step from e; returns z_H and all other kept states, with gradient."""
        raise NotImplementedError

    def predict(self, z_H: Tensor) -> Prediction:
        """Returns the prediction for a state: the answer of each cell, and the values for halting."""
        raise NotImplementedError

    def forward(
        self,
        state: State,
        inputs: Tensor,
        puzzle_identifiers: Tensor,
        *,
        reasoning: Reasoning,
        draws: Draws | None = None,
    ) -> tuple[State, Prediction]:
        """Runs one thinking step; returns the new state, detached, and the prediction.

        inputs: int32 [batch, seq_len]. puzzle_identifiers: int32 [batch]. draws: needed for noise or dropout.
        """
        assert draws is not None or not reasoning.is_noisy, "noise without random numbers"
        if reasoning.step_noise:
            # Noise on z_L, as PTRM has; without a z_L, on every z_X.
            names, std = {"z_L"} & state.keys() or {*self.state_names} & state.keys(), reasoning.step_noise
            state = state | {n: plus_noise(state[n], std, draws, use=f"step {n}") for n in names}
        e = self.embed(inputs, puzzle_identifiers)
        reasoned = self.reason(state, e, reasoning, draws)
        kept = {name: reasoned[name].detach() for name in state}
        return kept, self.predict(reasoned["z_H"])


def dtype_of(arch: ArchConfig) -> torch.dtype:
    """Returns the dtype of activations and states. The number format must be chosen already."""
    assert arch.forward_dtype != "auto", "a network is built with a chosen number format"
    return getattr(torch, arch.forward_dtype)


def plus_noise(z: Tensor, std: float, draws: Draws | None, *, use: str) -> Tensor:
    """Adds normal noise of standard deviation `std`. use: name of the random numbers (`Draws`)."""
    return z + (std * draws.normal(z.shape[1:], use=use)).to(z.dtype) if std else z


def _init_of(name: str) -> str:
    return f"{name.removeprefix('z_')}_init"
