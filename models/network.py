"""What all networks share: an embedded input, a recurrence, an answer, and what is kept between steps.

The halting wrapper sees only `Network`. Most are a `TokenNetwork`, which has the embedding in front and the
two heads behind, plus `reason`, the recurrence of their own file.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from dataset.format import Metadata, columns_of
from models.layers import (
    Attention,
    Block,
    Convolution,
    Embedding,
    Level,
    Linear,
    SwiGLU,
    casts_shared,
    truncated_normal,
)
from models.random import Draws
from models.rotary import Rotary, rotary_table

if TYPE_CHECKING:
    from config.architecture import NetworkConfig, TokenConfig

# Halting starts out improbable.
Q_HEAD_BIAS = -5.0


# Tensors by name, [batch, ...] each; z_X end in [..., hidden], in the forward dtype.
State = dict[str, Tensor]


class Prediction(NamedTuple):
    """The output of a step.

    logits: [batch, seq_len, vocab] in the forward dtype. q_halt: float32 [batch], the logit of being right.
    q_continue: float32 [batch], or None where the network has none.
    """

    logits: Tensor
    q_halt: Tensor
    q_continue: Tensor | None

    def select(self, slots: Tensor) -> Prediction:
        """Returns the prediction of some of the slots, int64 [n]."""
        return Prediction(*(None if column is None else column[slots] for column in self))


class PuzzleEmbedding(nn.Module):
    """A table with one learned row for each puzzle identifier, trained by an optimizer of its own.

    It may have a million rows, of which a step touches a few hundred. So it is no parameter of autograd: each
    use hands out the rows as a leaf of their own and remembers them, and `SparseSignSGD` collects what the
    backward pass left there.

    weights: float32 [num_puzzle_identifiers, ndim], initially 0. Rows that live elsewhere are fetched, and
    then read instead (`read_from`).
    """

    def __init__(self, num_puzzle_identifiers: int, ndim: int):
        super().__init__()
        self.register_buffer("weights", torch.zeros(num_puzzle_identifiers, ndim))
        self._used: list[tuple[Tensor, Tensor]] = []
        self._fetched: tuple[Tensor, Tensor] | None = None

    def read_from(self, identifiers: Tensor, rows: Tensor) -> None:
        """Makes further uses read these rows, [n, ndim] of rising identifiers, int64 [n], and no others."""
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

    def identifiers_used(self) -> Tensor:
        """Returns the identifiers [n] of all uses that are remembered; they repeat."""
        used = [identifiers for identifiers, _ in self._used]
        return torch.cat(used) if used else torch.zeros(0, dtype=torch.int64, device=self.weights.device)

    def _look_up(self, identifiers: Tensor) -> Tensor:
        if self._fetched is None:
            return self.weights[identifiers]
        known, rows = self._fetched
        places = torch.searchsorted(known, identifiers.long())
        assert identifiers.is_cuda or torch.equal(known[places], identifiers.long()), "fetched beforehand"
        return rows[places]

    def collect_gradients(self) -> tuple[Tensor, Tensor]:
        """Returns and forgets (identifiers [n], gradients [n, ndim]) of all uses; identifiers repeat."""
        used = [(identifiers, rows.grad) for identifiers, rows in self._used if rows.grad is not None]
        self._used.clear()
        if not used:
            nothing = torch.zeros(0, dtype=torch.int64, device=self.weights.device)
            return nothing, self.weights.new_zeros(0, self.weights.shape[1])
        identifiers, gradients = zip(*used, strict=True)
        return torch.cat(identifiers), torch.cat(gradients)


class Network(nn.Module):
    """One step of a model, from tokens to logits and halting values: embed, reason, predict.

    Modules are registered in the order in which they are used: gradients are complete in about the reverse
    one, in which they travel between ranks.

    state_names: what is kept between steps; z_H, which the answer is read from, is among them. Each z_X
    starts from X_init, [hidden], a buffer that is drawn and never trained. `initial_state` may keep others,
    or none.
    puzzle_emb: None where there is none. is_random: whether `reason` takes keys, for random numbers in
    training. halts_at_random: whether slots halt by chance in training, and not where q_halt says so.
    init_noise, state_noise, damping: as in `arch`, and evaluation may change them; step_noise, its alone: the
    standard deviation of normal noise on the state before every step.
    """

    state_names: ClassVar[tuple[str, ...]] = ("z_H", "z_L")
    halts_at_random: ClassVar[bool] = False
    is_random = False
    rotary: Rotary | None = None

    def __init__(self, arch: NetworkConfig):
        super().__init__()
        self.hidden_size = arch.hidden_size
        self.dtype = getattr(torch, arch.forward_dtype)
        self.puzzle_emb: PuzzleEmbedding | None = None
        self.init_noise, self.state_noise, self.damping = arch.init_noise, arch.state_noise, arch.damping
        self.step_noise = 0.0

    def register_initial_values(self) -> None:
        """Draws X_init for each of the states."""
        for name in self.state_names:
            self.register_buffer(_init_of(name), truncated_normal(self.hidden_size, std=1).to(self.dtype))

    @staticmethod
    def sizes_in(weights: State, arch: NetworkConfig) -> dict[str, int]:
        """Reads off trained weights which sizes the dataset must have, by their names in `Metadata`."""
        raise NotImplementedError

    def block_weights(self) -> frozenset[str]:
        """Returns the names of the matrices inside the blocks: neither of embeddings nor of heads."""
        levels = [(name, module) for name, module in self.named_modules() if isinstance(module, Level)]
        return frozenset(
            f"{name}.{inner}"
            for name, level in levels
            for inner, weight in level.named_parameters()
            if weight.ndim == 2
        )

    def state_shape(self, seq_len: int) -> tuple[int, ...]:
        """Returns the shape of each z_X of one slot; its last axis is hidden."""
        raise NotImplementedError

    def initial_state(self, batch_size: int, *, seq_len: int) -> State:
        """Returns what every slot starts from, by the names of what is kept: X_init at every position."""
        shape = (batch_size, *self.state_shape(seq_len))
        return {name: self.get_buffer(_init_of(name)).expand(shape) for name in self.state_names}

    @property
    def is_noisy(self) -> bool:
        """Whether a step needs random numbers, in training and evaluation."""
        return any((self.init_noise, self.step_noise, self.state_noise))

    def random_start(self, state: State, draws: Draws, slots: Tensor) -> State:
        """Returns a start with noise in place of X_init, at every position, in these slots, int64 [n].

        As in EqR: normal, cut at 2 sigma, with standard deviation init_noise; where that is 0, the start as
        it is.
        """
        if not self.init_noise:
            return state
        start, draws = dict(state), draws[slots]
        for name in self.state_names:
            noise = draws.truncated_normal(state[name].shape[1:], use=f"start {name}")
            start[name] = state[name].index_copy(0, slots, (self.init_noise * noise).to(self.dtype))
        return start

    def noisy_state(self, state: State, draws: Draws) -> State:
        """Adds the noise of before a step to z_L, as PTRM does; to all that is kept where there is no z_L."""
        names = {"z_L"} & state.keys() or state.keys()
        return {
            name: _plus_noise(z, self.step_noise, draws, use=f"step {name}") if name in names else z
            for name, z in state.items()
        }

    def update(self, z: Tensor, proposed: Tensor, draws: Draws | None, *, use: str) -> Tensor:
        """Computes what a call of a level makes of z: what it proposes, damped, and with noise (EqR)."""
        if self.damping != 1:
            proposed = torch.lerp(z, proposed, self.damping)
        return _plus_noise(proposed, self.state_noise, draws, use=use)

    def embed(self, inputs: Tensor, puzzle_identifiers: Tensor) -> Tensor:
        """Computes the input e of every call in the step, of the shape of a state."""
        raise NotImplementedError

    def reason(self, state: State, e: Tensor, rotary: Rotary | None) -> State:
        """Computes the recurrence of one step: z_H and whatever else is kept, still with their gradient.

        A call of a level makes of a state what `update` says. Where there is state_noise, draws come too.
        """
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
        keys: Tensor | None = None,
        draws: Draws | None = None,
    ) -> tuple[State, Prediction]:
        """Runs one step; the new state is detached.

        inputs: int32 [batch, seq_len]. puzzle_identifiers: int32 [batch]. keys: int64 [batch], needed in
        training by a network that `is_random` (`models.random`). draws: needed by one that `is_noisy`.
        """
        assert draws is not None or not self.is_noisy, "noise without random numbers"
        drawn = {"keys": keys} if self.is_random and self.training else {}
        if self.state_noise:
            drawn["draws"] = draws
        if self.step_noise:
            state = self.noisy_state(state, draws)
        with casts_shared(self, self.dtype):
            reasoned = self.reason(state, self.embed(inputs, puzzle_identifiers), self.rotary, **drawn)
            kept = {name: reasoned[name].detach() for name in state}
            return kept, self.predict(reasoned["z_H"])


class TokenNetwork(Network):
    """A network whose states are [batch, puzzle_emb_len + seq_len, hidden].

    Its Q head reads the first position, which sees all others; with `conv=instead`, where each sees its
    neighbours alone, the mean of all. ValueError where a convolution finds no grid.

    levels: number of blocks of each level, in the order of their use; each becomes an attribute. mlp: of the
    blocks, a SwiGLU or another class that is made and called like it.
    """

    def __init__(
        self,
        arch: TokenConfig,
        metadata: Metadata,
        *,
        levels: dict[str, int],
        mlp: type[nn.Module] = SwiGLU,
    ):
        super().__init__(arch)
        self.puzzle_emb_len = arch.puzzle_emb_positions
        self.q_reads_mean = arch.conv == "instead"
        length = self.puzzle_emb_len + metadata.seq_len

        std = arch.hidden_size**-0.5
        self.embed_tokens = Embedding(metadata.vocab_size, arch.hidden_size, std=std, dtype=self.dtype)
        self.embed_pos = None
        if arch.puzzle_emb_ndim:
            self.puzzle_emb = PuzzleEmbedding(metadata.num_puzzle_identifiers, arch.puzzle_emb_ndim)
        self.has_rotary = arch.pos_encodings == "rope"
        if self.has_rotary:
            cos, sin = rotary_table(length, arch.hidden_size // arch.num_heads, base=arch.rope_theta)
            self.register_buffer("rotary_cos", cos, persistent=False)
            self.register_buffer("rotary_sin", sin, persistent=False)
        elif arch.pos_encodings == "learned":
            self.embed_pos = Embedding(length, arch.hidden_size, std=std, dtype=self.dtype)

        self.register_initial_values()

        # Drawn in one order, which figures measured with a seed depend on, and registered in that of use.
        lm_head = Linear(arch.hidden_size, metadata.vocab_size)
        q_head = Linear(arch.hidden_size, 2, bias=True)
        drawn = {
            name: Level(_block(arch, metadata, mlp) for _ in range(levels[name])) for name in sorted(levels)
        }
        for name in levels:
            self.add_module(name, drawn[name])

        self.lm_head, self.q_head = lm_head, q_head
        with torch.no_grad():
            self.q_head.weight.zero_()
            self.q_head.bias.fill_(Q_HEAD_BIAS)

    @staticmethod
    def sizes_in(weights: State, arch: TokenConfig) -> dict[str, int]:
        sizes = {"vocab_size": len(weights["embed_tokens.embedding_weight"])}
        if arch.puzzle_emb_ndim:
            sizes["num_puzzle_identifiers"] = len(weights["puzzle_emb.weights"])
        over_positions = [
            n for n in weights if n.endswith(("embed_pos.embedding_weight", "mlp_t.down_proj.weight"))
        ]
        if over_positions:
            sizes["seq_len"] = len(weights[over_positions[0]]) - arch.puzzle_emb_positions
        return sizes

    @property
    def rotary(self) -> Rotary | None:
        """Returns the table of the blocks."""
        return (self.rotary_cos, self.rotary_sin) if self.has_rotary else None

    def state_shape(self, seq_len: int) -> tuple[int, ...]:
        return self.puzzle_emb_len + seq_len, self.hidden_size

    def embed(self, inputs: Tensor, puzzle_identifiers: Tensor) -> Tensor:
        """Computes sqrt(hidden) * [puzzle embedding, tokens]; learned positions are scaled too."""
        e = self.embed_tokens(inputs)
        if self.puzzle_emb is not None:
            rows = self.puzzle_emb(puzzle_identifiers).to(self.dtype)
            rows = nn.functional.pad(rows, (0, self.puzzle_emb_len * self.hidden_size - rows.shape[1]))
            e = torch.cat((rows.view(rows.shape[0], self.puzzle_emb_len, self.hidden_size), e), dim=1)
        if self.embed_pos is not None:
            e = math.sqrt(0.5) * (e + self.embed_pos(torch.arange(e.shape[1], device=e.device)))
        return math.sqrt(self.hidden_size) * e

    def predict(self, z_H: Tensor) -> Prediction:
        logits = self.lm_head(z_H)[:, self.puzzle_emb_len :]
        q = self.q_values(z_H)
        return Prediction(logits, q[:, 0], q[:, 1])

    def q_values(self, z_H: Tensor) -> Tensor:
        """Computes q_halt and q_continue of a state: float32 [batch, 2]."""
        return self.q_head(z_H.mean(dim=1) if self.q_reads_mean else z_H[:, 0]).float()


def _block(arch: TokenConfig, metadata: Metadata, mlp: type[nn.Module]) -> Block:
    width, mixing = arch.hidden_size, {}
    if arch.mlp_t:
        length = arch.puzzle_emb_positions + metadata.seq_len
        mixing["mlp_t"] = SwiGLU(length, expansion=arch.expansion)
    elif arch.conv != "instead":
        mixing["self_attn"] = Attention(width, num_heads=arch.num_heads)
    if arch.conv != "none":
        num_columns = columns_of(metadata, needed_by=f"arch.conv={arch.conv}")
        mixing["conv"] = Convolution(width, num_columns=num_columns, num_before=arch.puzzle_emb_positions)
    return Block(mlp=mlp(width, expansion=arch.expansion), eps=arch.rms_norm_eps, **mixing)


def _plus_noise(z: Tensor, std: float, draws: Draws | None, *, use: str) -> Tensor:
    """Adds normal noise of standard deviation `std`, drawn for this use."""
    return z + (std * draws.normal(z.shape[1:], use=use)).to(z.dtype) if std else z


def _init_of(name: str) -> str:
    """Returns the name of the buffer that z_X starts from: X_init."""
    return f"{name.removeprefix('z_')}_init"
