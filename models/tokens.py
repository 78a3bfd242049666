"""Token networks: an embedding of the cells' tokens, the recurrence of a model, and two output heads."""

import math

import torch
from torch import Tensor, nn

from config.architecture import TokenConfig
from dataset.format import Metadata, columns_of
from models.blocks import Block, Level, Take, take_all
from models.carry import Prediction, State
from models.flops import flops
from models.layers import Attention, Convolution, Embedding, Linear, SwiGLU, rotary_angles
from models.network import Network
from models.q_head import QHead

Q_HEAD_BIAS = -5.0  # initially, slots hardly halt


class TokenNetwork(QHead, Network):
    """A network with states [batch, num_puzzle_positions + seq_len, hidden]: puzzle embedding, then cells.

    The Q head reads the first position; with `conv=instead`, where the first position sees few or no cells,
    the mean of all. Raises ValueError if a convolution is wanted, but the puzzles are no grids.

    levels: {attribute name: number of blocks} in the order of use. mlp: class of MLPs. take: called with each
    new block; returns what this rank holds of the block.
    """

    def __init__(
        self,
        arch: TokenConfig,
        metadata: Metadata,
        *,
        levels: dict[str, int],
        mlp: type[nn.Module] = SwiGLU,
        take: Take = take_all,
    ):
        super().__init__(arch)
        self.num_puzzle_positions = arch.num_puzzle_positions
        self.q_reads_mean = arch.conv == "instead"
        length = self.num_puzzle_positions + metadata.seq_len

        std = arch.hidden_size**-0.5
        self.embed_tokens = Embedding(metadata.vocab_size, arch.hidden_size, std=std, dtype=self.dtype)
        self.embed_pos = None
        self.register_puzzle_rows(arch, metadata)
        if arch.pos_encodings == "rope":
            head_dim = arch.hidden_size // arch.num_heads
            self.register_rotary(rotary_angles(torch.arange(length), head_dim, base=arch.rope_theta))
        elif arch.pos_encodings == "learned":
            self.embed_pos = Embedding(length, arch.hidden_size, std=std, dtype=self.dtype)

        self.register_initial_values()

        # Initialized in an order that recorded results depend on, but registered in the order of use.
        lm_head = Linear(arch.hidden_size, metadata.vocab_size)
        q_head = Linear(arch.hidden_size, 2, bias=True)
        drawn = {
            name: self.build_level(arch, metadata, num_layers=levels[name], mlp=mlp, take=take)
            for name in sorted(levels)
        }
        for name in levels:
            self.add_module(name, drawn[name])

        self.lm_head, self.q_head = lm_head, q_head
        with torch.no_grad():
            self.q_head.weight.zero_()
            self.q_head.bias.fill_(Q_HEAD_BIAS)

    def build_level(
        self, arch: TokenConfig, metadata: Metadata, *, num_layers: int, mlp: type[nn.Module], take: Take
    ) -> Level:
        """Builds a level of `num_layers` blocks; a subclass may build another kind."""
        return Level(lambda _: _block(arch, metadata, mlp), num_layers, take=take)

    @staticmethod
    def sizes_in(weights: State, arch: TokenConfig) -> dict[str, int]:
        sizes = {"vocab_size": len(weights["embed_tokens.embedding_weight"])}
        if (table := Network.table_in(weights, arch)) is not None:
            sizes["num_puzzle_identifiers"] = len(table)
        over_positions = [
            n for n in weights if n.endswith(("embed_pos.embedding_weight", "mlp_t.down_proj.weight"))
        ]
        if over_positions:
            sizes["seq_len"] = len(weights[over_positions[0]]) - arch.num_puzzle_positions
        return sizes

    def state_shape(self, seq_len: int) -> tuple[int, ...]:
        return self.num_puzzle_positions + seq_len, self.hidden_size

    def embed(self, inputs: Tensor, puzzle_identifiers: Tensor) -> Tensor:
        """Returns sqrt(hidden) * [puzzle embedding, embedded tokens]; with learned positions,
        sqrt(hidden / 2) * ([puzzle embedding, embedded tokens] + positions).
        """
        e = self.embed_tokens(inputs)
        if (rows := self.puzzle_rows(puzzle_identifiers)) is not None:
            rows = nn.functional.pad(rows, (0, self.num_puzzle_positions * self.hidden_size - rows.shape[1]))
            e = torch.cat((rows.view(rows.shape[0], self.num_puzzle_positions, self.hidden_size), e), dim=1)
        if self.embed_pos is not None:
            e = math.sqrt(0.5) * (e + self.embed_pos(torch.arange(e.shape[1], device=e.device)))
        return math.sqrt(self.hidden_size) * e

    def predict(self, z_H: Tensor) -> Prediction:
        logits = self.lm_head(z_H)[:, self.num_puzzle_positions :]
        q = self.q_values(z_H)
        return Prediction(logits, q[:, 0], q[:, 1])

    def head_flops(self, seq_len: int, *, trains: bool = False) -> int:
        of_tokens = flops(self.lm_head, self.state_shape(seq_len), trains=trains)
        return of_tokens + flops(self.q_head, (1, self.hidden_size), trains=trains)

    def q_values(self, z_H: Tensor) -> Tensor:
        """Returns q_halt and q_continue for a state: float32 [batch, 2]."""
        return self.q_head(z_H.mean(dim=1) if self.q_reads_mean else z_H[:, 0]).float()


def _block(arch: TokenConfig, metadata: Metadata, mlp: type[nn.Module]) -> Block:
    width, mixing = arch.hidden_size, {}
    if arch.mlp_t:
        length = arch.num_puzzle_positions + metadata.seq_len
        mixing["mlp_t"] = SwiGLU(length, expansion=arch.expansion)
    elif arch.conv != "instead":
        mixing["self_attn"] = Attention(width, num_heads=arch.num_heads)
    if arch.conv != "none":
        num_columns = columns_of(metadata, needed_by=f"arch.conv={arch.conv}")
        mixing["conv"] = Convolution(width, num_columns=num_columns, num_before=arch.num_puzzle_positions)
    return Block(mlp=mlp(width, expansion=arch.expansion), eps=arch.rms_norm_eps, **mixing)
