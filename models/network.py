"""What training and evaluation see of a network: its step, what is kept between steps, its science."""

from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from config.architecture import ArchConfig
from dataset.format import Metadata
from dataset.loader import Batch
from models.blocks import Level
from models.carry import Board, Carry, Counts, Metrics, Prediction, Reasoning, State, StepOutput, Sums
from models.flops import flops
from models.layers import Rotary, truncated_normal
from models.random import Draws


class PuzzleEmbedding(nn.Module):
    """A table with one learned row for each puzzle identifier, trained by an optimizer of its own.

    The table may have a million rows, and a step touches a few hundred. So the table is no parameter of
    autograd: each use hands out its rows as a leaf and remembers them, until the optimizer collects what the
    backward pass left there.

    weights: float32 [num_puzzle_identifiers, ndim], initially 0. A sharded table reads fetched rows instead
    (`read_from`).
    """

    weights_name: ClassVar[str] = "puzzle_emb.weights"  # among the weights of a network

    def __init__(self, num_puzzle_identifiers: int, ndim: int):
        super().__init__()
        self.register_buffer("weights", torch.zeros(num_puzzle_identifiers, ndim))
        self._used: list[tuple[Tensor, Tensor]] = []
        self._fetched: tuple[Tensor, Tensor] | None = None

    def read_from(self, identifiers: Tensor, rows: Tensor) -> None:
        """Makes later uses read these rows alone, [n, ndim] of rising identifiers, int64 [n]."""
        self._fetched = identifiers, rows

    def forward(self, identifiers: Tensor) -> Tensor:
        """Returns the rows of `identifiers` [batch]: float32 [batch, ndim].

        In training with gradient they are remembered until collected.
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
        """Returns and forgets (identifiers [n], gradients [n, ndim]) of all uses; identifiers repeat."""
        used = [(identifiers, rows.grad) for identifiers, rows in self._used if rows.grad is not None]
        self._used.clear()
        if not used:
            nothing = torch.zeros(0, dtype=torch.int64, device=self.weights.device)
            return nothing, self.weights.new_zeros(0, self.weights.shape[1])
        identifiers, gradients = zip(*used, strict=True)
        return torch.cat(identifiers), torch.cat(gradients)


class Network(nn.Module):
    """A model's network and science: one step from tokens to an answer, its losses, and when a slot halts.

    Modules are registered in the order in which they are used: gradients are complete in about the reverse
    one, in which they travel between ranks.

    state_names      what is kept between steps; z_H, which the answer is read from, is among them. Each z_X
                     starts from X_init, [hidden], a buffer that is drawn and never trained
    metrics          made of the sums of `losses` and `sums`; training_metrics: of the sums of `losses` alone
    boards_per_slot  puzzles that a slot holds in training; each step works on one of them
    advances         whether `advance` does anything
    undecayed        weights without weight decay, by name, where a network has them
    is_search        whether a run answers only where it wants to halt: an evaluation ends it there, the first
                     run to halt answers its puzzle, and a puzzle without such a run is not decided
    puzzle_emb       None where there is none
    """

    state_names: ClassVar[tuple[str, ...]] = ("z_H", "z_L")
    metrics: ClassVar[Metrics] = {}
    training_metrics: ClassVar[Metrics] = {}
    boards_per_slot: int = 1
    advances: bool = False
    undecayed: ClassVar[tuple[str, ...]] = ()
    is_search: ClassVar[bool] = False
    puzzle_emb: PuzzleEmbedding | None

    def __init__(self, arch: ArchConfig):
        super().__init__()
        self.hidden_size = arch.hidden_size
        self.dtype = choose_dtype(arch.forward_dtype)
        self.puzzle_emb = None

    def register_initial_values(self) -> None:
        """Draws X_init for each of the states."""
        for name in self.state_names:
            self.register_buffer(_init_of(name), truncated_normal(self.hidden_size, std=1).to(self.dtype))

    def register_rotary(self, angles: Tensor) -> None:
        """Adds a table of rotary positions (arXiv 2104.09864). angles: float32 [positions, head_dim / 2]."""
        self.register_buffer("rotary_cos", angles.cos(), persistent=False)
        self.register_buffer("rotary_sin", angles.sin(), persistent=False)

    @property
    def rotary(self) -> Rotary | None:
        """Returns the table of rotary positions, None where there is none."""
        return (self.rotary_cos, self.rotary_sin) if hasattr(self, "rotary_cos") else None

    def register_puzzle_rows(self, arch: ArchConfig, metadata: Metadata, *, width: int | None = None) -> None:
        """Adds the table of puzzle embeddings, if the architecture has one. width: of rows that differ."""
        if arch.has_puzzle_embeddings:
            width = width or arch.puzzle_emb_ndim
            self.puzzle_emb = PuzzleEmbedding(metadata.num_puzzle_identifiers, width)

    def puzzle_rows(self, puzzle_identifiers: Tensor) -> Tensor | None:
        """Returns the rows of puzzles, [batch, width] in the forward dtype; None where there is no table."""
        return None if self.puzzle_emb is None else self.puzzle_emb(puzzle_identifiers).to(self.dtype)

    def keep_puzzles(self, identifiers: Tensor) -> None:
        """Keeps the rows of these puzzles alone, int64 [n], which are then numbered anew."""
        if self.puzzle_emb is not None:
            self.puzzle_emb.weights = self.puzzle_emb.weights[identifiers]

    @staticmethod
    def sizes_in(weights: State, arch: ArchConfig) -> dict[str, int]:
        """Reads off trained weights which sizes the dataset must have, by their names in `Metadata`."""
        raise NotImplementedError

    @staticmethod
    def table_in(weights: State, arch: ArchConfig) -> Tensor | None:
        """Returns the table of puzzle embeddings among trained weights; None where there is none."""
        return weights[PuzzleEmbedding.weights_name] if arch.has_puzzle_embeddings else None

    @staticmethod
    def complete(metadata: Metadata, weights: State) -> Metadata:
        """Returns the metadata with what training found in its data, if the weights keep that."""
        return metadata

    def levels(self) -> dict[str, Level]:
        """Returns the levels by the names of their modules."""
        return {name: each for name, each in self.named_modules() if isinstance(each, Level)}

    def block_weights(self) -> frozenset[str]:
        """Returns the names of the weights inside the blocks, which are used in the forward dtype alone."""
        levels = tuple(f"{name}.layers." for name in self.levels())
        return frozenset(name for name, _ in self.named_parameters() if name.startswith(levels))

    def cast_blocks_(self) -> None:
        """Casts the weights of the blocks to the forward dtype, once for all uses; not for training."""
        for name in self.block_weights():
            weight = self.get_parameter(name)
            weight.data = weight.data.to(self.dtype)

    # Its science: what a network may say otherwise.

    def needs_draws(self, reasoning: Reasoning) -> bool:
        """Returns whether a step needs random numbers in evaluation too."""
        return reasoning.is_noisy

    @property
    def keeps_state(self) -> bool:
        """Returns whether something is kept between steps."""
        return bool(self.initial_state(1, seq_len=1))

    def draw(self, *, seed: int, step: int, batch_size: int, reasoning: Reasoning) -> dict[str, np.ndarray]:
        """Draws arrays [batch_size, ...] for the global batch of a training step; each slot gets its row."""
        return {}

    def start(self, data: Batch, reasoning: Reasoning, draws: Draws | None, fresh: Tensor) -> State:
        """Returns the state of slots that start on `data`; only rows where `fresh`, bool [batch], are used.

        With init_noise the start is, as in EqR, normal noise cut at 2 sigma, of that standard deviation.
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

    def advance(self, carry: Carry, reasoning: Reasoning, draws: Draws) -> tuple[Carry, Sums]:
        """Returns what the boards of the last step become with the weights after its update, and sums of it.

        Only for a network that `advances`. reasoning, draws: of that step.
        """
        raise NotImplementedError

    def board(self, state: State) -> Board | None:
        """Returns what is known of each puzzle; None where a network keeps no candidates."""
        return None

    def search_facts(self) -> dict[str, Any] | None:
        """Returns what a program must know to move the boards of a search; None where there are none."""
        return None

    def counts(self, carry: Carry) -> Sums:
        """Returns what the losses are divided by besides `slots`, as known before the forward pass.

        Summed over ranks, if there is anything.
        """
        return {}

    def losses(
        self, before: Carry, output: StepOutput, *, counts: Counts, reasoning: Reasoning, draws: Draws | None
    ) -> tuple[Tensor, Sums]:
        """Computes the loss, which the step divides by counts["slots"], and the sums of the metrics.

        before: what the step was called with. counts: over the global batch. A loss over another count is
        multiplied by counts["slots"] / counts[name].
        """
        raise NotImplementedError

    def sums(self, output: StepOutput) -> Sums:
        """Computes the sums of an evaluation, of slots with their final answer."""
        raise NotImplementedError

    def wants_to_halt(self, state: State, prediction: Prediction) -> Tensor:
        """Returns where a slot would rather stop than go on: bool [batch]."""
        return prediction.q_halt > 0

    def halts(
        self, carry: Carry, prediction: Prediction, reasoning: Reasoning, draws: Draws | None
    ) -> Tensor:
        """Returns which slots halt after a step: bool [batch]. carry: as the step left it."""
        halted = carry.steps >= reasoning.max_steps
        if reasoning.halts_early and reasoning.max_steps > 1:
            halted = halted | self.wants_to_halt(carry.state, prediction)
        return halted

    # Its cost, in floating-point operations (`models.flops`).

    def step_flops(self, reasoning: Reasoning, *, seq_len: int, trains: bool = False) -> float:
        """Counts the operations of a step of one slot; where it `trains`, of all that its update needs."""
        shape, total = self.state_shape(seq_len), self.head_flops(seq_len, trains=trains)
        for level, calls, with_gradient in self.calls(reasoning):
            with_gradient *= trains
            total += (calls - with_gradient) * flops(level, shape)
            total += with_gradient * flops(level, shape, trains=True)
        return total

    def calls(self, reasoning: Reasoning) -> list[tuple[Level, int, int]]:
        """Returns each level with the number of its calls in a step, and of those that carry gradient."""
        raise NotImplementedError

    def head_flops(self, seq_len: int, *, trains: bool = False) -> int:
        """Counts the operations of `predict` for one slot."""
        raise NotImplementedError

    # Its step: embed, reason, predict.

    def state_shape(self, seq_len: int) -> tuple[int, ...]:
        """Returns the shape of each z_X of one slot; its last axis is hidden."""
        raise NotImplementedError

    def initial_state(self, batch_size: int, *, seq_len: int) -> State:
        """Returns X_init at every position, by name; a subclass may keep other tensors, or none."""
        shape = (batch_size, *self.state_shape(seq_len))
        return {name: self.get_buffer(_init_of(name)).expand(shape) for name in self.state_names}

    def embed(self, inputs: Tensor, puzzle_identifiers: Tensor) -> Tensor:
        """Computes the input e of every call in the step, of the shape of a state."""
        raise NotImplementedError

    def reason(
        self, state: State, e: Tensor, rotary: Rotary | None, reasoning: Reasoning, draws: Draws | None
    ) -> State:
        """Computes the recurrence of one step: z_H and whatever else is kept, still with their gradient."""
        raise NotImplementedError

    def predict(self, z_H: Tensor) -> Prediction:
        """Computes the answer, and how much it is worth to halt with it."""
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
        """Runs one step; the new state is detached.

        inputs: int32 [batch, seq_len]. puzzle_identifiers: int32 [batch]. draws: needed where there is noise
        or dropout.
        """
        assert draws is not None or not reasoning.is_noisy, "noise without random numbers"
        if reasoning.step_noise:
            # On z_L, as PTRM does; where there is no z_L, on every z_X.
            names, std = {"z_L"} & state.keys() or {*self.state_names} & state.keys(), reasoning.step_noise
            state = state | {n: plus_noise(state[n], std, draws, use=f"step {n}") for n in names}
        e = self.embed(inputs, puzzle_identifiers)
        reasoned = self.reason(state, e, self.rotary, reasoning, draws)
        kept = {name: reasoned[name].detach() for name in state}
        return kept, self.predict(reasoned["z_H"])


def choose_dtype(name: str) -> torch.dtype:
    """Returns the dtype of a forward_dtype; auto is bfloat16, unless a CUDA device only emulates that."""
    emulates = torch.cuda.is_available() and not torch.cuda.is_bf16_supported(including_emulation=False)
    return getattr(torch, {"auto": "float32" if emulates else "bfloat16"}.get(name, name))


def plus_noise(z: Tensor, std: float, draws: Draws | None, *, use: str) -> Tensor:
    """Adds normal noise of standard deviation `std`, drawn for this use."""
    return z + (std * draws.normal(z.shape[1:], use=use)).to(z.dtype) if std else z


def _init_of(name: str) -> str:
    """Returns the name of the buffer that z_X starts from: X_init."""
    return f"{name.removeprefix('z_')}_init"
